"""What steps do to scales, histories, losses and all-reduces, event by event, as ``golden.json``
has it.

``python -m tests.integration.golden --write``, in the root of the repository, writes the file anew.

The records are the same on every machine. No sum has more than two terms that are not 0: a row and
a column of a weight have two entries, a batch has two rows. So each sum is one rounding of exact
products, in whatever order it is taken. Losses are sums in float64 of a few numbers, and are
compared with a tolerance of 1e-12; all else is compared exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava_current import Float8CurrentScaling
from ottava_delayed import DelayedScaling
from ottava_mxfp8 import MXFP8BlockScaling
from ottava_testing import launch
from tests.integration.golden_recorder import (
    FILE,
    Net,
    Recorder,
    as_text,
    batch,
    layer,
    wait_for_the_end_of,
)
from tests.integration.stateful_package.acme_average_recipe import MovingAverage

STEPS = 4
#: Each with another recipe of its kind.
RECIPES: dict[str, tuple[ottava.Recipe, ottava.Recipe]] = {
    "delayed": (DelayedScaling(amax_history_len=3), DelayedScaling(amax_history_len=2, margin=1)),
    "average": (MovingAverage(), MovingAverage(decay=0.25)),
    "current": (Float8CurrentScaling(), Float8CurrentScaling(force_pow_2_scales=True)),
    "mxfp8": (MXFP8BlockScaling(), Float8CurrentScaling()),
}
#: On two ranks.
RANK_RECIPES: dict[str, tuple[ottava.Recipe, ottava.Recipe]] = {
    "delayed": RECIPES["delayed"],
    "delayed, not reduced": (
        DelayedScaling(amax_history_len=3, reduce_amax=False),
        DelayedScaling(amax_history_len=2, reduce_amax=False),
    ),
    "average": RECIPES["average"],
    "average, not reduced": (
        MovingAverage(reduces=False),
        MovingAverage(decay=0.25, reduces=False),
    ),
}
WORLD = 2
# Where ranks leave their records.
_FOLDER = "OTTAVA_TESTS_GOLDEN_FOLDER"


# -- the programs --

#: How a model comes to run under a recipe.
WAYS = ("converted", "block", "layers")
Program = Callable[[Recorder, ottava.Recipe, ottava.Recipe], None]
PROGRAMS: dict[str, Program] = {}
#: Those that ranks run too.
ON_RANKS: list[str] = []


def program(*ways: str, ranks: bool = False, **choices: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Put a function into the table, once for each way and each choice."""

    def register(function: Any) -> Any:
        name = function.__name__.replace("_", " ")
        for way in ways or (None,):
            for option, value in [(o, v) for o, values in choices.items() for v in values] or [
                (None, None)
            ]:
                if way == "layers" and value is True:
                    # Layers outside of every region begin no step in a forward pass without
                    # gradients.
                    continue
                words = [name, *([way] if way else []), *([f"{option}={value}"] if option else [])]
                given = ({"way": way} if way else {}) | ({option: value} if option else {})
                PROGRAMS[", ".join(words)] = _bound(function, given)
                if ranks and way != "layers":
                    ON_RANKS.append(", ".join(words))
        return function

    return register


def _bound(function: Any, given: dict[str, Any]) -> Program:
    return lambda record, recipe, other: function(record, recipe, other, **given)


def begin(way: str, net: Net, recipe: ottava.Recipe) -> Callable[..., torch.Tensor]:
    """What runs the model: as converted, in a block for each pass, or its layers outside of every
    region."""
    if way == "block":

        def run(*args: Any) -> torch.Tensor:
            with ottava.autocast(recipe):
                return net(*args)

        return run
    ottava.convert(net, recipe)
    return net if way == "converted" else net.forward


@program(*WAYS, ranks=True)
def steps(record: Recorder, recipe: Any, other: Any, way: str) -> None:
    net = Net()
    run = begin(way, net, recipe)
    record.watch(net=net)
    for step in range(STEPS):
        record.step(step, run)


@program(*WAYS, reentrant=(True, False), ranks=True)
def part_recomputed(record: Recorder, recipe: Any, other: Any, way: str, reentrant: bool) -> None:
    net = Net(reentrant=reentrant)
    run = begin(way, net, recipe)
    record.watch(net=net, reentrant=reentrant)
    for step in range(STEPS):
        record.step(step, run)


@program(*WAYS, reentrant=(True, False), ranks=True)
def whole_recomputed(record: Recorder, recipe: Any, other: Any, way: str, reentrant: bool) -> None:
    net = Net()
    run = begin("converted" if way == "converted" else "layers", net, recipe)
    record.watch(net=net, reentrant=reentrant)
    for step in range(STEPS):
        with ottava.autocast(recipe) if way == "block" else contextlib.nullcontext():
            loss = record.forward(
                f"forward {step}", lambda x: checkpoint(run, x, use_reentrant=reentrant), step
            )
        record.backward(f"backward {step}", loss)


@program(ranks=True)
def block_recomputed(record: Recorder, recipe: Any, other: Any) -> None:
    """The block stands in the function that is recomputed."""
    net = Net()
    run = begin("block", net, recipe)
    record.watch(net=net)
    for step in range(STEPS):
        record.step(step, lambda x: checkpoint(run, x, use_reentrant=False))


@program(reentrant=(True, False))
def backward_in_another_block(record: Recorder, recipe: Any, other: Any, reentrant: bool) -> None:
    """The backward pass, with its recomputation, runs inside of a block that has nothing to do with
    the forward."""
    net = Net(reentrant=reentrant)
    run = begin("block", net, recipe)
    record.watch(net=net, reentrant=reentrant)
    for step in range(STEPS):
        loss = record.forward(f"forward {step}", run, step)
        with ottava.autocast(other) if step % 2 else ottava.autocast(enabled=False):
            record.backward(f"backward {step}", loss)


@program("converted", "block", reentrant=(None, True, False))
def two_passes_of_a_step(
    record: Recorder, recipe: Any, other: Any, way: str, reentrant: bool | None
) -> None:
    """Both in one block, then both backward passes."""
    net = Net(reentrant=reentrant)
    if way == "converted":
        ottava.convert(net, recipe)
    record.watch(net=net, reentrant=reentrant)
    for step in range(STEPS):
        with ottava.autocast() if way == "converted" else ottava.autocast(recipe):
            first = record.forward(f"first forward {step}", net, step)
            second = record.forward(f"second forward {step}", net, step + 10)
        record.backward(f"backward {step}", first + second)


@program(ranks=True)
def nested_blocks(record: Recorder, recipe: Any, other: Any) -> None:
    """Blocks of the same recipe, of another one, of none, and switched off, in a block."""
    net, inner, plain = Net(), layer(4), layer(5, single=True)
    # In high precision the products of what a layer gives are not exact, and sums of two would
    # differ.
    plain.requires_grad_(False)
    record.watch(net=net, inner=inner, plain=plain)

    def run(x: torch.Tensor) -> torch.Tensor:
        with ottava.autocast(recipe):
            x = net.a(x)
            with ottava.autocast(other):
                x = inner(torch.relu(x))
                with ottava.autocast(recipe):
                    x = net.a(x)
            with ottava.autocast(enabled=False):
                x = plain(x)
                with ottava.autocast(recipe):
                    x = net.a(torch.relu(x))
            with ottava.autocast():
                return net.b(x)

    for step in range(STEPS):
        record.step(step, run)


@program()
def converted_in_blocks(record: Recorder, recipe: Any, other: Any) -> None:
    """A converted model in a block of its recipe, in one that names none, switched off, and by
    itself."""
    net = ottava.convert(Net(), recipe)
    record.watch(net=net)
    blocks = [
        ottava.autocast(recipe),
        ottava.autocast(),
        ottava.autocast(enabled=False),
        contextlib.nullcontext(),
    ]
    for step in range(2 * len(blocks)):
        with blocks[step % len(blocks)]:
            record.step(step, net)


@program()
def another_recipe_for_a_while(record: Recorder, recipe: Any, other: Any) -> None:
    """One without state."""
    net = ottava.convert(Net(), recipe)
    record.watch(net=net)
    for step in range(2 * STEPS):
        with ottava.autocast(Float8CurrentScaling()) if step % 3 == 1 else contextlib.nullcontext():
            record.step(step, net)


@program()
def another_configuration(record: Recorder, recipe: Any, other: Any) -> None:
    """State starts afresh."""
    net = ottava.convert(Net(), recipe)
    record.watch(net=net)
    for step in range(STEPS):
        with ottava.autocast(other) if step >= STEPS // 2 else contextlib.nullcontext():
            record.step(step, net)


@program(*WAYS)
def evaluations(record: Recorder, recipe: Any, other: Any, way: str) -> None:
    """Between steps, and between the passes of one; with gradients an evaluation is a step."""
    net = Net()
    run = begin(way, net, recipe)
    record.watch(net=net)
    for step in range(STEPS):
        loss = record.forward(f"forward {step}", run, step)
        with torch.no_grad():
            record.forward(f"no_grad {step}", run, step + 10)
        record.backward(f"backward {step}", loss)
        net.eval()
        with torch.no_grad():
            record.forward(f"eval, no_grad {step}", run, step + 11)
        with torch.inference_mode():
            record.forward(f"eval, inference_mode {step}", run, step + 12)
        if step % 2:
            record.forward(f"eval with gradients {step}", run, step + 13)
        net.train()


@program("converted", "block", ranks=True)
def one_rank_evaluates(record: Recorder, recipe: Any, other: Any, way: str) -> None:
    net = Net()
    run = begin(way, net, recipe)
    record.watch(net=net)
    for step in range(STEPS):
        record.step(step, run)
        if record.rank == step % 2:
            with torch.no_grad():
                record.forward(f"no_grad {step}", run, step + 10)
                net.eval()
                record.forward(f"eval {step}", run, step + 11)
                net.train()


@program(*WAYS, ranks=True)
def microbatches(record: Recorder, recipe: Any, other: Any, way: str) -> None:
    net = Net()
    run = begin(way, net, recipe)
    record.watch(net=net)
    for step in range(3):
        for number in range(3):
            loss = record.forward(
                f"forward {step}.{number}",
                lambda x, first=number == 0: run(x, first),
                3 * step + number,
            )
            loss.backward()
            record.event(f"backward {step}.{number}")
        with torch.no_grad():
            record.forward(f"evaluation {step}", lambda x: run(x, False), step + 10)
        record.backward(f"weights {step}", 0.0 * next(net.parameters()).sum())


@program(reentrant=(None, True, False))
def microbatches_in_one_block(
    record: Recorder, recipe: Any, other: Any, reentrant: bool | None
) -> None:
    """All forward passes in a block, and all backward passes after it."""
    net = Net(reentrant=reentrant)
    record.watch(net=net, reentrant=reentrant)
    for step in range(3):
        losses = []
        with ottava.autocast(recipe):
            for number in range(3):
                run = lambda x, number=number: net(x, number == 0)  # noqa: E731
                losses.append(record.forward(f"forward {step}.{number}", run, 3 * step + number))
        record.backward(f"backward {step}", torch.stack(losses).sum())


@program("converted", "block", ranks=True)
def calibration(record: Recorder, recipe: Any, other: Any, way: str) -> None:
    """Two batches in a block, then another block; what follows is an evaluation and then steps."""
    net = Net()
    run = begin(way, net, recipe)
    record.watch(net=net)
    for number in range(2):
        with torch.no_grad(), ottava.autocast(recipe, calibrating=True):
            for step in range(2 - number):
                record.forward(f"calibrating {number}.{step}", net, step + 5 * number)
        record.event(f"calibrated {number}")
    with torch.no_grad():
        record.forward("evaluation", run, 0)
    for step in range(2):
        record.step(step, run)


@program(*WAYS, ranks=True)
def used_twice(record: Recorder, recipe: Any, other: Any, way: str) -> None:
    net = Net(twice=True)
    run = begin(way, net, recipe)
    record.watch(net=net)
    for step in range(STEPS):
        record.step(step, run)


@program("converted", "block", ranks=True)
def two_models_in_turns(record: Recorder, recipe: Any, other: Any, way: str) -> None:
    """Step by step, and both forward passes before both backward passes."""
    nets = [Net(), Net(3)]
    runs = [begin(way, net, chosen) for net, chosen in zip(nets, (recipe, other), strict=True)]
    record.watch(one=nets[0], two=nets[1])
    for step in range(STEPS):
        if step % 2:
            losses = [
                record.forward(f"forward {step} of {number}", run, step)
                for number, run in enumerate(runs)
            ]
            record.backward(f"backward {step}", torch.stack(losses).sum())
        else:
            for run in runs:
                record.step(step, run)


@program()
def two_converted_of_one_recipe(record: Recorder, recipe: Any, other: Any) -> None:
    nets = [ottava.convert(Net(), recipe), ottava.convert(Net(3), recipe)]
    record.watch(one=nets[0], two=nets[1])
    for step in range(STEPS):
        losses = [
            record.forward(f"forward {step} of {number}", net, step)
            for number, net in enumerate(nets)
        ]
        record.backward(f"backward {step}", torch.stack(losses).sum())


@program()
def converted_in_converted(record: Recorder, recipe: Any, other: Any) -> None:
    """A part that was converted by itself begins no step of its own, unless it is called by
    itself."""
    inner = ottava.convert(Net(), recipe)
    net = ottava.convert(torch.nn.Sequential(inner, torch.nn.ReLU(), layer(3)), recipe)
    record.watch(net=net)
    for step in range(STEPS):
        record.step(step, net if step != 1 else inner)


@program("converted", "block", ranks=True)
def errors(record: Recorder, recipe: Any, other: Any, way: str) -> None:
    """An error between the layers, and one in the backward pass."""
    net = Net()
    run = begin(way, net, recipe)
    record.watch(net=net)

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    for step in range(STEPS):
        if step == 1:
            handle = net.b.register_forward_pre_hook(fails)
            with contextlib.suppress(ZeroDivisionError):
                run(batch(step, record.rank))
            handle.remove()
            record.event("error in a forward pass")
        if step == 2:
            y = run(batch(step, record.rank))
            y.register_hook(fails)
            with contextlib.suppress(ZeroDivisionError):
                y.sum().backward()
            record.event("error in a backward pass")
        record.step(step, run)


@program("converted", "block", ranks=True)
def saved_and_loaded(record: Recorder, recipe: Any, other: Any, way: str) -> None:
    """Another model goes on."""
    net = Net()
    run = begin(way, net, recipe)
    record.watch(net=net)
    for step in range(2):
        record.step(step, run)
    loaded = Net(5)
    again = begin(way, loaded, recipe)
    if way == "block":
        # The state has a place only once the layers have run under the recipe.
        with torch.no_grad():
            again(batch(0))
    loaded.load_state_dict({name: value.clone() for name, value in net.state_dict().items()})
    record.watch(net=loaded)
    record.event("loaded")
    for step in range(2, 4):
        record.step(step, again)


# -- running them --


def record(
    name: str, recipes: tuple[ottava.Recipe, ottava.Recipe], rank: int = 0
) -> list[dict[str, Any]]:
    """The events of a program."""
    recorder = Recorder(rank)
    with warnings.catch_warnings(), recorder.counted:
        warnings.simplefilter("ignore")
        PROGRAMS[name](recorder, *recipes)
    recorder.nets.clear()
    wait_for_the_end_of(recorder.watched)
    return recorder.events


def on_rank(name: str, mesh: Any, folder: Path) -> None:
    """All programs of ranks with the recipe ``name``: a file of each rank."""
    rank = mesh.get_rank()
    found = {each: record(each, RANK_RECIPES[name], rank) for each in ON_RANKS}
    (Path(os.environ[_FOLDER]) / f"{name} {rank}.json").write_text(json.dumps(found))


def of_ranks() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By recipe and rank what each program recorded.

    Raises:
        RuntimeError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_FOLDER] = folder
        try:
            told = launch.run_on_ranks(
                "tests.integration.golden:on_rank", list(RANK_RECIPES), WORLD
            )
        finally:
            del os.environ[_FOLDER]
        if any(told.values()):
            raise RuntimeError("\n".join(filter(None, told.values())))
        return {
            f"{name}, rank {rank}": json.loads((Path(folder) / f"{name} {rank}.json").read_text())
            for name in RANK_RECIPES
            for rank in range(WORLD)
        }


def write() -> None:
    """Write the file anew."""
    found = {
        f"{name}: {each}": record(each, recipes)
        for name, recipes in RECIPES.items()
        for each in PROGRAMS
    }
    found |= {
        f"{name}: {each}": events
        for name, programs in of_ranks().items()
        for each, events in programs.items()
    }
    FILE.write_text(as_text(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Records of what steps do.")
    parser.add_argument(
        "--write", action="store_true", required=True, help="write golden.json anew"
    )
    parser.parse_args()
    write()
