"""Importing the package changes nothing; ``register_features`` makes the features available."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.forking import python
from tests.debug.yaml_files import section

# Tests of new processes share the one that they are forked from.
pytestmark = pytest.mark.xdist_group("forking")

IMPORT = """
import sys
finders = list(sys.meta_path)
import ottava_debug
assert not {"torch", "nvdlfw_inspect"} & sys.modules.keys()
assert sys.meta_path == finders
"""
PROGRAM = """
import warnings
import ottava_debug
import nvdlfw_inspect.api as debug_api
import nvdlfw_inspect.debug_manager as debug_manager
import ottava
warnings.simplefilter("error", UserWarning)
manager = debug_manager.DebugManager
for name in ottava_debug.__all__:
    getattr(ottava_debug, name)
assert debug_manager.DebugManager is manager
assert not hasattr(ottava_debug, "something")
# A file that needs the features fails without them, and so does registering after initialize().
try:
    debug_api.initialize(config_file="debug.yaml", log_dir="logs")
except AssertionError:
    debug_api.end_debug()
debug_api.initialize(log_dir="logs")
try:
    ottava_debug.register_features()
except ottava.errors.UsageError as error:
    assert "end_debug()" in str(error)
debug_api.end_debug()
# One registration serves every later initialize().
ottava_debug.register_features()
for _ in range(2):
    debug_api.initialize(config_file="debug.yaml", log_dir="logs")
    assert not debug_api.transformer_engine.fp8_gemm_enabled("layer", gemm="fprop", iteration=0)
    debug_api.end_debug()
    assert debug_api.DEBUG_MANAGER is None
print("passed")
"""


def test_an_import_changes_nothing_and_imports_little() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], check=True)


def test_registration_in_a_new_process(tmp_path: Path) -> None:
    (tmp_path / "debug.yaml").write_text(section("DisableFP8Layer"))
    done = python(PROGRAM, cwd=tmp_path)
    assert done.stdout.endswith("passed\n"), done.stderr
