"""What the cases of sharded weights share: quantizers of third parties, random weights, and two
oracles."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st

from ottava import QuantizedTensor, Quantizer
from ottava.distributed import ShardBatch, ShardJob, ShardRule
from ottava.tensors import Float8Tensor, InnerTensor
from ottava_blockwise import Float8BlockQuantizer
from ottava_current import Float8CurrentScalingQuantizer
from ottava_delayed import Float8Quantizer
from ottava_mxfp8 import MXFP8Quantizer
from ottava_rowwise import Float8RowwiseQuantizer

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

import mx_oracle
import oracle

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (
    *(math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, -1e-45, 3e38, -3.4028234663852886e38),
    # What a rounding to float16 or bfloat16 makes infinite, or not quite.
    *(65519.0, 65520.0, -3.3961775292304957e38, 3.39e38, 448.0, 464.0, 57344.0, 2.0**-9, 2.0**-10),
)


class RowTensor(QuantizedTensor):
    """E4M3 data and a scale for each row."""

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_data", "data", gather=True),
        InnerTensor("_scale_inv", "scale_inv", gather=True),
    )

    @staticmethod
    def __new__(
        cls,
        *,
        data: torch.Tensor,
        scale_inv: Any,
        dtype: Any,
        shape: Any = None,
        quantizer: Any = None,
        **rest: Any,
    ) -> RowTensor:
        made: RowTensor = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=dtype, device=data.device, **rest
        )
        return made

    def __init__(
        self,
        *,
        data: Any,
        scale_inv: Any,
        dtype: Any,
        shape: Any = None,
        quantizer: Any = None,
        **rest: Any,
    ) -> None:
        self._data, self._scale_inv, self._quantizer = data, scale_inv, quantizer

    def dequantize_impl(self, dtype: torch.dtype) -> torch.Tensor:
        return (self._data.view(E4M3).to(torch.float32) * self._scale_inv).to(dtype)


def row_data(values: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale_inv, whose number of dimensions is that of ``amax``."""
    scale_inv = amax.nan_to_num(0, 1e30).clamp(min=1e-12, max=1e30) / 448.0
    data = (values.to(torch.float32) / scale_inv).nan_to_num(0.0).clamp(-448.0, 448.0).to(E4M3)
    return data.view(torch.uint8), scale_inv


def row_amax(values: torch.Tensor) -> torch.Tensor:
    magnitudes = values.to(torch.float32).abs().nan_to_num(0.0, posinf=1e30)
    if values.dim() == 0:
        return magnitudes
    if not values.shape[-1]:
        return magnitudes.new_zeros(*values.shape[:-1], 1)
    return magnitudes.amax(-1, keepdim=True)


class RowQuantizer(Quantizer):
    """Says nothing about shards."""

    custom = True

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> RowTensor:
        data, scale_inv = row_data(tensor, row_amax(tensor))
        return RowTensor(data=data, scale_inv=scale_inv, dtype=dtype, quantizer=self)

    def make_empty(
        self, shape: Sequence[int], *, dtype: Any = torch.float32, device: Any = None, **rest: Any
    ) -> Any:
        shape, place = self.check_empty(shape, dtype, device, rest.get("requires_grad", False))
        return self.quantize_impl(torch.zeros(shape, dtype=dtype, device=place), dtype)


class RowAmaxBatch(ShardBatch):
    """One number for each row."""

    def amaxes(self) -> torch.Tensor:
        return torch.cat([self.of_rows(job) for job in self.jobs])

    def of_rows(self, job: ShardJob) -> torch.Tensor:
        shard, start_offset = job.rounded(), job.start_offset
        length = job.shape[-1] if job.shape else 1
        rows = math.prod(job.shape[:-1])
        amaxes = torch.zeros(rows)
        for row in range(rows if length else 0):
            first, last = row * length - start_offset, (row + 1) * length - start_offset
            own = shard[max(first, 0) : max(last, 0)]
            if own.numel():
                amaxes[row] = row_amax(own).reshape(())
        return amaxes

    def cast(self, amaxes: torch.Tensor) -> None:
        for job, own in zip(
            self.jobs, amaxes.split([math.prod(job.shape[:-1]) for job in self.jobs]), strict=True
        ):
            length = job.shape[-1] if job.shape else 1
            whole = own.reshape(*job.shape[:-1], 1) if job.shape else own.reshape(())
            of_each = whole.reshape(-1, 1).expand(-1, length).reshape(-1)
            data, _ = row_data(
                job.rounded(), of_each[job.start_offset : job.start_offset + job.shard.numel()]
            )
            job.output.data[0].copy_(data)
            _, scale_inv = row_data(torch.zeros_like(whole), whole)
            job.output.write_inner(RowTensor.inner_tensors[1], scale_inv)
        self.written()


class RowAmaxes(ShardRule):
    batch = RowAmaxBatch


class RowAmaxQuantizer(RowQuantizer):
    """Reduces one number for each row."""

    shards = RowAmaxes()


class OneScaleQuantizer(Quantizer):
    """A scale for the tensor, by a rule of its own, and nothing said about shards."""

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Float8Tensor:
        largest = row_amax(tensor.reshape(-1)).reshape(())
        data, scale_inv = row_data(tensor, largest)
        return Float8Tensor(
            data=data, fp8_scale_inv=scale_inv, fp8_dtype=E4M3, dtype=dtype, quantizer=self
        )

    def make_empty(
        self, shape: Sequence[int], *, dtype: Any = torch.float32, device: Any = None, **rest: Any
    ) -> Any:
        shape, place = self.check_empty(shape, dtype, device, rest.get("requires_grad", False))
        return self.quantize_impl(torch.zeros(shape, dtype=dtype, device=place), dtype)


Make = Callable[[], Quantizer]


@dataclass
class Weight:
    """One weight of a case: the quantizer of the weight, one for the oracle with a state of its
    own, and the values."""

    kind: str
    quantizer: Any
    oracle: Any
    dtype: torch.dtype
    master: torch.Tensor

    @property
    def expected(self) -> Any:
        """Quantized at once, by the code for whole tensors."""
        if not hasattr(self, "_expected"):
            self._expected = self.oracle.quantize(self.master.to(self.dtype))
        return self._expected


def _delayed(fmt: torch.dtype, scale: float, amax: float | None, fits: bool) -> Float8Quantizer:
    made = Float8Quantizer(
        torch.tensor([scale]),
        None if amax is None else torch.tensor([amax]),
        fmt,
        saturated=None if amax is None else torch.zeros(1, dtype=torch.int64),
    )
    made.fits = fits
    return made


KINDS = ("current", "delayed", "mxfp8", "blockwise", "rowwise", "rows", "row_amaxes", "one_scale")


@st.composite
def weights(draw: st.DrawFn, options: dict[str, Any]) -> Weight:
    kind = draw(st.sampled_from(KINDS))
    fmt, dtype = draw(st.sampled_from((E4M3, E5M2))), draw(st.sampled_from(DTYPES))
    make: Make = {
        "current": lambda: Float8CurrentScalingQuantizer(fmt, **options),
        "rows": RowQuantizer,
        "row_amaxes": RowAmaxQuantizer,
        "one_scale": OneScaleQuantizer,
    }.get(kind, RowQuantizer)
    if kind == "delayed":
        scale = draw(st.sampled_from((1.0, 0.37, 448.0, 2.0**-20, 3.0e38)))
        amax, fits = draw(st.sampled_from((None, 0.0, 2.5, 1e30))), draw(st.booleans())
        make = lambda: _delayed(fmt, scale, amax, fits and amax is not None)  # noqa: E731
    if kind == "mxfp8":
        square, rounding = draw(st.booleans()), draw(st.sampled_from(("up", "floor")))
        make = functools.partial(
            MXFP8Quantizer, fmt, with_2d_quantization=square, scale_rounding=rounding
        )
    if kind in ("blockwise", "rowwise"):
        scales = {
            "force_pow_2_scales": draw(st.booleans()),
            "amax_epsilon": draw(st.sampled_from((0.0, 1e-3))),
        }
        dim = draw(st.sampled_from((1, 2)))
        make = lambda: (  # noqa: E731
            Float8RowwiseQuantizer(fmt, **scales)
            if kind == "rowwise"
            else Float8BlockQuantizer(fmt, block_scaling_dim=dim, **scales)
        )
    shape = draw(
        st.one_of(
            *(
                [st.tuples(st.integers(100, 300), st.integers(1, 200))]
                if kind == "blockwise"
                else []
            ),
            st.tuples(st.integers(0, 70), st.integers(0, 70)),
            st.tuples(st.integers(1, 100), st.sampled_from((1, 31, 32, 33, 64))),
            st.tuples(st.integers(0, 130)),
            st.tuples(st.integers(0, 5), st.integers(0, 11), st.integers(0, 40)),
            st.tuples(st.just(1), st.integers(0, 200)),
            st.just(()),
        )
    )
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    values = torch.randn(shape, generator=random) * 2.0 ** draw(st.integers(-30, 30))
    if values.numel() and draw(st.booleans()):
        for _ in range(draw(st.integers(1, 6))):
            values.view(-1)[draw(st.integers(0, values.numel() - 1))] = draw(
                st.sampled_from(SPECIAL)
            )
    made = Weight(kind, make(), make(), dtype, values)
    usages = ((True, True), (True, True), (True, False), (False, True))
    # Of a transpose alone there is no range.
    rowwise, columnwise = draw(st.sampled_from(usages[:3] if kind == "blockwise" else usages))
    internal = draw(st.integers(0, 3)) == 0
    for quantizer in (made.quantizer, made.oracle):
        quantizer.internal = internal
        quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    return made


def scalar_bytes(weight: Weight) -> dict[str, list[int]] | None:
    """Codes and MX scales by Python numbers alone, for the kinds that have such an oracle."""
    quantizer = weight.oracle
    values = weight.master.to(weight.dtype).to(torch.float32)
    if weight.kind == "current":
        fmt = NAMES[quantizer.fp8_dtype]
        flat = values.reshape(-1).tolist()
        scale, _ = oracle.scale_from_amax(
            mx_oracle.block_amax(flat),
            oracle.MAX[fmt],
            quantizer.amax_epsilon,
            quantizer.force_pow_2_scales,
        )
        return {"_data": [oracle.encode(oracle.float32(value * scale), fmt) for value in flat]}
    if weight.kind == "mxfp8" and values.dim():
        fmt = NAMES[quantizer.fp8_dtype]
        columns = values.shape[-1]
        matrix = values.reshape(math.prod(values.shape[:-1]), columns).tolist()
        parts = mx_oracle.quantize(
            matrix, columns, fmt, quantizer.scale_rounding, quantizer.with_2d_quantization
        )
        names = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
        return {
            name: [code for row in part for code in row]
            for name, part in zip(names, parts, strict=True)
        }
    return None
