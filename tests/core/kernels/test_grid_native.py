"""The compiled module on grids of scales, against float32 arithmetic written here from the formats'
definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from ottava import _cpu
from tests.core.conftest import ISAS

E4M3, E5M2, INT8 = 0, 1, 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MAX = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0}
FLOAT_MAX = float(np.finfo(np.float32).max)
Array = np.ndarray[Any, Any]


def small_floats(mantissa: int, bias: int, codes: int) -> Array:
    """The values of a small float format's first codes."""
    code = np.arange(codes)
    exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    normal = (1 + fraction) * 2.0 ** (exponent.astype(float) - bias)
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)


VALUES = {E4M3: small_floats(3, 7, 0x7F), E5M2: small_floats(2, 15, 0x7C)}


def thresholds(values: Array) -> Array:
    """What a float32 has to be above for the next code: halfway between two values, which goes to
    the even code."""
    halfway = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    odd = np.arange(len(halfway)) % 2 == 1
    return np.where(odd, np.nextafter(halfway, np.float32(0)), halfway)


THRESHOLDS = {element: thresholds(values) for element, values in VALUES.items()}


def encoded(x: Array, element: int) -> Array:
    """Bytes of float32 values: to nearest even, saturating, NaN as the format has it."""
    nan = np.isnan(x)
    if element == INT8:
        rounded = np.rint(np.clip(np.where(nan, np.float32(0), x), -127, 127))
        return np.where(nan, np.uint8(0x80), rounded.astype(np.int8).view(np.uint8))
    code = np.searchsorted(THRESHOLDS[element], np.abs(x)).astype(np.uint8)
    return np.where(nan, np.uint8(0x7F), code | np.signbit(x).astype(np.uint8) << 7)


def decoded(data: Array, element: int) -> Array:
    """float32 values of bytes."""
    if element == INT8:
        return np.where(data == 0x80, np.float32(np.nan), data.view(np.int8).astype(np.float32))
    beyond = [np.nan] if element == E4M3 else [np.inf, np.nan, np.nan, np.nan]
    positive = np.concatenate([VALUES[element], beyond])
    return np.concatenate([positive, -positive]).astype(np.float32)[data]


def blocks_of(n: int, block: int) -> int:
    return 1 if block == 0 else -(-n // block)


def spread(values: Array, rows: int, cols: int, block_rows: int, block_cols: int) -> Array:
    """Each element's value of its block."""
    row = np.arange(rows) // (block_rows or max(rows, 1))
    col = np.arange(cols) // (block_cols or max(cols, 1))
    return values[row[:, None], col[None, :]]


def amaxes(x: Array, block_rows: int, block_cols: int) -> Array:
    magnitude = np.where(np.isnan(x), np.float32(0), np.abs(x))
    down, across = blocks_of(x.shape[0], block_rows), blocks_of(x.shape[1], block_cols)
    height, width = block_rows or x.shape[0], block_cols or x.shape[1]
    padded = np.zeros((down * height, across * width), np.float32)
    padded[: x.shape[0], : x.shape[1]] = magnitude
    if padded.size == 0:
        return np.zeros((down, across), np.float32)
    result: Array = padded.reshape(down, height, across, width).max((1, 3))
    return result


@dataclass(frozen=True)
class Rule:
    e8m0: bool = False
    floor: bool = False
    epsilon: float = 0.0
    largest: float = FLOAT_MAX

    def scales(self, amax: Array, element: int) -> tuple[Array, Array]:
        """Multipliers of the elements, and scales as they are stored."""
        with np.errstate(all="ignore"):
            if self.e8m0:
                code = self.exponents(amax, element)
                return np.exp2((127 - code).astype(np.float64)).astype(np.float32), code.astype(
                    np.uint8
                )
            raised = np.maximum(amax, np.float32(self.epsilon))
            scale = np.float32(MAX[element]) / raised
            scale = np.where(np.isinf(scale), np.float32(self.largest), scale)
            if self.floor:
                scale = (scale.view(np.int32) & ~0x7FFFFF).view(np.float32)
            scale = np.where((raised == 0) | np.isinf(raised), np.float32(1), scale)
            return scale, np.float32(1) / scale

    def exponents(self, amax: Array, element: int) -> Array:
        if self.floor:
            exponent = np.floor(np.log2(np.maximum(amax, np.float32(1e-45)).astype(np.float64)))
            code = exponent - np.floor(np.log2(MAX[element])) + 127
        else:
            ratio = (amax * (np.float32(1) / np.float32(MAX[element]))).astype(np.float64)
            code = np.ceil(np.log2(np.maximum(ratio, 2.0**-127))) + 127
        code = np.where(np.isinf(amax), 254, np.clip(np.where(np.isinf(code), 254, code), 0, 254))
        return np.where(amax == 0, 0, code).astype(np.int64)


@dataclass(frozen=True)
class Side:
    block_rows: int
    block_cols: int
    shared_rows: int = -1
    shared_cols: int = -1
    turned: bool = False

    @property
    def shared(self) -> tuple[int, int]:
        return (
            self.block_rows if self.shared_rows < 0 else self.shared_rows,
            self.block_cols if self.shared_cols < 0 else self.shared_cols,
        )

    def expected(self, x: Array, element: int, rule: Rule) -> tuple[Array, Array]:
        """Data and scales as they are stored."""
        multipliers, scales = rule.scales(amaxes(x, *self.shared), element)
        rows, cols = x.shape
        with np.errstate(all="ignore"):
            data = encoded(x * spread(multipliers, rows, cols, *self.shared), element)
        down, across = blocks_of(rows, self.block_rows), blocks_of(cols, self.block_cols)
        height = self.shared[0] // self.block_rows if self.shared[0] else max(down, 1)
        width = self.shared[1] // self.block_cols if self.shared[1] else max(across, 1)
        scales = spread(scales, down, across, height, width)
        return (data.T, scales.T) if self.turned else (data, scales)


class Memory:
    """Zeroed elements at an offset, followed by guards that nothing may write."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, offset: int) -> None:
        itemsize = np.dtype(dtype).itemsize
        self.bytes = np.full(
            int(np.prod(shape)) * itemsize + 64 + offset * itemsize + 64, 0xA5, np.uint8
        )
        begin = -self.bytes.ctypes.data % 64 + offset * itemsize
        self.end = begin + int(np.prod(shape)) * itemsize
        self.begin = begin
        self.array = self.bytes[begin : self.end].view(dtype).reshape(shape)
        self.address = self.bytes.ctypes.data + begin

    def check(self) -> None:
        assert (self.bytes[: self.begin] == 0xA5).all()
        assert (self.bytes[self.end :] == 0xA5).all()


@cache
def matrix(
    rows: int, cols: int, dtype: torch.dtype, offset: int = 0, seed: int = 0
) -> torch.Tensor:
    """Values of very different magnitudes, some of them special, at an offset into their
    storage."""
    generator = torch.Generator().manual_seed(seed + rows * 1000 + cols)
    limits = {torch.float32: (-149, 127), torch.bfloat16: (-133, 127), torch.float16: (-24, 15)}[
        dtype
    ]
    exponent = torch.randint(
        *limits, (-(-rows // 16), -(-cols // 16)), generator=generator
    ).double()
    exponent = exponent.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :cols]
    values = torch.randn(rows, cols, generator=generator, dtype=torch.float64) * torch.exp2(
        exponent
    )
    chosen = torch.rand(rows, cols, generator=generator)
    special = [
        float("nan"),
        float("inf"),
        -float("inf"),
        0.0,
        -0.0,
        1e-45,
        -6e-8,
        65504.0,
        FLOAT_MAX,
        -1e-40,
    ]
    quiet = torch.rand(-(-rows // 32), -(-cols // 32), generator=generator) < 0.6
    quiet = quiet.repeat_interleave(32, 0).repeat_interleave(32, 1)[:rows, :cols]
    for number, value in enumerate(special):
        at = (chosen > number / 500) & (chosen < (number + 1) / 500) & ~quiet
        values[at] = value
    storage = torch.empty(offset + rows * cols, dtype=dtype)
    result = storage[offset:].view(rows, cols)
    result.copy_(values)
    return result


def floats(x: torch.Tensor) -> Array:
    result: Array = x.float().numpy()
    return result


def on_every_isa() -> Iterator[str]:
    """The instruction sets that this machine has, each in use for one turn."""
    before = _cpu.isa()
    try:
        for isa in ISAS:
            _cpu.set_isa(isa)
            yield isa
    finally:
        _cpu.set_isa(before)


def check_quantize(
    x: torch.Tensor,
    element: int,
    rule: Rule,
    sides: list[Side | None],
    threads: tuple[int, ...] = (1, 2),
    offset: int = 0,
) -> None:
    rows, cols = x.shape
    expected = [side and side.expected(floats(x), element, rule) for side in sides]
    for isa, count in itertools.product(on_every_isa(), threads):
        note = (
            f"{isa} {tuple(x.shape)} {x.dtype} element {element} {rule} threads {count} offset "
            f"{offset}"
        )
        made = [
            pair and [Memory(part.shape, part.dtype, offset) for part in pair] for pair in expected
        ]
        arguments = [
            side
            and (
                side.block_rows,
                side.block_cols,
                *side.shared,
                side.turned,
                to[0].address,
                to[1].address,
            )
            for side, to in zip(sides, made, strict=True)
        ]
        _cpu.grid_quantize(
            x.data_ptr(), DTYPES.index(x.dtype), rows, cols, element,
            rule.e8m0, rule.floor, rule.epsilon, rule.largest, *arguments, count,
        )  # fmt: skip
        for side, pair, memories in zip(sides, expected, made, strict=True):
            for part, memory in zip(pair or (), memories or (), strict=True):
                wanted = np.ascontiguousarray(part).view(np.uint8)
                np.testing.assert_array_equal(
                    memory.array.view(np.uint8), wanted, f"{part.dtype} of {side}, {note}"
                )
                memory.check()


PAIRS: dict[str, list[Side | None]] = {
    "mx": [Side(1, 32), Side(32, 1)],
    "mx square": [Side(1, 32, 32, 32), Side(32, 1, 32, 32)],
    "blockwise rows": [Side(1, 128), Side(128, 1, turned=True)],
    "blockwise squares": [Side(128, 128), Side(128, 128, turned=True)],
    "rowwise": [Side(1, 0), Side(0, 1)],
    "rowwise turned": [Side(1, 0), Side(0, 1, turned=True)],
    "tensor": [Side(0, 0), Side(0, 0, turned=True)],
    "twice": [Side(0, 64), Side(0, 64)],
    "both turned": [Side(16, 16, turned=True), Side(16, 16, turned=True)],
    "oblong": [Side(8, 64), Side(64, 8)],
    "odd": [Side(3, 5), Side(7, 11, turned=True)],
    "one": [Side(1, 1), Side(1, 7)],
    "many rows": [Side(300, 3), Side(2, 96)],
    "shared by all": [Side(1, 16, 0, 0), Side(16, 1, 0, 16, turned=True)],
    "shared by four": [Side(2, 32, 8, 32), Side(32, 2, 32, 8)],
    "row only": [Side(1, 128), None],
    "column only": [None, Side(128, 1, turned=True)],
    "wide row only": [Side(1, 0), None],
}
SIZES = [0, 1, 31, 33, 127, 128, 129, 300]
SHAPES = sorted(
    {
        *zip(SIZES, SIZES[::-1], strict=True),
        *((n, n) for n in SIZES),
        (300, 31),
        (129, 128),
        (2, 1100),
        (1100, 3),
        (0, 5),
    }
)
RULES = [
    Rule(),
    Rule(floor=True, largest=float(torch.finfo(torch.bfloat16).max)),
    Rule(epsilon=1e-3),
    Rule(e8m0=True),
    Rule(e8m0=True, floor=True),
]


@pytest.mark.parametrize("pair", PAIRS)
def test_every_grid(pair: str) -> None:
    """Each grid with every shape; dtypes, elements, rules, threads and offsets take turns."""
    turns = itertools.cycle(itertools.product(DTYPES, [E4M3, E5M2, INT8], RULES))
    for number, (rows, cols) in enumerate(SHAPES):
        for _ in range(3):
            dtype, element, rule = next(turns)
            x = matrix(rows, cols, dtype, offset=number % 3)
            check_quantize(x, element, rule, PAIRS[pair], (1 + number % 2,), offset=number % 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("element", [E4M3, E5M2, INT8])
def test_every_rule_with_every_element(dtype: torch.dtype, element: int) -> None:
    x = matrix(70, 150, dtype)
    for rule in RULES:
        for pair in ("mx", "blockwise rows", "odd", "oblong"):
            check_quantize(x, element, rule, PAIRS[pair])


LARGE = [
    "mx",
    "mx square",
    "blockwise rows",
    "blockwise squares",
    "rowwise",
    "oblong",
    "odd",
    "shared by all",
]


@pytest.mark.parametrize("pair", LARGE)
def test_large_matrices(pair: str) -> None:
    """Several regions and panels, and threads that share them."""
    check_quantize(matrix(700, 2900, torch.bfloat16), E4M3, Rule(), PAIRS[pair])
    check_quantize(
        matrix(519, 2099, torch.float32, 1), INT8, Rule(e8m0=True), PAIRS[pair], offset=1
    )


@pytest.mark.parametrize("pair", ["mx", "blockwise rows", "rowwise", "row only", "wide row only"])
def test_long_rows(pair: str) -> None:
    """Rows of which few fill a cache: the scales of each are found just before it is cast."""
    for (dtype, rule), element in zip(
        itertools.product(DTYPES, RULES), itertools.cycle([E4M3, E5M2, INT8, E4M3])
    ):
        for cols in (1000, 1024):
            check_quantize(matrix(40, cols, dtype, 1), element, rule, PAIRS[pair], (1,))


@pytest.mark.parametrize("offset", [0, 1])
def test_stores_around_the_caches(offset: int) -> None:
    """What is larger than the caches is stored in whole lines, where they are aligned."""
    x = matrix(2048 + offset, 2112 + offset, torch.bfloat16, offset)
    for pair in ("blockwise rows", "twice"):
        check_quantize(x, E4M3, Rule(), PAIRS[pair], (2,), offset)


def every_value(dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.float32:
        return (
            torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
            .to(torch.int16)
            .view(dtype)
            .view(256, 256)
        )
    bits = torch.randint(
        -(1 << 31), 1 << 31, (512, 256), generator=torch.Generator().manual_seed(1)
    )
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("element", [E4M3, E5M2, INT8])
def test_cast_of_every_value(dtype: torch.dtype, element: int) -> None:
    """Multipliers of every kind: negative, zero, infinite, NaN, subnormal."""
    x = every_value(dtype)
    rows, cols = x.shape
    any_sign = np.array(
        [1, -1, 0, -0.0, np.inf, -np.inf, np.nan, 1e-41, 3e38, -2.5, 0.3], np.float32
    )
    for block_rows, block_cols, turned in (
        (0, 0, False),
        (1, 128, True),
        (3, 7, False),
        (64, 32, True),
    ):
        shape = blocks_of(rows, block_rows), blocks_of(cols, block_cols)
        generator = np.random.default_rng(4)
        plain = np.abs(generator.normal(size=shape)).astype(np.float32)
        for multipliers in (
            plain,
            generator.choice(any_sign, shape),
            np.full(shape, -0.0, np.float32),
        ):
            with np.errstate(all="ignore"):
                expected = encoded(
                    floats(x) * spread(multipliers, rows, cols, block_rows, block_cols), element
                )
            expected = expected.T if turned else expected
            for isa, threads in itertools.product(on_every_isa(), (1, 2)):
                out = Memory(expected.shape, np.uint8, threads)
                _cpu.grid_cast(
                    x.data_ptr(), DTYPES.index(dtype), rows, cols, multipliers.ctypes.data,
                    block_rows, block_cols, element, turned, out.address, threads,
                )  # fmt: skip
                np.testing.assert_array_equal(out.array, expected, isa)
                out.check()


GRIDS = [
    (0, 0),
    (1, 32),
    (32, 1),
    (1, 0),
    (0, 1),
    (1, 128),
    (128, 128),
    (8, 64),
    (64, 8),
    (3, 5),
    (1, 1),
    (300, 96),
]


def test_amaxes() -> None:
    dtypes = itertools.cycle(enumerate(DTYPES))
    for (rows, cols), (block_rows, block_cols) in itertools.product([*SHAPES, (300, 2100)], GRIDS):
        number, dtype = next(dtypes)
        x = matrix(rows, cols, dtype, number)
        expected = amaxes(floats(x), block_rows, block_cols)
        for isa, threads in itertools.product(on_every_isa(), (1, 2)):
            out = Memory(expected.shape, np.float32, number)
            _cpu.grid_amax(
                x.data_ptr(), number, rows, cols, block_rows, block_cols, out.address, threads
            )
            note = f"{isa} {rows}x{cols} {dtype} blocks {block_rows}x{block_cols} threads {threads}"
            np.testing.assert_array_equal(out.array, expected, note)
            out.check()


@pytest.mark.parametrize("e8m0", [False, True])
@pytest.mark.parametrize("element", [E4M3, E5M2, INT8])
def test_decode(element: int, e8m0: bool) -> None:
    generator = np.random.default_rng(3)
    cases = itertools.product(enumerate([*SHAPES, (140, 1100)]), enumerate(GRIDS))
    for (turn, (rows, cols)), (other_turn, (block_rows, block_cols)) in cases:
        data = Memory((rows, cols), np.uint8, 1)
        data.array[:] = generator.integers(0, 256, (rows, cols))
        shape = blocks_of(rows, block_rows), blocks_of(cols, block_cols)
        if e8m0:
            scales = generator.integers(0, 256, shape).astype(np.uint8)
            with np.errstate(all="ignore"):
                values = np.where(
                    scales == 255, np.nan, np.exp2(scales.astype(float) - 127)
                ).astype(np.float32)
        else:
            scales = np.exp2(generator.uniform(-149, 127, shape)).astype(np.float32)
            scales[generator.random(shape) < 0.1] = np.nan
            values = scales
        with np.errstate(all="ignore"):
            product = decoded(data.array, element) * spread(
                values, rows, cols, block_rows, block_cols
            )
        # Dtypes take turns, so that each shape and each grid meets all of them.
        number = (turn + other_turn) % len(DTYPES)
        dtype = DTYPES[number]
        expected = torch.from_numpy(product).to(dtype)
        for isa in on_every_isa():
            out = torch.full((rows * cols + 2,), 5.0, dtype=dtype)
            result = out[1:-1].view(rows, cols)
            _cpu.grid_decode(
                data.address, element, rows, cols, scales.ctypes.data, e8m0, block_rows, block_cols,
                result.data_ptr(), number, 1 + rows % 2,
            )  # fmt: skip
            same = (result == expected) & (torch.signbit(result) == torch.signbit(expected))
            same |= result.isnan() & expected.isnan()
            note = f"{isa} {rows}x{cols} {dtype} blocks {block_rows}x{block_cols}"
            assert bool(same.all()), (note, result[~same][:5], expected[~same][:5])
            assert out[0] == 5.0
            assert out[-1] == 5.0


def refused(message: str) -> Callable[..., None]:
    def check(*arguments: Any) -> None:
        with pytest.raises(ValueError, match=message):
            _cpu.grid_quantize(*arguments)

    return check


def test_bad_arguments_are_refused() -> None:
    rule = (False, False, 0.0, FLOAT_MAX)
    refused("element format code 2")(0, 1, 0, 0, 2, *rule, None, None, 1)
    refused("whole blocks: 33 rows are none of 32")(
        0, 1, 0, 0, 0, *rule, (32, 1, 33, 1, False, 0, 0), (), 1
    )
    refused("whole blocks: 32 columns are none of 0")(
        0, 1, 0, 0, 0, *rule, None, (1, 0, 1, 32, False, 0, 0), 1
    )
    refused("size is negative")(0, 1, -1, 0, 0, *rule, (), (), 1)
    refused("threads")(0, 1, 0, 0, 0, *rule, None, None, 0)
    _cpu.grid_quantize(0, 1, 5, 5, 0, *rule, None, (), 1)
