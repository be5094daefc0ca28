"""Shards of master weights, of any recipe and any cut: bytes and scales are those that quantizing
the whole weight at once gives."""

from __future__ import annotations

import copy
import functools
import math
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from ottava.distributed import (
    MasterWeights,
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    replace_raw_data,
    rule_of,
)
from ottava.tensors import columnwise_layout
from ottava_blockwise import Float8BlockQuantizer
from ottava_current import Float8CurrentScalingQuantizer
from ottava_delayed import Float8Quantizer
from ottava_mxfp8 import MXFP8Quantizer
from ottava_rowwise import Float8RowwiseQuantizer
from tests.comparing import assert_same
from tests.ranks import Collectives, on_ranks
from tests.strangers import ReducedRows, SilentOneScale, SilentRows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SPECIAL = (
    *(math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, -1e-45, 3e38, -3.4028234663852886e38),
    # What a rounding to float16 or bfloat16 makes infinite, or not quite.
    *(65519.0, 65520.0, -3.3961775292304957e38, 3.39e38, 448.0, 464.0, 57344.0, 2.0**-9),
)
#: Of every byte that was not written.
OLD = 0x5A


def delayed(fp8_dtype: torch.dtype, scale: float, amax: float | None, fits: bool) -> Any:
    found = None if amax is None else torch.tensor([amax])
    counts = None if amax is None else torch.zeros(1, dtype=torch.int64)
    quantizer = Float8Quantizer(torch.tensor([scale]), found, fp8_dtype, saturated=counts)
    quantizer.fits = fits and amax is not None
    return quantizer


FORMATS, FLAGS, EPSILONS = (
    st.sampled_from((E4M3, E5M2)),
    st.booleans(),
    st.sampled_from((0.0, 1e-3)),
)
SCALES = {"force_pow_2_scales": FLAGS, "amax_epsilon": EPSILONS}
ROUNDINGS = st.sampled_from(("up", "floor"))
QUANTIZERS: dict[str, st.SearchStrategy[Any]] = {
    "delayed": st.builds(
        delayed,
        FORMATS,
        st.sampled_from((1.0, 0.37, 448.0, 2.0**-20, 3.0e38)),
        st.sampled_from((None, 0.0, 2.5, 1e30)),
        FLAGS,
    ),
    "mxfp8": st.builds(
        MXFP8Quantizer, FORMATS, with_2d_quantization=FLAGS, scale_rounding=ROUNDINGS
    ),
    "blockwise": st.builds(
        Float8BlockQuantizer, FORMATS, block_scaling_dim=st.sampled_from((1, 2)), **SCALES
    ),
    "rowwise": st.builds(Float8RowwiseQuantizer, FORMATS, **SCALES),
    "strangers": st.sampled_from((SilentRows, SilentOneScale, ReducedRows)).map(lambda cls: cls()),
}
SHAPES = st.one_of(
    st.tuples(st.integers(0, 70), st.integers(0, 70)),
    st.tuples(st.integers(1, 100), st.sampled_from((1, 31, 32, 33, 64))),
    st.tuples(st.integers(0, 130)),
    st.tuples(st.integers(0, 5), st.integers(0, 11), st.integers(0, 40)),
    st.tuples(st.just(1), st.integers(0, 200)),
    st.just(()),
)
LARGE = st.tuples(st.integers(100, 300), st.integers(1, 200))


class Weight:
    """A quantizer, the whole master weight, and the dtype that the weight stands for."""

    def __init__(self, quantizer: Any, master: torch.Tensor, dtype: torch.dtype) -> None:
        self.quantizer, self.master, self.dtype = quantizer, master, dtype
        # With a state of its own.
        self.oracle = copy.deepcopy(quantizer)

    @functools.cached_property
    def expected(self) -> Any:
        """Quantized at once, by the code for whole tensors."""
        return self.oracle.quantize(self.master.to(self.dtype))

    def empty(self, shape: Sequence[int]) -> Any:
        """A quantized tensor that holds something else."""
        holder = self.quantizer.make_empty(shape, dtype=self.dtype)
        for inner in holder.inner_tensors:
            if getattr(holder, inner.attribute) is not None:
                getattr(holder, inner.attribute).fill_(OLD)
        holder.mark_written()
        return holder

    def __repr__(self) -> str:
        return f"{self.quantizer!r} {tuple(self.master.shape)} {self.dtype}"


@st.composite
def weights(draw: st.DrawFn, layout: str | None, current: st.SearchStrategy[Any]) -> Weight:
    kind = draw(st.sampled_from(("current", *QUANTIZERS)))
    quantizer = draw(current if kind == "current" else QUANTIZERS[kind])
    shape = draw(st.one_of(LARGE, SHAPES) if kind in ("blockwise", "strangers") else SHAPES)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    values = torch.randn(shape, generator=random) * 2.0 ** draw(st.integers(-30, 30))
    for _ in range(draw(st.integers(0, 6)) if values.numel() else 0):
        values.view(-1)[draw(st.integers(0, values.numel() - 1))] = draw(st.sampled_from(SPECIAL))
    usages = [(True, True), (True, False)]
    if kind != "blockwise" and layout is None:
        # Of a transpose alone there is no range.
        usages.append((False, True))
    rowwise, columnwise = draw(st.sampled_from(usages))
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    quantizer.internal = draw(st.integers(0, 3)) == 0
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    return Weight(quantizer, values, dtype)


class Case:
    """A batch of weights, of which each rank has shards."""

    def __init__(self, data: Any, mesh: DeviceMesh | None) -> None:
        self.data = data
        self.rank, self.world = (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())

    def cuts(self, numel: int) -> range:
        """This rank's range; drawn for all ranks, which go on in step."""
        points = st.integers(0, numel)
        if self.draw(st.integers(0, 3)) == 0:
            # All of it on one rank.
            points = st.sampled_from((0, numel))
        ends = [0, *sorted(self.draw(points) for _ in range(self.world - 1)), numel]
        place = self.draw(st.permutations(range(self.world)))[self.rank]
        return range(ends[place], ends[place + 1])

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.data.draw(strategy)

    def shards(self, batch: list[Weight]) -> tuple[list[range], list[Any], list[int | None]]:
        """This rank's ranges of weights, its shards in any memory, and where these begin; None for
        both where a shard is empty."""
        own = [self.cuts(weight.master.numel()) for weight in batch]
        values: list[Any] = []
        starts: list[int | None] = []
        for weight, place in zip(batch, own, strict=True):
            without, strided = self.draw(FLAGS), self.draw(FLAGS)
            value = weight.master.reshape(-1)[place.start : place.stop].clone()
            is_none = without and not place
            values.append(
                None if is_none else value.repeat_interleave(2)[::2] if strided else value
            )
            starts.append(None if is_none else place.start)
        return own, values, starts

    def cast(self, batch: list[Weight], holders: Any, shards: Any, starts: Any, **more: Any) -> Any:
        """One all-reduce for all weights, and one all-gather for those whose amaxes do not
        suffice. Returns the plan, where there is one."""
        plan = None
        with Collectives() as collectives:
            if self.draw(FLAGS):
                quantizers = [w.quantizer for w in batch] if self.draw(FLAGS) else None
                cast_master_weights_to_fp8(holders, shards, starts, quantizers=quantizers, **more)
            else:
                plan = MasterWeights(holders, shards, start_offsets=starts, **more)
                plan.quantize()
        several = self.world > 1 and len(batch) > 0
        assert collectives.count == several
        # The amaxes of a stranger's shards do not suffice.
        silent = any(rule_of(w.quantizer).batch_for(w.quantizer) is None for w in batch)
        assert len(collectives.gathered) == (several and silent)
        return plan


def raw(holder: Any) -> list[str]:
    return [inner.attribute for inner in holder.raw_inner()]


def assert_written(weight: Weight, holder: Any, own: range) -> None:
    """The elements of a range and all scales are those of the whole; other elements are old."""
    for inner in holder.inner_tensors:
        held = getattr(holder, inner.attribute)
        if held is None or holder.is_derived(inner):
            continue
        expected = getattr(weight.expected, inner.attribute)
        if inner.attribute in raw(holder):
            whole, expected = expected.reshape(-1), torch.full_like(held, OLD).reshape(-1)
            expected[own.start : own.stop] = whole[own.start : own.stop]
            held = held.reshape(-1)
        assert_same(held, expected, note=f"{weight} {inner.attribute}")


def assert_seen(weight: Weight) -> None:
    """A quantizer with state has seen what one of the whole weight sees."""
    mine, theirs = weight.quantizer, weight.oracle
    if isinstance(mine, Float8Quantizer) and mine.amax is not None:
        assert weight.expected is not None
        clamped = mine.saturated.clone()
        if dist.is_initialized():
            dist.all_reduce(clamped)
        assert_same((mine.amax, mine.scale, clamped), (theirs.amax, theirs.scale, theirs.saturated))


# -- where shards are written --


def into_weights(case: Case, batch: list[Weight]) -> None:
    """Into ranges of the weights; a plan is used again for other values."""
    holders = [weight.empty(weight.master.shape) for weight in batch]
    own, values, starts = case.shards(batch)
    plan = case.cast(batch, holders, values, starts)
    if plan is not None and not any(isinstance(w.quantizer, Float8Quantizer) for w in batch):
        # What delayed scaling has seen would stay.
        masters = copy.deepcopy(values)
        for value in values:
            if value is not None:
                value.fill_(3.0)
        plan.quantize()
        for value, master in zip(values, masters, strict=True):
            if value is not None:
                value.copy_(master)
        plan.quantize()
    for weight, holder, place in zip(batch, holders, own, strict=True):
        assert_written(weight, holder, place)


def into_bytes(case: Case, batch: list[Weight]) -> None:
    """Into buffers; the scales go into the weights, whose elements stay."""
    holders = [weight.empty(weight.master.shape) for weight in batch]
    own, values, starts = case.shards(batch)
    outs = [
        [torch.zeros(len(place), dtype=torch.uint8) for _ in raw(holder)]
        for holder, place in zip(holders, own, strict=True)
    ]
    given_outs = [o[0] if len(o) == 1 and case.draw(FLAGS) else tuple(o) for o in outs]
    case.cast(batch, holders, values, starts, fsdp_shard_model_weights=given_outs)
    for weight, holder, place, buffers in zip(batch, holders, own, outs, strict=True):
        assert_written(weight, holder, range(0))
        for name, buffer in zip(raw(holder), buffers, strict=True):
            whole = getattr(weight.expected, name).reshape(-1)[place.start : place.stop]
            assert_same(buffer, whole.view(torch.uint8), note=f"{weight} {name}")


def into_one_buffer(case: Case, batch: list[Weight]) -> None:
    """ZeRO-2: the bytes of all weights lie in one buffer, of which each rank writes its share; the
    caller's all-gather completes it."""
    holders = [weight.empty(weight.master.shape) for weight in batch]
    batch[:] = [w for w, holder in zip(batch, holders, strict=True) if len(raw(holder)) == 1]
    holders = [holder for holder in holders if len(raw(holder)) == 1]
    share = -(-sum(weight.master.numel() for weight in batch) // case.world)
    buffer, place = torch.zeros(share * case.world, dtype=torch.uint8), 0
    mine = range(case.rank * share, (case.rank + 1) * share)
    shards: list[Any] = []
    for weight, holder in zip(batch, holders, strict=True):
        end = place + weight.master.numel()
        replace_raw_data(holder, buffer[place:end])
        assert torch.all(buffer[place:end] == OLD)
        own = range(max(place, mine.start) - place, min(end, mine.stop) - place)
        flat = weight.master.reshape(-1)
        shards.append((flat[own.start : own.stop], own.start) if own else (None, None))
        place = end
    values, starts = ([each[number] for each in shards] for number in (0, 1))
    manual = case.draw(FLAGS)
    case.cast(batch, holders, values, starts, manual_post_all_gather_processing=manual)
    if dist.is_initialized():
        dist.all_gather_into_tensor(buffer, buffer[mine.start : mine.stop].clone())
    post_all_gather_processing(holders)
    for weight, holder in zip(batch, holders, strict=True):
        assert_written(weight, holder, range(weight.master.numel()))
        assert_same(holder.dequantize(), weight.expected.dequantize(), note=weight)
        transpose = getattr(holder, "_transpose", None)
        if transpose is not None:
            assert_same(transpose, getattr(holder, raw(holder)[0]).movedim(-1, 0), note=weight)


TARGETS = (into_weights, into_bytes, into_one_buffer)


def check(mesh: DeviceMesh | None, examples: int) -> None:
    """Random weights and cuts, the same on all ranks; none after one that failed."""
    failures: list[str] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: Any) -> None:
        if failures:
            return
        # Quantizers of one class agree in these options.
        options = {name: data.draw(strategy) for name, strategy in SCALES.items()}
        constants = {name: st.just(value) for name, value in options.items()}
        current = st.builds(Float8CurrentScalingQuantizer, FORMATS, **constants)
        layout = data.draw(st.sampled_from((None, "transpose")))
        target = data.draw(st.sampled_from(TARGETS))
        with nullcontext() if layout is None else columnwise_layout(layout):
            batch = data.draw(st.lists(weights(layout, current), min_size=1, max_size=4))
            try:
                target(Case(data, mesh), batch)
                for weight in batch:
                    assert_seen(weight)
            except Exception:
                note = f"{target.__name__}, {layout}: {batch}"
                failures.append(f"{traceback.format_exc()}\n{note}")
        if mesh is not None:
            # The ranks go on in step.
            every: list[Any] = [None] * mesh.size()
            dist.all_gather_object(every, failures)
            failures[:] = [text for texts in every for text in texts]

    run()
    assert not failures, "\n".join(failures)


EXAMPLES = pytest.mark.parametrize("examples", [12, pytest.param(300, marks=pytest.mark.slow)])


@EXAMPLES
def test_one_process_has_all_shards(examples: int) -> None:
    check(None, examples)


@EXAMPLES
@on_ranks(3)
def test_ranks(mesh: DeviceMesh, examples: int) -> None:
    check(mesh, examples)


def test_a_plan_follows_a_quantizer_that_makes_other_bytes() -> None:
    up, floor = (
        MXFP8Quantizer(torch.float8_e4m3fn, scale_rounding=rule) for rule in ("up", "floor")
    )
    master = torch.randn(64, 64) * 100
    weight = up.quantize(torch.ones(64, 64))
    plan = MasterWeights([weight], [master])
    for quantizer in (up, floor, up):
        weight.update_quantizer(quantizer)
        plan.quantize()
        assert_same(weight._rowwise_scale_inv, quantizer.quantize(master)._rowwise_scale_inv)
