"""Views of quantized tensors share what a write changes, stay fresh, and leave the rest of their
tensor as it is."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from strided import VIEWS as PLACES
from strided import check_places

from ottava import prepare_for_saving, restore_from_saved
from ottava.distributed import replace_raw_data
from ottava.errors import UsageError
from ottava.tensors import Float8Tensor, columnwise_layout


@pytest.fixture(params=["shared", "transpose"])
def layout(request: pytest.FixtureRequest) -> Iterator[str]:
    with columnwise_layout(request.param):
        yield request.param


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda t: t[1:3],
    "select": lambda t: t[1],
    "columns": lambda t: t[:, 2:5],
    "view": lambda t: t.view(8, 4),
    "transpose": lambda t: t.t(),
    "transposed slice": lambda t: t.t()[2:5],
    "3-d permute": lambda t: t.view(2, 2, 8).permute(2, 0, 1),
    "diagonal": lambda t: t.diagonal(),
    "unbind": lambda t: t.unbind(0)[2],
    "iteration": lambda t: list(t)[3],
    "split": lambda t: t.split(3)[1],
    "as_strided": lambda t: t.as_strided((2, 3), (8, 2), 1),
    "unsqueeze": lambda t: t.unsqueeze(0),
}


@pytest.mark.parametrize(
    "usages", [(True, True), (True, False), (False, True)], ids=["both", "rowwise", "columnwise"]
)
@pytest.mark.parametrize("name", VIEWS)
def test_writing_to_a_view_writes_to_the_whole(
    name: str, usages: tuple[bool, bool], layout: str, x: torch.Tensor, quantizer: object
) -> None:
    """With the scale that it has; another one would change the rest of the tensor, and is
    refused."""
    quantizer.set_usage(rowwise=usages[0], columnwise=usages[1])
    whole = quantizer(x)
    plain = whole.dequantize().clone()
    if name == "view" and layout == "transpose" and not usages[0]:
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            VIEWS[name](whole)
        assert torch.equal(whole.reshape(8, 4).dequantize(), plain.reshape(8, 4))
        return
    view = VIEWS[name](whole)
    assert isinstance(view, Float8Tensor)
    assert torch.equal(view.dequantize(), VIEWS[name](plain))
    turned = VIEWS[name](quantizer(x.flip(0).flip(1)))
    view.copy_(turned)
    VIEWS[name](plain).copy_(turned.dequantize())
    assert torch.equal(whole.dequantize(), plain)
    assert torch.equal(view.dequantize(), turned.dequantize())
    if layout == "transpose" and all(usages):
        whole.update_usage(columnwise_usage=True)
        assert torch.equal(whole._transpose, whole.ordered(columnwise=False)[0].t())
    if view.numel() == whole.numel():
        view.mul_(16.0)
        plain.mul_(16.0)
        assert torch.equal(whole.dequantize(), quantizer(plain).dequantize())
        return
    before = whole.dequantize()
    with pytest.raises(UsageError, match="rest of the tensor"):
        view.mul_(16.0)
    assert torch.equal(whole.dequantize(), before)


def test_views_lie_where_plain_ones_do(layout: str, quantizer: object) -> None:
    check_places(quantizer(torch.randn(96, 64)), set(PLACES))


def test_views_of_data_in_a_buffer_lie_in_it(quantizer: object) -> None:
    whole, buffer = quantizer(torch.randn(6, 4)), torch.zeros(100, dtype=torch.uint8)
    values = whole.dequantize()
    replace_raw_data(whole, buffer[10:34])
    rows = whole[2:4]
    assert torch.equal(
        whole.as_strided((2, 4), (4, 1), whole.storage_offset() + 8).dequantize(), values[2:4]
    )
    assert torch.equal(
        rows.as_strided((2, 4), (4, 1), rows.storage_offset() - 4).dequantize(), values[1:3]
    )


@pytest.mark.parametrize(
    "through",
    [
        lambda rows: restore_from_saved(*prepare_for_saving(rows))[0],
        copy.copy,
        lambda rows: rows.detach(),
        lambda rows: rows.view(-1).view(2, 8),
    ],
    ids=["saved", "copied", "detached", "viewed"],
)
def test_a_view_stays_a_view(
    through: Callable[..., torch.Tensor], x: torch.Tensor, quantizer: object
) -> None:
    whole = quantizer(x)
    before = whole.dequantize()
    with pytest.raises(UsageError, match="rest of the tensor"):
        through(whole[0:2]).copy_(torch.full((2, 8), 100.0))
    assert torch.equal(whole.dequantize(), before)
    through(whole[0:2]).copy_(whole[2:])
    assert torch.equal(whole[0:2].dequantize(), before[2:])


@pytest.mark.parametrize("index", [1, slice(0, 2), (slice(None), 3), (0, 0)], ids=str)
def test_an_assignment_quantizes_all_of_it_again(
    index: object, layout: str, x: torch.Tensor, quantizer: object
) -> None:
    whole = quantizer(x)
    plain = whole.dequantize()
    whole[index] = 100.0
    plain[index] = 100.0
    assert torch.equal(whole.dequantize(), quantizer(plain).dequantize())
    # Data of the same scale is taken over as it is.
    other = quantizer(plain.flip(0))
    whole[0:2] = other[0:2]
    assert torch.equal(whole.dequantize()[0:2], other.dequantize()[0:2])


def test_a_pickled_view_is_on_its_own(x: torch.Tensor, quantizer: object) -> None:
    whole = quantizer(x)
    stream = io.BytesIO()
    torch.save([whole, whole[0:2]], stream)
    stream.seek(0)
    loaded, part = torch.load(stream, weights_only=True)
    part.copy_(torch.full((2, 8), 100.0))
    assert torch.equal(loaded.dequantize(), whole.dequantize())
    assert torch.equal(part.dequantize(), torch.full((2, 8), 100.0))


def test_overlapping_memory_is_not_written(x: torch.Tensor, quantizer: object) -> None:
    whole = quantizer(x)
    before = whole.dequantize()
    with pytest.raises(UsageError, match="rest of the tensor"):
        whole.as_strided((4, 8), (1, 1)).copy_(torch.full((4, 8), 100.0))
    assert torch.equal(whole.dequantize(), before)


def test_a_wrapper_shows_the_memory_of_what_it_holds(
    layout: str, x: torch.Tensor, quantizer: object
) -> None:
    for usages in ((True, True), (True, False), (False, True)):
        quantizer.set_usage(rowwise=usages[0], columnwise=usages[1])
        tensor = quantizer(x)
        held = tensor._transpose if tensor._data is None else tensor._data
        assert tensor.data_ptr() == held.data_ptr()
        assert tensor.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
        assert tensor.untyped_storage().nbytes() == x.numel()


@pytest.mark.parametrize("flag", [0.0, 1.0])
@pytest.mark.parametrize(
    "usages", [(True, True), (True, False), (False, True)], ids=["both", "rowwise", "columnwise"]
)
def test_noop_flag_keeps_usages(
    flag: float, usages: tuple[bool, bool], layout: str, x: torch.Tensor, quantizer: object
) -> None:
    quantizer.set_usage(rowwise=usages[0], columnwise=usages[1])
    tensor, new = quantizer(x), 3 * x.flip(0)
    before, held = tensor.dequantize().clone(), tensor.get_usages()
    tensor.quantize_(new, noop_flag=torch.tensor([flag]))
    assert tensor.get_usages() == held
    assert torch.equal(tensor.dequantize(), before if flag else quantizer(new).dequantize())


def test_an_alias_sees_the_write(layout: str, x: torch.Tensor, quantizer: object) -> None:
    quantizer.set_usage(rowwise=False, columnwise=True)
    tensor = quantizer(x)
    alias = tensor.detach()
    alias.copy_(2 * x)
    assert torch.equal(tensor.dequantize(), alias.dequantize())
    assert torch.equal(tensor.dequantize(), quantizer(2 * x).dequantize())


def test_replaced_data_outdates_the_transpose(x: torch.Tensor, quantizer: object) -> None:
    with columnwise_layout("transpose"):
        quantizer.set_usage(rowwise=True, columnwise=True)
        tensor = quantizer(x)
        tensor._data = torch.zeros_like(tensor._data)
        assert tensor._transpose is None
        tensor.update_usage(columnwise_usage=True)
        assert not tensor._transpose.any()


def test_a_cleared_tensor_refuses_writes(x: torch.Tensor, quantizer: object) -> None:
    for write in (lambda t: t.quantize_(x), lambda t: t.copy_(x), lambda t: t.copy_(quantizer(x))):
        tensor = quantizer(x)
        tensor.clear()
        with pytest.raises(UsageError, match="holds no data"):
            write(tensor)
    with pytest.raises(UsageError, match="holds no data to pickle"):
        torch.save(tensor, io.BytesIO())


def test_contiguous_and_reshape_of_a_transpose(x: torch.Tensor, quantizer: object) -> None:
    transposed = quantizer(x).t()
    made = transposed.contiguous()
    assert made.is_contiguous()
    assert made._data.is_contiguous()
    assert torch.equal(made.dequantize(), transposed.dequantize())
    assert torch.equal(transposed.reshape(-1).dequantize(), transposed.dequantize().reshape(-1))


def test_scale_with_one_dimension(x: torch.Tensor, quantizer: object) -> None:
    made = quantizer(x)
    other = Float8Tensor(
        dtype=torch.float32,
        data=made._data.clone(),
        fp8_dtype=made._fp8_dtype,
        fp8_scale_inv=made._scale_inv.reshape(1).clone(),
    )
    other.copy_(quantizer(5 * x))
    assert torch.equal(other.dequantize(), quantizer(5 * x).dequantize())


def test_autograd_refuses_a_value_that_was_overwritten(x: torch.Tensor, quantizer: object) -> None:
    tensor, w = quantizer(x), torch.ones(4, 8, requires_grad=True)
    for overwrite in (
        lambda: tensor.quantize_(0 * x),
        lambda: quantizer.update_quantized(0 * x, tensor),
        lambda: tensor.copy_(quantizer(0 * x)),
    ):
        y = (tensor * w).sum()
        overwrite()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_to_dtype_is_differentiable(x: torch.Tensor, quantizer: object) -> None:
    tensor = quantizer(x).requires_grad_(True)
    made = tensor.to_dtype(torch.bfloat16)
    assert isinstance(made, Float8Tensor)
    assert made.dtype == torch.bfloat16
    made.sum().backward()
    assert torch.equal(tensor.grad, torch.ones(4, 8))


def test_data_takes_over_dtype_and_values(x: torch.Tensor, quantizer: object) -> None:
    parameter = torch.nn.Parameter(quantizer(x))
    alias = parameter.detach()
    parameter.data = (2 * x).bfloat16()
    assert parameter.dtype == torch.bfloat16
    assert parameter.requires_grad
    assert torch.equal(
        parameter.dequantize(torch.float32), quantizer((2 * x).bfloat16()).dequantize(torch.float32)
    )
    assert torch.equal(alias.dequantize(), quantizer(x).dequantize())
    parameter.data = quantizer(3 * x)
    assert parameter.dtype == torch.float32
    assert torch.equal(parameter.dequantize(), quantizer(3 * x).dequantize())


def test_float64_is_not_a_nominal_dtype(x: torch.Tensor, quantizer: object) -> None:
    made = quantizer(x).double()
    assert type(made) is torch.Tensor
    assert made.dtype == torch.float64


def test_optimizer_moments_are_plain(x: torch.Tensor, quantizer: object) -> None:
    assert type(torch.zeros_like(quantizer(x))) is torch.Tensor


def test_shared_memory(x: torch.Tensor, quantizer: object) -> None:
    tensor = quantizer(x)
    assert not tensor.is_shared()
    assert tensor.share_memory_() is tensor
    assert tensor.is_shared()
    assert torch.equal(tensor.dequantize(), quantizer(x).dequantize())


def test_pinning_pins_what_is_inside(
    x: torch.Tensor, quantizer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = quantizer(x)
    assert not tensor.is_pinned()
    pinned: list[torch.dtype] = []

    def pin(inner: torch.Tensor) -> torch.Tensor:
        pinned.append(inner.dtype)
        return inner.clone()

    # Pinning itself needs an accelerator.
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    made = torch.ops.aten._pin_memory(tensor)
    assert isinstance(made, Float8Tensor)
    assert pinned == [torch.uint8, torch.float32]
    assert torch.equal(made.dequantize(), tensor.dequantize())
