"""A folder on sys.path for recipe packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ottava.recipes import registry


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder; what a test puts there is found, and forgotten after it."""
    monkeypatch.delenv("OTTAVA_DISABLE_PLUGINS", raising=False)
    monkeypatch.delenv("OTTAVA_STRICT_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    registry.reload()
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    registry.reload()
