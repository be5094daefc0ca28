"""MX blocks into given buffers, beside which nothing is written, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mx_arrays import (
    DTYPES,
    FP8,
    array_expected,
    by_arrays,
    check_decoded,
    check_four,
    mx,
    random_blocks,
    sample,
    scale_shapes,
)

from ottava import Layout, kernels
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError
from ottava.kernels import table, use_backend


def buffers(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Four buffers inside of larger ones, at odd addresses."""
    rows, columns = scale_shapes(shape)
    return [inside(s, torch.uint8) for s in (shape, rows, shape, columns)]


def inside(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    whole = torch.full((math.prod(shape) + 131,), 85, dtype=dtype)
    return whole[65 : 65 + math.prod(shape)].view(shape)


def check_surroundings(view: torch.Tensor) -> None:
    whole = view.new_empty(0).set_(view.untyped_storage())
    assert bool((whole[:65] == 85).all())
    assert bool((whole[65 + view.numel() :] == 85).all())


@pytest.mark.parametrize(
    "shape", [(), (0, 5), (3, 0), (33, 70), (2, 31, 97), (35, 1100), (1, 5001)], ids=str
)
def test_quantize_out(code_path: str, shape: tuple[int, ...]) -> None:
    for dtype, fmt, square in itertools.product(DTYPES, FP8, (False, True)):
        x, options = sample(shape, dtype), (dtype, fmt, "floor", square)
        expected = array_expected(shape, options)
        for rowwise, columnwise in ((True, True), (True, False), (False, True)):
            out = buffers(shape)
            wanted = [out[at] if (rowwise, columnwise)[at // 2] else None for at in range(4)]
            table.grid_quantize.into(
                wanted, x, mx(FP8[fmt], square, "floor").text, rowwise, columnwise
            )
            untouched = [torch.full_like(t, 85) for t in out]
            written = [
                *(expected if rowwise else untouched)[:2],
                *(expected if columnwise else untouched)[2:],
            ]
            check_four(out, written, (options, rowwise, columnwise), x)
            for view in out:
                check_surroundings(view)


def test_out_at_the_size_of_streaming_stores(on_every_isa: Callable[..., None]) -> None:
    shape, options = (64, 65536), ("bfloat16", "e4m3", "up", False)
    codes, scales = random_blocks((33, 65537), False)

    def run() -> None:
        out = buffers(shape)
        table.grid_quantize.into(out, sample(shape, "bfloat16"), mx(FP8["e4m3"]).text, True, True)
        check_four(out, array_expected(shape, options))
        for fmt in FP8:
            decoded = inside((33, 65537), torch.bfloat16)
            table.grid_decode.into(
                [decoded], codes, scales, mx(FP8[fmt]).text, False, decoded.dtype
            )
            check_decoded(decoded, codes, scales, fmt, "bfloat16", False)
            out.append(decoded)
        for view in out:
            check_surroundings(view)

    on_every_isa(run)


def test_quantize_out_of_strided_input(code_path: str, fmt: str) -> None:
    x = sample((75, 70), "bfloat16").t()
    out = buffers((70, 75))
    table.grid_quantize.into(out, x, mx(FP8[fmt]).text, True, True)
    check_four(out, by_arrays(x, fmt, "up"))


@pytest.mark.parametrize("columnwise", [False, True])
def test_decode_out(code_path: str, columnwise: bool) -> None:
    shapes: list[tuple[int, ...]] = [(), (0, 5), (3, 0), (33, 70), (2, 31, 97), (65, 1100)]
    for shape, dtype, fmt in itertools.product(shapes, DTYPES, FP8):
        codes, scales = random_blocks(shape, columnwise)
        out = inside(shape, DTYPES[dtype])
        table.grid_decode.into([out], codes, scales, mx(FP8[fmt]).text, columnwise, out.dtype)
        check_decoded(out, codes, scales, fmt, dtype, columnwise)
        check_surroundings(out)


# Requests are checked before a backend is asked, so the reference and the compiled CPU kernels
# stand for all.
@pytest.fixture(params=["reference", "cpu"])
def on_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with use_backend(request.param):
        yield


@pytest.mark.parametrize(
    "wrong", [torch.float8_e4m3fn, mx(FP8["e4m3"]).text, "", None, 0, [mx(FP8["e4m3"])]], ids=str
)
def test_what_is_no_layout_is_refused(on_backend: None, wrong: Any) -> None:
    codes, scales = random_blocks((4, 4), False)
    for run in (
        lambda: kernels.grid_quantize(torch.ones(4, 4), wrong),
        lambda: kernels.grid_scales(torch.ones(4), wrong),
        lambda: kernels.grid_decode(codes, scales, wrong, torch.float32),
        lambda: kernels.check_grid(codes, scales, wrong, False),
    ):
        with pytest.raises(DTypeError, match="layout"):
            run()


@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.int32),
        torch.eye(4).to_sparse(),
        [1.0],
        None,
    ],
    ids=["float64", "int32", "sparse", "list", "none"],
)
def test_what_cannot_be_quantized_is_refused(on_backend: None, wrong: Any) -> None:
    with pytest.raises(DTypeError):
        kernels.grid_quantize(wrong, mx(FP8["e4m3"]))


def test_other_refusals(on_backend: None) -> None:
    codes, scales = random_blocks((33, 70), False)
    layout = mx(FP8["e4m3"])
    with pytest.raises(OptionError, match="neither"):
        kernels.grid_quantize(torch.ones(4, 4), layout, rowwise=False, columnwise=False)
    for amax in (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.float64), 1.0):
        with pytest.raises(DTypeError):
            kernels.grid_scales(amax, layout)
    for dtype in (torch.int32, torch.uint8, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(DTypeError):
            kernels.grid_decode(codes, scales, layout, dtype)
        with pytest.raises(DTypeError):
            kernels.grid_scales(torch.ones(4), layout, dtype)
    for data, blocks in (
        (codes.view(FP8["e4m3"]), scales),
        (codes, scales.view(torch.int8)),
        (codes.int(), scales),
    ):
        with pytest.raises(DTypeError):
            kernels.grid_decode(data, blocks, layout, torch.float32)
    for blocks in (scales[:-1], scales[:, :-1], scales.t(), scales.flatten(), scales[None]):
        with pytest.raises(ShapeError):
            kernels.grid_decode(codes, blocks, layout, torch.float32)
    with pytest.raises(ShapeError):
        kernels.grid_decode(codes, scales, layout, torch.float32, columnwise=True)
    with pytest.raises(DeviceError):
        kernels.grid_decode(codes, scales.to("meta"), layout, torch.float32)
    # Scales in the format of another layout.
    with pytest.raises(DTypeError):
        kernels.grid_decode(codes, scales, Layout(FP8["e4m3"], (1, 32)), torch.float32)
    with pytest.raises(DTypeError):
        kernels.grid_decode(codes, scales.float(), layout, torch.float32)
