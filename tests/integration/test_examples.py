"""The commands of the documentation start the examples as printed. Other ways to run these are
example_cases.py's."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from example_commands import ROOT, commands, parsed

# No port is fixed, and nothing but this machine is asked for a name.
ENVIRONMENT = os.environ | {
    "PET_STANDALONE": "1",
    "PET_LOCAL_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
}
PRINTED = commands()
# One goes through torchrun each time; the arguments of all are tried on ranks that are there.
SHORT = next(command for command in PRINTED if command.startswith("torchrun"))


def test_commands_are_printed() -> None:
    assert any(command.startswith("torchrun") and "zero.py" in command for command in PRINTED)
    assert any(command.startswith("torchrun") and "fsdp2.py" in command for command in PRINTED)


@pytest.mark.parametrize(
    "command", [c if c == SHORT else pytest.param(c, marks=pytest.mark.slow) for c in PRINTED]
)
def test_commands_of_the_documentation_work_as_printed(command: str) -> None:
    done = subprocess.run(
        shlex.split(command), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    run = parsed(done.stdout)
    assert sorted(run.losses) == list(range(1, 21))
    assert run.falls()
