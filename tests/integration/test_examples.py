"""The examples run under torchrun and alone, with every installed recipe, and continue where they were interrupted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import ottava

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WORKER = Path(__file__).with_name("examples_worker.py")
RECIPES = [spec.name for spec in ottava.list_recipes()]
STATEFUL = [spec.name for spec in ottava.list_recipes() if spec.stateful]
TINY = "--width 64 --layers 1 --batch 8"
VARIANTS = {
    "zero": "zero",
    "zero-stage-2": "zero --stage 2",
    "fsdp2": "fsdp2",
    "fsdp2-primary": "fsdp2 --weights primary",
    "fsdp2-accumulated": "fsdp2 --no-reshard --no-mixed-precision --accumulate 2",
}
CASES = [
    (recipe, variant)
    for recipe in RECIPES
    for variant in VARIANTS
    # Microbatches matter to recipes that remember.
    if variant != "fsdp2-accumulated" or recipe in STATEFUL
]
# No port is fixed, and nothing but this machine is asked for a name.
ENVIRONMENT = os.environ | {
    "PET_STANDALONE": "1",
    "PET_LOCAL_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
}


@dataclass
class Run:
    """What a run printed: losses by step, as text, and the checksum of the weights."""

    losses: dict[int, str]
    weights: str
    continued: str | None


def parsed(text: str) -> Run:
    losses = {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", text, re.M)}
    continued = re.search(r"^continues from (\S+)$", text, re.M)
    (weights,) = re.findall(r"^weights (\w+)$", text, re.M)
    return Run(losses, weights, continued and continued[1])


def execute(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def execute_lines(lines: list[str], ranks: int, folder: Path) -> list[Run]:
    """Run command lines of the examples on ranks that torchrun starts once for all of them."""
    (folder / "lines").write_text("\n".join(lines))
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    output = execute([*launch, str(WORKER), str(EXAMPLES), str(folder / "lines")])
    parts = re.split(r"^## .*\n", output, flags=re.M)[1:]
    assert len(parts) == len(lines)
    return [parsed(part) for part in parts]


def falls(run: Run) -> bool:
    losses = [float(loss) for _, loss in sorted(run.losses.items())]
    return losses[-1] < losses[0] - 0.5


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[str, str, str], Run], Path]:
    """Every variant with every recipe on two ranks: at once, to the middle, and from there on."""
    folder = tmp_path_factory.mktemp("examples")
    keys, lines = [], []
    for recipe, variant in CASES:
        saved = f"--checkpoint {folder / variant}-{recipe} --save-every 2"
        parts = {"whole": "--steps 6", "first": f"--steps 3 {saved}", "rest": f"--steps 6 {saved}"}
        for part, arguments in parts.items():
            keys.append((recipe, variant, part))
            lines.append(f"{VARIANTS[variant]} --recipe {recipe} {TINY} {arguments}")
    keys.append(("current", "fsdp2", "compiled"))
    lines.append(f"fsdp2 --recipe current {TINY} --steps 6 --compile aot_eager")
    return dict(zip(keys, execute_lines(lines, 2, folder), strict=True)), folder


@pytest.mark.parametrize(("recipe", "variant"), CASES)
def test_an_interrupted_run_ends_as_one_that_was_not(
    recipe: str, variant: str, runs: tuple[dict[tuple[str, str, str], Run], Path]
) -> None:
    whole, first, rest = (runs[0][recipe, variant, part] for part in ("whole", "first", "rest"))
    assert sorted(whole.losses) == [1, 2, 3, 4, 5, 6]
    assert sorted(first.losses) == [1, 2, 3]
    assert sorted(rest.losses) == [4, 5, 6]
    assert (whole.continued, first.continued, rest.continued) == (None, None, "step-0000003")
    assert first.losses | rest.losses == whole.losses
    assert rest.weights == whole.weights != first.weights
    assert falls(whole)


@pytest.mark.parametrize("recipe", RECIPES)
def test_sharding_the_gradients_changes_nothing(
    recipe: str, runs: tuple[dict[tuple[str, str, str], Run], Path]
) -> None:
    one, two = runs[0][recipe, "zero", "whole"], runs[0][recipe, "zero-stage-2", "whole"]
    assert (one.losses, one.weights) == (two.losses, two.weights)


def test_compiling_changes_nothing(runs: tuple[dict[tuple[str, str, str], Run], Path]) -> None:
    """With a backend that leaves the operations as they are."""
    eager, compiled = runs[0]["current", "fsdp2", "whole"], runs[0]["current", "fsdp2", "compiled"]
    assert (compiled.losses, compiled.weights) == (eager.losses, eager.weights)


def test_one_process_continues_what_two_ranks_began(
    runs: tuple[dict[tuple[str, str, str], Run], Path], tmp_path: Path
) -> None:
    """Gradients are summed in another order, so that losses are not the same to the last digit."""
    recipe, variants = RECIPES[-1], ("zero", "fsdp2-primary")
    lines = []
    for variant in variants:
        folder = runs[1] / f"{variant}-{recipe}"
        assert sorted(path.name for path in folder.iterdir()) == ["step-0000004", "step-0000006"]
        lines.append(f"{VARIANTS[variant]} --recipe {recipe} {TINY} --steps 9 --checkpoint {folder}")
    for variant, run in zip(variants, execute_lines(lines, 1, tmp_path), strict=True):
        assert run.continued == "step-0000006"
        assert sorted(run.losses) == [7, 8, 9]
        assert float(run.losses[9]) < float(runs[0][recipe, variant, "whole"].losses[6])


def commands(page: Path) -> list[str]:
    """What is to be typed, of code blocks and docstrings."""
    return re.findall(r"^\s*((?:torchrun|python) .*examples/\w+\.py.*)$", page.read_text(), re.M)


PRINTED = sorted(
    {
        command
        for page in (*ROOT.glob("docs/*.md"), ROOT / "README.md", *EXAMPLES.glob("*.[pm][yd]"))
        for command in commands(page)
    }
)


def test_commands_are_printed() -> None:
    assert any(command.startswith("torchrun") and "zero.py" in command for command in PRINTED)
    assert any(command.startswith("torchrun") and "fsdp2.py" in command for command in PRINTED)


@pytest.mark.parametrize("command", PRINTED)
def test_commands_of_the_documentation_work_as_printed(command: str) -> None:
    run = parsed(execute(shlex.split(command)))
    assert sorted(run.losses) == list(range(1, 21))
    assert falls(run)
