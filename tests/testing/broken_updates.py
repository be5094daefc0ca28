"""Broken updates, derivatives and products."""

from __future__ import annotations

from typing import Any

import torch
from broken_quantizers import TwoWays, TwoWaysQuantizer, TwoWaysTensor
from defects import broken
from row_recipe import RowQuantizer, RowStorage, RowTensor

from ottava.tensors import implements

aten = torch.ops.aten

# -- updates --


@broken(
    "in-place-ops", r"an in-place op \(mul_\) on a DropsMul was dropped: the values did not change"
)
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


def _drops(word: str, message: str, *ops: Any, check: str = "in-place-ops") -> None:
    """Register a tensor class that leaves an op out."""

    def nothing(op: Any, tensor: Any, *rest: Any, **more: Any) -> Any:
        return None if op.__name__.startswith("_") else tensor

    cls = type(f"Drops{word}", (RowTensor,), {"__module__": __name__})
    globals()[cls.__name__] = cls
    implements(cls, *ops)(nothing)
    broken(check, message)(cls)


_drops("IndexPut", r"\(index_put_\) on a DropsIndexPut was dropped", aten.index_put_.default)
_drops("Abs", r"\(abs_\) on a DropsAbs was dropped", aten.abs_.default)
_drops("Pow", r"\(pow_\) on a DropsPow was dropped", aten.pow_.Scalar)
_drops("Number", r"\(mul_ \(Scalar\)\) on a DropsNumber was dropped", aten.mul_.Scalar)
_drops("ClampMin", r"\(clamp_min_\) on a DropsClampMin was dropped", aten.clamp_min_.default)
_drops("Lerp", r"\(_foreach_lerp_\) on a DropsLerp was dropped", aten._foreach_lerp_.Scalar)
_drops(
    "Sgd",
    r"a step of SGD\(fused=True\) on a DropsSgd was",
    aten._fused_sgd_.default,
    check="optimizer-steps",
)
_drops(
    "Adam",
    r"of AdamW\(fused=True\) on a DropsAdam was",
    aten._fused_adamw_.default,
    check="optimizer-steps",
)


@broken("in-place-ops", r"an in-place op \(w\[1\] = x\) on a DropsItems was dropped")
class DropsItems(RowTensor):
    def __setitem__(self, index: Any, value: Any) -> None:
        pass


@broken("in-place-ops", r"after the in-place op w\[1\] = x, is off")
class WritesAnotherRow(RowTensor):
    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(2 if index == 1 else index, value)


class KeepsProducts(RowTensor):
    """Keeps what it dequantized for products, and never forgets it."""


@broken(
    "nothing-stale",
    "the fprop product with a StaleOperand, after mul_, reads stale values: it did not change",
)
class StaleOperand(RowTensor):
    _kept: torch.Tensor | None = None

    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
        if self._kept is None:
            self._kept = self.dequantize(torch.float32)
        return self._kept.reshape(-1, self.shape[-1]).to(dtype), None


class Columns(TwoWays):
    """Products that read the columnwise usage read the copy for it."""

    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
        data = self._columns if columnwise and self._columns is not None else self._data
        values = data.view(torch.float8_e4m3fn).float() * self._scale_inv
        return values.to(dtype).reshape(-1, self.size(-1)), None


class ColumnsTensor(Columns, TwoWaysTensor):
    pass


class ColumnsQuantizer(TwoWaysQuantizer):
    storage, tensor = Columns, ColumnsTensor


class KeepsColumns(ColumnsTensor):
    def _adopt(self, value: Any) -> None:
        kept = self._columns
        super()._adopt(value)
        self._columns = kept


@broken(
    "nothing-stale",
    "the dgrad product with a KeepsColumns, after .data = a plain tensor, reads stale values",
)
class KeepsColumnsQuantizer(ColumnsQuantizer):
    tensor = KeepsColumns


class RowsOnly(ColumnsTensor):
    """Writes the copy for one usage only."""

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: Any = None) -> Any:
        kept = None if self._columns is None else self._columns.clone()
        super().quantize_(tensor, noop_flag=noop_flag)
        if kept is not None and self._data is not None:
            assert self._columns is not None
            self._columns.copy_(kept)
        return self


@broken(
    "copying-in-place",
    "the product that reads the columnwise data of .*, after quantize_.*, reads stale values",
)
class RowsOnlyQuantizer(ColumnsQuantizer):
    tensor = RowsOnly


# -- autograd --


class CutsGraph(RowQuantizer):
    def quantize(self, tensor: torch.Tensor, **rest: Any) -> Any:
        return super().quantize(tensor.detach(), **rest)


broken("quantize-is-straight-through", "requires none: the graph is cut")(CutsGraph)


@broken(
    "dequantize-is-straight-through", r"dequantize\(\) of a CutsDequantize|does not require grad"
)
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


@broken(
    "operands", r"the columnwise operand \(gemm_operand\) of a \(48, 40\) tensor .*wrong transpose"
)
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


broken("products", "the dgrad product of .* holds the values of its transpose: wrong transpose")(
    WrongProduct
)


class Overwrites(RowQuantizer):
    """Named as the base class names them, so that they come as keywords or in their places."""

    custom = True

    def qgemm(  # type: ignore[override]
        self, qx: Any, qw: Any, m_params: Any, out_dtype: Any, sx: Any, sw: Any, bias: Any = None,
        out: Any = None, accumulate: bool = False, gemm_type: str = "fprop", qresult_x: Any = None,
        qresult_w: Any = None,
    ) -> Any:  # fmt: skip
        return super().qgemm(
            qx, qw, m_params, out_dtype, sx, sw, bias, out, False, gemm_type, qresult_x, qresult_w
        )


broken("accumulating-products", "gradients are lost under accumulation: .* overwrites out")(
    Overwrites
)
broken(
    "fused-accumulation",
    "gradients are lost under accumulation: .*weight.main_grad is that of the last",
)(Overwrites)


class NoBias(RowQuantizer):
    custom = True

    def qgemm(
        self,
        qx: Any,
        qw: Any,
        m_params: Any,
        out_dtype: Any,
        sx: Any,
        sw: Any,
        bias: Any = None,
        *rest: Any,
    ) -> Any:  # type: ignore[override]
        return super().qgemm(qx, qw, m_params, out_dtype, sx, sw, None, *rest)


broken("product-bias", "the fprop product with a bias did not change")(NoBias)
