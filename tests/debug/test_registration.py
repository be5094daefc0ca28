"""Importing the package changes nothing; ``register_features`` makes the features available."""

import subprocess
import sys

import pytest

FILE = """
it:
  enabled: True
  layers: {layer_types: [fc]}
  transformer_engine:
    FakeQuant: {enabled: True, gemms: [fprop], tensors: [weight], quant_format: FP8E4M3}
  ottava:
    LogTensorStats: {enabled: True, tensors: [activation], stats: [max]}
"""
SHOW = """
import nvdlfw_inspect.api as debug_api
import ottava, ottava_debug, torch
def show():
    layer = ottava.nn.Linear(8, 8, name="fc", recipe="current")
    layer(torch.ones(2, 8))
    debug_api.step()
    return debug_api.transformer_engine.fp8_gemm_enabled("fc", gemm="fprop", iteration=0)
"""
BEGIN = "debug_api.initialize(config_file='it.yaml', log_dir='logs')\n"
PROGRAMS = {
    "once": f"""
{SHOW}
ottava_debug.on_error("warn")
ottava_debug.register_features()
{BEGIN}
print(show())
""",
    "twice, and initialized again": f"""
{SHOW}
for _ in range(2):
    ottava_debug.register_features()
    {BEGIN}
    shown = show()
    debug_api.end_debug()
    assert debug_api.DEBUG_MANAGER is None
{BEGIN}
assert show() is shown
ottava_debug.register_features()
print(shown)
""",
    "after a file that needs them": f"""
{SHOW}
try:
    {BEGIN}
except AssertionError:
    debug_api.end_debug()
    ottava_debug.register_features()
    {BEGIN}
print(show())
""",
    "after it was initialized without a file": f"""
{SHOW}
debug_api.initialize(log_dir="logs")
try:
    ottava_debug.register_features()
except ottava.errors.UsageError as error:
    assert "end_debug()" in str(error)
    debug_api.end_debug()
ottava_debug.register_features()
{BEGIN}
print(show())
""",
}


def run(tmp_path, program):
    (tmp_path / "it.yaml").write_text(FILE)
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("case", PROGRAMS)
def test_the_features_are_available(case, tmp_path):
    done = run(tmp_path, PROGRAMS[case])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "False"
    log = tmp_path / "logs" / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log"
    lines = [line.split("INFO - ")[1].split()[0] for line in log.read_text().splitlines()]
    # nvdlfw-inspect's own manager leaves its loggers behind, which repeat lines.
    own_runs_only = not case.startswith("after")
    assert (lines if own_runs_only else lines[:1]) == ["fc_activation_max"]


def test_importing_it_changes_nothing(tmp_path):
    program = """
import sys
finders = list(sys.meta_path)
import ottava_debug
print([n for n in ("torch", "nvdlfw_inspect") if n in sys.modules], sys.meta_path == finders)
import nvdlfw_inspect.debug_manager as debug_manager
manager = debug_manager.DebugManager
names = [getattr(ottava_debug, name) for name in ottava_debug.__all__]
print(debug_manager.DebugManager is manager)
"""
    done = run(tmp_path, program)
    assert done.stdout.split("\n")[:2] == ["[] True", "True"], done.stderr


def test_every_public_name_can_be_had():
    import ottava_debug

    assert [name for name in ottava_debug.__all__ if not hasattr(ottava_debug, name)] == []
    assert not hasattr(ottava_debug, "something")
    assert set(ottava_debug.__all__) <= set(dir(ottava_debug))
