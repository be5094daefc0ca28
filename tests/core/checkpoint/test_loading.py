"""Loading into a model, and into the tensors of a state: everything, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ottava
from ottava import GridQuantizer, Layout, checkpoint
from ottava.checkpoint import load_sharded, save_sharded
from ottava.errors import CheckpointError, DTypeError, OttavaError, ShapeError, UsageError
from ottava.gemm import gemm
from ottava.tensors import columnwise_layout
from tests.comparing import assert_same
from tests.core.checkpoint.files import contents, module_of
from tests.samples import wide


def linear(recipe: Any, seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe, **options):
        layer = ottava.nn.Linear(16, 8, recipe=recipe, dtype=dtype)
    return torch.nn.Sequential(layer, torch.nn.BatchNorm1d(8))


# -- models --


def test_bytes_go_into_parameters_of_the_same_kind(small: Any, tmp_path: Path) -> None:
    saved, model = small(0), small(1)
    checkpoint.save_model(saved, tmp_path / "x")
    # A quantizer is not needed for bytes.
    model.layer.weight.update_quantizer(None)
    parameters = dict(model.named_parameters())
    assert checkpoint.load_model(model, tmp_path / "x") == ([], [])
    assert contents(model) == contents(saved)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert model.tied is model.first


def test_values_between_kinds(recipe: Any, tmp_path: Path) -> None:
    """Dequantized into high precision, and quantized by the quantizer of the parameter."""
    quantized = linear(recipe, 0)
    plain = linear(recipe, 1, torch.bfloat16, enabled=False)
    checkpoint.save_model(quantized, tmp_path / "quantized")
    checkpoint.load_model(plain, tmp_path / "quantized")
    assert torch.equal(plain[0].weight, quantized[0].weight.dequantize(torch.bfloat16))
    wide = recipe.quantizer("grad_output")(torch.randn(8, 16))
    assert wide._fp8_dtype != quantized[0].weight._fp8_dtype
    for source in (torch.randn(8, 16).bfloat16(), wide):
        state = quantized.state_dict() | {"0.weight": source}
        checkpoint.save_file(state, tmp_path / "x")
        checkpoint.load_model(quantized, tmp_path / "x")
        values = source.dequantize() if source is wide else source
        assert contents(quantized[0].weight) == contents(recipe.quantizer("weight")(values))
        assert quantized[0].weight.dtype == torch.float32


def test_transposes_that_the_device_needs_are_made(recipe: Any, tmp_path: Path) -> None:
    """The bytes of a file from a device that needs none stay; quantizing would need a quantizer."""
    checkpoint.save_model(linear(recipe, 0), tmp_path / "x")
    written: Any = checkpoint.load_file(tmp_path / "x")["0.weight"]
    with columnwise_layout("transpose"):
        model = linear(recipe, 1)
        model[0].weight.update_quantizer(None)
        checkpoint.load_model(model, tmp_path / "x")
        weight = model[0].weight
    assert torch.equal(weight._data, written._data)
    assert torch.equal(weight._transpose, written._data.t())
    assert torch.equal(weight._scale_inv, written._scale_inv)


def test_names_that_only_one_of_them_has(small: Any, tmp_path: Path) -> None:
    model, state = small(0), small(1).state_dict()
    del state["step"]
    checkpoint.save_file(state | {"more": torch.ones(1), "most": torch.ones(1)}, tmp_path / "x")
    before = contents(model)
    message = r"x: the file misses 'step'; the model has no place for 'more', 'most'"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_model(model, tmp_path / "x")
    assert contents(model) == before
    missing, unexpected = checkpoint.load_model(model, tmp_path / "x", strict=False)
    assert (missing, sorted(unexpected)) == (["step"], ["more", "most"])
    assert contents(model) == contents(state) | {"step": before["step"]}


OTHER_VALUES = [
    ("layer.weight", torch.randn(7, 5), ShapeError),
    ("layer.weight", torch.ones(5, 7, dtype=torch.int32), DTypeError),
    ("layer.bias", torch.ones(6), ShapeError),
    ("layer.bias", torch.ones(5, dtype=torch.int64), DTypeError),
    ("layer.bias", torch.ones(5, dtype=torch.complex64), DTypeError),
    ("step", torch.ones(()), DTypeError),
    ("step", torch.ones((), dtype=torch.int32), DTypeError),
    ("flags", torch.ones(3, dtype=torch.uint8), DTypeError),
    ("flags", torch.ones(3, 1, dtype=torch.bool), ShapeError),
]


@pytest.mark.parametrize(("name", "value", "error"), OTHER_VALUES)
def test_another_shape_or_kind(
    small: Any, tmp_path: Path, name: str, value: torch.Tensor, error: type[OttavaError]
) -> None:
    model = small(0)
    checkpoint.save_file(small(1).state_dict() | {name: value}, tmp_path / "x")
    before = contents(model)
    for strict in (True, False):
        with pytest.raises(error, match=rf"x: '{name}'"):
            checkpoint.load_model(model, tmp_path / "x", strict=strict)
        assert contents(model) == before


def on_meta(model: Any) -> None:
    model.first = torch.nn.Parameter(torch.zeros(2, 3, device="meta"))


TARGETS: list[tuple[Callable[[Any], None], str]] = [
    (lambda model: model.layer.weight.clear(), "'layer.weight' of the model holds no data"),
    (on_meta, "'first' of the model is on meta"),
    (lambda model: model.layer.weight.update_quantizer(None), "'layer.weight'.*has no quantizer"),
]


@pytest.mark.parametrize(("change", "words"), TARGETS)
def test_models_that_cannot_be_written(change: Any, words: str, small: Any, tmp_path: Path) -> None:
    state = small(0).state_dict()
    plain = {"layer.weight": state["layer.weight"].dequantize()}
    checkpoint.save_file(state | plain, tmp_path / "x")
    model = small(1)
    change(model)
    before = contents(model.layer.bias), contents(model.flags)
    with pytest.raises(UsageError, match=words):
        checkpoint.load_model(model, tmp_path / "x")
    assert (contents(model.layer.bias), contents(model.flags)) == before


class Own(torch.nn.Linear):
    """A layer that loads in a way of its own, and fails at its end."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        raise ZeroDivisionError("by the module")


def by_a_hook(error: type[BaseException]) -> Callable[[Any, Any], None]:
    def hook(module: Any, keys: Any) -> None:
        assert int(module.step) == 9
        raise error("by the hook")

    return lambda model, state: model.register_load_state_dict_post_hook(hook)


def by_a_module(model: Any, state: Any) -> None:
    model.own = Own(3, 3)
    state |= {f"own.{name}": value for name, value in torch.nn.Linear(3, 3).state_dict().items()}


def by_a_quantizer(model: Any, state: Any) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("by the quantizer")

    model.layer.weight._quantizer.update_quantized = fails
    state["layer.weight"] = torch.randn(5, 7)


def by_a_hook_after_a_state_for_later(model: Any, state: Any) -> None:
    model.late = ottava.nn.Linear(3, 3)
    state |= {f"late.{name}": value for name, value in model.late.state_dict().items()}
    state["late.recipe_state.scales"] = torch.ones(3)
    by_a_hook(ZeroDivisionError)(model, state)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (by_a_hook(ZeroDivisionError), CheckpointError),
        (by_a_hook_after_a_state_for_later, CheckpointError),
        (by_a_hook(KeyboardInterrupt), KeyboardInterrupt),
        (by_a_module, CheckpointError),
        (by_a_quantizer, CheckpointError),
    ],
    ids=["hook", "state for later", "interrupt", "module", "quantizer"],
)
def test_a_module_that_refuses_undoes_everything(
    change: Any, error: type[BaseException], small: Any, tmp_path: Path
) -> None:
    """What fails after all the rest is loaded cannot be foreseen."""
    model, state = small(0), small(1).state_dict()
    state["step"] = torch.tensor(9)
    change(model, state)
    checkpoint.save_file(state, tmp_path / "x")
    before = contents(model)
    with pytest.raises(error, match="by the"):
        checkpoint.load_model(model, tmp_path / "x")
    assert contents(model) == before


class Copies(TorchDispatchMode):
    """Counts the elements that are copied into new memory."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.clone):
            self.count += args[0].numel()
        return func(*args, **kwargs or {})


def test_memory_is_doubled_only_for_modules_that_may_refuse(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.BatchNorm1d(100))
    checkpoint.save_model(model, tmp_path / "x")
    with Copies() as copies:
        checkpoint.load_model(model, tmp_path / "x")
    assert copies.count < 100
    model[1].register_load_state_dict_post_hook(lambda *_: None)
    with Copies() as copies:
        checkpoint.load_model(model, tmp_path / "x")
    assert copies.count > 10_000


# -- tensors of a nested state --


def test_names_that_differ_are_listed(tmp_path: Path) -> None:
    x, y = torch.ones(2), torch.zeros(2)
    groups = [{"lr": 1.0}]
    saved = {"a": {"x": x, "n": 1}, "l": [x, 2], "groups": groups}
    checkpoint.save_sharded(saved, tmp_path / "s")
    cases: list[tuple[Any, str]] = [
        ({"a": {"x": y, "y": y, "n": 0}, "l": [y, 0]}, "misses 'a.y'"),
        ({"a": {"x": y, "n": 0, "m": 5}, "l": [y, 0]}, "misses 'a.m'"),
        ({"a": {"n": 0}, "l": [y, 0]}, "no place for 'a.x'"),
        ({"a": {"x": y, "n": 0}, "l": [y, 0, y]}, "misses 'l.2'"),
        ({"a": {"x": y, "n": y}, "l": [y, 0]}, "misses 'a.n'"),
        ({"a": {"x": 1, "n": 0}, "l": [y, 0]}, "misses 'a.x'"),
        ({"a": [y]}, "misses 'a.0'"),
        ({}, "no place for 'a.x', 'l.0'"),
        ({"a": {"x": y, "n": 0}, "l": [y, 0], "groups": [{"fused": 1}]}, "misses 'groups.0.fused'"),
    ]
    for target, words in cases:
        with pytest.raises(CheckpointError, match=words):
            checkpoint.load_sharded(target, tmp_path / "s")
        assert not y.any()
    z = torch.full((3,), 7.0)
    target = {"a": {"x": y, "m": 5, "z": z}, "more": {"z": 1}}
    loaded = checkpoint.load_sharded(target, tmp_path / "s", strict=False)
    assert loaded["a"]["z"] is z
    assert (z == 7).all()
    assert (loaded["a"]["n"], loaded["a"]["m"], loaded["more"]) == (1, 5, {"z": 1})
    assert torch.equal(y, x)


def test_kinds_that_differ_are_named(quantizer: Any, tmp_path: Path) -> None:
    weight, plain = quantizer(torch.randn(4, 4)), torch.randn(4, 4)
    checkpoint.save_sharded({"q": weight, "p": plain}, tmp_path / "s")
    whole = quantizer(torch.randn(8, 4))
    wide = type(quantizer)(torch.float8_e5m2)(torch.randn(4, 4))
    cases: list[tuple[str, Any, type[Exception], str]] = [
        ("q", plain, CheckpointError, r"'q' of .* is quantized.*Expected: not quantized"),
        ("p", weight, CheckpointError, r"'p' of .* is not quantized.*Expected: quantized"),
        ("q", wide, CheckpointError, "as in the state"),
        ("q", quantizer(plain.bfloat16()), CheckpointError, "as in the state"),
        ("q", whole[:4], UsageError, "'q' is a view of another tensor"),
        ("p", torch.zeros(4), CheckpointError, r"'p' of .* has shape \(4, 4\) and dtype float32"),
        ("p", plain.double(), CheckpointError, r"Expected: shape \(4, 4\) and dtype float64"),
    ]
    for name, value, error, words in cases:
        before = contents(value)
        with pytest.raises(error, match=words):
            checkpoint.load_sharded({name: value}, tmp_path / "s", strict=False)
        assert contents(value) == before


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


UNWRITABLE: dict[str, Callable[[], torch.Tensor]] = {
    "is an expanded view": lambda: torch.zeros(1).expand(3),
    "was made in inference mode": made_in_inference_mode,
}


@pytest.mark.parametrize("words", UNWRITABLE)
def test_a_tensor_that_cannot_be_written_leaves_the_others(words: str, tmp_path: Path) -> None:
    """What autograd has saved of them stays valid, too."""
    saved = {name: torch.ones(3) for name in "abc"}
    checkpoint.save_sharded(saved, tmp_path / "saved")
    checkpoint.save_file(saved, tmp_path / "file")
    target = {"a": torch.zeros(3).requires_grad_(), "b": UNWRITABLE[words](), "c": torch.zeros(3)}
    loss = target["a"].square().sum()
    with pytest.raises(UsageError, match=f"'b' {words}"):
        checkpoint.load_sharded(target, tmp_path / "saved")
    with pytest.raises(UsageError, match=f"'b' {words}"):
        checkpoint.load_model(module_of(target), tmp_path / "file")
    assert not target["a"].any()
    assert not target["c"].any()
    loss.backward()


def test_a_write_that_torch_refuses_is_found_before_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One element of each tensor is written as it is, and only then any value."""
    checkpoint.save_sharded({name: torch.ones(3) for name in "abc"}, tmp_path / "saved")
    target, real = {name: torch.zeros(3) for name in "abc"}, torch.Tensor.copy_

    def fails(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        if tensor.data_ptr() == target["b"].data_ptr():
            raise RuntimeError("no more writing")
        return real(tensor, *args)

    monkeypatch.setattr(torch.Tensor, "copy_", fails)
    with pytest.raises(RuntimeError, match="no more writing"):
        checkpoint.load_sharded(target, tmp_path / "saved")
    assert not any(value.any() for value in target.values())


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    checkpoint.save_sharded({"a": torch.ones(3), "b": torch.full((3,), 2.0)}, tmp_path / "saved")
    tied = torch.zeros(3)
    loaded = checkpoint.load_sharded({"a": tied, "b": tied}, tmp_path / "saved")
    assert loaded["a"] is tied
    assert tied.tolist() == [2.0, 2.0, 2.0]


def test_ctrl_c_while_modules_load_leaves_all_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt is raised at the end; a layer without a recipe keeps the state for later."""
    import signal

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    saved, net = (torch.nn.Sequential(ottava.nn.Linear(4, 4)) for _ in range(2))
    state = saved.state_dict() | {"0.recipe_state.scales": torch.full((3,), 7.0)}
    checkpoint.save_file(state, tmp_path / "saved")
    real = torch.nn.Module.load_state_dict

    def load_state_dict(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        signal.raise_signal(signal.SIGINT)
        return result

    load_state_dict.__module__ = "torch.nn"
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", load_state_dict)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.load_model(net, tmp_path / "saved")
    signal.signal(signal.SIGINT, handler)
    assert contents(net) == contents(state)


def test_what_is_derived_of_a_loaded_tensor_is_made_anew(tmp_path: Path) -> None:
    """Of a tensor that was made in inference mode, too, which counts no writes."""
    quantizer = GridQuantizer(Layout(torch.float8_e4m3fn, (4, 4), columnwise="transposed"))
    with torch.inference_mode():
        saved, loaded = (quantizer.quantize(wide(64, 64, seed=seed)) for seed in range(2))
        dy = wide(8, 64)
        expected = gemm(dy, saved, "dgrad", out_dtype=torch.float32)
        gemm(dy, loaded, "dgrad", out_dtype=torch.float32)
        save_sharded({"w": saved}, tmp_path / "w")
        load_sharded({"w": loaded}, tmp_path / "w")
        assert_same(gemm(dy, loaded, "dgrad", out_dtype=torch.float32), expected)
