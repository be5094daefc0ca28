"""Broken quantizers, and quantizers that lose values."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from defects import broken
from row_recipe import RowQuantizer, Rows, RowStorage, RowTensor

from ottava import QuantizedTensorStorage, QuantizerRole
from ottava.tensors import InnerTensor

# -- quantizers --


@broken("roles", "gets a str in place of a quantizer")
class NoOutputRole(Rows):
    def quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Any:
        if QuantizerRole.of(role).tensor_type == "output":
            return "none"
        return super().quantizer(role)


@broken(
    "flags", "the spec says stateful=True, and a layer's state says stateful=False", stateful=True
)
class NotStateful(RowQuantizer):
    pass


@broken("usages", r"set_usage\(columnwise=False\) is ignored")
class IgnoresUsage(RowQuantizer):
    def set_usage(self, *, rowwise: Any = None, columnwise: Any = None) -> None:
        pass


class TwoWays(RowStorage):
    """Another copy of the data for the columnwise usage."""

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_data", "data", usage="rowwise", gather=True),
        InnerTensor("_columns", "columns", usage="columnwise", gather=True),
        InnerTensor("_scale_inv", "scale_inv", gather=True),
    )

    _columns: torch.Tensor | None

    def size(self, dim: int | None = None) -> Any:
        held = self._data if self._data is not None else self._columns
        return held.size() if dim is None else held.size(dim)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        data = self._data if self._data is not None else self._columns
        return (data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(dtype or self.dtype)


class TwoWaysTensor(RowTensor, TwoWays):
    pass


class TwoWaysQuantizer(RowQuantizer):
    """Makes both always, unless ``follows``."""

    storage, tensor = TwoWays, TwoWaysTensor
    follows = True

    def columns(self, data: torch.Tensor) -> torch.Tensor:
        return data.clone()

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> QuantizedTensorStorage:
        data, scale_inv = self.data_and_scale(tensor.to(torch.float32))
        make: Any = self.storage if self.internal else self.tensor
        rows = data if self.rowwise_usage or not self.follows else None
        columns = self.columns(data) if self.columnwise_usage or not self.follows else None
        made = make(
            data=rows, columns=columns, scale_inv=scale_inv, dtype=dtype, quantizer=self,
            **({} if self.internal else {"shape": tensor.shape}),
        )  # fmt: skip
        return made  # type: ignore[no-any-return]


@broken(
    "usages",
    r"set_usage\(rowwise=True, columnwise=False\) is ignored .*holds columnwise data all the same",
)
class MakesBothAlways(TwoWaysQuantizer):
    follows = False


@broken("usages-agree", "gives another '_data' for the rowwise usage alone")
class UsageChangesBytes(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        data, scale_inv = super().data_and_scale(x)
        return (data if self.columnwise_usage else data ^ 1), scale_inv


@broken("out", "out= is ignored by .*still holds the old values")
class IgnoresOut(RowQuantizer):
    def quantize(self, tensor: torch.Tensor, *, out: Any = None, dtype: Any = None) -> Any:
        return super().quantize(tensor, dtype=dtype) if out is None else out


@broken("out", "out= is ignored by .*another object")
class ReturnsAnother(RowQuantizer):
    def quantize(self, tensor: torch.Tensor, *, out: Any = None, dtype: Any = None) -> Any:
        return super().quantize(tensor, dtype=dtype)


@broken("noop-flag", "noop_flag is ignored by")
class IgnoresNoop(RowQuantizer):
    def update_quantized(self, src: Any, dst: Any, *, noop_flag: Any = None) -> Any:
        return super().update_quantized(src, dst)


@broken("noop-flag", "an update with it set changed 'seen'")
class CountsNoops(RowQuantizer):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(1)

    def update_quantized(self, src: Any, dst: Any, *, noop_flag: Any = None) -> Any:
        self.seen.add_(1)
        return super().update_quantized(src, dst, noop_flag=noop_flag)


@broken("make-empty", r"has dtype torch.float32")
class EmptyOfFloat32(RowQuantizer):
    def make_empty(self, shape: Any, *, dtype: Any = torch.float32, **rest: Any) -> Any:
        return super().make_empty(shape, **rest)


@broken("results-are-apart", "overwrites an earlier result: its '_data' changed")
class ReusesBuffer(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        data, scale_inv = super().data_and_scale(x)
        kept = _BUFFERS.setdefault(tuple(data.shape), torch.empty_like(data))
        return kept.copy_(data), scale_inv


_BUFFERS: dict[Any, torch.Tensor] = {}


@broken("results-are-apart", "writes to the tensor that it quantizes")
class WritesInput(RowQuantizer):
    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        return super().quantize_impl(tensor.mul_(0.5), dtype)


@broken("copy", "shares the mutable 'workspace'")
class SharesWorkspace(RowQuantizer):
    def __init__(self) -> None:
        super().__init__()
        self.workspace: list[Any] = []


@broken("copy", "returns the quantizer itself")
class CopiesNothing(RowQuantizer):
    def copy(self) -> Any:
        return self

    def with_usage(self, rowwise: bool, columnwise: bool) -> Any:
        return self


@broken("equality", "does not equal one made with the same options")
class ComparesByIdentity(RowQuantizer):
    def __init__(self) -> None:
        super().__init__()
        self.scratch = torch.zeros(1)


@broken("equality", "equals one made with the same options, but their hashes differ")
class HashesById(RowQuantizer):
    def __hash__(self) -> int:
        return id(self)


@broken("equality", "equals a copy with internal=False")
class ComparesUsagesOnly(RowQuantizer):
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.get_usages() == other.get_usages()

    def __hash__(self) -> int:
        return 1


class Coarse(RowQuantizer):
    """An option that does not count in comparisons."""

    steps = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coarse) and (self.get_usages(), self.internal) == (
            other.get_usages(),
            other.internal,
        )

    def __hash__(self) -> int:
        return 1

    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale((x * self.steps).round() / self.steps if self.steps else x)


@broken(
    "equality",
    "the quantizer of 'input' with .* equals the quantizer of 'weight' .*gives another '_data'",
)
class ComparesNoOptions(Rows):
    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Any:
        made = Coarse()
        made.steps = 4 if role.tensor_type == "weight" else 0
        return made


@broken("make-empty", r"make_empty\(.*with device='meta' is on cpu")
class EmptyIgnoresDevice(RowQuantizer):
    def make_empty(self, shape: Any, *, device: Any = None, **rest: Any) -> Any:
        return super().make_empty(shape, **rest)


@broken("quantized-input", "takes a tensor of integers without a DTypeError")
class TakesIntegers(RowQuantizer):
    def quantize(self, tensor: torch.Tensor, **rest: Any) -> Any:
        integers = isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        return super().quantize(tensor.float() if integers else tensor, **rest)


# -- values --


@broken("accuracy", "is off by .* of its norm, where 0.001 is allowed", relative_error=0.001)
class NotThatGood(RowQuantizer):
    pass


@broken("accuracy", "is 2 times what it should be")
class TwiceTheScale(RowStorage):
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return super().dequantize(dtype) * 2


@broken("shapes", "ShapeError.*two dimensions.*raised at .*broken_quantizers.py")
class MatricesOnly(RowQuantizer):
    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        from ottava.errors import ShapeError

        if tensor.dim() != 2:
            raise ShapeError(f"shape {tuple(tensor.shape)}", expected="two dimensions")
        return super().quantize_impl(tensor, dtype)


@broken("empty-shapes", r"an empty tensor of shape \(0,\) .* fails: IndexError")
class NoEmptyRows(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        x.abs().amax(-1, keepdim=True)
        return super().data_and_scale(x)


@broken("non-contiguous", r"a transposed tensor \(not contiguous\) is misread by")
class IgnoresStrides(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        if not x.is_contiguous():
            x = (
                x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
                if x.numel() < 4000
                else x * 1
            )
        return super().data_and_scale(x)


@broken(
    "dtypes",
    r"dequantize\(torch.bfloat16\) of a IgnoresDtype ignores dtype and gives torch.float32",
)
class IgnoresDtype(RowStorage):
    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return super().dequantize()


@broken("zeros", "zeros quantized by .* dequantize to nan")
class DividesByZero(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        amax = x.abs().amax(-1, keepdim=True)
        return (x / (amax / 448)).to(torch.float8_e4m3fn).view(torch.uint8), amax / 448


@broken("tiny-values", "dequantize to NaN or inf")
class InvertsTheScale(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        amax = x.abs().amax(-1, keepdim=True)
        scale = torch.where(amax > 0, 448.0 / amax, 1.0)
        return (x * scale).to(torch.float8_e4m3fn).view(torch.uint8), 1.0 / scale


@broken("large-values", "values up to 3e[+]38")
class OverflowsInHalf(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(x.clamp(-1e30, 1e30))


@broken("special-values", "^inf quantized by .* which hides it")
class HidesInfinity(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(torch.where(x.isinf(), 0.0, x))


@broken("special-values", "^nan quantized by .* dequantizes to .*, which hides it")
class HidesNan(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(torch.where(x.isnan(), 5.0, x))


@broken("special-values", "one nan among what .* makes NaN or inf of rows in other blocks")
class NanRuinsAll(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        data, scale_inv = super().data_and_scale(x)
        return data, scale_inv + (0.0 if x.is_meta else 0.0 * x.sum())


@broken("special-values", "one inf among what .* changes rows in other blocks")
class InfChangesAll(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(x * (2.0 if bool(x.isinf().any()) else 1.0))


@broken("blocks", "a value in the first block changed rows of others")
class OneScale(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        if not x.numel():
            return super().data_and_scale(x)
        scale_inv = x.abs().amax().expand(*x.shape[:-1], 1).clamp(min=1e-30) / 448
        return (x / scale_inv).to(torch.float8_e4m3fn).view(torch.uint8), scale_inv.contiguous()


@broken(
    "deterministic-cast",
    "quantizing the same tensor twice gives different bytes in '_data': the cast of",
)
class RoundsAtRandom(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale(x * (1 + 0.01 * torch.rand_like(x)))


@broken(
    "fake-quantization", r"fake_quantizer\('ROWS'\) gives a NoneType", fake_quant_formats=("ROWS",)
)
class NoFakeQuantizer(Rows):
    def fake_quantizer(self, fp8_format: str) -> Any:
        return None


@broken("quantizing-on-meta", "on the meta device")
class NotOnMeta(RowQuantizer):
    def data_and_scale(self, x: torch.Tensor) -> Any:
        data, scale_inv = super().data_and_scale(x)
        return data, torch.ones(scale_inv.shape)
