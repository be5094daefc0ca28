"""Moving the bytes of weights into a caller's buffer."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import ottava
from ottava import GridQuantizer, Layout
from ottava.distributed import (
    is_custom,
    post_all_gather_processing,
    replace_raw_data,
)
from ottava.errors import DeviceError, DTypeError, OttavaError, ShapeError, UsageError
from ottava.tensors import Float8QuantizerBase, columnwise_layout
from ottava_blockwise import Float8BlockQuantizer
from ottava_current import Float8CurrentScalingQuantizer
from ottava_delayed import Float8Quantizer
from ottava_mxfp8 import MXFP8Quantizer
from ottava_rowwise import Float8RowwiseQuantizer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

MAKERS = {
    "current": lambda: Float8CurrentScalingQuantizer(E4M3),
    "current e5m2": lambda: Float8CurrentScalingQuantizer(E5M2),
    "delayed": lambda: Float8Quantizer(torch.tensor([3.0]), torch.zeros(1), E4M3),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "mxfp8 2-D": lambda: MXFP8Quantizer(E5M2, with_2d_quantization=True),
    "blockwise": lambda: Float8BlockQuantizer(
        E4M3, rowwise=True, columnwise=True, block_scaling_dim=1
    ),
    "blockwise 2-D": lambda: Float8BlockQuantizer(E5M2, rowwise=True, columnwise=True),
    "rowwise": lambda: Float8RowwiseQuantizer(E4M3),
    "a layout": lambda: GridQuantizer(Layout(E5M2, (8, 16), rounding="floor")),
}


@pytest.fixture(params=list(MAKERS))
def quantizer(request: pytest.FixtureRequest) -> Any:
    return MAKERS[request.param]()


@pytest.fixture(params=[None, "transpose"], ids=["shared", "transpose"])
def layout(request: pytest.FixtureRequest) -> Iterator[str | None]:
    with nullcontext() if request.param is None else columnwise_layout(request.param):
        yield request.param


def held(weight: Any) -> dict[str, torch.Tensor]:
    both = zip(weight.inner_tensors, weight.inner_list(), strict=True)
    return {inner.attribute: tensor for inner, tensor in both if tensor is not None}


def names(weight: Any) -> list[str]:
    return [inner.attribute for inner in weight.raw_inner()]


def buffers_for(weight: Any, dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
    return [
        torch.zeros(getattr(weight, name).numel() + 3, dtype=dtype)[3:] for name in names(weight)
    ]


def no_stale_transpose(weight: Any) -> None:
    transposed = getattr(weight, "_transpose", None)
    assert transposed is None or torch.equal(transposed, weight._data.movedim(-1, 0))


@pytest.mark.parametrize("shape", [(33, 40), (64,), (3, 5, 8), (1, 32), (0, 8), (8, 0)])
@pytest.mark.parametrize("native", [False, True])
def test_values_and_everything_else_stay(
    quantizer: Any, layout: Any, shape: tuple[int, ...], native: bool
) -> None:
    weight = quantizer.quantize(torch.randn(shape).bfloat16())
    before = {name: tensor.clone() for name, tensor in held(weight).items()}
    rest = {name: tensor for name, tensor in held(weight).items() if name not in names(weight)}
    values, usages, size, stride = (
        weight.dequantize(),
        weight.get_usages(),
        weight.shape,
        weight.stride(),
    )
    buffers = buffers_for(weight)
    given = [b.view(weight.grid_layout.element) for b in buffers] if native else buffers
    replace_raw_data(weight, given[0] if len(given) == 1 else given)
    assert {n: t.tolist() for n, t in held(weight).items()} == {
        n: t.tolist() for n, t in before.items()
    }
    assert weight.get_usages() == usages
    assert (weight.shape, weight.stride(), weight.dtype, weight._quantizer) == (
        size,
        stride,
        torch.bfloat16,
        quantizer,
    )
    assert torch.equal(weight.dequantize(), values)
    for name, tensor in rest.items():
        # The transpose, the scales: the very same.
        assert getattr(weight, name).data_ptr() == tensor.data_ptr(), name
    for name, buffer in zip(names(weight), buffers, strict=True):
        assert getattr(weight, name).dtype == torch.uint8
        assert getattr(weight, name).data_ptr() == buffer.data_ptr()
        assert torch.equal(buffer, before[name].reshape(-1))


def test_writes_to_the_weight_reach_the_buffer(quantizer: Any, layout: Any) -> None:
    weight = quantizer.quantize(torch.randn(64, 32).bfloat16())
    buffers = buffers_for(weight)
    replace_raw_data(weight, buffers)
    values = torch.randn(64, 32).bfloat16()
    with torch.no_grad():
        weight.copy_(values)
    expected = alike(quantizer).quantize(values)
    for name, buffer in zip(names(weight), buffers, strict=True):
        assert getattr(weight, name).data_ptr() == buffer.data_ptr(), name
        assert torch.equal(buffer.view(64, 32), getattr(expected, name)), name
    no_stale_transpose(weight)


def alike(quantizer: Any) -> Any:
    """A quantizer of the same configuration with a state of its own."""
    if isinstance(quantizer, Float8Quantizer):
        return Float8Quantizer(quantizer.scale.clone(), None, quantizer.fp8_dtype)
    return quantizer.copy()


def test_writes_to_the_buffer_reach_the_weight_and_leave_nothing_stale(
    quantizer: Any, layout: Any
) -> None:
    weight = quantizer.quantize(torch.randn(64, 32).bfloat16())
    buffers = buffers_for(weight)
    replace_raw_data(weight, buffers)
    other = alike(quantizer).quantize(torch.randn(64, 32).bfloat16())
    for name, buffer in zip(names(weight), buffers, strict=True):
        buffer.copy_(getattr(other, name).reshape(-1))
    for name in names(weight):
        assert torch.equal(getattr(weight, name), getattr(other, name)), name
    no_stale_transpose(weight)
    post_all_gather_processing([weight])
    no_stale_transpose(weight)
    if layout == "transpose" and isinstance(quantizer, Float8QuantizerBase):
        assert weight._transpose is not None


@pytest.mark.parametrize("storage", [False, True])
def test_a_bare_storage_and_an_alias(storage: bool, layout: Any) -> None:
    """What was an alias keeps the old bytes."""
    quantizer = Float8CurrentScalingQuantizer(E4M3)
    quantizer.internal = storage
    weight = quantizer.quantize(torch.randn(6, 8))
    alias = weight if storage else weight.detach()
    old = weight._data
    buffer = torch.zeros(48, dtype=torch.uint8)
    replace_raw_data(weight, buffer)
    assert weight._data.data_ptr() == buffer.data_ptr()
    if not storage:
        assert alias._data.data_ptr() == old.data_ptr()
        alias.copy_(torch.randn(6, 8))
        assert torch.equal(buffer.view(6, 8), weight._data)
        no_stale_transpose(alias)
    no_stale_transpose(weight)


def test_only_a_transpose_is_held() -> None:
    with columnwise_layout("transpose"):
        weight = Float8CurrentScalingQuantizer(E4M3).quantize(torch.randn(6, 8))
        weight.update_usage(rowwise_usage=False)
        values, buffer = weight.dequantize(), torch.zeros(48, dtype=torch.uint8)
        replace_raw_data(weight, buffer)
        assert weight.get_usages() == {"rowwise": False, "columnwise": True}
        assert torch.equal(weight.dequantize(), values)
        assert weight._transpose.data_ptr() == buffer.data_ptr()


def test_rows_alone_of_blocks() -> None:
    weight = MXFP8Quantizer(E4M3).quantize(torch.randn(64, 32))
    columns = weight._columnwise_data
    buffer = torch.zeros(2048, dtype=torch.uint8)
    replace_raw_data(weight, buffer)
    assert weight._rowwise_data.data_ptr() == buffer.data_ptr()
    assert weight._columnwise_data is columns


REFUSED = {
    "dtype": (DTypeError, lambda n: torch.zeros(n, dtype=torch.int8)),
    "high precision": (DTypeError, lambda n: torch.zeros(n)),
    "bool": (DTypeError, lambda n: torch.zeros(n, dtype=torch.bool)),
    "another format": (DTypeError, lambda n: torch.zeros(n, dtype=torch.uint8).view(E5M2)),
    "E8M0": (DTypeError, lambda n: torch.zeros(n, dtype=torch.uint8).view(torch.float8_e8m0fnu)),
    "no tensor": (DTypeError, lambda n: b"\0" * n),
    "too small": (ShapeError, lambda n: torch.zeros(n - 1, dtype=torch.uint8)),
    "too large": (ShapeError, lambda n: torch.zeros(n + 1, dtype=torch.uint8)),
    "device": (DeviceError, lambda n: torch.zeros(n, dtype=torch.uint8, device="meta")),
    "not contiguous": (UsageError, lambda n: torch.zeros(2 * n, dtype=torch.uint8)[::2]),
    "none": (ShapeError, lambda n: []),
    "too many": (ShapeError, lambda n: [torch.zeros(n, dtype=torch.uint8) for _ in range(3)]),
}


@pytest.mark.parametrize("why", list(REFUSED))
@pytest.mark.parametrize("maker", ["current", "delayed", "mxfp8"])
def test_a_wrong_buffer_is_refused_before_anything_is_written(
    why: str, maker: str, layout: Any
) -> None:
    weight = MAKERS[maker]().quantize(torch.randn(32, 32))
    before = {name: (tensor, tensor.clone()) for name, tensor in held(weight).items()}
    kind, make = REFUSED[why]
    given = make(1024)
    if maker == "mxfp8" and not isinstance(given, list):
        # The second of two.
        good = torch.full((1024,), 7, dtype=torch.uint8)
        given = [good, given]
    with pytest.raises(kind):
        replace_raw_data(weight, given)
    if maker == "mxfp8" and why != "none" and len(given) == 2:
        assert torch.all(good == 7)
    for name, (tensor, value) in before.items():
        assert getattr(weight, name) is tensor
        assert torch.equal(tensor, value)


def test_what_has_no_bytes_to_move_is_refused() -> None:
    buffer = torch.zeros(48, dtype=torch.uint8)
    with pytest.raises(DTypeError):
        replace_raw_data(torch.zeros(6, 8), buffer)  # type: ignore[arg-type]
    for maker in MAKERS.values():
        weight = maker().quantize(torch.randn(6, 8))
        weight.clear()
        with pytest.raises(UsageError):
            replace_raw_data(weight, buffer)
    weight = Float8CurrentScalingQuantizer(E4M3).quantize(torch.randn(6, 8))
    with pytest.raises(UsageError, match="no view"):
        replace_raw_data(weight.t(), buffer)


def test_a_part_of_another_weight_is_refused() -> None:
    """It shares the scale of the whole, which finds its views by where their bytes are."""
    weight = Float8CurrentScalingQuantizer(E4M3).quantize(torch.randn(6, 8))
    values = weight.dequantize()
    part = weight[2:4]
    with pytest.raises(OttavaError):
        replace_raw_data(part, torch.zeros(16, dtype=torch.uint8))
    assert torch.equal(part.dequantize(), values[2:4])


def test_one_buffer_for_two_directions_is_refused() -> None:
    weight = MXFP8Quantizer(E4M3).quantize(torch.randn(32, 32))
    before = [tensor.clone() for tensor in weight.inner_list()]
    buffer = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(OttavaError):
        replace_raw_data(weight, [buffer, buffer])
    assert all(torch.equal(a, b) for a, b in zip(weight.inner_list(), before, strict=True))


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8", "blockwise", "rowwise"])
def test_training_goes_on_in_the_buffer(recipe: str, layout: Any) -> None:
    """Forward, backward, optimizer, state_dict, copies and pickles as without a buffer."""

    def model() -> Any:
        torch.manual_seed(0)
        with ottava.quantized_model_init(recipe):
            return torch.nn.Sequential(
                *(ottava.nn.Linear(32, 32, dtype=torch.bfloat16, recipe=recipe) for _ in range(2))
            )

    nets = [model(), model()]
    moved = nets[1]
    placed = [(layer.weight, name) for layer in moved for name in names(layer.weight)]
    flat = torch.zeros(len(placed) * 1024, dtype=torch.uint8)
    buffers = iter(flat.split(1024))
    for layer in moved:
        replace_raw_data(layer.weight, [next(buffers) for _ in names(layer.weight)])
    losses: list[list[float]] = [[], []]
    for net, seen in zip(nets, losses, strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        random = torch.Generator().manual_seed(1)
        for _ in range(3):
            loss = net(torch.randn(32, 32, generator=random).bfloat16()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    assert losses[0] == losses[1]
    for place, (weight, name) in enumerate(placed):
        assert torch.equal(
            flat[1024 * place : 1024 * (place + 1)].view(32, 32), getattr(weight, name)
        )
    copied = copy.deepcopy(moved)
    file = io.BytesIO()
    torch.save(moved.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    before = flat.clone()
    for layer, twin, name in zip(moved, copied, ("0.weight", "1.weight"), strict=True):
        for attribute, tensor in held(layer.weight).items():
            assert torch.equal(tensor, getattr(twin.weight, attribute)), attribute
            assert tensor.data_ptr() != getattr(twin.weight, attribute).data_ptr()
            if attribute in names(layer.weight):
                assert torch.equal(tensor, getattr(loaded[name], attribute))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(flat, before)
    # Loading writes into the buffer.
    moved.load_state_dict(copied.state_dict())
    assert not flat.any()
    for layer in moved:
        no_stale_transpose(layer.weight)


def test_is_custom(quantizer: Any) -> None:
    assert is_custom() is False
    assert is_custom(torch.ones(1)) is False
    assert is_custom(quantizer) is False
    assert is_custom(quantizer.quantize(torch.ones(4, 4))) is False

    class Own(type(quantizer)):  # type: ignore[misc]
        custom = True

    own = object.__new__(Own)
    own.__dict__.update(quantizer.__dict__)
    assert is_custom(own) is True
    for wrong in ("current", 1, type(quantizer)):
        with pytest.raises(TypeError):
            is_custom(wrong)  # type: ignore[arg-type]
