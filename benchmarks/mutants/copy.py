"""A copy of the repository, in which tests run with one changed file."""

from __future__ import annotations

import enum
import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# What is hidden, generated or built is not copied.
NOT_COPIED = (".*", "__pycache__", "_build", "build", "dist")


class Outcome(enum.StrEnum):
    """How a run of tests ended: one fails, they take too long, or all pass."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"


@dataclass(frozen=True)
class Limit:
    """How long a run may take, in seconds.

    Processor time is the strict one, because it hardly depends on what else the machine does.
    Processes that wait for each other use none.
    """

    processor: float
    clock: float

    def apply(self) -> None:
        """Limit the processor time of this process, and of each process that it starts."""
        seconds = int(self.processor) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


class Copy:
    """A copy of the repository, whose packages the tests import.

    The packages have to be installed too: their entry points and compiled modules are used.

    Args:
        root: the repository.
        folder: an empty folder, where the copy is made.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "copy"
        self.log = folder / "log"
        self._temporary = folder / "tmp"
        shutil.copytree(root, self.root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for package in self.root.glob("packages/*/src/*/"):
            spec = importlib.util.find_spec(package.name)
            for module in Path(spec.origin).parent.glob("*.so") if spec and spec.origin else ():
                shutil.copy2(module, package)

    def run_mutated(
        self, file: str, source: str, arguments: Sequence[str], limit: Limit
    ) -> Outcome:
        """Run pytest within a limit, while a file has another text."""
        path = self.root / file
        original, status = path.read_bytes(), path.stat()
        path.write_text(source, encoding="utf-8")
        # Python takes bytecode for that of a file with the same size and the same second. A mutant
        # that is tried within a second of the copy would run as the original.
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10 * 10**9))
        try:
            return self.run(arguments, limit, PYTHONDONTWRITEBYTECODE="1")
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def run(self, arguments: Sequence[str], limit: Limit | None, **variables: str) -> Outcome:
        """Run pytest with these environment variables; its output is in ``log``."""
        # Hypothesis must not try the failing example of one mutant on the next.
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        path = [*map(str, self.root.glob("packages/*/src")), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._temporary / "hypothesis"),
            "TMPDIR": str(self._temporary),
            **variables,
        }
        command = [sys.executable, "-m", "pytest", *arguments]
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=limit.apply if limit else None,
            )
        try:
            code = process.wait(limit.clock if limit else None)
        except subprocess.TimeoutExpired:
            return Outcome.TIMED_OUT
        finally:
            # After a failure the processes that a test started may wait for each other.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # The system ends a process whose processor time is over by one of these signals.
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return Outcome.TIMED_OUT
        return Outcome.SURVIVED if code == 0 else Outcome.KILLED
