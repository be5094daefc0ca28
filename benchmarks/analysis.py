"""The model that the page about ``ottava analyze`` analyzes, and a picture of its report.

The model is the demo's after some steps, with a huge weight in some of its layers. These weights
multiply inputs that are always zero, so they change nothing in high precision.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ottava_debug
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import SIZES
from ottava_demo.training import Batch, Trainee

#: Block -> the size of the outlier in the layers that read its two norms.
OUTLIERS = {1: (None, 1e4), 2: (None, 300.0), 3: (3e5, None)}
STEPS = 60
_SIZE = SIZES["small"]
_FEATURE = 5
_BROWSER = """--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking
--disable-sync --disable-component-update --disable-quic --hide-scrollbars
--window-size=1280,1330"""


def plant(model: torch.nn.Module, outliers: dict[int, tuple[float | None, float | None]]) -> None:
    """Put one huge weight into layers of the demo's model.

    It multiplies a feature of the norm before the layer, which is set to zero and stays zero.
    """
    for number, (attention, feed_forward) in outliers.items():
        block = model.get_submodule(f"blocks.{number}")
        for size, norm, layer in ((attention, "norm1", "qkv"), (feed_forward, "norm2", "up")):
            if size is None:
                continue
            with torch.no_grad():
                for parameter in block.get_submodule(norm).parameters():
                    parameter[_FEATURE] = 0
                    parameter.requires_grad_(False)
                block.get_submodule(layer).weight[3, _FEATURE] = size


def _batches(number: int, seed: int) -> Iterator[Batch]:
    """Random windows of the demo's corpus."""
    corpus, generator = load_corpus().train, torch.Generator().manual_seed(seed)
    return (batch(corpus, _SIZE.batch, _SIZE.length, generator) for _ in range(number))


def model(steps: int = STEPS) -> torch.nn.Module:
    """The demo's model after some steps, with outliers."""
    trainee = Trainee(None, size=_SIZE)
    plant(trainee.model, OUTLIERS)
    for data in _batches(steps, seed=0):
        trainee.step(data)
    return trainee.model


def data() -> Iterator[Batch]:
    """Batches that the model has not seen."""
    return _batches(3, seed=1)


def report(steps: int = STEPS) -> Any:
    """The report of the model."""
    return ottava_debug.analyze(model=model(steps), data=data(), loss="cross_entropy")


def draw(report: Any, out: Path) -> None:
    """Draw the page of a report by Chromium, which runs headless."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("chromium is not installed")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        ottava_debug.write_html(report, page)
        own = [f"--user-data-dir={folder}/profile", f"--screenshot={out}", page.as_uri()]
        subprocess.run([browser, *_BROWSER.split(), *own], check=True, timeout=120)
