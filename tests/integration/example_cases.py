"""The examples on two ranks and on one, with every installed recipe, and continued where they were
interrupted."""

from __future__ import annotations

import gc
import importlib
import re
import sys
from pathlib import Path

import torch.distributed as dist
from example_commands import EXAMPLES, TINY, Run, commands, parsed
from forked_ranks import Ranks
from sampling import each, some
from torch.distributed.device_mesh import DeviceMesh

import ottava

sys.path.insert(0, str(EXAMPLES))

RECIPES = [spec.name for spec in ottava.list_recipes()]
STATEFUL = [spec.name for spec in ottava.list_recipes() if spec.stateful]
VARIANTS = {
    "zero": "zero",
    "zero-stage-2": "zero --stage 2",
    "fsdp2": "fsdp2",
    "fsdp2-primary": "fsdp2 --weights primary",
}
#: Microbatches matter to recipes that remember.
ACCUMULATED = {"fsdp2-accumulated": "fsdp2 --no-reshard --no-mixed-precision --accumulate 2"}


def run(lines: list[str], world: int, folder: Path) -> list[Run]:
    """Run command lines, each the name of an example and its arguments, one after the other on the
    same ranks."""

    def job(mesh: DeviceMesh) -> None:
        for line in lines:
            if dist.get_rank() == 0:
                print(f"## {line}", flush=True)
            name, *arguments = line.split()
            importlib.import_module(name).main(arguments)
            # A model that is gone on one rank and not yet on another would take part in the other's
            # collectives.
            gc.collect()

    ranks = Ranks(job, world, folder)
    ranks.succeed(300)
    parts = re.split(r"^## .*\n", ranks.printed(0), flags=re.M)[1:]
    assert len(parts) == len(lines)
    return [parsed(part) for part in parts]


def interrupted_runs_end_as_others(folder: Path) -> None:
    """Every variant and recipe: at once, to the middle, and from there on."""
    variants = VARIANTS | ACCUMULATED
    cases = each(some(["blockwise", "current", "mxfp8", "delayed"], RECIPES), list(VARIANTS))
    cases += [
        (name, v)
        for name in STATEFUL
        for v in ("zero", "zero-stage-2", *ACCUMULATED)
        if (name, v) not in cases
    ]
    keys, lines = [], []
    for recipe, variant in cases:
        saved = f"--checkpoint {folder / variant}-{recipe} --save-every 2"
        parts = {"whole": "--steps 6", "first": f"--steps 3 {saved}", "rest": f"--steps 6 {saved}"}
        # Each rank's rows of a weight that is kept in blocks of 128 are whole blocks.
        wide = "--width 256 " if (recipe, variant) == ("blockwise", "fsdp2-primary") else ""
        for part, arguments in parts.items():
            keys.append((recipe, variant, part))
            lines.append(f"{variants[variant]} --recipe {recipe} {TINY} {wide}{arguments}")
    # Compiling takes longer than all the others.
    for name, more in some([], [("eager", ""), ("compiled", " --compile aot_eager")]):
        keys.append(("current", "fsdp2", name))
        lines.append(f"fsdp2 --recipe current {TINY} --steps 6{more}")
    runs = dict(zip(keys, run(lines, 2, folder), strict=True))
    for recipe, variant in cases:
        whole, first, rest = (runs[recipe, variant, part] for part in ("whole", "first", "rest"))
        what = (recipe, variant)
        assert sorted(whole.losses) == [1, 2, 3, 4, 5, 6], what
        assert sorted(first.losses) == [1, 2, 3], what
        assert sorted(rest.losses) == [4, 5, 6], what
        assert (whole.continued, first.continued, rest.continued) == (None, None, "step-0000003"), (
            what
        )
        assert first.losses | rest.losses == whole.losses, (what, first, rest, whole)
        assert rest.weights == whole.weights != first.weights, what
        assert whole.falls(), what
        if variant == "zero-stage-2" and (recipe, "zero") in cases:
            # Sharding the gradients changes nothing.
            one = runs[recipe, "zero", "whole"]
            assert (one.losses, one.weights) == (whole.losses, whole.weights), what
    if ("current", "fsdp2", "compiled") in runs:
        # With a backend that leaves the operations as they are.
        eager, compiled = runs["current", "fsdp2", "eager"], runs["current", "fsdp2", "compiled"]
        assert (compiled.losses, compiled.weights) == (eager.losses, eager.weights)
    continued_by_one(cases, runs, folder)


def continued_by_one(
    cases: list[tuple[str, str]], runs: dict[tuple[str, str, str], Run], folder: Path
) -> None:
    """Gradients are summed in another order, so that losses are not the same to the last digit."""
    chosen = [
        next(case for case in cases[::-1] if case[1] == variant)
        for variant in ("zero", "fsdp2-primary")
    ]
    lines = []
    for recipe, variant in chosen:
        place = folder / f"{variant}-{recipe}"
        assert sorted(path.name for path in place.iterdir()) == ["step-0000004", "step-0000006"]
        lines.append(f"{VARIANTS[variant]} --recipe {recipe} {TINY} --steps 9 --checkpoint {place}")
    for (recipe, variant), end in zip(chosen, run(lines, 1, folder), strict=True):
        assert end.continued == "step-0000006", variant
        assert sorted(end.losses) == [7, 8, 9], variant
        assert float(end.losses[9]) < float(runs[recipe, variant, "whole"].losses[6]), variant


def commands_of_the_documentation(folder: Path) -> None:
    """What follows the name of the example, with a small model unless all are tried; how ranks are
    started is test_examples.py's."""
    by_world: dict[int, list[str]] = {}
    for command in commands():
        ranks = re.match(r"torchrun --nproc-per-node (\d+) ", command)
        assert ranks or command.startswith("python "), command
        line = re.sub(r".*examples/(\w+)\.py", r"\1", command) + some(f" {TINY}", "")
        by_world.setdefault(int(ranks[1]) if ranks else 1, []).append(line)
    assert by_world.keys() == {1, 2}
    for world, lines in by_world.items():
        for line, end in zip(lines, run(lines, world, folder), strict=True):
            assert sorted(end.losses) == list(range(1, 21)), line
            assert end.falls(), line
