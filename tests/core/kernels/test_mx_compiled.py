"""The operators on MX blocks in compiled graphs."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_same
from mx_arrays import FP8, ROUNDINGS, random_blocks, sample

from ottava import kernels


@pytest.mark.parametrize("shape", [(), (33, 70), (2, 31, 97), (0, 5), (3, 0)], ids=str)
def test_compiled_equals_eager(shape: tuple[int, ...]) -> None:
    """One graph with both formats, rules and kinds of blocks."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = []
        for fmt, scale_rounding, square in zip(FP8, ROUNDINGS, (False, True), strict=True):
            a, b, c, d = kernels.mx_quantize(x, FP8[fmt], two_dimensional=square, scale_rounding=scale_rounding)
            rows = kernels.mx_decode(a, b, FP8[fmt], x.dtype)
            columns = kernels.mx_decode(c, d, FP8[fmt], torch.float32, columnwise=True)
            only = kernels.mx_quantize(x, FP8[fmt], rowwise=False, scale_rounding=scale_rounding)
            scale = kernels.mx_scale_from_amax(x.abs().float(), FP8[fmt], scale_rounding)
            found += [a, b, c, d, rows, columns, *only, scale]
        return tuple(found)

    x = sample(shape, "bfloat16").nan_to_num(1.0)
    torch._dynamo.reset()
    assert_same(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


def test_compiled_for_any_size() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        data, scales, _, _ = kernels.mx_quantize(x, FP8["e4m3"], columnwise=False)
        return kernels.mx_decode(data, scales, FP8["e4m3"], torch.bfloat16)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in [(33, 70), (5, 128), (97, 31)]:
        x = sample(shape, "bfloat16").nan_to_num(1.0)
        assert torch.equal(compiled(x), run(x))


@pytest.mark.parametrize("shape", [(), (0, 5), (3, 0), (33, 70), (2, 3, 41)], ids=str)
def test_operators_are_well_formed(shape: tuple[int, ...]) -> None:
    """Schemas, shapes under tracing and graphs with symbolic sizes, by torch's own checks."""
    x, (e4m3, e5m2) = sample(shape, "float32").nan_to_num(1.0), FP8.values()
    for fp8, rowwise, columnwise, two_dimensional, floor in [
        (e4m3, True, True, False, False),
        (e5m2, True, False, True, True),
        (e4m3, False, True, False, True),
    ]:
        arguments = (x, fp8, two_dimensional, floor, rowwise, columnwise)
        torch.library.opcheck(torch.ops.ottava.mx_quantize.default, arguments)
    torch.library.opcheck(torch.ops.ottava.mx_scale_from_amax.default, (x.abs(), e5m2, False))
    for columnwise, dtype, fp8 in ((False, torch.bfloat16, e4m3), (True, torch.float32, e5m2)):
        data, scales = random_blocks(shape, columnwise)
        data, scales = data % 0x78, scales % 64 + 96  # no NaN: it differs from itself
        torch.library.opcheck(torch.ops.ottava.mx_decode.default, (data, scales, fp8, columnwise, dtype))
