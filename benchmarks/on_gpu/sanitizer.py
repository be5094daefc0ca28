"""compute-sanitizer over a small part of the checks, in processes of their own. Imports neither torch nor ottava."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT, find_tool

# memcheck's and racecheck's last line; and what the script says of the checks that it ran.
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_CASES = re.compile(r"(\d+) checks, \d+ failed")
# One after the other: the tools' options have changed names. The last one checks torch's kernels too, slowly.
_FILTERS = (["--kernel-regex", "kns=ottava"], ["--kernel-name", "kernel_substring=ottava"], [])
# A call with one row more than there is memory for.
_PLANTED = """
import sys
from pathlib import Path
from benchmarks import checkout
if len(sys.argv) > 1:
    checkout.use(Path(sys.argv[1]))
import torch
from ottava import _cuda
x, out = torch.randn(4096, device='cuda'), torch.empty(4096, dtype=torch.uint8, device='cuda')
scale, stream = torch.ones((), device='cuda'), torch.cuda.current_stream().cuda_stream
_cuda.cast(x.data_ptr(), 0, 2, 4096, scale.data_ptr(), 0, 0, 0, out.data_ptr(), 0, 0, 0, stream)
torch.cuda.synchronize()
"""


def _run(tool: str, command: list[str], seconds: float) -> dict[str, Any]:
    """Whether the tool found nothing in the command: ``clean``, None with ``why`` where it could not be run."""
    # Each allocation by itself: beyond its end nothing is there.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for chosen in _FILTERS:
        full = [find_tool("compute-sanitizer") or "compute-sanitizer", "--tool", tool, *chosen, *command]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment}
        try:
            # A group of its own: what the tool has started would go on using the GPU when it is gone.
            done = subprocess.Popen(full, text=True, cwd=ROOT, start_new_session=True, **pipes)
        except FileNotFoundError:
            return {"clean": None, "why": "compute-sanitizer is not installed"}
        try:
            text, _ = done.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.communicate()
            return {"clean": None, "why": f"not done after {seconds:.0f} s"}
        if "nrecogni" in text and "option" in text:
            continue
        errors, cases = _SUMMARY.findall(text), sum(map(int, _CASES.findall(text)))
        words = f"{'+'.join(errors) or 'no summary of'} errors, {cases} cases, exit {done.returncode}"
        # The exit code is the program's own where that failed too.
        clean = False if any(map(int, errors)) else True if errors and cases and not done.returncode else None
        return {"clean": clean, "why": words, "filter": " ".join(chosen), "output": text[-2000:]}
    return {"clean": None, "why": "none of the ways to name kernels is known to this compute-sanitizer"}


def run(site: Path | None, seconds: float) -> dict[str, dict[str, Any]]:
    """Each tool on the small checks of the ottava in ``site``; and memcheck on a planted error, not to be "clean"."""
    own = [str(site)] if site else []
    checks = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--only", "bytes", "--small", "--out", os.devnull]
    checks += ["--budget-s", str(int(0.2 * seconds)), *(["--site", *own] if site else ["--no-build"])]
    found = {"planted": _run("memcheck", [sys.executable, "-c", _PLANTED, *own], 0.2 * seconds)}
    return found | {tool: _run(tool, checks, 0.4 * seconds) for tool in ("memcheck", "racecheck")}
