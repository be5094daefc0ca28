"""Which backend serves a kernel inside of a block that forces one, and after it."""

from __future__ import annotations

import pytest

from ottava.kernels import use_backend
from ottava.kernels.backends import backend_for


def test_a_backend_is_forced_inside_its_block_alone() -> None:
    before = backend_for("cpu")
    with use_backend("reference"):
        assert backend_for("cpu") == "reference"
        with use_backend("cpu"):
            assert backend_for("cpu") == "cpu"
        assert backend_for("cpu") == "reference"
        # Another device is asked for the first time in the block; no module for CPUs serves it.
        with use_backend("cpu"):
            assert backend_for("meta") == "reference"
    assert backend_for("cpu") == before


def test_an_error_ends_the_block_too() -> None:
    before = backend_for("cpu")
    with pytest.raises(KeyError), use_backend("reference"):
        assert backend_for("cpu") == "reference"
        raise KeyError
    assert backend_for("cpu") == before
