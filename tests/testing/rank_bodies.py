"""What the ranks of test_launch.py do, by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from ottava_testing import CheckFailed


def body(name: str, mesh: Any, folder: Path) -> None:
    if name == "hangs":
        time.sleep(3600)
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "fails on one" and mesh.get_rank() == 1:
        raise CheckFailed("this one")
    if name == "raises":
        raise KeyError("a key")
    if name == "reads":
        assert (folder / "given").read_text() == os.environ["GIVEN"]
