"""What other libraries ask of quantized weights: where their data lies, and what is written of them
to a file."""

from __future__ import annotations

import copy
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

import forking

import ottava
from ottava_custom import CustomRecipe, IdentityQuantizer, current_scaling_ref_quantizer_factory
from tests import ranks
from tests.comparing import assert_same

RECIPES: dict[str, Any] = {
    name: name for name in ("blockwise", "current", "delayed", "mxfp8", "rowwise")
}
RECIPES |= {
    "reference": CustomRecipe(current_scaling_ref_quantizer_factory),
    "identity": CustomRecipe(lambda role: IdentityQuantizer()),
}
# One of these keeps its operands in high precision.
pytestmark = pytest.mark.filterwarnings("ignore:nothing of the weights of products runs quantized")
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def net(recipe: Any, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Four layers, the last two of which share a weight, quantized only."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 128, bias=False, dtype=dtype) for _ in range(4)]
    layers[3].weight = layers[2].weight
    return ottava.convert(torch.nn.Sequential(*layers), recipe, primary=True)


def places(model: torch.nn.Module) -> list[tuple[int, int]]:
    weights = [layer.weight for layer in model]
    return [(weight.data_ptr(), weight.untyped_storage().data_ptr()) for weight in weights]


def data_of(weight: Any) -> torch.Tensor:
    return next(inner for inner in weight.inner_list() if inner is not None)


@each_recipe
def test_weights_are_told_apart_and_tied_ones_are_the_same(recipe: Any) -> None:
    model = net(recipe)
    found = places(model)
    assert found[2] == found[3]
    assert len({*found}) == 3
    assert all(one and one == other for one, other in found)
    for weight in model.parameters():
        data = data_of(weight)
        assert weight.data_ptr() == data.data_ptr()
        assert weight.untyped_storage().nbytes() == data.untyped_storage().nbytes()
        assert safetensors.torch.storage_ptr(weight) == data.untyped_storage().data_ptr()
    assert places(model.to(torch.float32)) == found
    assert len({*places(model.to(torch.bfloat16))}) == 3
    assert not {*places(copy.deepcopy(model))} & {*places(model)}


@each_recipe
def test_views_and_aliases_show_the_memory_that_they_share(recipe: Any) -> None:
    weight = net(recipe)[0].weight
    memory = weight.untyped_storage().data_ptr()
    for alias in (weight.detach(), weight.data, weight.to(weight.device)):
        assert (alias.data_ptr(), alias.untyped_storage().data_ptr()) == (weight.data_ptr(), memory)
    rows = weight.detach()[64:]
    if isinstance(rows, ottava.QuantizedTensor):
        assert rows.data_ptr() == data_of(rows).data_ptr()
    assert weight.detach().clone().data_ptr() not in (0, weight.data_ptr())
    on_meta = weight.detach().to("meta")
    assert (on_meta.data_ptr(), on_meta.untyped_storage().nbytes()) in {(0, 0), (0, on_meta.nbytes)}


@each_recipe
def test_the_memory_that_is_shown_outlives_the_weight_and_cannot_be_resized(recipe: Any) -> None:
    weight = net(recipe)[0].weight.detach().clone()
    expected = data_of(weight).clone()
    storage = weight.untyped_storage()
    with pytest.raises(RuntimeError, match="resiz"):
        storage.resize_(0)
    del weight
    seen = torch.empty(0, dtype=expected.dtype).set_(storage)
    assert torch.equal(seen.view(torch.uint8), expected.flatten().view(torch.uint8))


def shards(mesh: Any) -> None:
    # FSDP2 shards what a quantizer in plain PyTorch made in high precision.
    for recipe in (recipe for recipe in RECIPES.values() if isinstance(recipe, str)):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(128, 256, bias=False), torch.nn.Linear(256, 256, bias=False)]
        model = ottava.convert(torch.nn.Sequential(*layers), recipe, primary=True)
        fully_shard(model, mesh=mesh)
        local = [parameter.to_local() for parameter in model.parameters()]
        assert all(isinstance(shard, ottava.QuantizedTensor) for shard in local), recipe
        found = {shard.data_ptr() for shard in local}
        assert len(found) == 2, recipe
        assert 0 not in found, recipe
        assert all(shard.data_ptr() == data_of(shard).data_ptr() for shard in local), recipe


def test_shards_of_fully_shard_are_told_apart() -> None:
    assert ranks.failures(__name__, ["shards"]) == {"shards": None}


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_safetensors_writes_values_and_says_how_to_keep_the_bytes(
    recipe: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, path = net(recipe, dtype), tmp_path / "model.safetensors"
    state = {name: value for name, value in model.state_dict().items() if name != "3.weight"}
    weights = {name: value.dequantize() for name, value in state.items() if name.endswith("weight")}
    with pytest.warns(
        UserWarning, match="3 quantized tensors.*ottava.checkpoint.save_model"
    ) as told:
        safetensors.torch.save_file(state, path)
    assert [warning.filename for warning in told] == [__file__]
    written = safetensors.torch.load_file(path)
    for name, expected in weights.items():
        assert_same(written[name], expected)
    with pytest.warns(UserWarning, match="3 quantized tensors"):
        assert safetensors.torch.load(safetensors.torch.save(state)).keys() == written.keys()
    other = net(recipe, dtype)
    with torch.no_grad():
        other[0].weight.zero_()
    other.load_state_dict(written | {"3.weight": written["2.weight"]})
    for mine, its in zip(other.parameters(), model.parameters(), strict=True):
        assert (mine.dequantize() - its.dequantize()).norm() <= 0.01 * its.dequantize().norm()


def steps(model: torch.nn.Module, count: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(count):
        trained(model, optimizer)


MIXED = CustomRecipe(
    lambda role: ottava.QuantizerRequest("delayed" if role.tensor_type == "weight" else "current")
)


@pytest.mark.parametrize("recipe", [*RECIPES.values(), MIXED], ids=[*RECIPES, "mixed"])
def test_written_values_load_into_weights_that_were_trained_on(recipe: Any, tmp_path: Path) -> None:
    """A recipe with state quantizes them by the scale that is loaded with them, not by that of
    later steps."""
    model, path = net(recipe), tmp_path / "model.safetensors"
    steps(model, 2)
    state = {name: value for name, value in model.state_dict().items() if name != "3.weight"}
    with pytest.warns(UserWarning, match="3 quantized tensors"):
        safetensors.torch.save_file(state, path)
    expected = [weight.dequantize().detach().clone() for weight in model.parameters()]
    steps(model, 4)
    written = safetensors.torch.load_file(path)
    for target in (model, net(recipe)):
        target.load_state_dict(written | {"3.weight": written["2.weight"]})
        for weight, values in zip(target.parameters(), expected, strict=True):
            assert (weight.dequantize() - values).norm() <= 1e-4 * values.norm()


def test_a_state_without_steps_gives_loaded_weights_no_scale(tmp_path: Path) -> None:
    written = {
        name: v.detach().dequantize() if v.dim() == 2 and "weight" in name else v.clone()
        for name, v in net("delayed").state_dict().items()
    }
    model = net("delayed")
    steps(model, 2)
    model.load_state_dict(written)
    for index, weight in enumerate(layer.weight for layer in model):
        values = written[f"{index}.weight"]
        assert (weight.dequantize() - values).norm() <= 0.05 * values.norm()


@each_recipe
def test_a_whole_model_with_shared_weights_is_written_by_safetensors(
    recipe: Any, tmp_path: Path
) -> None:
    model, path = net(recipe), tmp_path / "model.safetensors"
    with pytest.warns(UserWarning, match="3 quantized tensors"):
        safetensors.torch.save_model(model, str(path))
    assert {name for name in safetensors.torch.load_file(path) if name.endswith("weight")} == {
        "0.weight",
        "1.weight",
        "2.weight",
    }
    assert safetensors.torch.load_model(net(recipe), path) == (set(), [])


def test_plain_tensors_are_written_as_ever(tmp_path: Path) -> None:
    plain, path = (
        {"a": torch.arange(6.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)},
        tmp_path / "plain.safetensors",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        safetensors.torch.save_file(plain, path)
    assert all(
        torch.equal(value, plain[name]) for name, value in safetensors.torch.load_file(path).items()
    )
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file({"a": plain["a"], "b": plain["a"]}, path)
    with pytest.raises(ValueError, match="dict"):
        safetensors.torch.save_file([plain["a"]], path)


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


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@each_recipe
def test_an_optimizer_from_before_the_conversion_is_warned_of_once(recipe: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ottava.convert(model, recipe, primary=True)
    with pytest.warns(
        UserWarning, match=r"SGD holds parameters.*'0.weight', '1.weight'; make the optimizer"
    ) as told:
        trained(model, optimizer)
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, optimizer)


def test_optimizers_that_train_the_weights_are_not_warned_of() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
    before = list(model.parameters())
    frozen = torch.optim.SGD(model.parameters(), lr=0.1)
    both = torch.optim.SGD(model.parameters(), lr=0.1)
    ottava.convert(model, "current", primary=True)
    both.add_param_group({"params": [layer.weight for layer in model]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
        trained(model, both)
        # Weights without gradients want no optimizer.
        for layer in model:
            layer.weight.requires_grad_(False)
        trained(model, frozen)
    model[1].weight.requires_grad_(True)
    with pytest.warns(UserWarning, match="'1.weight'; make"):
        trained(model, frozen)
    assert len(before) == 4


def test_a_parameter_of_before_that_is_a_master_is_not_dead() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    masters = list(model.parameters())
    ottava.convert(model, "current", primary=True)
    optimizer = torch.optim.SGD(masters, lr=0.1)
    model(torch.randn(4, 128)).sum().backward()
    for master, weight in zip(masters, model.parameters(), strict=True):
        master.grad = weight.grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_each_dead_optimizer_is_warned_of() -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(128, 128)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model in models:
        ottava.convert(model, "current", primary=True)
    for model, optimizer in zip(models, optimizers, strict=True):
        with pytest.warns(UserWarning, match="SGD holds parameters"):
            trained(model, optimizer)
