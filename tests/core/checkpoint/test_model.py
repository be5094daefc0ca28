"""Models in files: all or nothing, whatever kind the file and the model have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint
from ottava.checkpoint.files import write_tensors
from ottava.errors import (
    CheckpointError,
    DTypeError,
    OptionError,
    OttavaError,
    ShapeError,
    UsageError,
)
from ottava.tensors import (
    Float8Tensor,
    InnerTensor,
    QuantizedTensorStorage,
    StaticField,
    columnwise_layout,
)


def linear(recipe: Any, seed: int, *, primary: bool, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe, enabled=primary):
        return torch.nn.Sequential(
            ottava.nn.Linear(16, 8, recipe=recipe, dtype=dtype), torch.nn.BatchNorm1d(8)
        )


def test_bytes_into_the_same_kind(small: Any, contents: Any, tmp_path: Path) -> None:
    first, second = small(0), small(1)
    checkpoint.save_model(first, tmp_path / "x")
    parameters = dict(second.named_parameters())
    assert checkpoint.load_model(second, tmp_path / "x") == ([], [])
    assert contents(second) == contents(first)
    assert all(parameters[name] is parameter for name, parameter in second.named_parameters())
    assert second.layer.weight._quantizer is not None
    assert second.tied is second.first


def test_between_kinds(recipe: Any, tmp_path: Path) -> None:
    quantized, plain = (
        linear(recipe, 0, primary=True),
        linear(recipe, 1, primary=False, dtype=torch.bfloat16),
    )
    checkpoint.save_model(quantized, tmp_path / "quantized")
    checkpoint.load_model(plain, tmp_path / "quantized")
    assert torch.equal(plain[0].weight, quantized[0].weight.dequantize(torch.bfloat16))
    plain[0].weight.data.copy_(torch.randn(8, 16))
    checkpoint.save_model(plain, tmp_path / "plain")
    checkpoint.load_model(quantized, tmp_path / "plain")
    expected = recipe.quantizer("weight")(plain[0].weight.detach())
    assert torch.equal(quantized[0].weight._data, expected._data)
    assert torch.equal(quantized[0].weight._scale_inv, expected._scale_inv)
    assert quantized[0].weight.dtype == torch.float32


def test_another_format_is_quantized_again(recipe: Any, tmp_path: Path) -> None:
    model = linear(recipe, 0, primary=True)
    values = torch.randn(8, 16)
    wide = recipe.quantizer("grad_output")(values)
    assert wide._fp8_dtype != model[0].weight._fp8_dtype
    checkpoint.save_file(model.state_dict() | {"0.weight": wide}, tmp_path / "x")
    checkpoint.load_model(model, tmp_path / "x")
    assert torch.equal(model[0].weight._data, recipe.quantizer("weight")(wide.dequantize())._data)


def test_names_of_only_one_of_them(small: Any, contents: Any, tmp_path: Path) -> None:
    model = small(0)
    state = small(1).state_dict()
    del state["step"]
    checkpoint.save_file(state | {"more": torch.ones(1), "most": torch.ones(1)}, tmp_path / "x")
    before = contents(model)
    with pytest.raises(
        CheckpointError,
        match=r"x: the file misses 'step'; the model has no place for 'more', 'most'",
    ):
        checkpoint.load_model(model, tmp_path / "x")
    assert contents(model) == before
    missing, unexpected = checkpoint.load_model(model, tmp_path / "x", strict=False)
    assert (missing, sorted(unexpected)) == (["step"], ["more", "most"])
    after = contents(model)
    assert after.pop("step") == before["step"]
    assert after == contents(state)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("layer.weight", torch.randn(7, 5), ShapeError),
        ("layer.weight", torch.ones(5, 7, dtype=torch.int32), DTypeError),
        ("layer.bias", torch.ones(6), ShapeError),
        ("layer.bias", torch.ones(5, dtype=torch.int64), DTypeError),
        ("layer.bias", torch.ones(5, dtype=torch.complex64), DTypeError),
        ("step", torch.ones(()), DTypeError),
        ("step", torch.ones((), dtype=torch.int32), DTypeError),
        ("flags", torch.ones(3, dtype=torch.uint8), DTypeError),
        ("flags", torch.ones(3, 1, dtype=torch.bool), ShapeError),
    ],
)
def test_another_shape_or_kind(
    small: Any,
    contents: Any,
    tmp_path: Path,
    name: str,
    value: torch.Tensor,
    error: type[OttavaError],
) -> None:
    """What the model has come before it in the file: nothing of that is loaded either."""
    model = small(0)
    checkpoint.save_file(small(1).state_dict() | {name: value}, tmp_path / "x")
    before = contents(model)
    for strict in (True, False):
        with pytest.raises(error, match=rf"x: '{name}'"):
            checkpoint.load_model(model, tmp_path / "x", strict=strict)
        assert contents(model) == before


def test_models_that_cannot_be_loaded_into(small: Any, tmp_path: Path) -> None:
    checkpoint.save_model(small(0), tmp_path / "x")
    no_quantizer = small(1)
    no_quantizer.layer.weight.update_quantizer(None)
    checkpoint.load_model(no_quantizer, tmp_path / "x")
    state = small(0).state_dict()
    checkpoint.save_file(
        state | {"layer.weight": state["layer.weight"].dequantize()}, tmp_path / "plain"
    )
    with pytest.raises(UsageError, match="has no quantizer"):
        checkpoint.load_model(no_quantizer, tmp_path / "plain")
    with pytest.raises(UsageError, match="on meta"):
        checkpoint.load_model(torch.nn.Linear(2, 2, device="meta"), tmp_path / "x")
    for wrong in (None, small(0).state_dict()):
        with pytest.raises(DTypeError, match="the model is a"):
            checkpoint.load_model(wrong, tmp_path / "x")
        with pytest.raises(DTypeError, match="the model is a"):
            checkpoint.save_model(wrong, tmp_path / "y")
    with pytest.raises(OptionError, match="strict"):
        checkpoint.load_model(small(0), tmp_path / "x", strict="yes")  # type: ignore[arg-type]

    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return 3

    for use in (checkpoint.load_model, checkpoint.save_model):
        with pytest.raises(DTypeError, match="_extra_state"):
            use(Extra(2, 2), tmp_path / "x")


def test_a_module_that_refuses_undoes_everything(small: Any, contents: Any, tmp_path: Path) -> None:
    """A hook of the model's own, which nothing can foresee, fails when all the rest is loaded."""
    model = small(0)
    for error in (ZeroDivisionError("by the hook"), KeyboardInterrupt()):

        def hook(module: Any, keys: Any, error: BaseException = error) -> None:
            assert int(model.step) == 9
            raise error

        handle = model.register_load_state_dict_post_hook(hook)
        other = small(1)
        other.step.fill_(9)
        checkpoint.save_model(other, tmp_path / "x")
        before = contents(model)
        with pytest.raises(CheckpointError if isinstance(error, Exception) else KeyboardInterrupt):
            checkpoint.load_model(model, tmp_path / "x")
        assert contents(model) == before
        handle.remove()


def test_no_copy_of_a_model_is_kept_that_refuses_nothing(
    small: Any, contents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would take longer than the load: its memory is new."""
    import ottava.checkpoint.model as module

    kept: list[Any] = []
    monkeypatch.setattr(module, "_on_the_cpu", kept.append)
    checkpoint.save_model(small(0), tmp_path / "x")
    model = small(1)
    checkpoint.load_model(model, tmp_path / "x")
    assert contents(model) == contents(small(0))
    assert not kept
    model.layer.register_load_state_dict_post_hook(lambda *_: None)
    checkpoint.load_model(model, tmp_path / "x")
    assert len(kept) == len(model.state_dict())


def test_a_module_with_a_way_of_its_own_to_load_undoes_everything(
    contents: Any, tmp_path: Path
) -> None:
    class Own(torch.nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            super()._load_from_state_dict(*args)
            raise ZeroDivisionError("by the module")

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), Own(3, 3))
    saved = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)
    )
    checkpoint.save_model(saved, tmp_path / "x")
    before = contents(model)
    with pytest.raises(CheckpointError, match="by the module"):
        checkpoint.load_model(model, tmp_path / "x")
    assert contents(model) == before


def test_values_that_cannot_be_quantized_undo_everything(
    recipe: Any, contents: Any, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(*(linear(recipe, seed, primary=True)[0] for seed in range(2)))
    checkpoint.save_model(
        torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(16, 8)), tmp_path / "x"
    )

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("by the quantizer")

    model[1].weight._quantizer.update_quantized = fails
    before = contents(model)
    with pytest.raises(CheckpointError, match="by the quantizer"):
        checkpoint.load_model(model, tmp_path / "x")
    assert contents(model) == before


class Loose(QuantizedTensorStorage):
    """A third party's storage, which checks nothing."""

    inner_tensors = (
        InnerTensor("_codes", "codes", native="_element"),
        InnerTensor("_factor", "factor"),
    )
    static_fields = (StaticField("_element", "element"), StaticField("_sizes", "sizes"))

    def __init__(
        self, *, codes: Any, factor: Any, element: Any, sizes: Any, quantizer: Any = None
    ) -> None:
        self._codes, self._factor, self._quantizer = codes, factor, quantizer
        self._element, self._sizes = element, sizes
        assert sizes is not None

    def size(self, dim: int | None = None) -> Any:
        return self._sizes if dim is None else self._sizes[dim]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._codes.view(self._element).to(dtype) * self._factor.to(dtype)[:, None]


def test_a_class_that_checks_nothing(contents: Any, tmp_path: Path) -> None:
    """Whatever a file says to it: an error of Ottava's and nothing is changed, or a weight of the
    right shape."""
    made = Loose(
        codes=torch.arange(6, dtype=torch.uint8).view(2, 3),
        factor=torch.rand(2),
        element=torch.float8_e5m2,
        sizes=(2, 3),
    )
    tensors, metadata = checkpoint.flatten_state_dict({"weight": made, "bias": torch.ones(2)})
    model = torch.nn.Linear(3, 2)
    before, refused, loaded = contents(model), 0, 0
    junk: list[Any] = [
        None,
        [],
        [2, 3],
        [3, 2],
        [2],
        [-1, 3],
        "x",
        "23",
        1,
        1.5,
        {},
        {"dtype": "float8_e4m3fn"},
    ]
    junk += [{"dtype": "uint8"}, {"dtype": "float32"}, {"a": 1}, True, ["2", "3"], [[2], 3]]
    for field in ("element", "sizes"):
        for value in junk:
            described = json.loads(metadata["ottava"])
            described["quantized"]["weight"]["static"][field] = value
            (tmp_path / "x").unlink(missing_ok=True)
            write_tensors(tmp_path / "x", tensors, {"ottava": json.dumps(described)})
            try:
                checkpoint.load_model(model, tmp_path / "x")
            except OttavaError as error:
                message = str(error)
            else:
                message = ""
            if message:
                assert str(tmp_path / "x") in message
                assert contents(model) == before
                refused += 1
                continue
            loaded += 1
            assert torch.equal(model.weight, made.dequantize(torch.float32))
            model = torch.nn.Linear(3, 2)
            before = contents(model)
    # The values that stood there.
    assert loaded == 1
    assert refused == 2 * len(junk) - 1


def test_what_the_device_needs_besides_is_made(recipe: Any, tmp_path: Path) -> None:
    """A file without transposes, as of a device that needs none, for a device that does: the bytes
    stay."""
    checkpoint.save_model(linear(recipe, 0, primary=True), tmp_path / "x")
    written = checkpoint.load_file(tmp_path / "x")["0.weight"]
    with columnwise_layout("transpose"):
        model = linear(recipe, 1, primary=True)
        assert model[0].weight._transpose is not None
        # Quantizing again would ask the quantizer.
        model[0].weight.update_quantizer(None)
        checkpoint.load_model(model, tmp_path / "x")
        assert torch.equal(model[0].weight._data, written._data)
        assert torch.equal(model[0].weight._transpose, written._data.t())
        assert torch.equal(model[0].weight._scale_inv, written._scale_inv)


def test_a_part_is_saved_whole(recipe: Any, tmp_path: Path) -> None:
    weight = recipe.quantizer("weight")(torch.randn(8, 16))
    checkpoint.save_file({"part": weight[2:4]}, tmp_path / "x")
    read = checkpoint.load_file(tmp_path / "x")["part"]
    assert isinstance(read, Float8Tensor)
    assert torch.equal(read.dequantize(), weight[2:4].dequantize())


def test_a_parameter_that_cannot_be_written(small: Any, contents: Any, tmp_path: Path) -> None:
    """An expanded view: several of its elements are one."""
    checkpoint.save_model(small(0), tmp_path / "x")
    model = small(1)
    model.first = model.tied = torch.nn.Parameter(torch.zeros(1, 3).expand(2, 3))
    before = contents(model)
    with pytest.raises(UsageError, match="'first' is an expanded view"):
        checkpoint.load_model(model, tmp_path / "x")
    assert contents(model) == before
