"""Broken updates, derivatives and products."""

from __future__ import annotations

from typing import Any

import torch
from defects import broken
from rows import RowQuantizer, RowStorage, RowTensor

from ottava.tensors import implements

aten = torch.ops.aten

# -- updates --


@broken("in-place-ops", r"an in-place op \(mul_\) on a DropsMul was dropped: the values did not change")
class DropsMul(RowTensor):
    pass


@implements(DropsMul, aten.mul_.Tensor)
def _nothing(op: Any, tensor: Any, *rest: Any, **more: Any) -> Any:
    return tensor


@broken("in-place-ops", r"an in-place op \(copy_\) on a DropsCopy was dropped")
class DropsCopy(RowTensor):
    pass


implements(DropsCopy, aten.copy_.default)(_nothing)


@broken("copy-of-quantized", "ties them: a later write reaches both")
class CopyTies(RowTensor):
    pass


@implements(CopyTies, aten.copy_.default)
def _ties(op: Any, dst: Any, src: Any, *rest: Any) -> Any:
    if not isinstance(src, CopyTies):
        return NotImplemented
    dst._data, dst._scale_inv = src._data, src._scale_inv
    return dst


@broken("data-assignment", "after its .data was set to a plain tensor, did not change")
class IgnoresData(RowTensor):
    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        pass


@broken("optimizer-steps", r"a step of SGD on a DropsSteps was dropped: no value changed")
class DropsSteps(RowTensor):
    pass


implements(DropsSteps, aten.add_.Tensor, aten.addcdiv_.default, aten._foreach_add_.List)(_nothing)


class KeepsProducts(RowTensor):
    """Keeps what it dequantized for products, and never forgets it."""


@broken("nothing-stale", "the fprop product with a StaleOperand, after mul_, reads stale values: it did not change")
class StaleOperand(RowTensor):
    _kept: torch.Tensor | None = None

    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
        if self._kept is None:
            self._kept = self.dequantize(torch.float32)
        return self._kept.reshape(-1, self.shape[-1]).to(dtype), None


# -- autograd --


class CutsGraph(RowQuantizer):
    def quantize(self, tensor: torch.Tensor, **rest: Any) -> Any:
        return super().quantize(tensor.detach(), **rest)


broken("quantize-is-straight-through", "requires none: the graph is cut")(CutsGraph)


@broken("dequantize-is-straight-through", r"dequantize\(\) of a CutsDequantize|does not require grad")
class CutsDequantize(RowTensor):
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.dequantize_impl(dtype or self.dtype)


class Mangles(RowStorage):
    """A constructor that is not the inverse of flattening."""

    def __init__(self, **declared: Any) -> None:
        super().__init__(**declared)
        if self._scale_inv is not None and self._scale_inv.grad_fn is None and _mangling():
            self._scale_inv = self._scale_inv * 2


def _mangling() -> bool:
    import traceback

    return any(frame.name == "backward" for frame in traceback.extract_stack()[-8:])


broken("saved-for-backward", "saved for backward, comes back with other values")(Mangles)


class UncountedWrites(RowTensor):
    def copy_from_storage(self, src: Any, *, noop_flag: Any = None) -> None:
        self._data, self._scale_inv = src._data.clone(), src._scale_inv.clone()


broken("saved-weights-are-guarded", "is not counted as a write")(UncountedWrites)


# -- products --


@broken("operands", r"the columnwise operand \(gemm_operand\) of a \(48, 40\) tensor .*wrong transpose")
class WrongColumns(RowStorage):
    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
        values = self.dequantize(dtype).reshape(-1, self.size(-1))
        return values.t().reshape(values.shape) if columnwise else values, None


class WrongProduct(RowQuantizer):
    custom = True

    def qgemm(self, qx: Any, qw: Any, *rest: Any, **more: Any) -> Any:
        result = super().qgemm(qx, qw, *rest, **more)
        gemm_type = rest[7] if len(rest) > 7 else more.get("gemm_type", "fprop")
        return result.t().reshape(result.shape) if gemm_type == "dgrad" else result


broken("products", "the dgrad product of .* holds the values of its transpose: wrong transpose")(WrongProduct)


class Overwrites(RowQuantizer):
    """Named as the base class names them, so that they come as keywords or in their places."""

    custom = True

    def qgemm(  # type: ignore[override]
        self, qx: Any, qw: Any, m_params: Any, out_dtype: Any, sx: Any, sw: Any, bias: Any = None, out: Any = None,
        accumulate: bool = False, gemm_type: str = "fprop", qresult_x: Any = None, qresult_w: Any = None,
    ) -> Any:  # fmt: skip
        return super().qgemm(qx, qw, m_params, out_dtype, sx, sw, bias, out, False, gemm_type, qresult_x, qresult_w)


broken("accumulating-products", "gradients are lost under accumulation: .* overwrites out")(Overwrites)
broken("fused-accumulation", "gradients are lost under accumulation: .*weight.main_grad is that of the last")(
    Overwrites
)


class NoBias(RowQuantizer):
    custom = True

    def qgemm(
        self, qx: Any, qw: Any, m_params: Any, out_dtype: Any, sx: Any, sw: Any, bias: Any = None, *rest: Any
    ) -> Any:  # type: ignore[override]
        return super().qgemm(qx, qw, m_params, out_dtype, sx, sw, None, *rest)


broken("product-bias", "the fprop product with a bias did not change")(NoBias)
