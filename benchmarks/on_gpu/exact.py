"""Kernels over elements against float64, by the definitions of the formats alone: nothing of ottava computes here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.on_gpu.checks import Outcome, difference
from benchmarks.on_gpu.inputs import FLOATS, FORMATS, Draw
from benchmarks.on_gpu.place import Gpu
from ottava import kernels

Tensor = torch.Tensor
#: What was computed, what it is to be, and a name.
Found = Iterator[tuple[str, Tensor, Tensor]]
SHAPES = [(64, 96), (257, 131)]
_BLOCK = 32


def finite(fp8: torch.dtype) -> Tensor:
    """The values of the codes 0, 1, ..., as far as they are finite, in float64: they ascend."""
    values = torch.arange(128, dtype=torch.uint8).view(fp8).double()
    return values[values.isfinite()]


def product(x: Tensor, factor: Tensor) -> Tensor:
    """``x * factor`` of float32's, or narrower ones, as float32 rounds it: float64 holds the product exactly."""
    return (x.double() * factor.double()).float().double()


def nearest(values: Tensor, fp8: torch.dtype) -> Tensor:
    """Codes: the nearest value, to even between two, and the largest one beyond it."""
    ladder = finite(fp8)
    size = values.abs().clamp(max=float(ladder[-1])).contiguous()
    above = torch.searchsorted(ladder, size)
    below = (above - 1).clamp(min=0)
    up, down = ladder[above] - size, size - ladder[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code + 128 * values.signbit()).to(torch.uint8)


def _scale_of(amax: Tensor, fp8: torch.dtype) -> Tensor:
    # A quotient of float32's that was rounded to float64 is rounded to float32 as the exact one is.
    return (finite(fp8)[-1] / amax.double()).float()


def _per_tensor(x: Tensor, there: Tensor, fp8: torch.dtype, draw: Draw) -> Found:
    largest, limit = x.double().abs().max(), finite(fp8)[-1]
    known = torch.tensor(float(limit) / float(largest) * 1.7)
    codes = nearest(product(x, known), fp8)
    beyond = (product(x, known).abs() > limit).sum()
    inverse = (1.0 / known.double()).float()
    scale = known.to(there.device)
    yield "amax", kernels.amax(there), largest.float()
    yield "cast", kernels.cast(there, scale, fp8), codes
    data, turned = kernels.cast_transpose(there, scale, fp8)
    yield "cast_transpose", data, codes
    yield "cast_transpose, columns", turned, codes.t()
    amax, saturated = scale.new_zeros(()), torch.zeros((), dtype=torch.int64, device=scale.device)
    data, _, scale_inv = kernels.cast_amax(there, scale, amax, fp8, saturated=saturated)
    for name, mine, theirs in (
        ("", data, codes),
        (", amax", amax, largest.float()),
        (", scale_inv", scale_inv, inverse),
    ):
        yield f"cast_amax{name}", mine, theirs
    yield "cast_amax, clamped", saturated, beyond
    own = _scale_of(largest, fp8)
    data, turned, scale_out, _, amax = kernels.quantize(there, fp8, transposed=True)
    expected = nearest(product(x, own), fp8)
    yield "quantize", data, expected
    yield "quantize, columns", turned, expected.t()
    yield "quantize, scale", scale_out, own
    yield "transpose", kernels.transpose(data), expected.t()
    values = codes.view(fp8).double()
    yield "decode", kernels.decode(codes.to(there.device), scale, fp8, torch.float32), product(values, known).float()


def _mx_scales(blocks: Tensor, fp8: torch.dtype) -> Tensor:
    """Codes of ``[..., blocks]`` from their amaxes in float64: the exponent, rounded up."""
    reciprocal = (1.0 / finite(fp8)[-1]).float()
    mantissa, exponent = torch.frexp(product(blocks, reciprocal))
    code = exponent - (mantissa == 0.5).int() + 127
    return torch.where(blocks == 0, 0, code.clamp(0, 254)).to(torch.uint8)


def _mx_rows(x: Tensor, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks along rows."""
    rows, columns = x.shape
    padded = torch.zeros(rows, -(-columns // _BLOCK) * _BLOCK, dtype=torch.float64)
    padded[:, :columns] = x.double()
    scales = _mx_scales(padded.view(rows, -1, _BLOCK).abs().amax(2), fp8)
    spread = scales.repeat_interleave(_BLOCK, 1)[:, :columns].double()
    return nearest(product(x, torch.exp2(127 - spread)), fp8), scales


def _blocks(x: Tensor, there: Tensor, fp8: torch.dtype, draw: Draw) -> Found:
    made = kernels.mx_quantize(there, fp8)
    by_row, by_column = _mx_rows(x, fp8), _mx_rows(x.t(), fp8)
    for name, mine, theirs in zip(
        ("rows", "rows, scales", "columns", "columns, scales"),
        made,
        (*by_row, *(tensor.t() for tensor in by_column)),
        strict=True,
    ):
        yield f"mx_quantize, {name}", mine, theirs
    codes, scales = by_row
    factor = torch.exp2(scales.repeat_interleave(_BLOCK, 1)[:, : x.shape[1]].double() - 127)
    decoded = kernels.mx_decode(codes.to(there.device), scales.to(there.device), fp8, torch.float32)
    yield "mx_decode", decoded, (codes.view(fp8).double() * factor).float()


def _many(x: Tensor, there: Tensor, fp8: torch.dtype, draw: Draw) -> Found:
    parts, sizes = list(there.view(-1).split(1000)), [part.double() for part in x.view(-1).split(1000)]
    dtypes, scales = [x.dtype] * len(parts), torch.rand(len(parts), generator=draw.generator) + 0.5
    yield "multi_amax", kernels.multi_amax(parts, dtypes), torch.stack([size.abs().max() for size in sizes]).float()
    outs = [torch.empty(part.shape, dtype=torch.uint8, device=part.device) for part in parts]
    kernels.multi_cast(parts, dtypes, scales.to(there.device), [fp8] * len(parts), outs)
    for number, (size, out) in enumerate(zip(sizes, outs, strict=True)):
        yield f"multi_cast, {number}", out, nearest(product(size, scales[number]), fp8)
    history = torch.rand(9, 40, generator=draw.generator) + 0.1
    made, kept = torch.ones(40, device=there.device), history.to(there.device, copy=True)
    kernels.update_scales([made], [kept], [float(finite(fp8)[-1])] * 40)
    yield "update_scales", made, _scale_of(history.amax(0), fp8)


_KINDS: tuple[Callable[[Tensor, Tensor, torch.dtype, Draw], Found], ...] = (_per_tensor, _blocks, _many)


def check(place: Gpu) -> Outcome:
    """Every kernel over elements, for each dtype and format."""
    outcome = Outcome("kernels against float64")
    for number, shape in enumerate(SHAPES):
        for dtype in FLOATS.values():
            for fmt, fp8 in FORMATS.items():
                draw = Draw(number)
                x = draw.values(shape, dtype)
                for kind in _KINDS:
                    label = f"{shape} {dtype} {fmt}"
                    try:
                        with place.serving():
                            found = list(kind(x, place.put(x), fp8, draw))
                    except Exception as error:
                        outcome.note(label, f"{type(error).__name__}: {error}")
                        continue
                    for name, mine, theirs in found:
                        outcome.note(f"{name} {label}", difference(mine.cpu(), theirs))
    return outcome
