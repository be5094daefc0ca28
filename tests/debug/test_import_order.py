"""Whichever is imported first, initialized again, or was initialized before: the features are
there."""

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
import ottava, torch
def show():
    layer = ottava.nn.Linear(8, 8, name="fc", recipe="current")
    layer(torch.ones(2, 8))
    debug_api.step()
    return debug_api.transformer_engine.fp8_gemm_enabled("fc", gemm="fprop", iteration=0)
"""
BEGIN = "debug_api.initialize(config_file='it.yaml', log_dir='logs')\n"
PROGRAMS = {
    "ottava_debug last": f"""
import nvdlfw_inspect.api as debug_api
{SHOW}
import ottava_debug
{BEGIN}
print(show())
""",
    "a name of the package before nvdlfw-inspect": f"""
import ottava_debug
ottava_debug.on_error("warn")
import nvdlfw_inspect.api as debug_api
{SHOW}
{BEGIN}
print(show())
""",
    "ottava_debug first, and initialized again": f"""
import ottava_debug
import nvdlfw_inspect.api as debug_api
{SHOW}
for _ in range(2):
    {BEGIN}
    shown = show()
    debug_api.end_debug()
    assert debug_api.DEBUG_MANAGER is None
{BEGIN}
assert show() is shown
print(shown)
""",
    "initialized before it was imported": f"""
import nvdlfw_inspect.api as debug_api
try:
    {BEGIN}
except AssertionError:
    import ottava_debug
{SHOW}
print(show())
""",
    "initialized before without a file": f"""
import nvdlfw_inspect.api as debug_api
debug_api.initialize(log_dir="logs")
import ottava_debug
assert debug_api.ottava.fp8_gemm_enabled("fc", gemm="fprop", iteration=0) is True
debug_api.end_debug()
{SHOW}
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
def test_the_features_are_there(case, tmp_path):
    done = run(tmp_path, PROGRAMS[case])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "False"
    log = tmp_path / "logs" / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log"
    # Each run has its own file, in which each line stands once.
    assert [line.split("INFO - ")[1].split()[0] for line in log.read_text().splitlines()] == [
        "fc_activation_max"
    ]


def test_importing_it_imports_neither_torch_nor_nvdlfw_inspect(tmp_path):
    program = (
        "import ottava_debug, sys; print([n for n in ('torch', 'nvdlfw_inspect') if n in "
        "sys.modules])"
    )
    done = run(tmp_path, program)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_public_name_can_be_had(tmp_path):
    import ottava_debug

    assert [name for name in ottava_debug.__all__ if not hasattr(ottava_debug, name)] == []
    assert not hasattr(ottava_debug, "something")
    assert set(ottava_debug.__all__) <= set(dir(ottava_debug))
