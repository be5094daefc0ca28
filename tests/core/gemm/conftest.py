"""Hardware that multiplies FP8, which a stand-in plays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ottava.gemm import scaled
from ottava.tensors import columnwise_layout
from tests.choosing import scaled_products
from tests.core.gemm.operands import Library


@pytest.fixture(params=[89, 90, 100, 120], ids="sm{}".format)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """Each kind of GPU, with the layout that its tensors have."""
    library = Library(request.param, scaled.scaled_mm)
    monkeypatch.setattr(scaled, "capability", lambda operand: library.capability)
    monkeypatch.setattr(scaled, "scaled_mm", library)
    with scaled_products(), columnwise_layout("transpose" if request.param < 100 else "shared"):
        yield library


@pytest.fixture
def cpu_library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """torch's own function for the CPU, with its calls; tests enter ``scaled_products``."""
    library = Library(0, scaled.scaled_mm)
    monkeypatch.setattr(scaled, "scaled_mm", library)
    return library
