"""Draws ``docs/_static/analyze.png``, a picture of the page of ``ottava analyze``.

``python -m benchmarks.analysis [file]`` needs Chromium, which runs headless. The model is the
demo's after some steps, with a huge weight in some of its layers. These weights multiply inputs
that are always zero, so they change nothing in high precision.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import ottava_debug
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import SIZES, Size
from ottava_demo.training import Batch, Trainee

PICTURE = Path(__file__).parents[1] / "docs" / "_static" / "analyze.png"
#: Block -> the size of the outlier in the layers that read its two norms.
OUTLIERS = {1: (None, 1e4), 2: (None, 300.0), 3: (3e5, None)}
STEPS = 60
_FEATURE = 5


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


def batches(size: Size, number: int, seed: int) -> Iterator[Batch]:
    """Random windows of the demo's corpus."""
    corpus, generator = load_corpus(), torch.Generator().manual_seed(seed)
    return (batch(corpus.train, size.batch, size.length, generator) for _ in range(number))


def model() -> torch.nn.Module:
    """The demo's model after some steps, with outliers."""
    trainee = Trainee(None, size=SIZES["small"])
    plant(trainee.model, OUTLIERS)
    for data in batches(SIZES["small"], STEPS, seed=0):
        trainee.step(data)
    return trainee.model


def data() -> Iterator[Batch]:
    """Batches that the model has not seen."""
    return batches(SIZES["small"], 3, seed=1)


def main() -> None:
    """Analyze the model, and draw the page."""
    picture = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("chromium is not installed")
    report = ottava_debug.analyze(model=model(), data=data(), loss="cross_entropy")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        ottava_debug.write_html(report, page)
        options = (
            "--headless --no-sandbox --disable-gpu --no-first-run "
            "--disable-background-networking --disable-sync"
        )
        options += (
            " --disable-component-update --disable-quic --hide-scrollbars --window-size=1280,1330"
        )
        own = [f"--user-data-dir={folder}/profile", f"--screenshot={picture}", page.as_uri()]
        subprocess.run([browser, *options.split(), *own], check=True, timeout=120)


if __name__ == "__main__":
    main()
