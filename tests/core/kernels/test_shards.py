"""Kernels on many shards in one call: the bytes of the whole matrix, wherever it was cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ottava import Layout, kernels
from tests import arrays, samples
from tests.comparing import assert_same
from tests.core.conftest import running
from tests.core.kernels.test_grids import E4M3, E5M2, LAYOUTS, any_scales
from tests.core.placing import at, is_alone, junk, running_on

Tensor = torch.Tensor
Pairs = list[tuple[Tensor, Tensor] | None]
searching = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Shards:
    """Shards of matrices, and the numbers that they are: rounded to a dtype first."""

    def __init__(self) -> None:
        self.arguments: tuple[list[Any], ...] = ([], [], [], [], [])
        self.numbers: list[np.ndarray[Any, Any]] = []
        self.offsets: list[int] = []

    def add(
        self,
        x: Tensor,
        dtype: torch.dtype,
        shape: tuple[int, int],
        start: int,
        layout: Layout,
        offset: int = 0,
    ) -> None:
        values = (x, dtype, shape, start, layout)
        for argument, value in zip(self.arguments, values, strict=True):
            argument.append(value)
        whole = np.zeros(math.prod(shape), np.float32)
        whole[start : start + x.numel()] = arrays.numbers(x.detach().to(dtype)).ravel()
        self.numbers.append(whole.reshape(shape))
        self.offsets.append(offset)

    def each(self) -> Iterator[tuple[int, Tensor, Layout, tuple[int, int], int]]:
        xs, _, shapes, starts, layouts = self.arguments
        yield from zip(range(len(xs)), xs, layouts, shapes, starts, strict=True)

    def amaxes(self) -> Tensor:
        """The amaxes of each whole matrix, to which elements outside of the shard are zeros."""
        parts = [np.zeros(0, np.float32)]
        for i, _, layout, _, _ in self.each():
            area = layout.shared or layout.block
            parts.append(arrays.amaxes(self.numbers[i], area).ravel())
            if area[0] != area[1]:
                parts.append(arrays.amaxes(self.numbers[i].T, area).T.ravel())
        return torch.from_numpy(np.concatenate(parts))

    def scales(self, columnwise: bool) -> list[Tensor]:
        """Any scales of the whole matrices."""
        return [
            any_scales(layout.grid(shape, columnwise), layout)
            for _, _, layout, shape, _ in self.each()
        ]

    def data(self, scales: list[Tensor], columnwise: bool) -> list[Tensor]:
        """The data of each shard with these scales: float32 multipliers, or bytes of E8M0."""
        results = []
        for i, x, layout, _, start in self.each():
            factors, matrix = scales[i].numpy(), self.numbers[i]
            if layout.scale is torch.float8_e8m0fnu:
                with np.errstate(all="ignore"):
                    factors = (1 / arrays.scale_values(factors, layout)).astype(np.float32)
            if columnwise:
                whole = arrays.cast(matrix.T, factors.T, layout).T
            else:
                whole = arrays.cast(matrix, factors, layout)
            data = torch.from_numpy(np.array(whole, order="C").ravel())
            results.append(data[start : start + x.numel()])
        return results

    def check(self) -> None:
        """Amaxes, and data of both directions at any address; every fifth is left out."""
        assert_same(kernels.grid_multi_amax(*self.arguments), self.amaxes())
        pairs: list[Pairs] = []
        expected, outs = [], []
        for columnwise in (False, True):
            scales = self.scales(columnwise)
            data = self.data(scales, columnwise)
            places = [
                junk((x.numel(),), torch.uint8, self.offsets[i] + columnwise)
                for i, x, *_ in self.each()
            ]
            chosen = [i % 5 != 3 + columnwise for i in range(len(places))]
            pairs.append(
                [
                    pair if asked else None
                    for pair, asked in zip(zip(scales, places, strict=True), chosen, strict=True)
                ]
            )
            outs += places
            expected += [
                part if asked else torch.full_like(part, 0xA5)
                for part, asked in zip(data, chosen, strict=True)
            ]
        kernels.grid_multi_cast(*self.arguments, *pairs)
        assert_same(outs, expected)
        assert all(is_alone(out) for out in outs)


def weight(count: int, seed: int = 0) -> Tensor:
    """float32 values, of which some are infinite in a narrower dtype."""
    return samples.tiles(-(-count // 64), 64, seed=seed).view(-1)[:count]


def cut(shape: tuple[int, int], cuts: list[int], layout: Layout, number: int = 0) -> Shards:
    """A matrix cut into shards, of which dtypes and nominal dtypes differ."""
    count, shards = math.prod(shape), Shards()
    values = weight(count, number)
    ends = [0, *sorted(cut % (count + 1) for cut in cuts), count]
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        x = values[start:end].to(samples.DTYPES[(number + i) % 3])
        shards.add(x, samples.DTYPES[(number + i // 3) % 3], shape, start, layout, i)
    return shards


SIZES = st.sampled_from([0, 1, 2, 31, 32, 33, 64, 65, 97, 129])


@searching
@given(
    st.tuples(SIZES, SIZES | st.sampled_from([300, 1024, 1025])),
    st.lists(st.integers(0, 2**20), max_size=5),
    st.sampled_from([*LAYOUTS]),
    st.integers(0, 8),
)
def test_any_cut_of_any_matrix(
    code_path: str, shape: tuple[int, int], cuts: list[int], name: str, number: int
) -> None:
    cut(shape, [*cuts, *cuts[:1]], LAYOUTS[name], number).check()


def test_matrices_on_all_grids_in_one_call(code_path: str) -> None:
    """Strided sources, some that autograd follows, of every dtype at any address."""
    shards = Shards()
    for i, layout in enumerate(LAYOUTS.values()):
        shape = (17 + i, 40 + 11 * i)
        count = [0, 1, 7, 100, shape[0] * shape[1] - 3][i % 5]
        x = weight(count, i).to(samples.DTYPES[i % 3])
        if i % 4 == 1:
            x = torch.stack([x, -x], 1)[:, 0]
        elif i % 4 == 3:
            x = at(x, 1 + i % 3)
        shards.add(
            x.requires_grad_(i % 7 == 0), samples.DTYPES[i // 3 % 3], shape, i % 3, layout, i * 5
        )
    for threads in (1, 2, 5):
        with running_on(threads):
            shards.check()
    assert not kernels.grid_multi_amax(*shards.arguments).requires_grad


PER_TENSOR = [LAYOUTS["tensor"], Layout(E5M2, (None, None))]


@pytest.mark.grid
def test_more_tensors_than_a_table_holds() -> None:
    """Each has its own amax and its own scale, whichever launch of a CUDA kernel it is in."""
    shards = Shards()
    # A table has jobs of one dtype and format, and a shard without elements has no job. The tables
    # of the module for these tests have at most 137 jobs of tensors, and 45 of matrices.
    for i in range(142):
        count = 1 + i % 5
        dtype = samples.DTYPES[i % 3]
        shards.add(weight(count, i % 9), dtype, (1, count), 0, PER_TENSOR[0], i % 64)
    matrices = Shards()
    for i in range(48):
        shape = (i % 4 + 1, i % 5 + 1)
        start = i % 2
        count = max(math.prod(shape) - start, 0)
        matrices.add(weight(count), torch.bfloat16, shape, start, LAYOUTS["mxfp8"], i % 64)
    with running("grid"):
        shards.check()
        matrices.check()


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_every_address_and_size_of_a_chunk(code_path: str, dtype: torch.dtype) -> None:
    """Sources and results at each element of a wide access; sizes around those of blocks."""
    shards = Shards()
    for source, result in itertools.product(range(16 // dtype.itemsize), (0, 1, 4, 7)):
        x = at(weight(777 + source).to(dtype), source)
        shards.add(x, samples.DTYPES[source % 3], (1, x.numel()), 0, PER_TENSOR[result % 2], result)
    for count in (8191, 8193, 16383, 16384, 32767, 32769):
        x = weight(count, count).to(dtype)
        x[-1] = 60000.0  # The largest is the last.
        shards.add(x, dtype, (1, count), 0, PER_TENSOR[1])
    for (rows, columns), (start, stop) in itertools.product(
        ((64, 256), (33, 129), (1, 500), (500, 1)), ((0, 0), (1, 0), (0, 1), (127, 130))
    ):
        x = weight(rows * columns - start - stop, rows).to(dtype)
        shards.add(x, torch.bfloat16, (rows, columns), start, LAYOUTS["mxfp8"], start)
    shards.check()


@pytest.mark.parametrize("dtype", samples.DTYPES, ids=str)
def test_elements_are_rounded_first(code_path: str, dtype: torch.dtype) -> None:
    """Neighbours of every value of the dtype and of every midpoint of two; each has an amax."""
    values = samples.patterns(dtype).float().view(-1)
    bits = values.view(torch.int32).view(-1, 1)
    half = {torch.float32: 1, torch.bfloat16: 1 << 15, torch.float16: 1 << 12}[dtype]
    near = torch.tensor([-half - 1, -half, 1 - half, 0, half - 1, half, half + 1])
    x = (bits + near.int()).view(-1).view(torch.float32)[:: 29 if code_path == "grid" else 3]
    shards = Shards()
    shards.add(x, dtype, (1, x.numel()), 0, LAYOUTS["mxfp8"])
    assert_same(kernels.grid_multi_amax(*shards.arguments), shards.amaxes())
    # Just beyond a tie of E4M3, which is a value of each dtype: the rounded ones are the tie.
    ties = torch.tensor([17.0, 19.0, 21.0, -17.0, -27.0])
    shards = Shards()
    shards.add(ties * (1 + 2.0**-20), dtype, (1, 5), 0, Layout(E4M3, (None, None)))
    assert_same(kernels.grid_multi_amax(*shards.arguments), shards.amaxes())
    (data,) = shards.data([torch.ones(1, 1)], False)
    out = torch.empty(5, dtype=torch.uint8)
    kernels.grid_multi_cast(*shards.arguments, [(torch.ones(1, 1), out)], [None])
    assert_same(out, data, ties)


def test_sizes_beyond_the_caches(on_every_isa: Callable[..., None]) -> None:
    """Streaming stores, at the beginning of a line and not; threads that share a matrix."""
    shards, shape = Shards(), (1100, 4096)
    values = weight(math.prod(shape), 9)
    shards.add(values, torch.bfloat16, shape, 0, LAYOUTS["mxfp8"])
    shards.add(values[77:-5000], torch.float32, shape, 77, LAYOUTS["mxfp8"], 1)
    shards.add(values[:-3], torch.float16, (1, values.numel()), 3, PER_TENSOR[0], 3)
    scales = [shards.scales(columnwise) for columnwise in (False, True)]
    expected = [shards.data(own, bool(columnwise)) for columnwise, own in enumerate(scales)]

    def run() -> None:
        for threads in (1, 3):
            outs = [
                [junk((x.numel(),), torch.uint8, shards.offsets[i]) for i, x, *_ in shards.each()]
                for _ in scales
            ]
            pairs = [list(zip(*both, strict=True)) for both in zip(scales, outs, strict=True)]
            with running_on(threads):
                kernels.grid_multi_cast(*shards.arguments, *pairs)
            assert_same(outs, expected, note=threads)
            assert all(is_alone(out) for own in outs for out in own)

    on_every_isa(run)


def test_nothing(code_path: str) -> None:
    assert kernels.grid_multi_amax([], [], [], [], []).shape == (0,)
    kernels.grid_multi_cast([], [], [], [], [], [], [])
    one = ([torch.ones(4)], [torch.float32], [(2, 3)], [1], [LAYOUTS["mxfp8"]])
    kernels.grid_multi_cast(*one, [None], [None])
    empty = ([torch.empty(0)], [torch.float32], [(2, 3)], [4], [LAYOUTS["mxfp8"]])
    assert kernels.grid_multi_amax(*empty).tolist() == [0.0] * 5
