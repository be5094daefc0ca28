"""Broken storages, files and tensors."""

from __future__ import annotations

from typing import Any

import torch
from broken_quantizers import TwoWays, TwoWaysQuantizer, TwoWaysTensor
from defects import broken
from row_recipe import RowQuantizer, RowStorage, RowTensor

from ottava.tensors import implements

aten = torch.ops.aten

# -- storages --


@broken("description", "nbytes of .* is 1")
class OneByte(RowStorage):
    @property
    def nbytes(self) -> int:
        return 1


class Undeclared(RowStorage):
    """Has a tensor that the declaration does not have."""

    _offset: torch.Tensor | None = None

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = super().dequantize(dtype)
        return values if self._offset is None else values + self._offset.to(values)


class UndeclaredTensor(Undeclared, RowTensor):
    pass


@broken("flatten", r"what is not declared is lost \['_offset'\]")
class UndeclaredQuantizer(RowQuantizer):
    storage, tensor = Undeclared, UndeclaredTensor

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        mean = tensor.mean()
        made: Any = super().quantize_impl(tensor - mean, dtype)
        made._offset = mean
        return made


@broken("save-and-restore", "saved and restored, has another '_data'")
class RestoresWrongly(RowStorage):
    def restore_from_saved(self, tensors: Any) -> Any:
        rest = super().restore_from_saved(tensors)
        self._data = self._data ^ 1
        return rest


def _aliased(clone: Any, original: Any) -> Any:
    clone._scale_inv = original._scale_inv
    return clone


@broken(
    "clone-shares-nothing",
    r"shares memory: writing to the clone's '_scale_inv' changed the original's '_scale_inv'",
)
class AliasedScale(RowStorage):
    def clone_storage(self) -> Any:
        return _aliased(super().clone_storage(), self)


@broken("clone-shares-nothing", r"^clone\(\) of a AliasedClone shares memory: .*'_scale_inv'")
class AliasedClone(RowTensor):
    pass


@implements(AliasedClone, aten.clone.default)
def _aliased_clone(op: Any, tensor: Any, *, memory_format: Any = None) -> Any:
    return _aliased(tensor.clone_storage(), tensor)


@broken("device-moves", "leaves '_scale_inv' on cpu")
class ScaleStays(RowStorage):
    def apply_to_inner(self, function: Any) -> Any:
        moved: Any = super().apply_to_inner(function)
        if moved._data.device != self._data.device:
            moved._scale_inv = self._scale_inv
        return moved


@broken("dropping-usages", r"update_usage\(columnwise_usage=False\) of .* loses the rowwise usage")
class DropsAll(RowStorage):
    _served = (True, True)

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self._served[0], "columnwise": self._served[1]}

    def update_usage(self, rowwise_usage: Any = None, columnwise_usage: Any = None) -> None:
        if columnwise_usage is False:
            self._served = (False, True)


class KeepsUsages(TwoWays):
    def update_usage(self, rowwise_usage: Any = None, columnwise_usage: Any = None) -> None:
        pass


class KeepsUsagesTensor(KeepsUsages, TwoWaysTensor):
    pass


@broken(
    "dropping-usages",
    r"update_usage\(columnwise_usage=False\) of .* does nothing: \['_columns'\] is held",
)
class KeepsUsagesQuantizer(TwoWaysQuantizer):
    storage, tensor = KeepsUsages, KeepsUsagesTensor


@broken("copying-in-place", r"copy_from_storage\(\) into .* leaves another '_scale_inv'")
class CopiesCodesOnly(RowStorage):
    def copy_from_storage(self, src: Any, *, noop_flag: Any = None) -> None:
        kept = self._scale_inv.clone()
        super().copy_from_storage(src, noop_flag=noop_flag)
        self._scale_inv.copy_(kept)


@broken("detach-is-an-alias", r"detach\(\) of a DetachCopies copies '_data'")
class DetachCopies(RowTensor):
    def detach(self) -> Any:
        return self.clone_storage()


# -- files --


def rebuilt(*arguments: Any) -> Any:
    return RowStorage(**dict(arguments))


@broken(
    "pickle-needs-no-code",
    r"the pickle of .* needs code \(broken_tensors.rebuilt\)",
)
class PicklesCode(RowStorage):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuilt, (
            ("data", self._data),
            ("scale_inv", self._scale_inv),
            ("dtype", self.dtype),
        )


@broken("pickle-needs-no-code", "the pickle of .* needs code that cannot be saved: .*lambda")
class PicklesLambda(RowStorage):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return (lambda: None), ()


@broken("safetensors", "has another '_data' in a safetensors file")
class FlattensWrongly(RowTensor):
    def inner_list(self) -> Any:
        import traceback

        inner = super().inner_list()
        if any("checkpoint/" in frame.filename for frame in traceback.extract_stack()[-6:]):
            return [None if t is None else t.clone().zero_() for t in inner]
        return inner


# -- tensors --


@broken(
    "transposes", r"wrong transpose: t\(\) of a WrongTranspose holds the values of its transpose"
)
class WrongTranspose(RowTensor):
    pass


@implements(WrongTranspose, aten.t.default)
def _wrong_t(op: Any, tensor: Any) -> Any:
    return tensor.dequantize().reshape(tensor.shape[1], tensor.shape[0])


@broken("views", r"\[3:17\] of a WrongSlice")
class WrongSlice(RowTensor):
    pass


@implements(WrongSlice, aten.slice.Tensor)
def _wrong_slice(op: Any, tensor: Any, dim: int = 0, *rest: Any) -> Any:
    return op(tensor.dequantize() * 2, dim, *rest)


@broken("views", r"a write to \[3:17\] of a SliceIsACopy does not reach")
class SliceIsACopy(RowTensor):
    pass


@implements(SliceIsACopy, aten.slice.Tensor)
def _copied_slice(op: Any, tensor: Any, *rest: Any) -> Any:
    return tensor._quantizer(op(tensor.dequantize(), *rest))


@broken("results-of-ops", r"sum\(0\) of a WrongSum")
class WrongSum(RowTensor):
    pass


@implements(WrongSum, aten.sum.dim_IntList)
def _wrong_sum(op: Any, tensor: Any, *rest: Any) -> Any:
    return op(tensor._data.float(), *rest)


@broken("nominal-dtype", r"half\(\) of a HalfIsFloat gives torch.float32")
class HalfIsFloat(RowTensor):
    def half(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.dequantize(torch.float32)


@broken("new-tensors", "zeros_like of a ZerosAreOnes does not hold 0.0")
class ZerosAreOnes(RowTensor):
    pass


@implements(ZerosAreOnes, aten.zeros_like.default)
def _ones(op: Any, tensor: Any, **rest: Any) -> Any:
    return torch.ones(tensor.shape)


@broken("requires-grad", r"a deep copy of a parameter around a LosesGrad loses requires_grad")
class LosesGrad(RowTensor):
    def __deepcopy__(self, memo: Any) -> Any:
        return self.clone_storage()


@broken("requires-grad", r"copy.copy of a parameter around a CopyLosesGrad loses requires_grad")
class CopyLosesGrad(RowTensor):
    def __copy__(self) -> Any:
        return self.make_like(self)


def _declared_safe(*arguments: Any) -> Any:
    return RowStorage(**dict(arguments))


torch.serialization.add_safe_globals([_declared_safe])


@broken(
    "pickle-needs-no-code",
    r"needs code \(broken_tensors._declared_safe\): loading it calls functions",
)
class PicklesSafeFunction(RowStorage):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _declared_safe, (
            ("data", self._data),
            ("scale_inv", self._scale_inv),
            ("dtype", self.dtype),
        )


class Settings:
    """No class that torch knows."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Settings

    def __hash__(self) -> int:
        return 1


@broken(
    "pickle-needs-no-code",
    r"weights_only=True\) refuses the pickle of .* needs code \(broken_tensors.Settings\)",
)
class PicklesUnknownClass(RowQuantizer):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()


@broken("transposes", r"wrong transpose: t\(\) of a ScaleStaysBehind")
class ScaleStaysBehind(RowTensor):
    pass


@implements(ScaleStaysBehind, aten.t.default, aten.transpose.int)
def _codes_only(op: Any, tensor: Any, *rest: Any) -> Any:
    data = op(tensor._data, *rest)
    return ScaleStaysBehind(
        data=data,
        scale_inv=tensor._scale_inv,
        shape=data.shape,
        dtype=tensor.dtype,
        quantizer=tensor._quantizer,
    )


@broken("clone-shares-nothing", "has dtype torch.float32")
class CloneLosesDtype(RowTensor):
    def clone_storage(self) -> Any:
        made: Any = super().clone_storage()
        return made.make_like(made, dtype=torch.float32)


@broken("clone-shares-nothing", r"shares memory: writing to the clone's '_scale_inv' changed")
class MovesCodesOnly(RowStorage):
    def apply_to_inner(self, function: Any) -> Any:
        return _aliased(super().apply_to_inner(function), self)
