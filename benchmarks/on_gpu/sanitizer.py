"""compute-sanitizer over a small part of the checks, in processes of their own.

Imports neither torch nor ottava.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.on_gpu.build import ROOT, find_tool

# memcheck's and racecheck's last line.
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
# In the table of the script that is run.
_CASES = re.compile(r"(\d+) checks, \d+ failed")
TOOLS = ("memcheck", "racecheck")
# One after the other: the tools' options have changed names. The last one checks torch's kernels too, slowly.
_FILTERS = (["--kernel-regex", "kns=ottava"], ["--kernel-name", "kernel_substring=ottava"], [])
_PLANTED = """
import sys
from pathlib import Path
from benchmarks.on_gpu import build
if len(sys.argv) > 1:
    build.use(Path(sys.argv[1]))
import torch
from ottava import _cuda
x, out = torch.randn(4096, device='cuda'), torch.empty(4096, dtype=torch.uint8, device='cuda')
scale = torch.ones((), device='cuda')
stream = torch.cuda.current_stream().cuda_stream
# One row more than there is memory for.
_cuda.cast(x.data_ptr(), 0, 2, 4096, scale.data_ptr(), 0, 0, 0, out.data_ptr(), 0, 0, 0, stream)
torch.cuda.synchronize()
"""


def _run(tool: str, command: list[str], seconds: float) -> dict[str, Any]:
    """Whether the tool found errors in the command; None for "clean" where it could not be run."""
    program = find_tool("compute-sanitizer")
    if program is None:
        return {"clean": None, "why": "compute-sanitizer is not installed"}
    # Each allocation by itself: beyond its end nothing is there.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for chosen in _FILTERS:
        full = [program, "--tool", tool, *chosen, *command]
        # A group of its own: what the tool has started would go on using the GPU when it is gone.
        done = subprocess.Popen(
            full,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            text, _ = done.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.communicate()
            return {"clean": None, "why": f"not done after {seconds:.0f} s"}
        if "nrecogni" in text and "option" in text:
            continue
        # The exit code is the program's own where that failed too.
        summary = _SUMMARY.findall(text)
        errors = sum(int(one or other) for one, other in summary)
        found: dict[str, Any] = {"filter": " ".join(chosen), "exit": done.returncode, "errors": errors}
        found["output"] = text[-2000:]
        run = sum(int(cases) for cases in _CASES.findall(text))
        found["cases"] = run
        if errors:
            return found | {"clean": False}
        if summary and done.returncode == 0 and not run:
            return found | {"clean": None, "why": "no check was run in the time there was"}
        if summary and done.returncode == 0:
            return found | {"clean": True}
        return found | {"clean": None, "why": f"the program ended with {done.returncode}, and no summary was seen"}
    return {"clean": None, "why": "none of the ways to name kernels is known to this compute-sanitizer"}


def run(script: Path, site: Path | None, seconds: float) -> dict[str, Any]:
    """Each tool on the small checks; and memcheck on a call that writes too much, which it must find.

    Args:
        script: benchmarks/gpu.py.
        site: where to import ottava from; None for what is installed.
        seconds: for all of it.

    Returns:
        Tool -> ``clean`` (True, False, or None with ``why``); under ``planted``, whether that was found.
    """
    checks = [
        sys.executable,
        str(script),
        "--no-build",
        "--only",
        "bytes",
        "--small",
        "--budget-s",
        str(int(0.2 * seconds)),
    ]
    checks += ["--out", os.devnull, *(["--site", str(site)] if site else [])]
    results: dict[str, Any] = {}
    planted = _run("memcheck", [sys.executable, "-c", _PLANTED, *([str(site)] if site else [])], 0.2 * seconds)
    # Not tried is neither.
    results["planted"] = planted | {"found": None if planted["clean"] is None else planted["clean"] is False}
    for tool in TOOLS:
        results[tool] = _run(tool, checks, 0.4 * seconds)
    return results
