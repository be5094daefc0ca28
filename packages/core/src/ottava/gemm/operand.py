"""What a product takes: matrices, each with the side that is summed over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ottava.kernels import transpose
from ottava.kernels.direct import is_direct
from ottava.kernels.table import define_product
from ottava.layout import Layout
from ottava.tensors.storage import QuantizedTensorStorage

Tensor = torch.Tensor


class Operand(NamedTuple):
    """A matrix as a product takes it.

    Attributes:
        values: a matrix in high precision, or the bytes of elements; of columnwise data that a layout transposes, the
            transpose.
        scales: of elements, as they are stored; of high precision a scalar that it is still to be multiplied with, or
            None.
        layout: the text of the layout of elements; empty for high precision.
        columnwise: whether the product sums over the matrix's rows; of elements, whether these are columnwise data.
        source: the storage that the elements are of, which keeps what is made of them.
    """

    values: Tensor
    scales: Tensor | None = None
    layout: str = ""
    columnwise: bool = False
    source: QuantizedTensorStorage | None = None

    def is_turned(self) -> bool:
        """Whether ``values`` are ``[reduced, outer]``: the rows of it are what is summed over."""
        return self.columnwise and not (self.layout and Layout.of(self.layout).transposed)

    def rows(self) -> Tensor:
        """``values`` as ``[outer, reduced]``."""
        return self.values.t() if self.is_turned() else self.values


#: An operand of a tuple of all its fields; the constructor is a function of Python.
operand_of: Callable[[tuple[Any, ...]], Operand] = partial(tuple.__new__, Operand)


def fitted(rows: Tensor, outer: int, inner: int, views: bool = False) -> Tensor:
    """Bytes ``[outer, reduced]`` as a library takes them, in the same memory if it can be.

    They are contiguous, or with ``views`` perhaps the transposed view of contiguous ones, at an address that is a
    multiple of 16; zeros are added up to multiples of ``outer`` and ``inner``.
    """
    data = rows.view(torch.uint8)
    if not data.is_contiguous() and data.t().is_contiguous():
        if views:
            # Its outer size is a stride then.
            return _padded(data.t(), inner, inner).t().view(rows.dtype)
        data = transpose(data.t())
    return _padded(data.contiguous(), outer, inner).view(rows.dtype)


def _padded(data: Tensor, rows: int, columns: int) -> Tensor:
    padding = [0, -data.shape[1] % columns, 0, -data.shape[0] % rows]
    if any(padding):
        return F.pad(data, padding)
    # The stride of a single row means nothing, except to the library.
    plain = data.as_strided(data.shape, (data.shape[1], 1)) if data.shape[0] == 1 else data
    return plain.clone() if plain.data_ptr() % 16 else plain


def kept(weight: Operand, make: Callable[[], Any], option: Any = None) -> Any:
    """What ``make`` gives of a weight, made again when that has been written to, or ``option`` is another."""
    cache = None if weight.source is None else weight.source.gemm_cache()
    # A graph that is replayed would never see a weight that has changed.
    if cache is None or (weight.values.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make()
    tensors = [tensor for tensor in (weight.values, weight.scales) if tensor is not None]
    made = cache.get(weight.columnwise, tensors, make, option)
    if isinstance(made, Tensor) and made.data_ptr() == weight.values.data_ptr():
        # The weight's own memory, which the cache would keep when the weight has other data.
        cache.entries.pop(weight.columnwise)
    return made


_SCHEMA = (
    "(Tensor a, Tensor b, Tensor? scales_a, str layout_a, bool columnwise_a, Tensor? scales_b, str layout_b,"
    " bool columnwise_b, Tensor? bias, ScalarType out_dtype, "
)


def _sizes(a: Any, b: Any, *fields: Any) -> tuple[Any, Any, Any]:
    left, right = Operand(a, *fields[:3]).is_turned(), Operand(b, *fields[3:6]).is_turned()
    return a[left], b[right], a[not left]


def define(name: str, option: str, multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``multiply(a, b, bias, out_dtype, option)`` of two operands, in graphs one operator of this name and option."""

    def of_fields(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        return multiply(Operand(a, *rest[:3]), Operand(b, *rest[3:6]), *rest[6:])

    operator = define_product(f"{name}{_SCHEMA}{option}) -> Tensor", of_fields, _sizes)

    def product(a: Operand, b: Operand, bias: Tensor | None, *rest: Any) -> Tensor:
        if is_direct(a.values, b.values, a.scales, b.scales, bias):
            return multiply(a, b, bias, *rest)
        return operator(a.values, b.values, *a[1:4], *b[1:4], bias, *rest)  # type: ignore[no-any-return]

    return product
