"""Lets the tests use what stands beside them."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def one_thread():
    """Threads cost small tensors more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def path(tmp_path):
    """Where a step is captured."""
    return tmp_path / "step.safetensors"
