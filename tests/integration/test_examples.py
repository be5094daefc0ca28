"""torchrun starts the examples, and the commands of the documentation work as printed. Other ways
to run these are example_cases.py's."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from example_commands import ROOT, TINY, Run, commands, parsed

# No port is fixed, and nothing but this machine is asked for a name.
ENVIRONMENT = os.environ | {
    "PET_STANDALONE": "1",
    "PET_LOCAL_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
}
PRINTED = commands()


def test_commands_are_printed() -> None:
    assert any(command.startswith("torchrun") and "zero.py" in command for command in PRINTED)
    assert any(command.startswith("torchrun") and "fsdp2.py" in command for command in PRINTED)


def printed_by(command: str) -> Run:
    done = subprocess.run(
        shlex.split(command), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return parsed(done.stdout)


def test_torchrun_starts_an_example() -> None:
    """A small model on one rank; example_cases.py tries the arguments of all commands."""
    command = next(command for command in PRINTED if command.startswith("torchrun"))
    command = command.replace("--nproc-per-node 2", "--nproc-per-node 1")
    run = printed_by(f"{command} {TINY} --steps 2")
    assert sorted(run.losses) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("command", PRINTED)
def test_commands_of_the_documentation_work_as_printed(command: str) -> None:
    run = printed_by(command)
    assert sorted(run.losses) == list(range(1, 21))
    assert run.falls()
