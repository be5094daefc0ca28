"""The operators on MX blocks in compiled graphs."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_same
from mx_arrays import FP8, ROUNDINGS, mx, random_blocks, sample

from ottava import kernels


@pytest.mark.parametrize("shape", [(), (33, 70), (2, 31, 97), (0, 5), (3, 0)], ids=str)
def test_compiled_equals_eager(shape: tuple[int, ...]) -> None:
    """One graph with both formats, rules and kinds of blocks."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = []
        for fmt, scale_rounding, square in zip(FP8, ROUNDINGS, (False, True), strict=True):
            layout = mx(FP8[fmt], square, scale_rounding)
            a, b, c, d = kernels.grid_quantize(x, layout)
            rows = kernels.grid_decode(a, b, layout, x.dtype)
            columns = kernels.grid_decode(c, d, layout, torch.float32, columnwise=True)
            only = kernels.grid_quantize(x, mx(FP8[fmt], rounding=scale_rounding), rowwise=False)
            _, scale = kernels.grid_scales(x.abs().float(), layout)
            found += [a, b, c, d, rows, columns, *only, scale]
        return tuple(found)

    x = sample(shape, "bfloat16").nan_to_num(1.0)
    torch._dynamo.reset()
    assert_same(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


def test_compiled_for_any_size() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        data, scales, _, _ = kernels.grid_quantize(x, mx(FP8["e4m3"]), columnwise=False)
        return kernels.grid_decode(data, scales, mx(FP8["e4m3"]), torch.bfloat16)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in [(33, 70), (5, 128), (97, 31)]:
        x = sample(shape, "bfloat16").nan_to_num(1.0)
        assert torch.equal(compiled(x), run(x))


@pytest.mark.parametrize("shape", [(), (0, 5), (3, 0), (33, 70), (2, 3, 41)], ids=str)
def test_operators_are_well_formed(shape: tuple[int, ...]) -> None:
    """Schemas, shapes under tracing and graphs with symbolic sizes, by torch's own checks."""
    x, (e4m3, e5m2) = sample(shape, "float32").nan_to_num(1.0), FP8.values()
    for fp8, rowwise, columnwise, square, rounding in [
        (e4m3, True, True, False, "up"),
        (e5m2, True, False, True, "floor"),
        (e4m3, False, True, False, "floor"),
    ]:
        arguments = (x, mx(fp8, square, rounding).text, rowwise, columnwise)
        torch.library.opcheck(torch.ops.ottava.grid_quantize.default, arguments)
    torch.library.opcheck(
        torch.ops.ottava.grid_scales.default, (x.abs(), mx(e5m2).text, torch.float32)
    )
    for columnwise, dtype, fp8 in ((False, torch.bfloat16, e4m3), (True, torch.float32, e5m2)):
        data, scales = random_blocks(shape, columnwise)
        data, scales = data % 0x78, scales % 64 + 96  # no NaN: it differs from itself
        torch.library.opcheck(
            torch.ops.ottava.grid_decode.default, (data, scales, mx(fp8).text, columnwise, dtype)
        )
