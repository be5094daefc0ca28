"""Configurations of nvdlfw-inspect, for the tests of the features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def initialize(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Initializes nvdlfw-inspect with the text of a file, and options; returns its folder.

    What was initialized before ends.
    """
    # Not above, because pytest's first process, which only hands out the tests, imports this file,
    # and torch with it for seconds.
    import nvdlfw_inspect.api as debug_api

    import ottava_debug

    ottava_debug.register_features()

    def begin(text: str, **options: Any) -> Path:
        debug_api.end_debug()
        path = tmp_path / "debug.yaml"
        path.write_text(text)
        debug_api.initialize(config_file=str(path), log_dir=str(tmp_path), **options)
        return tmp_path

    yield begin
    debug_api.end_debug()
