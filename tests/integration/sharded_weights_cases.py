"""Random shards of master weights, of every recipe and three of third parties, are cast as the
whole weights."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_weights import Weight, scalar_bytes, weights
from sampling import some

from ottava.distributed import (
    MasterWeights,
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
    rule_of,
)
from ottava.tensors import columnwise_layout

# Python's oracle is slow.
SMALL = 400


class Counted:
    """Counts the all-reduces and the all-gathers of a block."""

    def __enter__(self) -> Counted:
        self.count, self.gathers = 0, 0
        self.all_reduce, self.all_gather = dist.all_reduce, dist.all_gather_into_tensor

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self.all_reduce(*args, **kwargs)

        def all_gather(*args: Any, **kwargs: Any) -> Any:
            self.gathers += 1
            return self.all_gather(*args, **kwargs)

        dist.all_reduce, dist.all_gather_into_tensor = all_reduce, all_gather
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_reduce, dist.all_gather_into_tensor = self.all_reduce, self.all_gather

    def check(self, batch: Sequence[Weight]) -> None:
        """One all-reduce for all weights, and one all-gather for those whose quantizers declare no
        amaxes."""
        several = ranks()[1] > 1 and len(batch) > 0
        silent = any(
            rule_of(weight.quantizer).batch_for(weight.quantizer) is None for weight in batch
        )
        assert (self.count, self.gathers) == (int(several), int(several and silent)), (
            self.count,
            self.gathers,
        )


def ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def together(error: str) -> None:
    """Fail on all ranks if one did, so that they go on in step."""
    errors: list[Any] = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    assert not any(errors), next(e for e in errors if e)


def raw(weight: Any) -> list[str]:
    return [inner.attribute for inner in weight.raw_inner()]


def filled(weight: Weight) -> Any:
    """A weight that holds something else: every byte is 0x5A."""
    made = weight.quantizer.make_empty(weight.master.shape, dtype=weight.dtype)
    for inner in made.inner_tensors:
        held = getattr(made, inner.attribute)
        if held is not None:
            held.fill_(0x5A)
    made.mark_written()
    return made


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    if found.dtype == torch.float32:
        found, expected = found.view(torch.int32), expected.view(torch.int32)
    assert torch.equal(found, expected), (what, found, expected)


def check_whole(weight: Weight, made: Any, what: str) -> None:
    """All bytes, all scales."""
    for inner in made.inner_tensors:
        held = getattr(made, inner.attribute)
        if held is not None:
            derived = made.is_derived(inner)
            whole = weight.expected
            turned = derived and hasattr(whole, "_data")
            expected = whole._data.movedim(-1, 0) if turned else getattr(whole, inner.attribute)
            same(held, expected, f"{what} {inner.attribute}")
    codes = scalar_bytes(weight) if weight.master.numel() <= SMALL else None
    for name, expected in (codes or {}).items():
        if getattr(made, name) is not None:
            assert getattr(made, name).reshape(-1).tolist() == expected, (
                f"{what} {name}: the scalar oracle"
            )


def check_scales(weight: Weight, made: Any, what: str) -> None:
    codes = raw(made)
    for inner in made.inner_tensors:
        held = getattr(made, inner.attribute)
        if held is not None and inner.attribute not in codes and not made.is_derived(inner):
            same(held, getattr(weight.expected, inner.attribute), f"{what} {inner.attribute}")


def check_state(weight: Weight, what: str) -> None:
    """What a quantizer with state has seen."""
    _ = weight.expected
    if weight.kind != "delayed" or weight.quantizer.amax is None:
        return
    same(weight.quantizer.amax, weight.oracle.amax, f"{what} amax")
    same(weight.quantizer.scale, weight.oracle.scale, f"{what} scale")
    clamped = weight.quantizer.saturated.clone()
    if dist.is_initialized():
        dist.all_reduce(clamped)
    same(clamped, weight.oracle.saturated, f"{what} saturated")


def cuts(data: Any, numel: int, world: int) -> list[range]:
    """A partition of a weight: where each rank's shard lies; some are empty."""
    ends = sorted(
        data.draw(st.lists(st.integers(0, numel), min_size=world - 1, max_size=world - 1))
    )
    if data.draw(st.integers(0, 3)) == 0:
        # All of it on one rank.
        ends = [0] * data.draw(st.integers(0, world - 1))
        ends += [numel] * (world - 1 - len(ends))
    ranges = [range(a, b) for a, b in zip([0, *ends], [*ends, numel], strict=True)]
    return [ranges[i] for i in data.draw(st.permutations(range(world)))]


def shards_of(
    data: Any, batch: Sequence[Weight], ranges: Sequence[Sequence[range]]
) -> tuple[list[torch.Tensor | None], list[int | None]]:
    """This rank's shards and offsets; drawn for all ranks, so that these stay in step."""
    rank, world = ranks()
    shards: list[torch.Tensor | None] = []
    offsets: list[int | None] = []
    for weight, places in zip(batch, ranges, strict=True):
        without = [data.draw(st.booleans()) for _ in range(world)]
        strided = data.draw(st.booleans())
        place = places[rank]
        if not len(place) and without[rank]:
            shards.append(None)
            offsets.append(None)
            continue
        shard = weight.master.reshape(-1)[place.start : place.stop].clone()
        shards.append(shard.repeat_interleave(2)[::2] if strided else shard)
        offsets.append(place.start)
    return shards, offsets


def cast(
    data: Any, batch: Sequence[Weight], made: Sequence[Any], shards: Any, offsets: Any, **more: Any
) -> None:
    with Counted() as reductions:
        if data.draw(st.booleans()):
            quantize_master_weights(made, shards, offsets, **more)
        else:
            given_quantizers = data.draw(st.booleans())
            quantizers = [weight.quantizer for weight in batch] if given_quantizers else None
            cast_master_weights_to_fp8(made, shards, offsets, quantizers=quantizers, **more)
    reductions.check(batch)


def into_weights(data: Any, batch: Sequence[Weight]) -> None:
    """Each rank writes its range of the weights, and nothing else."""
    rank, world = ranks()
    made = [filled(weight) for weight in batch]
    ranges = [cuts(data, weight.master.numel(), world) for weight in batch]
    shards, offsets = shards_of(data, batch, ranges)
    cast(data, batch, made, shards, offsets)
    for number, (weight, quantized, places) in enumerate(zip(batch, made, ranges, strict=True)):
        what = f"weight {number}"
        check_scales(weight, quantized, what)
        own = places[rank]
        for name in raw(quantized):
            flat = getattr(quantized, name).reshape(-1)
            reference = torch.full_like(flat, 0x5A)
            reference[own.start : own.stop] = getattr(weight.expected, name).reshape(-1)[
                own.start : own.stop
            ]
            same(flat, reference, f"{what} {name}")
        check_state(weight, what)


def again_and_again(data: Any, batch: Sequence[Weight]) -> None:
    """What is looked up once serves other values of the masters."""
    rank, world = ranks()
    # What delayed scaling has seen would stay.
    batch = [weight for weight in batch if weight.kind != "delayed"]
    made = [filled(weight) for weight in batch]
    ranges = [cuts(data, weight.master.numel(), world) for weight in batch]
    shards, offsets = shards_of(data, batch, ranges)
    masters = MasterWeights(made, shards, start_offsets=offsets)
    values = [None if shard is None else shard.clone() for shard in shards]
    for factor in (3.0, 0.0, 1.0):
        for shard, value in zip(shards, values, strict=True):
            if shard is not None and value is not None:
                shard.copy_(value * factor if factor != 1.0 else value)
        with Counted() as reductions:
            masters.quantize()
        reductions.check(batch)
    for number, (weight, quantized, places) in enumerate(zip(batch, made, ranges, strict=True)):
        check_scales(weight, quantized, f"weight {number}")
        own = places[rank]
        for name in raw(quantized):
            found, expected = (
                getattr(w, name).reshape(-1)[own.start : own.stop]
                for w in (quantized, weight.expected)
            )
            same(found, expected, f"weight {number} {name}")


def whole_masters(data: Any, batch: Sequence[Weight]) -> None:
    """Without offsets every rank has the whole masters."""
    made = [filled(weight) for weight in batch]
    cast(data, batch, made, [weight.master for weight in batch], None)
    for number, (weight, quantized) in enumerate(zip(batch, made, strict=True)):
        check_whole(weight, quantized, f"weight {number}")


def into_bytes(data: Any, batch: Sequence[Weight]) -> None:
    """The shards go into buffers, the scales into the weights, whose bytes stay."""
    rank, world = ranks()
    made = [filled(weight) for weight in batch]
    ranges = [cuts(data, weight.master.numel(), world) for weight in batch]
    shards, offsets = shards_of(data, batch, ranges)
    outs: list[Any] = []
    for quantized, places in zip(made, ranges, strict=True):
        as_float = data.draw(st.booleans())
        buffers = []
        for inner in quantized.raw_inner():
            buffer = torch.full((len(places[rank]),), 0xA5, dtype=torch.uint8)
            native = (
                getattr(quantized, inner.native) if isinstance(inner.native, str) else inner.native
            )
            buffers.append(buffer.view(native) if as_float and native is not None else buffer)
        outs.append(
            buffers[0] if len(buffers) == 1 and data.draw(st.booleans()) else tuple(buffers)
        )
    cast(data, batch, made, shards, offsets, fsdp_shard_model_weights=outs)
    for number, (weight, quantized, places, out) in enumerate(
        zip(batch, made, ranges, outs, strict=True)
    ):
        what = f"weight {number}"
        check_scales(weight, quantized, what)
        own = places[rank]
        for name, buffer in zip(
            raw(quantized), out if isinstance(out, tuple) else (out,), strict=True
        ):
            whole = getattr(weight.expected, name).reshape(-1)[own.start : own.stop]
            same(buffer.view(torch.uint8), whole, f"{what} {name}")
            assert torch.all(getattr(quantized, name) == 0x5A), what
        check_state(weight, what)


def _scattered(weight: Weight) -> bool:
    return (
        weight.kind == "blockwise" and rule_of(weight.quantizer).batch_for(weight.quantizer) is None
    )


def into_rows(data: Any, batch: Sequence[Weight]) -> None:
    """The shards are quantized tensors that have rows of the weight."""
    rank, world = ranks()
    # Rows of blocks along transposed columns do not exist.
    batch = [weight for weight in batch if weight.master.dim() > 1 and not _scattered(weight)]
    if not batch:
        return
    made = [filled(weight) for weight in batch]
    shards, offsets, outs, rows = [], [], [], []
    for weight in batch:
        count, lines = (
            weight.master.shape[0],
            max(weight.master[:1].reshape(-1, weight.master.shape[-1] or 1).shape[0], 1),
        )
        step = 1
        blocks = math.lcm(
            *(inner.block_rows or 1 for inner in made[len(outs)].inner_tensors if inner.gather)
        )
        while step * lines % blocks:
            step += 1
        ends = sorted(data.draw(st.integers(0, count // step)) * step for _ in range(world - 1))
        own = [range(a, b) for a, b in zip([0, *ends], [*ends, count], strict=True)][rank]
        rows.append(own)
        part = weight.master[own.start : own.stop]
        shards.append(part.clone())
        offsets.append(own.start * weight.master[:1].numel())
        outs.append(
            filled(Weight(weight.kind, weight.quantizer, weight.oracle, weight.dtype, part))
        )
    cast(data, batch, made, shards, offsets, fsdp_shard_model_weights=outs)
    for number, (weight, out, own) in enumerate(zip(batch, outs, rows, strict=True)):
        what = f"weight {number} rows {own}"
        lines = weight.master.shape[1:-1].numel()
        for inner in out.inner_tensors:
            held = getattr(out, inner.attribute)
            if held is None:
                continue
            expected = getattr(weight.expected, inner.attribute)
            if inner.gather:
                step = inner.block_rows
                first = own.start if step is None else own.start * lines // step
                expected = expected[first : first + held.shape[0]]
            same(held, expected, f"{what} {inner.attribute}")
        check_state(weight, what)


def contiguous_buffer(data: Any, batch: Sequence[Weight]) -> None:
    """ZeRO-2: all bytes in one buffer, of which each rank writes its share; an all-gather completes
    it."""
    rank, world = ranks()
    made = [filled(weight) for weight in batch]
    moved = [(weight, name) for weight in made for name in raw(weight)]
    if len(moved) != len(made):
        # One flat buffer for each direction would do; not here.
        return
    total = sum(getattr(weight, name).numel() for weight, name in moved)
    share = -(-total // world)
    buffer = torch.zeros(share * world, dtype=torch.uint8)
    place, shards, offsets = 0, [], []
    for weight, (quantized, name) in zip(batch, moved, strict=True):
        count = getattr(quantized, name).numel()
        replace_raw_data(quantized, buffer[place : place + count])
        assert torch.all(buffer[place : place + count] == 0x5A)
        first, last = max(place, rank * share), min(place + count, (rank + 1) * share)
        flat = weight.master.reshape(-1)
        shards.append(flat[first - place : last - place] if first < last else None)
        offsets.append(first - place if first < last else None)
        place += count
    cast(
        data,
        batch,
        made,
        shards,
        offsets,
        manual_post_all_gather_processing=data.draw(st.booleans()),
    )
    if dist.is_initialized():
        dist.all_gather_into_tensor(buffer, buffer[rank * share : (rank + 1) * share].clone())
    post_all_gather_processing(made)
    for number, (weight, quantized) in enumerate(zip(batch, made, strict=True)):
        what = f"weight {number}"
        check_whole(weight, quantized, what)
        check_state(weight, what)
        same(
            quantized.dequantize(torch.float32),
            weight.expected.dequantize(torch.float32),
            f"{what} values",
        )


WAYS = (
    into_weights,
    into_weights,
    again_and_again,
    whole_masters,
    into_bytes,
    into_rows,
    contiguous_buffer,
)


def run(examples: int) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        # All ranks are to run the same examples: no shrinking, which follows what one of them saw.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: Any) -> None:
        options = {
            "force_pow_2_scales": data.draw(st.booleans()),
            "amax_epsilon": data.draw(st.sampled_from((0.0, 1e-3))),
        }
        batch = data.draw(st.lists(weights(options), min_size=1, max_size=4))
        way = data.draw(st.sampled_from(WAYS))
        layout = data.draw(st.sampled_from((None, "transpose")))
        error = ""
        with nullcontext() if layout is None else columnwise_layout(layout):
            # A transpose alone has no bytes in the order of the weight.
            for weight in batch if layout is not None else ():
                for quantizer in (weight.quantizer, weight.oracle):
                    quantizer.set_usage(rowwise=True)
            try:
                way(data, batch)
            except Exception:
                error = (
                    f"rank {ranks()[0]}, {way.__name__}, layout {layout}, "
                    f"{batch}\n{traceback.format_exc()}"
                )
        together(error)

    check()


def random_shards(mesh: Any) -> None:
    run(some(40, 250) if mesh.size() == 2 else some(20, 120))
