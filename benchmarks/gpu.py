"""Builds, checks and times the CUDA backend in one call: ``python benchmarks/gpu.py`` on a machine with a GPU.

Runs from a checkout, with nothing installed but torch, pluggy, typer, rich, numpy, pyyaml, cmake, ninja, pybind11 and
nvcc, and without a network. Writes JSON and ends with a table of the targets. Exit code 0: every check passed (targets
of speed may be missed all the same), 1: one failed, or a section did, 2: there is no GPU that torch can use.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
# As a script: the modules beside this one are benchmarks.kernels and the like, not kernels.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"]

from benchmarks.on_gpu import build, sanitizer  # noqa: E402

Results = dict[str, Any]
#: Section -> its part of the time. In this order; what one leaves over goes to the next.
SECTIONS = {
    "bytes": 0.22,
    "products": 0.05,
    "kernels": 0.14,
    "linear": 0.28,
    "host": 0.03,
    "demo": 0.12,
    "large": 0.05,
    "layers": 0.11,
    "sanitizer": 0.2,
}
_CHECKS = ("bytes", "products", "large", "layers")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-build", action="store_true", help="use the ottava that is installed")
    parser.add_argument("--site", type=Path, help="use the ottava that an earlier call made in this folder")
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "gpu", help="kept between calls")
    parser.add_argument(
        "--build-only", action="store_true", help="build, without a GPU too, and print the folder to import from"
    )
    parser.add_argument("--all-targets", action="store_true", help="machine code for every GPU, not for this one alone")
    parser.add_argument("--only", default="", help=f"comma separated, out of {','.join(SECTIONS)}")
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="seconds for everything; what does not fit is left out"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the checks' inputs; a fresh one by default")
    parser.add_argument("--small", action="store_true", help="fewer and smaller checks")
    parser.add_argument(
        "--out", type=Path, help="the file of results; benchmarks/gpu_results.json, or none for a rehearsal"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="run everything at tiny sizes on the CPU; no figure means anything"
    )
    options = parser.parse_args(arguments)
    chosen = [name for name in options.only.split(",") if name] or list(SECTIONS)
    unknown = sorted(set(chosen) - set(SECTIONS))
    if unknown:
        parser.error(f"--only {','.join(unknown)}: expected some of {', '.join(SECTIONS)}")
    if options.out is None:
        options.out = Path(os.devnull) if options.rehearse else ROOT / "benchmarks" / "gpu_results.json"
    options.sections = [name for name in SECTIONS if name in chosen]
    return options


def _sources() -> str:
    """What the sources are, where no version control says it."""
    digest = hashlib.sha256()
    for folder in sorted((ROOT / "packages").glob("*/csrc")) + sorted((ROOT / "packages").glob("*/src")):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in {".py", ".h", ".cpp", ".cu", ".cmake"}):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _answer(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def environment(device: Any) -> Results:
    """What the figures belong to."""
    import torch

    import ottava
    from benchmarks.on_gpu.peers import torchao_version

    found: Results = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda of torch": torch.version.cuda,
        "torchao": torchao_version(),
        "ottava": ottava.__version__,
        "sources": _sources(),
        "processors": os.cpu_count(),
        "nvcc": (_answer([build.find_tool("nvcc") or "nvcc", "--version"]) or "").splitlines()[-1:],
    }
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            from ottava import _cuda

            targets = _cuda.targets
        except ImportError as error:
            targets = str(error)
        found |= {
            "GPU": facts.name,
            "capability": [facts.major, facts.minor],
            "multiprocessors": facts.multi_processor_count,
            "memory": facts.total_memory,
            "driver": _answer(query),
            "GPUs": torch.cuda.device_count(),
            "kernels built for": targets,
        }
    return found


def _place(options: argparse.Namespace) -> Any:
    from benchmarks.on_gpu.place import Gpu
    from benchmarks.on_gpu.rehearsal import stand_in

    return stand_in() if options.rehearse else Gpu(0)


def _import(options: argparse.Namespace) -> None:
    """Build, unless that is not wanted, and see that ottava can be imported."""
    if options.site is not None:
        build.use(options.site)
        return
    if options.no_build or (options.rehearse and not options.build_only):
        return
    import torch

    architectures = None
    if not options.all_targets and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(0)
        if capability < (8, 0):
            found = ".".join(map(str, capability))
            raise build.BuildError(f"the CUDA kernels are for compute capability 8.0 and later; this GPU has {found}")
        architectures = build.architecture(capability)
    folder = options.build_dir / f"{sys.implementation.cache_tag}-{architectures or 'all'}"
    start = time.monotonic()
    modules = build.compile_modules(folder, cuda="on", architectures=architectures)
    build.assemble(folder / "site", modules)
    options.site = folder / "site"
    build.use(options.site)
    print(f"built {', '.join(m.name for m in modules)} in {time.monotonic() - start:.0f} s", flush=True)


_COLUMNS = {
    "kernels": [
        "kernel",
        "size",
        "dtype",
        "seconds",
        "gigabytes a second",
        "of copy",
        "times eager",
        "times compile",
        "times torchao",
        "ottava, error",
    ],
    "linear": ["linear", "size", "seconds", "teraflops", "times bf16", "spread", "error"],
    "host": ["step", "recipe", "shape", "microseconds", "times nn.Linear"],
    "demo": ["demo", "validation", "from bf16", "peak, of bf16", "tokens a second", "error"],
}


def main(arguments: list[str] | None = None) -> int:
    """Everything; the exit code."""
    options = _options(arguments)
    begin = time.monotonic()
    import torch

    if not (options.rehearse or options.build_only) and not torch.cuda.is_available():
        print(f"No GPU: torch {torch.__version__} sees none; nothing was built, checked or measured.", file=sys.stderr)
        return 2
    try:
        _import(options)
        if options.build_only:
            print(options.site)
            return 0
        from benchmarks.on_gpu import report
        from benchmarks.on_gpu.session import Session

        session = Session(options, _place(options), SECTIONS, begin + options.budget_s)
    except (build.BuildError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    session.results["rehearsal"] = options.rehearse
    session.results["environment"] = environment(session.place.device)
    print(json.dumps(session.results["environment"], default=str), flush=True)
    broken = []
    for section in options.sections:
        seconds, start = session.share(section), time.monotonic()
        try:
            found = getattr(session, f"run_{section}")(seconds)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
            broken.append(section)
        session.results[section] = found | {"seconds": round(time.monotonic() - start, 1), "share": round(seconds, 1)}
        print(f"\n{section}: {session.results[section]['seconds']} s of {seconds:.0f}", flush=True)
        if section in _COLUMNS and found.get("rows"):
            print(report.row_table(found["rows"], _COLUMNS[section]), flush=True)
        session.save()
    made = report.targets(session.results)
    session.results["targets"] = [dataclasses.asdict(target) for target in made]
    session.save()
    failed = [
        row["name"] for name in _CHECKS for row in session.results.get(name, {}).get("rows", ()) if not row["passed"]
    ]
    errors = [t.name for t in made if t.holds is False and t.name in sanitizer.TOOLS]
    print("\n" + report.target_table(made))
    print(
        f"{len(failed)} checks failed; {time.monotonic() - begin:.0f} s"
        + (f"; sections that broke: {broken}" if broken else "")
    )
    if options.rehearse:
        print("A rehearsal on the CPU: no figure above means anything.")
    return 1 if failed or broken or errors else 0


if __name__ == "__main__":
    sys.exit(main())
