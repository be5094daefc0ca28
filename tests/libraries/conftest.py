"""Tests with the released libraries that train models. Where one of these is missing, the folder is
skipped."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

LIBRARIES = ["accelerate", "datasets", "diffusers", "lightning", "peft", "transformers", "trl"]
MISSING = [name for name in LIBRARIES if find_spec(name) is None]

# Not a skip for each test: one for the folder.
collect_ignore_glob = ["test_with_*.py"] if MISSING else []

# Models are made from small configurations, so that nothing is fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def missing_libraries() -> list[str]:
    return MISSING
