"""The one line that says why the tests of this folder are not run."""

from __future__ import annotations

import pytest
import torch

from ottava.kernels import available_backends

pytestmark = pytest.mark.gpu


def test_the_backend_is_there() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU: nothing of tests/gpu is run")
    assert available_backends()["cuda"] == "available"
