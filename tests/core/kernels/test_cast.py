"""Kernels with one scale for the tensor, on every path, against the array twin of the oracle."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ottava import Layout, kernels
from ottava.kernels import for_layers, table
from tests import arrays, oracle, samples
from tests.comparing import assert_same
from tests.core.placing import check

Tensor = torch.Tensor
FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E4M3, E5M2 = FP8_DTYPES.values()
SHAPES = [(), (0,), (1,), (0, 5), (3, 0), (63,), (1, 300), (131, 77), (2, 3, 41), (40, 1030)]
OPTIONS = [(0.0, False), (1e-3, True), (0.0, True), (2.0, False)]
ASKED = [(True, True), (True, False), (False, True)]
FACTORS = [1.0, 13.7, -2.0, 0.0, 1e-30, 3e38, math.inf, math.nan]


class Case(NamedTuple):
    """Arguments of a row of the table, its results, and what it writes into arguments."""

    arguments: tuple[Any, ...]
    expected: tuple[Tensor | None, ...]
    written: dict[int, Tensor] = {}  # noqa: RUF012


def matrices() -> Iterator[tuple[Tensor, torch.dtype]]:
    """Every shape and every value of each dtype, each with one of the formats."""
    formats = itertools.cycle(FP8_DTYPES.values())
    for dtype in samples.DTYPES:
        for shape in SHAPES:
            yield samples.tiles(*shape, dtype=dtype), next(formats)
        yield samples.patterns(dtype), E4M3
        yield samples.patterns(dtype), E5M2
        for _, x in samples.special(dtype):
            yield x, next(formats)


def largest(x: Tensor) -> Tensor:
    return torch.from_numpy(arrays.amaxes(arrays.numbers(x), (None, None))).view(())


def amaxes() -> Iterator[Case]:
    for x, _ in matrices():
        yield Case((x,), (largest(x),))
    # The largest element may be anywhere.
    for n, dtype in itertools.product((1, 15, 17, 64, 65, 1000, 4097, 70_003), samples.DTYPES):
        for place in {0, n // 2, n - 1}:
            x = torch.full((n,), 0.5, dtype=dtype)
            x[place] = -7.0
            yield Case((x,), (torch.tensor(7.0),))


def scales() -> Iterator[Case]:
    """Of every exponent, around values at which a rule changes, and of random bits."""
    edges = torch.tensor([oracle.MAX["e4m3"], oracle.MAX["e5m2"], 1e-3, 2.0, 0.0, math.inf])
    bits = torch.cat([samples.patterns(torch.float32).view(-1)[:65536:7], edges])
    around = (bits.view(torch.int32)[:, None] + torch.arange(-1, 2, dtype=torch.int32)).view(-1)
    amax = around.view(torch.float32).abs()
    for fp8, (epsilon, floor) in itertools.product(FP8_DTYPES.values(), OPTIONS):
        rounding = "floor" if floor else "nearest"
        layout = Layout(fp8, (None, None), rounding=rounding, epsilon=epsilon)
        expected = map(torch.from_numpy, arrays.scales(amax.numpy(), layout, torch.float32))
        yield Case((amax, fp8, epsilon, floor), tuple(expected))
    for shape in ((), (0,), (2, 3)):
        ones = torch.ones(shape)
        yield Case((448 * ones, E4M3, 0.0, False), (ones, ones))
    # float32 does not hold this epsilon: whatever was seen counts as infinite.
    seen, one = torch.tensor([0.0, 3.0, math.inf]), torch.ones(3)
    yield Case((seen, E4M3, 1e39, False), (one, one))


def quantized() -> Iterator[Case]:
    options, asked = itertools.cycle(OPTIONS), itertools.cycle(ASKED)
    for x, fp8 in matrices():
        (epsilon, floor), (rowwise, transposed) = next(options), next(asked)
        rowwise, transposed = rowwise or not x.dim(), transposed and x.dim() > 0
        rounding = "floor" if floor else "nearest"
        layout = Layout(
            fp8, (None, None), rounding=rounding, epsilon=epsilon, columnwise="transposed"
        )
        parts, amax = arrays.quantize(x, layout), largest(x)
        scale = torch.from_numpy(arrays.scales(amax.view(1).numpy(), layout, x.dtype)[0])
        data = parts.rowwise_data if rowwise else None
        transpose = parts.columnwise_data if transposed else None
        inverse = parts.rowwise_scale_inv.view(())
        arguments = (x, fp8, epsilon, floor, rowwise, transposed)
        yield Case(arguments, (data, transpose, scale.view(()), inverse, amax))


def casts() -> Iterator[Case]:
    """With any scale; some update an amax, some count elements beyond the format too."""
    factors, asked = itertools.cycle(FACTORS), itertools.cycle([*ASKED, (False, False)])
    recordings = itertools.cycle([(True, True), (True, False), (False, False)])
    for x, fp8 in matrices():
        factor, (rowwise, transposed) = np.float32(next(factors)), next(asked)
        transposed = transposed and x.dim() > 0
        with np.errstate(all="ignore"):
            products = x.float().numpy() * factor
            inverse = torch.from_numpy(np.array(np.float32(1) / factor))
        beyond = int((np.abs(products) > oracle.MAX[oracle.NAMES[fp8]]).sum())
        data = torch.from_numpy(np.asarray(arrays.encode(products, fp8)))
        transpose = data.movedim(-1, 0).contiguous() if transposed else None
        recorded, counted = next(recordings)
        amax, count = torch.tensor(0.5), torch.tensor(7)
        written = {}
        if recorded:
            written[2] = torch.maximum(amax, largest(x))
        if counted:
            written[3] = count + beyond
        yield Case(
            (
                x,
                torch.tensor([factor]),
                amax if recorded else None,
                count if counted else None,
                fp8,
                rowwise,
                transposed,
            ),
            (data if rowwise else None, transpose, inverse),
            written,
        )


def transposes() -> Iterator[Case]:
    for shape in [*SHAPES[1:], (16, 16), (31, 47), (64, 200), (160, 144), (129, 257), (300, 1)]:
        data = torch.randint(0, 256, shape, dtype=torch.uint8)
        yield Case((data,), (data.movedim(-1, 0).contiguous(),))


def decoded() -> Iterator[Case]:
    """Every code, with any scale and without one; enough of them for wide loads."""
    for shape in ((), (0, 5), (256,), (3, 5, 7), (70_001,)):
        data = torch.arange(math.prod(shape)).to(torch.uint8).view(shape)
        few = shape != (256,)
        for fp8, dtype in itertools.product(FP8_DTYPES.values(), samples.DTYPES):
            layout = Layout(fp8, (None, None))
            for factor in (None, 0.1) if few else (None, *FACTORS):
                scale = None if factor is None else torch.tensor(factor)
                stored = torch.ones(1, 1) if scale is None else scale.view(1, 1)
                expected = arrays.decode(data, stored, layout, columnwise=False, dtype=dtype)
                yield Case((data, scale, layout.text, False, dtype), (expected,))


#: Row of the table -> its cases.
CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "amax": amaxes,
    "scale_from_amax": scales,
    "quantize": quantized,
    "cast_amax": casts,
    "transpose": transposes,
    "grid_decode": decoded,
}


@cache
def cases(name: str) -> list[Case]:
    torch.manual_seed(0)
    return list(CASES[name]())


@pytest.mark.parametrize("name", CASES)
def test_bytes(code_path: str, name: str) -> None:
    # The loops of the CUDA kernels are slow; every option is in every fifth case, too.
    every = 5 if code_path == "grid" and len(cases(name)) > 20 else 1
    for number, case in enumerate(cases(name)[::every]):
        shown = [tuple(a.shape) if isinstance(a, Tensor) else a for a in case.arguments]
        check(table.OPERATIONS[name], *case[:2], (number, shown), case.written)


@pytest.mark.parametrize("name", ["quantize", "cast_amax"])
def test_operands_of_layers(code_path: str, name: str) -> None:
    """Data and scale of each direction that is asked for, which the compiled module allocates."""
    run = for_layers.quantize if name == "quantize" else for_layers.cast
    for case in cases(name)[:: 5 if code_path == "grid" else 1]:
        arguments = [a.clone() if isinstance(a, Tensor) else a for a in case.arguments]
        data, transpose, *others = case.expected
        if data is None and transpose is None:
            continue
        inverse = others[-2 if name == "quantize" else -1]
        assert inverse is not None
        sides: list[Tensor | None] = []
        for part in (data, transpose):
            sides += [part, None if part is None else inverse.view(())]
        made = [m if m is None or m.dim() else m.view(()) for m in run(*arguments)]
        assert_same(made, sides, note=arguments)
        for number, expected in case.written.items():
            assert_same(arguments[number], expected)


CHUNK = 1 << 24


@pytest.mark.slow
def test_every_float32(code_path: str, fmt: str) -> None:
    """All 2^32 values, against torch's conversions on the host, which saturate for neither inf."""
    dtype, limit = FP8_DTYPES[fmt], oracle.MAX[fmt]
    for start in range(0, 1 << 32, CHUNK):
        bits = torch.arange(start, start + CHUNK, dtype=torch.int64).to(torch.uint32)
        x = bits.view(torch.float32)
        expected = x.clamp(-limit, limit).to(dtype).view(torch.uint8).masked_fill(x.isnan(), 0x7F)
        assert_same(kernels.cast(x, torch.ones(()), dtype), expected, x, fmt)
