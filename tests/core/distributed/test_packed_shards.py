"""Shards of weights whose elements share bytes, are padded or rounded at random."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ottava import GridQuantizer, Layout
from ottava.distributed import cast_master_weights_to_fp8, quantize_master_weights, rule_of
from ottava.errors import ShapeError, UsageError
from ottava.kernels import draw_seed, fixed_seed
from ottava.layout import Rotation
from ottava.tensors.row_shard import RowShard
from tests.comparing import assert_same
from tests.core.layouts.layouts import LEVELS, SIGNS, assert_directions
from tests.ranks import on_ranks
from tests.samples import wide

LAYOUTS = {
    "nvfp4": LEVELS["nvfp4"],
    "mxfp4": LEVELS["mxfp4-even"],
    "int4": Layout("INT4", (1, 4), columnwise="transposed"),
    "squares": LEVELS["nvfp4-squares"],
    "rotated rows": replace(
        LEVELS["mxfp4-even"], block=(1, 16), rotation=Rotation(16, SIGNS, "both")
    ),
    "rotated bytes": replace(
        LEVELS["mxfp4-even"], element="E2M3", rotation=Rotation(32, SIGNS, "rowwise")
    ),
}
RANDOM = replace(LEVELS["mxfp4-even"], stochastic=True)
#: Layouts that round at random, of every kind: blocks of rows, squares, one scale, two levels, and
#: rotations that pad rows.
RANDOM_LAYOUTS = {name: layout for name, layout in LEVELS.items() if layout.stochastic}
#: Of every byte that was not written.
OLD = 0x5A


def bytes_of(layout: Layout, columns: int, first: int, last: int) -> list[int]:
    """The bytes of the flat rowwise data that have the elements, and the padding of rows that end
    with one."""
    width = layout.data_shape((1, columns), False)[1]
    places = set()
    for element in range(first, last):
        row, column = divmod(element, columns)
        places.add(row * width + column // layout.elements_per_byte)
        if column == columns - 1:
            places.update(
                range(row * width + column // layout.elements_per_byte, row * width + width)
            )
    return sorted(places)


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(2)
def test_a_shard_may_begin_and_end_in_a_byte(mesh: DeviceMesh, name: str) -> None:
    """The byte at a cut has both elements on both ranks."""
    layout, rank = LAYOUTS[name], dist.get_rank()
    quantizer = GridQuantizer(layout)
    for rows, columns, cut in ((3, 37, 38), (3, 37, 74), (4, 32, 33), (1, 5, 0), (2, 7, 14)):
        master, case = wide(rows, columns, seed=cut), f"{name} {rows} {columns} {cut}"
        whole, weight = quantizer(master), quantizer(torch.zeros(rows, columns))
        first, last = (0, cut) if rank == 0 else (cut, master.numel())
        weight._rowwise_data.fill_(OLD)
        shard = master.flatten()[first:last]
        quantize_master_weights([weight], [shard], [first])
        expected = torch.full_like(whole._rowwise_data, OLD).flatten()
        own = bytes_of(layout, columns, first, last)
        expected[own] = whole._rowwise_data.flatten()[own]
        assert_same(weight._rowwise_data.flatten(), expected, note=case)
        for inner, mine, theirs in zip(
            weight.inner_tensors, weight.inner_list(), whole.inner_list(), strict=True
        ):
            if inner.argument == "rowwise_data" or weight.is_derived(inner):
                continue
            if mine is not None or theirs is not None:
                assert_same(mine, theirs, note=f"{case} {inner.argument}")
        buffer = torch.zeros(len(own), dtype=torch.uint8)
        targets = {"fsdp_shard_model_weights": [buffer]}
        quantize_master_weights([weight], [shard], [first], **targets)
        assert_same(buffer, whole._rowwise_data.flatten()[own], note=case)


def test_a_buffer_has_the_bytes_and_not_the_elements() -> None:
    weight = GridQuantizer(LAYOUTS["nvfp4"])(torch.zeros(2, 8))
    buffer = [torch.zeros(16, dtype=torch.uint8)]
    with pytest.raises(ShapeError, match=r"16 elements.* Expected: 8"):
        quantize_master_weights([weight], [torch.ones(16)], [0], fsdp_shard_model_weights=buffer)


@pytest.mark.parametrize("name", RANDOM_LAYOUTS)
@on_ranks(2)
def test_ranks_round_weights_with_the_seeds_of_the_first_one(mesh: DeviceMesh, name: str) -> None:
    """Master weights that are cut anywhere, on ranks whose generators have different states."""
    rank, layout = dist.get_rank(), RANDOM_LAYOUTS[name]
    quantizer = GridQuantizer(layout)
    masters = [wide(3, 7, seed=seed) for seed in (1, 2)]
    torch.manual_seed(0)
    wholes = [quantizer(master) for master in masters]
    for cut in range(masters[0].numel() + 1):
        first, last = (0, cut) if rank == 0 else (cut, masters[0].numel())
        weights = [quantizer(torch.zeros(3, 7)) for _ in masters]
        torch.manual_seed(rank)
        shards = [master.flatten()[first:last] for master in masters]
        # Weights that FSDP2 has gathered have quantizers that expect rows alone.
        quantizers = quantizer.for_shards(mesh.get_group()) if cut % 2 else quantizer
        cast_master_weights_to_fp8(weights, shards, [first] * 2, quantizers=quantizers)
        own = bytes_of(layout, 7, first, last)
        for weight, whole in zip(weights, wholes, strict=True):
            data, expected = (q._rowwise_data.flatten()[own] for q in (weight, whole))
            assert_same(data, expected, note=cut)
            if layout.transposed and not layout.square:
                # Each rank has all columns that are not made of its rows.
                assert_same(weight._columnwise_data, whole._columnwise_data, note=cut)


def rows_per_block(layout: Layout) -> int:
    """The rows of a block of rowwise data; 1 where all rows share a scale."""
    return layout.block[0] or 1


@pytest.mark.parametrize("name", RANDOM_LAYOUTS)
@on_ranks(2)
def test_rows_are_rounded_at_their_place_in_the_whole(mesh: DeviceMesh, name: str) -> None:
    """Shards of rows, cut between any two of few rows and at some places of many, with the seed of
    the first rank."""
    rank, layout = dist.get_rank(), RANDOM_LAYOUTS[name]
    quantizer = GridQuantizer(layout)
    of_shards = quantizer.for_shards(mesh.get_group())
    for shape in ((2 * rows_per_block(layout) + 3, 21), (48, 16), (2, 3, 5)):
        x = wide(*shape, seed=1)
        torch.manual_seed(0)
        whole = quantizer(x)
        between = range(0, shape[0] + 1, rows_per_block(layout))
        for cut in between if len(between) < 10 else (*between[::7], shape[0]):
            torch.manual_seed(rank)
            own = slice(0, cut) if rank == 0 else slice(cut, None)
            q = of_shards(x[own])
            assert_same(q._rowwise_data, whole._rowwise_data[own], note=(shape, cut))
            expected = whole[own]
            if type(expected) is type(whole):
                # No block and no byte of the columns is cut.
                assert_directions(q, expected)


@on_ranks(2)
def test_reduced_amaxes_with_random_rounding(mesh: DeviceMesh) -> None:
    quantizer = GridQuantizer(LEVELS["nvfp4-stochastic"]).for_shards(mesh.get_group())
    x = wide(8, 32, seed=dist.get_rank())
    with fixed_seed():
        q = quantizer(x)
    largest = x.abs().amax()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert_same(q._amax_rowwise, largest)
    assert float((q.dequantize() - x).norm() / x.norm()) < 0.3


def test_candidates_for_a_scale_that_spans_the_rows_are_refused() -> None:
    """Each rank would choose by the errors of its own rows."""
    layout = Layout("E2M1", (1, None), columnwise="transposed", candidates=(1.0, 1.5), error="MAE")
    with pytest.raises(UsageError, match=r"spans the rows.*high precision"):
        GridQuantizer(layout).for_shards(None)
    assert rule_of(GridQuantizer(layout)).batch_of_rows(GridQuantizer(layout)) is None


def test_rows_that_are_rounded_at_random_are_not_independent() -> None:
    """Random numbers depend on the place in the whole weight."""
    for layout, expected in ((LAYOUTS["mxfp4"], 32), (RANDOM, None), (LAYOUTS["nvfp4"], None)):
        quantizer = GridQuantizer(layout)
        assert rule_of(quantizer).independent_rows(quantizer) == expected


def test_a_shard_cuts_no_block_no_group_and_no_byte_of_columns() -> None:
    for rotation, expected in (
        (Rotation(64, 5, "columnwise"), 64),
        (Rotation(16, 5, "both"), 32),
        (Rotation(64, 5, "rowwise"), 32),
    ):
        quantizer = GridQuantizer(replace(LAYOUTS["mxfp4"], rotation=rotation))
        rule = rule_of(quantizer)
        assert rule.rows_of_blocks(quantizer) == rule.independent_rows(quantizer) == expected
        x = wide(128, 40)
        shards = [quantizer(rows)._columnwise_data for rows in x.split(expected)]
        assert_same(torch.cat(shards, 1), quantizer(x)._columnwise_data)
        rowwise = quantizer.with_usage(rowwise=True, columnwise=False)
        assert rule.rows_of_blocks(rowwise) == 1
    spanning = GridQuantizer(Layout("INT4", (1, None), columnwise="transposed"))
    assert rule_of(spanning).rows_of_blocks(spanning) == 2


def test_a_shard_that_ends_inside_of_a_block_is_refused() -> None:
    quantizer = GridQuantizer(Layout(torch.float8_e4m3fn, (8, 8)))
    weight, target = (quantizer(torch.zeros(rows, 16)) for rows in (16, 12))
    with pytest.raises(ShapeError, match="rows 0 to 12 of 16, which cut the blocks"):
        quantize_master_weights([weight], [torch.ones(12 * 16)], [0], None, [target])


def test_rows_that_are_whole_groups_of_a_rotation_share_its_bytes() -> None:
    """Quantized again they would have other columns than the whole, as shards of FSDP2 had."""
    quantizer = GridQuantizer(LAYOUTS["rotated rows"])
    q = quantizer(wide(64, 40))
    part = q[32:]
    assert type(part) is type(q)
    assert_same(part._columnwise_data, q._columnwise_data[:, 16:])
    assert_same(part._columnwise_scale_inv, q._columnwise_scale_inv[:, 2:])
    assert part._columnwise_data.data_ptr() == q._columnwise_data[:, 16:].data_ptr()
    # Of 40 rows the last eight have padding, which is theirs, and 24 cuts a group.
    padded = quantizer(wide(40, 40))
    last = padded[32:]
    assert type(last) is type(q)
    assert_same(last._columnwise_data, quantizer(wide(40, 40)[32:])._columnwise_data)
    rows = padded[24:]
    assert type(rows) is not type(q)
    assert_same(rows * 1, padded.dequantize()[24:])


@pytest.mark.parametrize("is_first", [True, False])
def test_each_rank_draws_a_seed_so_that_generators_stay_alike(is_first: bool) -> None:
    shard = RowShard(wide(8, 32), RANDOM, rowwise=True, columnwise=False)
    torch.manual_seed(0)
    draw_seed(torch.device("cpu"))
    expected = torch.rand(1)
    torch.manual_seed(0)
    shard.numbers(is_first=is_first)
    assert_same(torch.rand(1), expected)
