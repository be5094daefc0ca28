"""Lets the tests use what stands beside them, and configurations of nvdlfw-inspect."""

import sys
import textwrap
from pathlib import Path

import nvdlfw_inspect.api as debug_api
import pytest

import ottava_debug

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def registration():
    """Makes the features available to configurations."""
    ottava_debug.register_features()


@pytest.fixture
def initialize(tmp_path):
    """Writes a file, and initializes nvdlfw-inspect with it; what is given besides goes to
    ``initialize()``."""

    def begin(text, **options):
        path = tmp_path / "debug.yaml"
        path.write_text(textwrap.dedent(text))
        debug_api.initialize(config_file=str(path), log_dir=str(tmp_path), **options)
        return path

    yield begin
    debug_api.end_debug()
