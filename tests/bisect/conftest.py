"""Lets the tests use what stands beside them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def path(tmp_path):
    """Where a step is captured."""
    return tmp_path / "step.safetensors"
