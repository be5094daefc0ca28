"""Checks on several processes: each runs on every rank of a group."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ottava
from ottava.distributed import rule_of
from ottava_testing import launch, table
from ottava_testing.checks.files import load
from ottava_testing.compare import (
    CheckFailed,
    inner_by_name,
    normal,
    plain,
    relative,
    require,
    require_same,
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
)
from ottava_testing.worker import import_from

_Named = list[tuple[str, torch.Tensor]]


def check(*needs: Needs) -> Callable[[RankBody], RankBody]:
    """Decorate a function that runs on each rank, to put it into the table as a check."""

    def register(body: RankBody) -> RankBody:
        def ask(subject: Subject) -> None:
            failure = _outcome(subject, name)
            if failure is not None:
                raise CheckFailed(failure)

        ask.__name__, ask.__doc__ = body.__name__, body.__doc__
        table.check("several processes", *needs, slow=True)(ask)
        name = next(reversed(CHECKS))
        RANK_BODIES[name] = body
        return body

    return register


def _outcome(subject: Subject, name: str) -> str | None:
    """The failure message of the check ``name``, or None if it passed.

    The first call for a subject runs all such checks that apply to it, in one launch.

    Raises:
        CheckFailed: another process cannot make the recipe.
    """
    if name not in subject.outcomes:
        chosen = {name, *(subject.check_names or RANK_BODIES)} - subject.outcomes.keys()
        names = [
            each
            for each in RANK_BODIES
            if each in chosen and CHECKS[each].why_not(subject.spec) is None
        ]
        prepare = partial(_prepare, subject, subject.source())
        body = f"{__name__}:{run.__name__}"
        subject.outcomes |= launch.run_on_ranks(body, names, prepare=prepare)
    return subject.outcomes[name]


def _prepare(subject: Subject, source: bytes, folder: Path) -> None:
    """Save the subject, and a quantized weight and its values, which a rank is to load."""
    (folder / "subject.pickle").write_bytes(source)
    if subject.spec.quantized_weights:
        weight = subject.weight()
        # A weight that cannot be pickled fails a check that runs in this process.
        with contextlib.suppress(Exception):
            torch.save(weight, folder / "weight.pt")
        torch.save(plain(weight), folder / "values.pt")


def run(name: str, mesh: Any, folder: Path) -> None:
    """Run one check on this rank, with the recipe that the launching process described.

    Raises:
        CheckFailed: the recipe does not pass.
    """
    source = (folder / "subject.pickle").read_bytes()
    subject = Subject.of_source(source, import_from)
    with CHECKS[name].seeds(subject.spec):
        RANK_BODIES[name](subject, mesh, folder)


@check(QUANTIZED_WEIGHTS)
def pickle_in_another_process(subject: Subject, mesh: Any, folder: Path) -> None:
    """A pickle loads in another process, which has made a layer."""
    subject.layer(8, 8, primary=True)
    expected = torch.load(folder / "values.pt", weights_only=True)
    title = "a weight in another process, which has made a layer"
    loaded = load(BytesIO((folder / "weight.pt").read_bytes()), title)
    require_same("the pickle of a weight has in another process", plain(loaded), expected)


@check(QUANTIZED_WEIGHTS, DETERMINISTIC)
def sharded_master_weights(subject: Subject, mesh: Any, folder: Path) -> None:
    """Weights that are written from shards of their masters have the bytes of the whole."""
    from ottava.distributed import quantize_master_weights

    masters = [wide(48, 40, seed=1), wide(33, 17, seed=2) * 8, wide(64, 96, seed=3)]
    masters.append(wide(5, 8, seed=4))
    # The first rank's shard ends inside a row for two weights, and is empty or whole for others.
    cuts = [masters[0].numel() // 3 + 7, masters[1].numel() // 2 + 1, 0, masters[3].numel()]
    is_first = dist.get_rank() == 0
    ranges = [
        (0, cut) if is_first else (cut, master.numel())
        for cut, master in zip(cuts, masters, strict=True)
    ]
    for dtype in (torch.bfloat16, torch.float32):
        weights = [subject.weight(torch.zeros(m.shape, dtype=dtype)) for m in masters]
        pairs = zip(copy.deepcopy(weights), masters, strict=True)
        expected = [_whole(weight, master.to(dtype)) for weight, master in pairs]
        shards = [
            master.flatten()[first:last] if first < last else None
            for master, (first, last) in zip(masters, ranges, strict=True)
        ]
        offsets = [first if first < last else None for first, last in ranges]
        quantize_master_weights(weights, shards, offsets)
        for number, weight in enumerate(weights):
            title = f"weight {number} ({dtype})"
            _same_shard(title, weight, expected[number], *ranges[number])


def _whole(weight: Any, values: torch.Tensor) -> Any:
    """The weight after all of ``values`` were written to it in this process."""
    quantizer = weight._quantizer.with_usage(*weight.get_usages().values())
    weight.copy_from_storage(quantizer.quantize_impl(values, values.dtype))
    return weight


def _same_shard(title: str, weight: Any, whole: Any, first: int, last: int) -> None:
    raw = weight.raw_inner()
    for inner in weight.inner_tensors:
        mine, theirs = getattr(weight, inner.attribute), getattr(whole, inner.attribute)
        if mine is None or theirs is None or weight.is_derived(inner):
            continue
        if inner in raw:
            place = weight.element_range(inner, first, last - first)
            require(place is not None, f"{title}: {inner.attribute!r} has another order")
            mine, theirs = (t.reshape(-1)[place.start : place.stop] for t in (mine, theirs))
        words = f"{title} is quantized otherwise from shards than as a whole: {inner.attribute!r}"
        require(same(mine, theirs), f"{words} differs")


def _sizes(subject: Subject, world: int) -> list[int]:
    """Numbers of rows of weights that FSDP2 can shard, by what storage and quantizer declare.

    The first cuts no block. If the storage allows shards to be padded, a second gives uneven ones.
    """
    weight = subject.weight(wide(64, 32))
    gathered = [
        (inner, getattr(weight, inner.attribute)) for inner in weight.inner_tensors if inner.gather
    ]
    blocks = [inner.block_rows for inner, _ in gathered if inner.block_rows]
    whole_groups = rule_of(weight._quantizer).rows_of_blocks(weight._quantizer)
    sizes = [world * math.lcm(32, whole_groups, *blocks)]
    if not blocks and all(tensor is None or tensor.shape == weight.shape for _, tensor in gathered):
        sizes.append(33)
    return sizes


def _shard(net: Any, mesh: Any, *, keep: bool = False) -> Any:
    from torch.distributed.fsdp import fully_shard

    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh, reshard_after_forward=not keep)
    return net


def _uneven(net: Any) -> Any:
    """The model, with weights whose rows differ so much that a shard has other scales."""
    with torch.no_grad():
        for layer in (net[0], net[2]):
            values = plain(layer.weight)
            factors = torch.linspace(0.2, 3.0, len(values), dtype=values.dtype)
            layer.weight.copy_(values * factors[:, None])
    return net


def _train(net: Any, width: int = 32, count: int = 3) -> _Named:
    """Train some steps; return outputs and gradients of the inputs, each after its name."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    results: _Named = []
    for number in range(count):
        x = normal(24, width, seed=100 + number, dtype=torch.bfloat16).requires_grad_()
        target = normal(24, width, seed=200 + number, dtype=torch.bfloat16)
        y = net(x)
        loss: Any = torch.nn.functional.mse_loss(y, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append((f"the output of step {number + 1}", y.detach()))
        results.append((f"the gradient of the input of step {number + 1}", x.grad))  # type: ignore[arg-type]
    return results


def _compare(subject: Subject, title: str, actual: _Named, expected: _Named) -> None:
    for (name, mine), (_, theirs) in zip(actual, expected, strict=True):
        subject.agree(f"{title} training differs from that in one process: {name}", mine, theirs)


@check()
def fsdp2(subject: Subject, mesh: Any, folder: Path) -> None:
    """Layers whose weights FSDP2 shards in high precision train as in one process."""
    from ottava.distributed import gather_quantized

    expected = _train(_uneven(subject.model(dtype=torch.bfloat16)))
    ways: dict[str, Callable[[Any], Any]] = {
        "": lambda net: net,
        " with gather_quantized": gather_quantized,
    }
    for words, prepare in ways.items():
        net = prepare(_uneven(subject.model(dtype=torch.bfloat16)))
        _compare(subject, f"under FSDP2{words}", _train(_shard(net, mesh)), expected)


@check(QUANTIZED_WEIGHTS)
def fsdp2_quantized_weights(subject: Subject, mesh: Any, folder: Path) -> None:
    """Layers whose weights are kept quantized and sharded by FSDP2 train as in one process."""
    for rows in _sizes(subject, dist.get_world_size()):
        alone, whole = (
            subject.model(dtype=torch.bfloat16, primary=True, width=rows, rows=rows)
            for _ in range(2)
        )
        expected = _train(_uneven(alone), rows)
        for keep in (False, True):
            net = _shard(_uneven(copy.deepcopy(whole)), mesh, keep=keep)
            title = f"(reshard_after_forward={not keep}, {rows} rows)"
            title = f"under FSDP2 with weights that are kept quantized {title}"
            _compare(subject, title, _train(net, rows), expected)
            for mine, theirs in zip((net[0], net[2]), (alone[0], alone[2]), strict=True):
                mine.unshard()
                _same_weight(subject, title, mine.weight, theirs.weight)
                mine.reshard()


def _same_weight(subject: Subject, title: str, gathered: Any, whole: Any) -> None:
    kind = type(gathered)
    require(kind is type(whole), f"{title} the gathered weight is a {kind.__name__}")
    mine, theirs = inner_by_name(gathered), inner_by_name(whole)
    for name in set(mine) & set(theirs) if subject.spec.deterministic else ():
        words = f"{title} a shard is quantized otherwise than the whole: {name!r} differs"
        require(same(mine[name], theirs[name]), words)


@check(REDUCES)
def reduces_amaxes(subject: Subject, mesh: Any, folder: Path) -> None:
    """What several ranks know of their data becomes the same on all of them."""
    model = subject.model()
    for number in range(3):
        # Ranks see different values in training.
        x = normal(24, 32, seed=number) * (1.0 + 6 * dist.get_rank())
        with ottava.autocast(subject.recipe()):
            model(x).square().mean().backward()
    with torch.no_grad():
        y = model(normal(24, 32, seed=50) * 5)
    outputs = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, y)
    require(
        torch.equal(outputs[0], outputs[1]),
        f"ranks that saw other data quantize the same input otherwise: nothing is reduced (off by "
        f"{relative(outputs[0], outputs[1]):.3g})",
    )
