"""Kernels on tensors in any order in memory, and on large ones, whose work threads share: the bytes
that the reference gives for contiguous tensors, which other files compare with oracles."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ottava import Layout, kernels
from ottava.kernels import use_backend
from tests import samples
from tests.comparing import assert_same
from tests.core.conftest import Runs
from tests.core.kernels.test_grids import LAYOUTS
from tests.core.kernels.test_levels import LAYOUTS as LEVELS
from tests.core.kernels.test_levels import seed_of
from tests.core.placing import running_on

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, SCALE = torch.bfloat16, torch.tensor(3.0)
ALL = LAYOUTS | LEVELS
STRIDED = ["tensor", "1x128", "rows", "mxfp8", "mxfp8-squares", "int8-8x64", "nvfp4-rotated"]
#: Matrices, and a call of a kernel with them.
Case = tuple[list[Tensor], Callable[..., Any]]


def of_one_scale(x: Tensor) -> dict[str, Case]:
    codes = kernels.cast(x, SCALE, E4M3)
    return {
        "amax": ([x], kernels.amax),
        "scale": ([x.float().abs()], lambda amax: kernels.scale_from_amax(amax, E4M3)),
        "quantize": ([x], lambda x: kernels.quantize(x, E4M3, transposed=True)),
        "cast": ([x], lambda x: kernels.cast(x, SCALE, E4M3)),
        "cast_transpose": ([x], lambda x: kernels.cast_transpose(x, SCALE, E4M3)),
        "transpose": ([codes], kernels.transpose),
        "decode": ([codes], lambda codes: kernels.decode(codes, SCALE, E5M2, BF16)),
    }


def of_layout(x: Tensor, layout: Layout) -> dict[str, Case]:
    """Quantizing, and decoding of each direction."""
    seed = seed_of(layout)

    def quantize(x: Tensor) -> Any:
        if layout in LEVELS.values():
            return kernels.grid_quantize_levels(x, layout, seed=seed)
        return kernels.grid_quantize(x, layout)

    cases: dict[str, Case] = {f"{layout.text} quantize": ([x], quantize)}
    made = quantize(x)
    for columnwise in (False, True):
        data, scales, *amax = made[columnwise * len(made) // 2 :][: len(made) // 2]
        options = {"amax": amax[0]} if layout.second_level != "none" else {}

        def decode(data: Tensor, scales: Tensor, side: bool = columnwise, **options: Any) -> Tensor:
            return kernels.grid_decode(data, scales, layout, BF16, columnwise=side, **options)

        cases[f"{layout.text} decode {columnwise}"] = [data, scales], partial(decode, **options)
    return cases


def expected(case: Case) -> Any:
    tensors, call = case
    with use_backend("reference"):
        return call(*tensors)


def test_any_strides(code_path: str) -> None:
    for number, name in enumerate(STRIDED):
        x = samples.tiles(67, 75, dtype=samples.DTYPES[number % 3])
        cases = of_layout(x, ALL[name]) | of_one_scale(x)
        for what, case in cases.items():
            wanted = expected(case)
            for views in zip(*map(samples.strided, case[0]), strict=True):
                found = case[1](*(view for _, view in views))
                assert_same(found, wanted, note=(what, x.dtype, views[0][0]))
    layout = LEVELS["rows-rotated-128"]
    data, scales, amax, *_ = kernels.grid_quantize_levels(samples.tiles(67, 75), layout)
    found = [
        kernels.grid_decode(data, scales, layout, BF16, amax=each)
        for each in (amax, torch.stack([amax, -amax], 1)[:, 0])
    ]
    assert_same(*found)
    cube = samples.tiles(5, 17, 42)
    for view in (cube.permute(2, 0, 1), cube[1:, :, 1::3], cube[:, :0], cube[:1].expand(4, 17, 42)):
        case, *_ = of_layout(view.contiguous(), LAYOUTS["mxfp8"]).values()
        assert_same(case[1](view), expected(case), note=view.shape)


def large(name: str) -> dict[str, Case]:
    if name in ALL:
        # Kernels of two levels write through the caches, so these only need work for three threads.
        rows = 197 if name in LEVELS else 2049
        return of_layout(samples.tiles(rows, 2113, dtype=BF16), ALL[name])
    cases = {}
    for shape in ((513, 517), (2050, 2100), (3, 70_000)):
        of_shape = of_one_scale(samples.tiles(*shape, dtype=BF16))
        cases |= {f"{what} {shape}": case for what, case in of_shape.items()}
    return cases


SOME = ["one scale", "mxfp8", "rows", "nvfp4", "nvfp4-gradients"]
MORE = ["1x128", "nvfp4-squares", "4over6", "rows-rotated-128", "E2M3-own"]


@pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_threads_and_sizes_beyond_the_caches(on_every_isa: Runs, name: str) -> None:
    """The work is divided, and large results are written around the caches."""
    cases = [(what, case, expected(case)) for what, case in large(name).items()]

    def run() -> None:
        for what, (tensors, call), wanted in cases:
            for threads in (1, 3):
                with running_on(threads):
                    found = call(*tensors)
                assert_same(found, wanted, note=(what, threads))

    on_every_isa(run)


def test_threads_count_what_each_of_them_clamps(on_every_isa: Runs) -> None:
    x = samples.tiles(300, 1001, dtype=BF16).nan_to_num()
    clamped = int((x.float() * SCALE > 448).sum() + (x.float() * SCALE < -448).sum())
    assert clamped > 1000

    def run() -> None:
        for threads, transposed in itertools.product((1, 3), (False, True)):
            amax, count = torch.zeros(()), torch.tensor(5)
            with running_on(threads):
                kernels.cast_amax(x, SCALE, amax, E4M3, saturated=count, transposed=transposed)
            assert (int(count), amax) == (5 + clamped, x.abs().max())

    on_every_isa(run)


def test_threads_begin_within_a_block_and_share_many_scales() -> None:
    cases = of_layout(samples.tiles(139, 1024, dtype=BF16), LEVELS["24x16"])
    cases |= of_layout(samples.tiles(70_001, 4, dtype=BF16), LAYOUTS["rows"])
    for what, case in cases.items():
        with running_on(3):
            assert_same(case[1](*case[0]), expected(case), note=what)
