"""Python processes that begin with torch imported: forks of one process, so that the import is paid
once.

That process imports nothing of Ottava. What a fork does with its variables and paths is what a new
process would do.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any


class Forks:
    """Runs code as ``python -c`` would, each time in a fork of a process that has imported torch.

    Args:
        interpreter: of an environment.
        variables: of the process, those of this one by default.
    """

    def __init__(
        self, interpreter: str | Path = sys.executable, variables: dict[str, str] | None = None
    ) -> None:
        self.variables = dict(os.environ) if variables is None else variables
        self._process = subprocess.Popen(
            [str(interpreter), "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.variables,
        )
        # It ends when its input does.
        atexit.register(self._process.communicate)

    def python(
        self,
        code: str,
        *arguments: str | Path,
        path: Path | None = None,
        cwd: Path | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """What ``python -c code arguments`` does, with ``path`` in front of where modules are
        looked for."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "code": code,
            "arguments": [str(argument) for argument in arguments],
            "path": [] if path is None else [str(path)],
            "variables": {**self.variables, **variables},
            "folder": os.getcwd() if cwd is None else str(cwd),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: list[Any] = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess([code, *request["arguments"]], *answer)


@functools.cache
def _here() -> Forks:
    return Forks()


def python(
    code: str, *arguments: str | Path, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`Forks.python` in this environment, with the variables as they are now."""
    forks = _here()
    forks.variables = dict(os.environ)
    return forks.python(code, *arguments, path=path, **variables)


def _run(request: dict[str, Any], outputs: list[Any]) -> None:
    code = 1
    try:
        for number, file in enumerate(outputs, 1):
            os.dup2(file.fileno(), number)
        os.environ.clear()
        os.environ.update(request["variables"])
        os.chdir(request["folder"])
        # The folder of this file goes.
        sys.path[:1] = ["", *request["path"]]
        sys.argv = ["-c", *request["arguments"]]
        importlib.invalidate_caches()
        try:
            exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
            if isinstance(left.code, str):
                print(left.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> None:
    import torch  # noqa: F401

    for line in sys.stdin:
        with contextlib.ExitStack() as files:
            outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
            child = os.fork()
            if child == 0:
                _run(json.loads(line), outputs)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            for file in outputs:
                file.seek(0)
            print(json.dumps([code, *(file.read() for file in outputs)]), flush=True)


if __name__ == "__main__":
    main()
