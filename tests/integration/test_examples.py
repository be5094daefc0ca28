"""The examples on two ranks and on one: they learn, go on where they were interrupted, and start as
the documentation says."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ottava
from tests import ranks
from tests.ranks import ROOT

EXAMPLES = ROOT / "examples"
PAGES = (*ROOT.glob("docs/*.md"), ROOT / "README.md", *EXAMPLES.glob("*.[pm][yd]"))
COMMAND = re.compile(r"^\s*((?:torchrun|python) .*examples/\w+\.py.*)$", re.M)
#: Commands of code blocks and docstrings.
PRINTED = sorted({command for page in PAGES for command in COMMAND.findall(page.read_text())})
#: Arguments of a small model.
TINY = "--width 64 --layers 1 --batch 8"
VARIANTS = {
    "zero": "zero",
    "zero of stage 2": "zero --stage 2",
    "fsdp2": "fsdp2",
    "fsdp2 of quantized weights": "fsdp2 --weights primary",
    # Microbatches matter to recipes that remember.
    "fsdp2 of microbatches": "fsdp2 --no-reshard --no-mixed-precision --accumulate 2",
}
SAMPLE = ("fsdp2 of quantized weights", "nvfp4")


@dataclass
class Run:
    """What a run printed: losses by step, as text, and the checksum of the weights."""

    losses: dict[int, str]
    weights: str
    continued: str | None

    @classmethod
    def of(cls, text: str) -> Run:
        losses = re.findall(r"^step (\d+) loss (\S+)$", text, re.M)
        continued = re.search(r"^continues from (\S+)$", text, re.M)
        (weights,) = re.findall(r"^weights (\w+)$", text, re.M)
        return cls({int(s): loss for s, loss in losses}, weights, continued and continued[1])

    def assert_learned(self, steps: int) -> None:
        assert list(self.losses) == list(range(1, steps + 1))
        assert float(self.losses[steps]) < float(self.losses[1]) - 0.5


def outputs(mesh: DeviceMesh, lines: list[str]) -> list[str]:
    """What examples print, each of which is a name and arguments."""
    sys.path.insert(0, str(EXAMPLES))
    texts = []
    for name, *arguments in map(str.split, lines):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            importlib.import_module(name).main(arguments)
        texts.append(printed.getvalue())
    return texts


def run(lines: list[str], world: int) -> list[Run]:
    return [Run.of(text) for text in ranks.run(outputs, world, lines=lines)[0]]


@pytest.mark.parametrize(
    ("variant", "recipe"),
    [
        pytest.param(v, r, marks=[] if (v, r) == SAMPLE else pytest.mark.slow)
        for v in VARIANTS
        for r in (spec.name for spec in ottava.list_recipes())
    ],
)
def test_an_interrupted_run_ends_as_another(variant: str, recipe: str, tmp_path: Path) -> None:
    """One rank goes on with what two have saved."""
    # Each rank's rows of a weight that is kept in blocks of 128 are whole blocks.
    wide = "--width 256" if (variant[-7:], recipe) == ("weights", "blockwise") else ""
    line = f"{VARIANTS[variant]} --recipe {recipe} {TINY} {wide}"
    saved = f"--checkpoint {tmp_path / 'saved'} --save-every 2"
    lines = [f"{line} --steps 6", f"{line} --steps 3 {saved}", f"{line} --steps 6 {saved}"]
    whole, first, rest = run(lines, 2)
    whole.assert_learned(6)
    assert (first.continued, rest.continued) == (None, "step-0000003")
    assert list(rest.losses) == [4, 5, 6]
    assert first.losses | rest.losses == whole.losses
    assert rest.weights == whole.weights != first.weights
    assert sorted(os.listdir(tmp_path / "saved")) == ["step-0000004", "step-0000006"]
    if "microbatches" not in variant:
        # Gradients are summed in another order, so the last digits of losses differ.
        (end,) = run([f"{line} --steps 9 {saved}"], 1)
        assert end.continued == "step-0000006"
        assert list(end.losses) == [7, 8, 9]
        assert float(end.losses[9]) < float(whole.losses[6])


@pytest.mark.slow
def test_compiled_blocks_and_sharded_gradients_change_nothing() -> None:
    tiny = f"--recipe current {TINY} --steps 6"
    fsdp2 = [f"fsdp2 {tiny}", f"fsdp2 {tiny} --compile aot_eager"]
    eager, compiled, whole, sharded = run([*fsdp2, f"zero {tiny}", f"zero --stage 2 {tiny}"], 2)
    assert eager == compiled
    assert whole == sharded


def program(mesh: DeviceMesh, line: str, variables: dict[str, str], printed: str) -> None:
    """Run an example as the program of this process, which ends with it."""
    rank = str(mesh.get_rank())
    dist.destroy_process_group()
    os.environ |= variables | ({"RANK": rank, "LOCAL_RANK": rank} if variables else {})
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = line.split()
    os.dup2(os.open(f"{printed}-{rank}", os.O_WRONLY | os.O_CREAT), 1)
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise AssertionError("the process has not ended")


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=[] if "zero" in c else pytest.mark.slow) for c in PRINTED]
)
def test_a_printed_command_starts(command: str, tmp_path: Path) -> None:
    """With a small model, and with the variables that torchrun sets."""
    started = re.fullmatch(r"(?:torchrun --nproc-per-node (\d+)|python) (.*)", command)
    assert started
    world, variables = int(started[1] or 1), {}
    if started[1]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        variables = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    line, printed = f"{ROOT / started[2]} {TINY} --steps 3", str(tmp_path / "printed")
    ranks.run(program, world, line=line, variables=variables, printed=printed)
    assert list(Run.of(Path(f"{printed}-0").read_text()).losses) == [1, 2, 3]
