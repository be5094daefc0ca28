"""Weights that layers keep quantized, or store transposed, under every recipe: the same training,
the memory that other libraries see, what they write to files, and optimizers of before."""

from __future__ import annotations

import copy
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ottava
from ottava.errors import UsageError
from ottava.nn import Linear, TransposedLinear
from ottava_custom import CustomRecipe, IdentityQuantizer, current_scaling_ref_quantizer_factory
from ottava_integrations import convert_file
from tests.comparing import assert_same
from tests.core import forking
from tests.ranks import on_ranks

NAMED = ("blockwise", "current", "delayed", "mxfp8", "rowwise")
REFERENCE = CustomRecipe(current_scaling_ref_quantizer_factory)
RECIPES: dict[str, Any] = {name: name for name in NAMED} | {"reference": REFERENCE}
RECIPES["identity"] = CustomRecipe(lambda role: IdentityQuantizer())
MIXED = CustomRecipe(
    lambda role: ottava.QuantizerRequest("delayed" if role.tensor_type == "weight" else "current")
)
each_name = pytest.mark.parametrize("recipe", NAMED)
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
pytestmark = [
    # One of these recipes keeps its operands in high precision.
    pytest.mark.filterwarnings("ignore:nothing of the weights of products runs quantized"),
    pytest.mark.filterwarnings("ignore:the state dict has no scaling state"),
]


def net(layer: Any = torch.nn.Linear) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(layer(64, 96), torch.nn.GELU(), layer(96, 32))


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))


def losses(model: torch.nn.Module) -> list[float]:
    """Of three steps."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(3):
        loss = model(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


# -- convert(primary=True) --


@each_name
def test_an_existing_model_trains_as_one_that_was_made_with_quantized_weights(recipe: str) -> None:
    with ottava.quantized_model_init(recipe):
        made = net(Linear)
    existing = ottava.convert(net(), recipe, primary=True, keep_initial_values=True)
    for one, other in zip(made.parameters(), existing.parameters(), strict=True):
        assert type(one) is type(other)
        if one.dim() == 2:
            assert_same(one.get_high_precision_init_val(), other.get_high_precision_init_val())
    assert losses(existing) == losses(ottava.convert(made, recipe))


@pytest.mark.parametrize("recipe", [*NAMED, REFERENCE], ids=[*NAMED, "reference"])
def test_a_model_on_meta_gets_its_values_later(recipe: Any) -> None:
    plain, expected = net(), ottava.convert(net(), recipe, primary=True)
    with torch.no_grad():
        expected(inputs(0))
    # Delayed scaling counts what a weight is given among what it saw of it.
    expected.load_state_dict(plain.state_dict())
    with torch.device("meta"):
        loaded, initialized = (ottava.convert(net(), recipe, primary=True) for _ in range(2))
    assert loaded(torch.empty(3, 64, device="meta")).shape == (3, 32)
    loaded.to_empty(device="cpu").load_state_dict(plain.state_dict())
    initialized.to_empty(device="cpu")
    torch.manual_seed(0)
    for i in (0, 2):
        initialized[i].reset_parameters()
    assert losses(loaded) == losses(initialized) == losses(expected)


def test_the_gradient_and_its_hooks_are_the_new_parameters() -> None:
    model, seen = net(), []
    model(inputs(0)).sum().backward()
    before = model[0].weight
    grad = before.grad.clone()
    handle = before.register_hook(lambda grad: seen.append("hook") or grad * 0)
    before.register_post_accumulate_grad_hook(seen.append)
    ottava.convert(model, "mxfp8", primary=True)
    weight = model[0].weight
    assert before.grad is None
    model(inputs(0)).sum().backward()
    assert torch.equal(weight.grad, grad), "the hook made the second one 0"
    assert seen == ["hook", weight]
    handle.remove()
    model(inputs(0)).sum().backward()
    assert seen == ["hook", weight, weight]
    assert not torch.equal(weight.grad, grad)


# -- weights that are stored transposed --


class Conv1D(torch.nn.Module):
    """As in GPT-2: ``x · weight + bias``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight = torch.nn.Parameter(torch.randn(inputs, outputs) * 0.02)
        self.bias = torch.nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


ottava.register_converter(Conv1D, TransposedLinear.from_linear)


def twins(recipe: Any) -> tuple[Any, Any]:
    """Layers with weights stored transposed, and the same in the usual way, in bfloat16."""
    stored, usual = net(Conv1D).bfloat16(), net().bfloat16()
    with torch.no_grad():
        for i in (0, 2):
            usual[i].weight.copy_(stored[i].weight.t())
            usual[i].bias.copy_(stored[i].bias)
    return ottava.convert(stored, recipe), ottava.convert(usual, recipe)


@each_name
def test_transposed_weights_train_with_the_same_bytes(recipe: str) -> None:
    nets = twins(recipe)
    assert [type(model[0]) for model in nets] == [TransposedLinear, Linear]
    for first in (None, True, False):
        results = []
        for model in nets:
            x = inputs(3).bfloat16().requires_grad_()
            # The third with main_grad, in high precision.
            for layer in (model[0], model[2]):
                layer.fuse_wgrad_accumulation = first is not None
                layer.weight.main_grad = torch.zeros(layer.weight.shape)
                layer.weight.grad_added_to_main_grad = False
            with ottava.autocast(enabled=first is not False):
                hidden = torch.nn.functional.gelu(model[0](x, is_first_microbatch=first))
                y = model[2](hidden, is_first_microbatch=first)
            y.square().mean().backward()
            name = "grad" if first is None else "main_grad"
            weights = [getattr(model[i].weight, name) for i in (0, 2)]
            assert all(gradient.any() for gradient in weights)
            told = {model[i].weight.grad_added_to_main_grad for i in (0, 2)}
            assert told == {first is not None}
            if model is nets[0]:
                weights = [gradient.t() for gradient in weights]
            results.append([y, x.grad, model[2].bias.grad, *weights])
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert all(map(torch.equal, *results))


def test_transposed_weights_are_saved_as_of_the_module_that_it_was(tmp_path: Path) -> None:
    stored, plain = twins("delayed")[0], net(Conv1D).bfloat16()
    file = tmp_path / "model.safetensors"
    stored(inputs(0).bfloat16()).square().mean().backward()
    plain.load_state_dict(ottava.checkpoint.without_state(stored.state_dict()))
    ottava.checkpoint.save_model(stored, file)
    other = ottava.convert(net(Conv1D).bfloat16(), "delayed")
    ottava.checkpoint.load_model(other, file)
    with torch.no_grad():
        assert torch.equal(other(inputs(1).bfloat16()), stored(inputs(1).bfloat16()))
    # No file is made with a quantized weight that is stored transposed.
    mixed = torch.nn.Sequential(stored[0], torch.nn.Linear(96, 32).bfloat16())
    ottava.checkpoint.save_model(mixed, file)
    convert_file(file, tmp_path / "out.safetensors", "current", model=mixed)
    loaded = ottava.checkpoint.load_file(tmp_path / "out.safetensors")
    kept = {name for name, value in loaded.items() if isinstance(value, ottava.QuantizedTensor)}
    assert kept == {"1.weight"}


# -- the memory of weights, and what other libraries write --


def tied(recipe: Any) -> Any:
    """Four layers, the last two of which share a weight, quantized only."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(4)]
    layers[3].weight = layers[2].weight
    return ottava.convert(torch.nn.Sequential(*layers), recipe, primary=True)


def places(model: Any) -> list[tuple[int, int]]:
    weights = [layer.weight for layer in model]
    return [(weight.data_ptr(), weight.untyped_storage().data_ptr()) for weight in weights]


def data_of(weight: Any) -> torch.Tensor:
    return next(inner for inner in weight.inner_list() if inner is not None)


@each_recipe
def test_weights_show_the_memory_that_they_share(recipe: Any) -> None:
    model = tied(recipe)
    found = places(model)
    assert found[2] == found[3]
    assert len({*found}) == 3
    assert not {*places(copy.deepcopy(model))} & {*found}
    weight, data = model[0].weight, data_of(model[0].weight)
    assert found[0] == (data.data_ptr(), data.untyped_storage().data_ptr())
    assert weight.untyped_storage().nbytes() == data.untyped_storage().nbytes()
    for alias in (weight.detach(), weight.data, weight.to(weight.device)):
        assert (alias.data_ptr(), alias.untyped_storage().data_ptr()) == found[0]
    rows = weight.detach()[32:]
    if isinstance(rows, ottava.QuantizedTensor):
        assert rows.data_ptr() == data_of(rows).data_ptr()
    on_meta = weight.detach().to("meta")
    assert (on_meta.data_ptr(), on_meta.untyped_storage().nbytes()) in {(0, 0), (0, on_meta.nbytes)}
    # The memory outlives the weight, and cannot be resized.
    expected, storage = data.clone(), weight.untyped_storage()
    with pytest.raises(RuntimeError, match="resiz"):
        storage.resize_(0)
    del weight, data, alias, rows, model
    seen = torch.empty(0, dtype=expected.dtype).set_(storage)
    assert torch.equal(seen.view(torch.uint8), expected.flatten().view(torch.uint8))


@each_recipe
def test_safetensors_writes_values_and_says_how_to_keep_the_bytes(
    recipe: Any, tmp_path: Path
) -> None:
    model, path = tied(recipe).bfloat16(), tmp_path / "model.safetensors"
    words = "3 quantized tensors.*ottava.checkpoint.save_mod"
    with pytest.warns(UserWarning, match=words) as told:
        safetensors.torch.save_model(model, str(path))
    assert [warning.filename for warning in told] == [safetensors.torch.__file__]
    written = safetensors.torch.load_file(path)
    assert {name for name in written if "weight" in name} == {f"{i}.weight" for i in range(3)}
    for i in range(3):
        assert_same(written[f"{i}.weight"], model[i].weight.dequantize())
    assert safetensors.torch.load_model(tied(recipe).bfloat16(), path) == (set(), [])
    with pytest.warns(UserWarning, match="1 quantized tensor") as told:
        data = safetensors.torch.save({"a": model[0].weight})
    assert [warning.filename for warning in told] == [__file__]
    assert_same(safetensors.torch.load(data)["a"], written["0.weight"])


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("recipe", [*RECIPES.values(), MIXED], ids=[*RECIPES, "mixed"])
def test_written_values_load_into_weights_that_were_trained_on(recipe: Any, tmp_path: Path) -> None:
    """A recipe with state quantizes them by the scale that is loaded with them, not by that of
    later steps."""
    model, path = tied(recipe), tmp_path / "model.safetensors"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        trained(model, optimizer)
    state = {name: value for name, value in model.state_dict().items() if name != "3.weight"}
    with pytest.warns(UserWarning, match="3 quantized tensors"):
        safetensors.torch.save_file(state, path)
    expected = [weight.dequantize().detach().clone() for weight in model.parameters()]
    for _ in range(4):
        trained(model, optimizer)
    written = safetensors.torch.load_file(path)
    written["3.weight"] = written["2.weight"]
    for target in (model, tied(recipe)):
        target.load_state_dict(written)
        for weight, values in zip(target.parameters(), expected, strict=True):
            assert (weight.dequantize() - values).norm() <= 1e-4 * values.norm()


def test_plain_tensors_are_written_as_ever(tmp_path: Path) -> None:
    path, plain = tmp_path / "plain.safetensors", {"a": torch.arange(6.0)}
    with warnings.catch_warnings(action="error"):
        safetensors.torch.save_file(plain, path)
    assert_same(safetensors.torch.load_file(path)["a"], plain["a"])
    for wrong in (plain | {"b": plain["a"]}, [plain["a"]]):
        with pytest.raises((RuntimeError, ValueError), match=r"share memory|dict"):
            safetensors.torch.save_file(wrong, path)


def test_a_safetensors_that_cannot_be_taught_is_shown_no_memory() -> None:
    """Otherwise it would read more bytes than there are."""
    code = """
        import safetensors.torch
        del safetensors.torch._remove_duplicate_names
        import torch, ottava
        model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        weight = ottava.convert(model, "current", primary=True)[0].weight
        assert (weight.data_ptr(), weight.untyped_storage().nbytes()) == (0, 0)
        try:
            safetensors.torch.save_file({"weight": weight}, "/dev/null")
        except Exception as error:
            print(type(error).__name__)
    """
    done = forking.python(textwrap.dedent(code))
    assert (done.returncode, done.stdout.strip()) == (0, "SafetensorError"), done.stderr


# -- optimizers from before the conversion --


def two_layers() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))


def test_each_optimizer_from_before_the_conversion_is_warned_of_once() -> None:
    models = [two_layers() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model in models:
        ottava.convert(model, "mxfp8", primary=True)
    words = r"SGD holds parameters.*'0.weight', '1.weight'; make the optimizer"
    for model, optimizer in zip(models, optimizers, strict=True):
        with pytest.warns(UserWarning, match=words) as told:
            trained(model, optimizer)
        assert [warning.filename for warning in told] == [__file__]
        with warnings.catch_warnings(action="error"):
            trained(model, optimizer)


def test_optimizers_that_train_the_weights_are_not_warned_of() -> None:
    model = two_layers()
    masters = list(model.parameters())
    frozen, both, of_masters = (torch.optim.SGD(masters, lr=0.1) for _ in range(3))
    ottava.convert(model, "current", primary=True)
    both.add_param_group({"params": [layer.weight for layer in model]})
    with warnings.catch_warnings(action="error"):
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
        trained(model, both)
        # Parameters of before whose gradients somebody copies are masters.
        model(torch.randn(4, 64)).sum().backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            master.grad = weight.grad
        of_masters.step()
        of_masters.zero_grad()
        # Weights without gradients want no optimizer.
        for layer in model:
            layer.weight.grad = None
            layer.weight.requires_grad_(False)
        trained(model, frozen)
    model[1].weight.requires_grad_(True)
    with pytest.warns(UserWarning, match="'1.weight'; make"):
        trained(model, frozen)


# -- FSDP2 --


@on_ranks(2)
def test_shards_of_transposed_weights_train_as_the_whole(mesh: DeviceMesh) -> None:
    for recipe, gathered in (("delayed", False), ("delayed", True), ("mxfp8", True)):
        model = torch.nn.Sequential(Conv1D(64, 96), torch.nn.Linear(96, 32))
        weight = ottava.convert(model, recipe)[0].weight
        expected = losses(copy.deepcopy(model))
        if gathered:
            ottava.distributed.gather_quantized(model)
            assert model[0].weight is weight
        fully_shard(model, mesh=mesh)
        assert losses(model) == expected, (recipe, gathered)


@on_ranks(2)
def test_shards_of_quantized_weights_are_told_apart(mesh: DeviceMesh) -> None:
    for recipe in NAMED:
        first: Any = fully_shard(ottava.convert(net(), recipe, primary=True), mesh=mesh)
        shards = [first[i].weight.to_local() for i in (0, 2)]
        assert len({shard.data_ptr() for shard in shards} - {0}) == 2
        assert all(shard.data_ptr() == data_of(shard).data_ptr() for shard in shards)
        assert "the weight is kept quantized" in str(ottava.conversion_report(first))
    model = fully_shard(ottava.convert(net(), "current"), mesh=mesh)
    with pytest.raises(UsageError, match=r"weight of '0' is a DTensor.*before gather_quant"):
        ottava.convert(model, "current", primary=True)
