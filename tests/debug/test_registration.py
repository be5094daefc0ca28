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
import torch
import ottava
warnings.simplefilter("error", UserWarning)
manager = debug_manager.DebugManager
for name in ottava_debug.__all__:
    getattr(ottava_debug, name)
assert debug_manager.DebugManager is manager


def begin():
    debug_api.initialize(config_file="debug.yaml", log_dir="logs")


def disabled():
    layer = ottava.nn.Linear(8, 8, name="layer", recipe="current")
    layer(torch.ones(2, 8))
    debug_api.step()
    return not debug_api.transformer_engine.fp8_gemm_enabled("layer", gemm="fprop", iteration=0)


# A file that needs the features fails without them, and so does registering after initialize().
try:
    begin()
except AssertionError:
    debug_api.end_debug()
debug_api.initialize(log_dir="logs")
try:
    ottava_debug.register_features()
except ottava.errors.UsageError as error:
    assert "end_debug()" in str(error)
else:
    raise SystemExit("it was registered too late")
debug_api.end_debug()
ottava_debug.on_error("warn")
# One registration serves every later initialize().
for _ in range(2):
    ottava_debug.register_features()
for _ in range(2):
    begin()
    assert disabled()
    debug_api.end_debug()
    assert debug_api.DEBUG_MANAGER is None
print("passed")
"""


def test_an_import_changes_nothing_and_imports_little() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], check=True)


def test_registration_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = section("FakeQuant", "gemms: fprop, tensors: weight, quant_format: FP8E4M3")
    text += "  ottava: {LogTensorStats: {enabled: True, tensors: activation, stats: max}}\n"
    Path("debug.yaml").write_text(text)
    done = python(PROGRAM)
    assert done.stdout.endswith("passed\n"), done.stderr
    log = next(Path("logs/nvdlfw_inspect_statistics_logs").iterdir())
    lines = [line.split("INFO - ")[1].split()[0] for line in log.read_text().splitlines()]
    assert set(lines) == {"layer_activation_max"}
