"""Tests that need a GPU. Without one they are skipped, in one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import checkout  # noqa: E402

# What benchmarks/gpu.py --build-only has made of this checkout.
if os.environ.get("OTTAVA_GPU_SITE"):
    checkout.use(Path(os.environ["OTTAVA_GPU_SITE"]))

from benchmarks.on_gpu.runner import Gpu  # noqa: E402

# Not a skip for each of some hundred tests: one for the folder.
collect_ignore_glob = [] if torch.cuda.is_available() else ["test_with_*.py"]


@pytest.fixture(scope="session")
def place() -> Gpu:
    """The first GPU and the CUDA backend."""
    return Gpu(0)
