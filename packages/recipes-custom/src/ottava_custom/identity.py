"""``IdentityQuantizer``: keeps values as they are, in high precision, where a quantizer is asked
for."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ottava.distributed import ShardRule
from ottava.gemm import as_matrix
from ottava.tensors import (
    InnerTensor,
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    StaticField,
    check_values_dtype,
    implements,
)
from ottava.torch_private import aten_overloads


class SharedElements(QuantizedTensorStorage):
    """A storage whose first inner tensor, in the order of rows, serves rows and columns; it says
    which it is for."""

    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype"),
        StaticField("_rowwise", "rowwise"),
        StaticField("_columnwise", "columnwise"),
    )
    rowwise_serves_columnwise = True

    _rowwise: bool
    _columnwise: bool

    def get_usages(self) -> dict[str, bool]:
        held = getattr(self, self.inner_tensors[0].attribute) is not None
        return {"rowwise": held and self._rowwise, "columnwise": held and self._columnwise}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Drop a usage (False), ask for one (True), or leave it (None). The elements serve both,
        and stay.

        Raises:
            UsageError: it holds no data.
            OptionError: neither usage would be left.
        """
        self._held()
        self._rowwise, self._columnwise = self._requested_usages(rowwise_usage, columnwise_usage)

    def _held(self) -> torch.Tensor:
        held = getattr(self, self.inner_tensors[0].attribute)
        if held is None:
            raise self._empty()
        return held  # type: ignore[no-any-return]


class IdentityTensorStorage(SharedElements):
    """Values in high precision as if they were quantized.

    Args:
        values: the values, of the nominal dtype.
        dtype: nominal dtype.
        columnwise, rowwise: the usages that they are said to serve.
        quantizer: used by in-place updates.
    """

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_kept", "values", gather=True),
    )

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of the values.

        Raises:
            DTypeError: ``dtype`` is not a floating-point dtype.
        """
        check_values_dtype(dtype)
        return self._held().to(dtype or self.dtype, copy=True)

    def gemm_operand(
        self, *, columnwise: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The values themselves."""
        return as_matrix(self._held().to(dtype)), None


class IdentityTensor(QuantizedTensor, IdentityTensorStorage):
    """Values in high precision as a quantized tensor. All views share them."""

    @classmethod
    def laid_out_like(cls, declared: dict[str, Any]) -> torch.Tensor | None:
        return declared["values"]  # type: ignore[no-any-return]


_aten = torch.ops.aten
#: Ops that give views, which elements in the order of the tensor share one by one.
VIEWS = (
    _aten.as_strided.default,
    _aten.diagonal.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unbind.int,
    _aten.unfold.default,
    _aten.unsqueeze.default,
    _aten.view.default,
    *aten_overloads("_unsafe_view"),
)


@implements(IdentityTensor, *VIEWS)
def view_of_elements(op: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """The view that ``op`` gives of the elements, or a list of such."""
    elements = tensor.inner_tensors[0]
    found = op(getattr(tensor, elements.attribute), *args, **kwargs)
    views = []
    for part in found if isinstance(found, (list, tuple)) else [found]:
        view = tensor.make_like(tensor, shape=part.shape, **{elements.argument: part})
        # A scale of all elements is that of the rest, too.
        view.mark_view(tensor, part=part.numel() != tensor.numel())
        views.append(view)
    return views if isinstance(found, (list, tuple)) else views[0]


@implements(IdentityTensor, _aten.clone.default)
def clone_of_elements(op: Any, tensor: Any, *, memory_format: Any = None) -> Any:
    """A copy whose elements lie in memory as ``memory_format`` says."""
    if memory_format in (None, torch.preserve_format):
        return NotImplemented
    elements = tensor.inner_tensors[0]
    cloned = getattr(tensor, elements.attribute).clone(memory_format=memory_format)
    return tensor.make_like(tensor, **{elements.argument: cloned}).clone_storage()


class IdentityQuantizer(Quantizer):
    """Quantizes nothing: a layer or a tensor of it stays in high precision, in the dtype that the
    layer computes in."""

    shards = ShardRule(rows=1)
    keeps_operands = keeps_values = True

    def quantize_impl(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        dtype = dtype or tensor.dtype
        make: Any = IdentityTensorStorage if self.internal else IdentityTensor
        made: QuantizedTensorStorage = make(
            # What a layer saves may be its operand itself: autograd sees to it that nobody writes
            # to that.
            values=tensor.detach().to(dtype, copy=not self.internal).contiguous(),
            dtype=dtype,
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
            quantizer=self,
        )
        return made

    def is_requantization_safe(self) -> bool:
        return True
