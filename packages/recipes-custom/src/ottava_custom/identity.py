"""``IdentityQuantizer``: high precision for a role for which a recipe needs a quantizer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ottava.contract import Contract
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
    """A storage whose first inner tensor, the elements in the order of rows, serves both usages.

    The storage notes which usages it was quantized for.
    """

    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype"),
        StaticField("_rowwise", "rowwise"),
        StaticField("_columnwise", "columnwise"),
    )
    rowwise_serves_columnwise = True

    _rowwise: bool
    _columnwise: bool

    def get_usages(self) -> dict[str, bool]:
        if getattr(self, self.inner_tensors[0].attribute) is None:
            return {"rowwise": False, "columnwise": False}
        return {"rowwise": self._rowwise, "columnwise": self._columnwise}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Drop a usage (False), ask for it (True), or leave it (None). The elements stay, because
        they serve both usages.

        Raises:
            UsageError: the storage holds no data.
            OptionError: neither usage would be left.
        """
        self._elements()
        self._rowwise, self._columnwise = self._requested_usages(rowwise_usage, columnwise_usage)

    def _elements(self) -> torch.Tensor:
        elements: torch.Tensor | None = getattr(self, self.inner_tensors[0].attribute)
        if elements is None:
            raise self._empty()
        return elements


class IdentityTensorStorage(SharedElements):
    """Values in high precision, with the interface of quantized data.

    Args:
        values: the values, of the nominal dtype.
        dtype: nominal dtype.
        columnwise, rowwise: the usages that the values serve.
        quantizer: the quantizer of in-place updates.
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
        return self._elements().to(dtype or self.dtype, copy=True)

    def gemm_operand(
        self, *, columnwise: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The values themselves."""
        return as_matrix(self._elements().to(dtype)), None


class IdentityTensor(QuantizedTensor, IdentityTensorStorage):
    """Values in high precision as a quantized tensor. All views share the values."""

    @classmethod
    def laid_out_like(cls, declared: dict[str, Any]) -> torch.Tensor | None:
        return declared["values"]  # type: ignore[no-any-return]


_aten = torch.ops.aten
#: Ops whose view of the elements holds the elements of their view of the tensor.
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
    """The view of a tensor, or the list of views, whose elements ``op`` gives."""
    inner = tensor.inner_tensors[0]
    elements = op(getattr(tensor, inner.attribute), *args, **kwargs)
    if isinstance(elements, (list, tuple)):
        return [_view(tensor, inner, each) for each in elements]
    return _view(tensor, inner, elements)


def _view(tensor: Any, inner: InnerTensor, elements: torch.Tensor) -> Any:
    view = tensor.make_like(tensor, shape=elements.shape, **{inner.argument: elements})
    # The scale of a view with fewer elements also belongs to the other elements.
    view.mark_view(tensor, part=elements.numel() != tensor.numel())
    return view


@implements(IdentityTensor, _aten.clone.default)
def clone_of_elements(op: Any, tensor: Any, *, memory_format: Any = None) -> Any:
    """A copy whose elements have the strides of ``memory_format``."""
    if memory_format in (None, torch.preserve_format):
        return NotImplemented
    inner = tensor.inner_tensors[0]
    elements = getattr(tensor, inner.attribute).clone(memory_format=memory_format)
    return tensor.make_like(tensor, **{inner.argument: elements}).clone_storage()


class IdentityQuantizer(Quantizer):
    """Keeps values in high precision, in the dtype in which the layer computes."""

    shards = ShardRule(rows=1)
    aliases_operands = in_high_precision = True

    def quantize_impl(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        dtype = dtype or tensor.dtype
        cls = IdentityTensorStorage if self.internal else IdentityTensor
        return cls(
            # A layer may save its operand itself, because autograd refuses a backward pass whose
            # saved tensors were written to.
            values=tensor.detach().to(dtype, copy=not self.internal).contiguous(),
            dtype=dtype,
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
            quantizer=self,
        )

    @property
    def contract(self) -> Contract:
        return Contract("identity", "identity")

    def is_requantization_safe(self) -> bool:
        return True
