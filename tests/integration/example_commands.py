"""The commands of the documentation that run examples, and what the examples print."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
#: Arguments of a small model.
TINY = "--width 64 --layers 1 --batch 8"
COMMAND = re.compile(r"^\s*((?:torchrun|python) .*examples/\w+\.py.*)$", re.M)


@dataclass
class Run:
    """What a run printed: losses by step, as text, and the checksum of the weights."""

    losses: dict[int, str]
    weights: str
    continued: str | None

    def falls(self) -> bool:
        losses = [float(loss) for _, loss in sorted(self.losses.items())]
        return losses[-1] < losses[0] - 0.5


def parsed(text: str) -> Run:
    losses = {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", text, re.M)}
    continued = re.search(r"^continues from (\S+)$", text, re.M)
    (weights,) = re.findall(r"^weights (\w+)$", text, re.M)
    return Run(losses, weights, continued and continued[1])


def commands() -> list[str]:
    """What is to be typed, of code blocks and docstrings."""
    pages = (*ROOT.glob("docs/*.md"), ROOT / "README.md", *EXAMPLES.glob("*.[pm][yd]"))
    return sorted({command for page in pages for command in COMMAND.findall(page.read_text())})
