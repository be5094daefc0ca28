"""A folder on sys.path for recipe packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.fake_plugins import installed


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """The folder; what a test puts there is found, and forgotten after it."""
    with installed(tmp_path):
        yield tmp_path
