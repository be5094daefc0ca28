"""Builds, checks and times the CUDA backend in one call: ``python benchmarks/gpu.py`` on a machine with a GPU.

Runs from a checkout, with nothing installed but torch, pluggy, typer, rich, numpy, pyyaml, cmake, ninja, pybind11 and
nvcc, and without a network. Writes JSON and ends with a table of the targets. Exit code 0: every check passed (targets
of speed may be missed all the same), 1: one failed, or a section did, 2: there is no GPU that torch can use.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# As a script: the modules beside this one are benchmarks.kernels and the like, not kernels.
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "benchmarks"))]

from benchmarks import checkout  # noqa: E402

Row = dict[str, Any]
#: Section -> its part of the time. In this order; what one leaves over goes to the next.
SECTIONS = {"bytes": 0.22, "products": 0.05, "kernels": 0.14, "linear": 0.28, "host": 0.03, "demo": 0.12}
SECTIONS |= {"large": 0.05, "layers": 0.11, "sanitizer": 0.2}
_CHECKS = ("bytes", "products", "large", "layers")


def _build() -> Path:
    """The kernels for this GPU, or, without one, for every GPU; the folder to import from."""
    import torch

    there = torch.cuda.is_available()
    architectures = checkout.architecture(torch.cuda.get_device_capability(0)) if there else None
    folder = ROOT / "build" / "gpu" / f"{sys.implementation.cache_tag}-{architectures or 'all'}"
    checkout.assemble(folder / "site", checkout.compile_modules(folder, architectures))
    return folder / "site"


def _environment(rehearsal: bool) -> Row:
    """What the figures belong to."""
    import torch
    from torch.utils.collect_env import get_env_info

    import ottava
    from ottava.kernels import available_backends

    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    found: Row = {"torch": torch.__version__, "ottava": ottava.__version__, "sources": git.stdout.strip() or None}
    if rehearsal:
        return found | {"backends": available_backends()}
    from ottava import _cuda

    found |= {"kernels built for": _cuda.targets, "GPU": str(torch.cuda.get_device_properties(0))}
    return get_env_info()._asdict() | found


def _checks(section: str, seconds: float, place: Any, small: bool, seed: int) -> Iterator[Row]:
    """What came of each name; failures are printed as they come."""
    from benchmarks.on_gpu import kernel_cases, model_cases, runner

    tiny, modes, table = place.rehearsal, ("",), {}
    if section == "bytes":
        modes = ("some bytes", "bytes") if small else tuple(runner.MODES)
        table = kernel_cases.byte_cases(small or tiny)
    elif section == "products":
        table = kernel_cases.exact_cases() | model_cases.product_cases(model_cases.SIZES[: 4 if tiny else None])
    elif section == "layers":
        table = model_cases.layer_cases(place, tiny)
    for shape in ([(70, 41)] if tiny else kernel_cases.LARGE) if section == "large" else ():
        table |= kernel_cases.large_cases(place, shape, 32 if tiny else 2048)
    for outcome in runner.run(table, place, modes, seed=seed, seconds=seconds):
        for failure in outcome.failures:
            print(f"FAILED {outcome.name}: {failure}", flush=True)
        yield dataclasses.asdict(outcome) | {"passed": outcome.passed}


def _rows(section: str, seconds: float, place: Any, small: bool, seed: int, site: Path | None) -> Iterator[Row]:
    from benchmarks.on_gpu import sanitizer, speed

    if section in _CHECKS:
        return _checks(section, seconds, place, small, seed)
    if section == "sanitizer":
        found = {} if place.rehearsal else sanitizer.run(site, seconds)
        return ({"name": tool} | row for tool, row in found.items())
    timed = {
        "kernels": speed.kernel_rows,
        "linear": speed.linear_rows,
        "host": speed.host_rows,
        "demo": speed.demo_rows,
    }
    return timed[section](place, seconds)


def _print(title: str, rows: list[Row]) -> None:
    hidden = ("seconds", "errors", "output", "moved", "flops")
    flat = [{k: v for k, v in (row | row.get("seconds", {})).items() if k not in hidden} for row in rows]
    table = Table(*dict.fromkeys(key for row in flat for key in row), title=title)
    for row in flat:
        cells = (row.get(str(column.header)) for column in table.columns)
        table.add_row(*("-" if c is None else f"{c:.4g}" if isinstance(c, float) else str(c)[:70] for c in cells))
    Console(width=240).print(table)


def _summary(rows: dict[str, list[Row]]) -> list[Row]:
    """Every check and target, and whether it holds: None where it was not looked at, or not at all of it."""
    from benchmarks.on_gpu import speed

    made: list[Row] = []
    for name in _CHECKS:
        total = {key: sum(row[key] for row in rows[name]) for key in ("cases", "failed", "left_out")}
        words = "{cases} checks, {failed} failed, {left_out} left out".format(**total)
        holds = False if not all(row["passed"] for row in rows[name]) else None if total["left_out"] else True
        made.append({"target": name, "bound": "all", "measured": words, "holds": holds if rows[name] else None})
    for row in rows["sanitizer"]:
        holds = row["clean"] if row["name"] != "planted" or row["clean"] is None else not row["clean"]
        bound = "found" if row["name"] == "planted" else "clean"
        made.append({"target": row["name"], "bound": bound, "measured": row["why"], "holds": holds})
    return made + speed.targets(rows)


def main(
    no_build: Annotated[bool, typer.Option("--no-build", help="use the ottava that is installed")] = False,
    site: Annotated[Path | None, typer.Option(help="use the ottava that an earlier call made in this folder")] = None,
    build_only: Annotated[bool, typer.Option("--build-only", help="build, print the folder to import from")] = False,
    only: Annotated[str, typer.Option(help=f"comma separated, out of {','.join(SECTIONS)}")] = "",
    budget_s: Annotated[float, typer.Option(help="seconds for everything; what does not fit is left out")] = 540.0,
    seed: Annotated[int, typer.Option(help="of the checks' inputs; a fresh one by default")] = -1,
    small: Annotated[bool, typer.Option("--small", help="fewer and smaller checks")] = False,
    out: Annotated[Path | None, typer.Option(help="the results; gpu_results.json here, or none of a rehearsal")] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="everything, tiny, on the CPU: no figure is one")
    ] = False,
) -> None:
    """Build, check and time the CUDA backend; write JSON, print a table of the targets."""
    begin = time.monotonic()
    left = [name for name in SECTIONS if name in (only or name).split(",")]
    if unknown := sorted(set(filter(None, only.split(","))) - set(SECTIONS)):
        raise typer.BadParameter(f"{','.join(unknown)}: expected some of {', '.join(SECTIONS)}", param_hint="--only")
    import torch

    if not (rehearse or build_only or torch.cuda.is_available()):
        print(f"No GPU: torch {torch.__version__} sees none; nothing was built, checked or measured.", file=sys.stderr)
        raise typer.Exit(2)
    try:
        if build_only or not (no_build or rehearse or site):
            site = _build()
            print(f"built in {time.monotonic() - begin:.0f} s\n{site}", flush=True)
        if build_only:
            return
        if site:
            checkout.use(site)
        from benchmarks.on_gpu.place import Gpu, Rehearsal

        environment = _environment(rehearse)
    except (checkout.BuildError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    out = out or (Path(os.devnull) if rehearse else ROOT / "benchmarks" / "gpu_results.json")
    seed = int(time.time()) % 100_000 if seed < 0 else seed
    results: Row = {"rehearsal": rehearse, "environment": environment, "seed": seed}
    place, broken, rows = Rehearsal() if rehearse else Gpu(), list[str](), {name: list[Row]() for name in SECTIONS}
    while left:
        share = max(0.0, begin + budget_s - time.monotonic()) * SECTIONS[left[0]] / sum(SECTIONS[n] for n in left)
        section, start = left.pop(0), time.monotonic()
        results[section] = {"rows": rows[section], "share": share}
        try:
            for row in _rows(section, share, place, small, seed, site):
                rows[section].append(row)
        except Exception as error:
            traceback.print_exc()
            results[section]["error"] = f"{type(error).__name__}: {error}"
            broken.append(section)
        results[section]["seconds"] = time.monotonic() - start
        _print(f"{section}: {time.monotonic() - start:.1f} s of {share:.0f}", rows[section])
        results["targets"] = _summary(rows)
        out.write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")
    _print("targets", results["targets"])
    failed = [
        row["target"]
        for row in results["targets"]
        if row["bound"] in ("all", "clean", "found") and row["holds"] is False
    ]
    print(f"failed: {', '.join(failed + broken) or 'nothing'}; {time.monotonic() - begin:.0f} s")
    print("A rehearsal on the CPU: no figure above means anything." if rehearse else "")
    raise typer.Exit(1 if failed or broken else 0)


if __name__ == "__main__":
    typer.run(main)
