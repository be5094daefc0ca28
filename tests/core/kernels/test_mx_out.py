"""MX blocks into given buffers, beside which nothing is written, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mx_arrays import DTYPES, FP8, array_expected, by_arrays, check_decoded, check_four, random_blocks, sample

from ottava import kernels
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError
from ottava.formats import mx_scale_shapes
from ottava.kernels import table, use_backend


def buffers(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Four buffers inside of larger ones, at odd addresses."""
    rows, columns = mx_scale_shapes(shape)
    return [inside(s, torch.uint8) for s in (shape, rows, shape, columns)]


def inside(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    whole = torch.full((math.prod(shape) + 131,), 85, dtype=dtype)
    return whole[65 : 65 + math.prod(shape)].view(shape)


def check_surroundings(view: torch.Tensor) -> None:
    whole = view.new_empty(0).set_(view.untyped_storage())
    assert bool((whole[:65] == 85).all())
    assert bool((whole[65 + view.numel() :] == 85).all())


@pytest.mark.parametrize("shape", [(), (0, 5), (3, 0), (33, 70), (2, 31, 97), (35, 1100), (1, 5001)], ids=str)
def test_quantize_out(code_path: str, shape: tuple[int, ...]) -> None:
    for dtype, fmt, square in itertools.product(DTYPES, FP8, (False, True)):
        x, options = sample(shape, dtype), (dtype, fmt, "floor", square)
        expected = array_expected(shape, options)
        for rowwise, columnwise in ((True, True), (True, False), (False, True)):
            out = buffers(shape)
            wanted = [out[at] if (rowwise, columnwise)[at // 2] else None for at in range(4)]
            table.mx_quantize.into(wanted, x, FP8[fmt], square, True, rowwise, columnwise)
            untouched = [torch.full_like(t, 85) for t in out]
            written = [*(expected if rowwise else untouched)[:2], *(expected if columnwise else untouched)[2:]]
            check_four(out, written, (options, rowwise, columnwise), x)
            for view in out:
                check_surroundings(view)


def test_out_at_the_size_of_streaming_stores(on_every_isa: Callable[..., None]) -> None:
    shape, options = (64, 65536), ("bfloat16", "e4m3", "up", False)
    codes, scales = random_blocks((33, 65537), False)

    def run() -> None:
        out = buffers(shape)
        table.mx_quantize.into(out, sample(shape, "bfloat16"), FP8["e4m3"], False, False, True, True)
        check_four(out, array_expected(shape, options))
        for fmt in FP8:
            decoded = inside((33, 65537), torch.bfloat16)
            table.mx_decode.into([decoded], codes, scales, FP8[fmt], False, decoded.dtype)
            check_decoded(decoded, codes, scales, fmt, "bfloat16", False)
            out.append(decoded)
        for view in out:
            check_surroundings(view)

    on_every_isa(run)


def test_quantize_out_of_strided_input(code_path: str, fmt: str) -> None:
    x = sample((75, 70), "bfloat16").t()
    out = buffers((70, 75))
    table.mx_quantize.into(out, x, FP8[fmt], False, False, True, True)
    check_four(out, by_arrays(x, fmt, "up"))


@pytest.mark.parametrize("columnwise", [False, True])
def test_decode_out(code_path: str, columnwise: bool) -> None:
    shapes: list[tuple[int, ...]] = [(), (0, 5), (3, 0), (33, 70), (2, 31, 97), (65, 1100)]
    for shape, dtype, fmt in itertools.product(shapes, DTYPES, FP8):
        codes, scales = random_blocks(shape, columnwise)
        out = inside(shape, DTYPES[dtype])
        table.mx_decode.into([out], codes, scales, FP8[fmt], columnwise, out.dtype)
        check_decoded(out, codes, scales, fmt, dtype, columnwise)
        check_surroundings(out)


# Requests are checked before a backend is asked, so the reference and the compiled CPU kernels stand for all.
@pytest.fixture(params=["reference", "cpu"])
def on_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with use_backend(request.param):
        yield


@pytest.mark.parametrize("value", ["down", "UP", "", "up ", None, 0, True, ["up"]])
def test_an_unknown_rounding_is_refused(on_backend: None, value: Any) -> None:
    x = torch.ones(4, 4)
    with pytest.raises(OptionError, match="scale_rounding"):
        kernels.mx_quantize(x, FP8["e4m3"], scale_rounding=value)
    with pytest.raises(OptionError, match="scale_rounding"):
        kernels.mx_scale_from_amax(x, FP8["e4m3"], value)
    with pytest.raises(OptionError, match="scale_rounding"):
        kernels.check_scale_rounding(value)


@pytest.mark.parametrize("wrong", [torch.float16, torch.float8_e8m0fnu, torch.uint8, "e4m3", None])
def test_an_unknown_format_is_refused(on_backend: None, wrong: Any) -> None:
    codes, scales = random_blocks((4, 4), False)
    for run in (
        lambda: kernels.mx_quantize(torch.ones(4, 4), wrong),
        lambda: kernels.mx_scale_from_amax(torch.ones(4), wrong),
        lambda: kernels.mx_decode(codes, scales, wrong, torch.float32),
    ):
        with pytest.raises(DTypeError):
            run()


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.int32), torch.eye(4).to_sparse(), [1.0], None],
    ids=["float64", "int32", "sparse", "list", "none"],
)
def test_what_cannot_be_quantized_is_refused(on_backend: None, wrong: Any) -> None:
    with pytest.raises(DTypeError):
        kernels.mx_quantize(wrong, FP8["e4m3"])


def test_other_refusals(on_backend: None) -> None:
    codes, scales = random_blocks((33, 70), False)
    with pytest.raises(OptionError, match="neither"):
        kernels.mx_quantize(torch.ones(4, 4), FP8["e4m3"], rowwise=False, columnwise=False)
    for amax in (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.float64), 1.0):
        with pytest.raises(DTypeError):
            kernels.mx_scale_from_amax(amax, FP8["e4m3"])
    for dtype in (torch.int32, torch.uint8, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(DTypeError):
            kernels.mx_decode(codes, scales, FP8["e4m3"], dtype)
    for data, blocks in ((codes.view(FP8["e4m3"]), scales), (codes, scales.view(torch.int8)), (codes.int(), scales)):
        with pytest.raises(DTypeError):
            kernels.mx_decode(data, blocks, FP8["e4m3"], torch.float32)
    for blocks in (scales[:-1], scales[:, :-1], scales.t(), scales.flatten(), scales[None]):
        with pytest.raises(ShapeError):
            kernels.mx_decode(codes, blocks, FP8["e4m3"], torch.float32)
    with pytest.raises(ShapeError):
        kernels.mx_decode(codes, scales, FP8["e4m3"], torch.float32, columnwise=True)
    with pytest.raises(DeviceError):
        kernels.mx_decode(codes, scales.to("meta"), FP8["e4m3"], torch.float32)
