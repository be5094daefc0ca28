"""Checks on several processes: each runs on every rank of a group."""

from __future__ import annotations

import copy
import math
import pickle
import traceback
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ottava
from ottava_testing import launch
from ottava_testing.checks.files import load
from ottava_testing.compare import (
    CheckFailed,
    describe,
    inner_by_name,
    normal,
    plain,
    relative,
    require,
    same,
    wide,
)
from ottava_testing.subject import Subject
from ottava_testing.table import (
    CHECKS,
    DETERMINISTIC,
    QUANTIZED_WEIGHTS,
    RANK_BODIES,
    REDUCES,
    Needs,
    RankBody,
    check,
)
from ottava_testing.worker import import_from


def rank_check(name: str, promise: str, *needs: Needs) -> Callable[[RankBody], RankBody]:
    """Decorate a function that runs on each rank, to put it into the table as a check."""

    def register(body: RankBody) -> RankBody:
        RANK_BODIES[name] = body

        def ask(subject: Subject) -> None:
            failure = launch.outcome(subject, name)
            if failure is not None:
                raise CheckFailed(failure)

        check(name, "several processes", promise, *needs, slow=True)(ask)
        return body

    return register


def run(name: str, mesh: Any, folder: Path) -> None:
    """Run one check on this rank, with the recipe that the launching process described.

    Raises:
        CheckFailed: the recipe does not pass.
    """
    try:
        source = pickle.loads((folder / "source.pickle").read_bytes())
        for module, file in source.modules:
            import_from(module, file)
        RANK_BODIES[name](Subject.of_source(source), mesh, folder)
    except CheckFailed:
        raise
    except Exception as error:
        traceback.print_exc()
        place = f"on rank {dist.get_rank()} of {dist.get_world_size()}"
        raise CheckFailed(f"{name} ({CHECKS[name].promise}), {place}: {describe(error)}") from error


@rank_check(
    "pickle-in-another-process",
    "A pickle loads in another process, which has made a layer",
    QUANTIZED_WEIGHTS,
)
def pickle_in_another_process(subject: Subject, mesh: Any, folder: Path) -> None:
    """The launching process has saved a weight and its values in the folder."""
    subject.layer(8, 8, primary=True)
    expected = torch.load(folder / "values.pt", weights_only=True)
    loaded = load(
        BytesIO((folder / "weight.pt").read_bytes()),
        "a weight in another process, which has made a layer",
    )
    require(
        same(plain(loaded), expected), "the pickle of a weight has other values in another process"
    )


@rank_check(
    "sharded-master-weights",
    "Weights that are written from shards of their masters have the bytes of the whole",
    QUANTIZED_WEIGHTS,
    DETERMINISTIC,
)
def sharded_master_weights(subject: Subject, mesh: Any, folder: Path) -> None:
    """quantize_master_weights on uneven ranges that end inside rows; some are empty."""
    from ottava.distributed import quantize_master_weights

    rank = dist.get_rank()
    for dtype in (torch.bfloat16, torch.float32):
        masters = [
            wide(48, 40, seed=1),
            wide(33, 17, seed=2) * 8,
            wide(64, 96, seed=3),
            wide(5, 8, seed=4),
        ]
        weights = [subject.weight(torch.zeros(m.shape, dtype=dtype)) for m in masters]
        expected = [
            _whole(copy.deepcopy(w), m.to(dtype)) for w, m in zip(weights, masters, strict=True)
        ]
        shards: list[torch.Tensor | None] = []
        offsets: list[int | None] = []
        ranges: list[tuple[int, int]] = []
        for number, master in enumerate(masters):
            # The first rank's shard ends inside a row for two weights, and is empty or whole for
            # the others.
            cut = (master.numel() // 3 + 7, master.numel() // 2 + 1, 0, master.numel())[number]
            first, last = (0, cut) if rank == 0 else (cut, master.numel())
            ranges.append((first, last))
            empty = first == last
            shards.append(None if empty else master.flatten()[first:last])
            offsets.append(None if empty else first)
        quantize_master_weights(weights, shards, offsets)
        for number, (weight, whole) in enumerate(zip(weights, expected, strict=True)):
            _same_shard(f"weight {number} ({dtype})", weight, whole, ranges[number])


def _whole(weight: Any, values: torch.Tensor) -> Any:
    """The weight after all of ``values`` were written to it in this process."""
    quantizer = weight._quantizer.with_usage(*weight.get_usages().values())
    weight.copy_from_storage(quantizer.quantize_impl(values, values.dtype))
    return weight


def _same_shard(title: str, weight: Any, whole: Any, elements: tuple[int, int]) -> None:
    raw = weight.raw_inner()
    first, last = elements
    for inner in weight.inner_tensors:
        mine, theirs = getattr(weight, inner.attribute), getattr(whole, inner.attribute)
        if mine is None or theirs is None or weight.is_derived(inner):
            continue
        if inner in raw:
            mine, theirs = (t.reshape(-1)[first:last] for t in (mine, theirs))
        require(
            same(mine, theirs),
            f"{title} is quantized otherwise from shards than as a whole: {inner.attribute!r} "
            f"differs",
        )


def _sizes(subject: Subject, world: int) -> list[int]:
    """Numbers of rows of weights that FSDP2 can shard, by what the storage declares.

    The first cuts no block. If the storage allows shards to be padded, a second gives uneven ones.
    """
    weight = subject.weight(wide(64, 32))
    gathered = [
        (inner, getattr(weight, inner.attribute)) for inner in weight.inner_tensors if inner.gather
    ]
    blocks = [inner.block_rows for inner, _ in gathered if inner.block_rows]
    sizes = [world * math.lcm(32, *blocks)]
    if not blocks and all(tensor is None or tensor.shape == weight.shape for _, tensor in gathered):
        sizes.append(33)
    return sizes


def _shard(net: Any, mesh: Any, *, keep: bool = False) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keep)
    return fully_shard(net, mesh=mesh, reshard_after_forward=not keep)


def _uneven(net: Any) -> Any:
    """The model, with weights whose rows differ so much that a shard has other scales."""
    with torch.no_grad():
        for layer in (net[0], net[2]):
            values = plain(layer.weight)
            layer.weight.copy_(
                values * torch.linspace(0.2, 3.0, len(values), dtype=values.dtype)[:, None]
            )
    return net


def _train(net: Any, width: int = 32, count: int = 3) -> list[tuple[str, torch.Tensor]]:
    """Train some steps; return outputs and gradients of the inputs, each after its name."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    results = []
    for number in range(count):
        x = normal(24, width, seed=100 + number, dtype=torch.bfloat16).requires_grad_()
        y = net(x)
        torch.nn.functional.mse_loss(
            y, normal(24, width, seed=200 + number, dtype=torch.bfloat16)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        results.append((f"the output of step {number + 1}", y.detach()))
        results.append((f"the gradient of the input of step {number + 1}", x.grad))
    return results


_Named = list[tuple[str, torch.Tensor]]


def _compare(subject: Subject, title: str, actual: _Named, expected: _Named) -> None:
    for (words, mine), (_, theirs) in zip(actual, expected, strict=True):
        error = relative(mine, theirs)
        is_right = error <= 2 * subject.bound
        if subject.spec.deterministic:
            is_right = same(mine, theirs)
        require(
            is_right,
            f"{title}: {words} is off by {error:.3g} of its norm from that in one process",
        )


@rank_check("fsdp2", "Layers whose weights FSDP2 shards in high precision train as in one process")
def fsdp2(subject: Subject, mesh: Any, folder: Path) -> None:
    """Weights gathered in high precision, and gathered quantized."""
    from ottava.distributed import gather_quantized

    expected = _train(_uneven(subject.model(dtype=torch.bfloat16)))
    ways: dict[str, Callable[[Any], Any]] = {
        "": lambda m: m,
        " with gather_quantized": gather_quantized,
    }
    for words, prepare in ways.items():
        actual = _train(_shard(prepare(_uneven(subject.model(dtype=torch.bfloat16))), mesh))
        _compare(subject, f"under FSDP2{words} training differs", actual, expected)


@rank_check(
    "fsdp2-quantized-weights",
    "Layers whose weights are kept quantized and sharded by FSDP2 train as in one process",
    QUANTIZED_WEIGHTS,
)
def fsdp2_quantized_weights(subject: Subject, mesh: Any, folder: Path) -> None:
    """Outputs, gradients, bytes and scales, with reshard_after_forward and without."""
    for rows in _sizes(subject, dist.get_world_size()):
        alone, whole = (
            subject.model(dtype=torch.bfloat16, primary=True, width=rows, rows=rows)
            for _ in range(2)
        )
        expected = _train(_uneven(alone), rows)
        for keep in (False, True):
            net = _shard(_uneven(copy.deepcopy(whole)), mesh, keep=keep)
            options = f"(reshard_after_forward={not keep}, {rows} rows)"
            title = f"under FSDP2 with weights that are kept quantized {options}"
            _compare(subject, f"{title} training differs", _train(net, rows), expected)
            for mine, theirs in zip((net[0], net[2]), (alone[0], alone[2]), strict=True):
                mine.unshard()
                _same_weight(subject, title, mine.weight, theirs.weight)
                mine.reshard()


def _same_weight(subject: Subject, title: str, gathered: Any, whole: Any) -> None:
    require(
        type(gathered) is type(whole), f"{title} the gathered weight is a {type(gathered).__name__}"
    )
    mine, theirs = inner_by_name(gathered), inner_by_name(whole)
    if not subject.spec.deterministic:
        return
    for name in set(mine) & set(theirs):
        require(
            same(mine[name], theirs[name]),
            f"{title} a shard is quantized otherwise than the whole: {name!r} of the weight "
            f"differs",
        )


@rank_check(
    "reduces-amaxes",
    "What several ranks know of their data becomes the same on all of them",
    REDUCES,
)
def reduces_amaxes(subject: Subject, mesh: Any, folder: Path) -> None:
    """Ranks see different values in training, and afterwards quantize the same way."""
    model = subject.model()
    rank = dist.get_rank()
    for number in range(3):
        x = normal(24, 32, seed=number) * (1.0 + 6 * rank)
        with ottava.autocast(subject.recipe()):
            model(x).square().mean().backward()
    probe = normal(24, 32, seed=50) * 5
    with torch.no_grad():
        y = model(probe)
    outputs = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, y)
    error = relative(outputs[0], outputs[1])
    require(
        torch.equal(outputs[0], outputs[1]),
        f"ranks that saw other data quantize the same input otherwise: nothing is reduced (off by "
        f"{error:.3g})",
    )
