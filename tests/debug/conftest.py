"""Configurations of nvdlfw-inspect, for the tests of the features."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest

import ottava_debug


@pytest.fixture
def initialize(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Writes ``debug.yaml`` and initializes nvdlfw-inspect with it; returns the folder.

    Options are those of ``initialize()``.
    """
    ottava_debug.register_features()

    def begin(text: str, **options: Any) -> Path:
        path = tmp_path / "debug.yaml"
        path.write_text(textwrap.dedent(text))
        debug_api.initialize(config_file=str(path), log_dir=str(tmp_path), **options)
        return tmp_path

    yield begin
    debug_api.end_debug()
