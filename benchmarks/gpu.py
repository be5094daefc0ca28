"""Builds, checks and times the CUDA backend in one call of ``python benchmarks/gpu.py``.

It needs a machine with a GPU, a checkout, and installed torch, pluggy, typer, rich, numpy, pyyaml,
cmake, ninja, pybind11 and nvcc; it needs no network. It writes JSON, and ends with a table of the
targets.

Exit codes: 0 if every check passed (targets of speed may be missed all the same), 1 if a check or a
section failed, 2 if torch sees no GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[1]
# Python puts the folder of a script on sys.path. The modules beside this one must be imported as
# benchmarks.kernels and so on, so the folder is replaced by the root of the checkout.
sys.path[:] = [
    str(ROOT),
    *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "benchmarks")),
]

from benchmarks import checkout  # noqa: E402
from benchmarks.markdown import markdown  # noqa: E402

Row = dict[str, Any]
#: Section -> its share of the time, in the order in which they run. Time that a section leaves over
#: goes to the next ones.
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

# The last line of memcheck and racecheck, and the last line of the checks themselves.
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_CASES = re.compile(r"(\d+) checks done")
#: The name of a run under compute-sanitizer, its tool, and its share of the time.
_TOOLS = (
    ("planted", "memcheck", 0.2),
    ("memcheck", "memcheck", 0.4),
    ("racecheck", "racecheck", 0.4),
)


def _build() -> Path:
    """Build the kernels for this GPU, or for every GPU if there is none here.

    Returns:
        The folder to import from.
    """
    import torch

    architectures = None
    if torch.cuda.is_available():
        architectures = checkout.architecture(torch.cuda.get_device_capability(0))
    folder = ROOT / "build" / "gpu" / f"{sys.implementation.cache_tag}-{architectures or 'all'}"
    checkout.assemble(folder / "site", checkout.compile_modules(folder, architectures))
    return folder / "site"


def _plant() -> None:
    """Make one call that reads and writes beyond the end of memory."""
    import torch

    from ottava import _cuda

    # The call has one row more than there is memory for.
    x = torch.randn(4096, device="cuda")
    out = torch.empty(4096, dtype=torch.uint8, device="cuda")
    scale, stream = torch.ones((), device="cuda"), torch.cuda.current_stream().cuda_stream
    _cuda.cast(x.data_ptr(), 0, 2, 4096, scale.data_ptr(), 0, 0, 0, out.data_ptr(), 0, 0, 0, stream)
    torch.cuda.synchronize()


def inside(name: str, seconds: float, site: str) -> None:
    """What runs under compute-sanitizer: a few checks of every kernel, or the planted error."""
    if site:
        checkout.use(Path(site))
    if name == "planted":
        _plant()
        return
    from benchmarks.on_gpu import kernel_cases, runner

    table, modes = kernel_cases.byte_cases(small=True), ("some bytes", "bytes")
    outcomes = list(runner.run(table, runner.Gpu(), modes, seconds=seconds))
    print(sum(outcome.cases for outcome in outcomes), "checks done")
    sys.exit(not all(outcome.passed for outcome in outcomes))


def _sanitizer(site: Path | None, seconds: float) -> Iterator[Row]:
    """The targets of compute-sanitizer.

    The checks of the ottava in ``site`` are clean for each tool, and memcheck finds a planted
    error.
    """
    # Each tensor is an allocation of its own, so that an access beyond its end is an error.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    sanitizer = checkout.find_tool("compute-sanitizer") or "false"
    for name, tool, limit in _TOOLS:
        arguments = f"{name!r}, {limit * seconds / 2}, {str(site or '')!r}"
        # timeout kills the tool's whole process group, because processes that the tool has started
        # would go on using the GPU. The filter leaves out torch's kernels.
        command = [
            *("timeout", "-s", "KILL", f"{limit * seconds + 1:.0f}"),
            *(sanitizer, "--tool", tool, "--kernel-name", "kns=ottava"),
            *(sys.executable, "-c", f"from benchmarks import gpu; gpu.inside({arguments})"),
        ]
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        text = process.stdout + process.stderr
        errors = [int(number) for number in _SUMMARY.findall(text)]
        cases = sum(map(int, _CASES.findall(text)))
        planted = name == "planted"
        # If there is no summary, the tool is not installed or did not finish. If the program
        # failed, the exit code is the program's.
        done = planted or (cases > 0 and process.returncode == 0)
        known = any(errors) or (bool(errors) and done)
        yield {
            "target": name,
            "bound": "found" if planted else "clean",
            "measured": f"{errors or 'no summary of'} errors, {cases} cases, exit "
            f"{process.returncode} of {Path(sanitizer).name}",
            "output": text[-2000:],
            "holds": any(errors) is planted if known else None,
        }


def _rows(section: str, seconds: float, place: Any, seed: int, site: Path | None) -> Iterator[Row]:
    """The rows of a section, one after the other; failures of checks are printed at once."""
    from benchmarks.on_gpu import kernel_cases, model_cases, runner, speed

    tiny = place.rehearsal
    tables = {
        "bytes": lambda: kernel_cases.byte_cases(tiny),
        "products": lambda: model_cases.product_cases(tiny),
        "layers": lambda: model_cases.layer_cases(place, tiny),
        "large": lambda: kernel_cases.large_cases(*(([(300, 41)], 128) if tiny else ())),
    }
    if section in tables:
        modes = tuple(runner.MODES) if section == "bytes" else ("",)
        for outcome in runner.run(tables[section](), place, modes, seed=seed, seconds=seconds):
            for failure in outcome.failures:
                print(f"FAILED {outcome.name}: {failure}", flush=True)
            yield vars(outcome) | {"passed": outcome.passed}
    elif section != "sanitizer":
        yield from getattr(speed, f"{section}_rows")(place, seconds)
    elif not tiny:
        yield from _sanitizer(site, seconds)


def _print(title: str, rows: list[Row]) -> None:
    hidden = ("seconds", "errors", "output")
    flat = [
        {k: v for k, v in (row | row.get("seconds", {})).items() if k not in hidden} for row in rows
    ]
    print(f"\n{title}\n\n{markdown(flat, '{:.4g}')}", flush=True)


def _check(name: str, rows: list[Row]) -> Row:
    """Whether the checks of a section hold; None if none was run, or only a part."""
    cases, failed, left_out = (
        sum(row[key] for row in rows) for key in ("cases", "failed", "left_out")
    )
    holds: bool | None = all(row["passed"] for row in rows)
    if holds and (left_out or not rows):
        holds = None
    words = f"{cases} checks, {failed} failed, {left_out} left out"
    return {"target": name, "bound": "all", "measured": words, "holds": holds}


def main(
    no_build: Annotated[
        bool, typer.Option("--no-build", help="use the ottava that is installed")
    ] = False,
    build_only: Annotated[
        bool, typer.Option("--build-only", help="build, print the folder to import from")
    ] = False,
    only: Annotated[str, typer.Option(help=f"comma separated, out of {','.join(SECTIONS)}")] = "",
    budget_s: Annotated[
        float, typer.Option(help="seconds for everything; what does not fit is left out")
    ] = 540.0,
    seed: Annotated[int, typer.Option(help="of the checks' inputs; a fresh one by default")] = -1,
    out: Annotated[
        Path | None, typer.Option(help="the results; gpu_results.json here, or none of a rehearsal")
    ] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="everything, tiny, on the CPU")
    ] = False,
) -> None:
    """Build, check and time the CUDA backend; write JSON, print a table of the targets."""
    begin = time.monotonic()
    names = only.split(",") if only else list(SECTIONS)
    if unknown := sorted(set(names) - set(SECTIONS)):
        raise typer.BadParameter(
            f"{','.join(unknown)}: expected some of {', '.join(SECTIONS)}", param_hint="--only"
        )
    import torch

    if not (rehearse or build_only or torch.cuda.is_available()):
        print(
            f"No GPU: torch {torch.__version__} sees none; nothing was built, checked or measured.",
            file=sys.stderr,
        )
        raise typer.Exit(2)
    site = None if no_build or rehearse else _build()
    if site:
        print(f"built in {time.monotonic() - begin:.0f} s\n{site}", flush=True)
        checkout.use(site)
    if build_only:
        return
    from benchmarks.on_gpu.runner import Gpu, Rehearsal

    if out is None:
        out = Path(os.devnull) if rehearse else ROOT / "benchmarks" / "gpu_results.json"
    if seed < 0:
        seed = int(time.time()) % 100_000
    results: Row = {"rehearsal": rehearse, "environment": _environment(rehearse), "seed": seed}
    place = Rehearsal() if rehearse else Gpu()
    weights = {name: weight for name, weight in SECTIONS.items() if name in names}
    _run_sections(weights, place, results, begin + budget_s, site, out)
    _print("targets", results["targets"])
    failures = _failures(results)
    print(f"failed: {', '.join(failures) or 'nothing'}; {time.monotonic() - begin:.0f} s")
    if rehearse:
        print("A rehearsal on the CPU: no figure above means anything.")
    raise typer.Exit(1 if failures else 0)


def _environment(rehearse: bool) -> Row:
    """The versions of what was measured, and the machine unless this is a rehearsal."""
    import torch
    from torch.utils.collect_env import get_env_info

    import ottava

    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    environment: Row = {
        "sources": subprocess.run(command, capture_output=True, text=True).stdout.strip(),
        "ottava": ottava.__version__,
        "torch": torch.__version__,
    }
    return environment if rehearse else environment | get_env_info()._asdict()


def _run_sections(
    weights: dict[str, float],
    place: Any,
    results: Row,
    deadline: float,
    site: Path | None,
    out: Path,
) -> None:
    """Run the sections, each for its share of the time until ``deadline``.

    ``results`` gets their rows and the targets, and is written to ``out`` after each section.
    """
    from benchmarks.on_gpu import speed

    rows: dict[str, list[Row]] = {name: [] for name in SECTIONS}
    weight_left = sum(weights.values())
    for section, weight in weights.items():
        start = time.monotonic()
        share = max(0.0, deadline - start) * weight / weight_left
        weight_left -= weight
        results[section] = {"rows": rows[section], "share": share}
        try:
            rows[section].extend(_rows(section, share, place, results["seed"], site))
        except Exception as error:
            traceback.print_exc()
            results[section]["error"] = f"{type(error).__name__}: {error}"
        results[section]["seconds"] = time.monotonic() - start
        _print(f"{section}: {time.monotonic() - start:.1f} s of {share:.0f}", rows[section])
        checks = [_check(name, rows[name]) for name in _CHECKS]
        results["targets"] = [*checks, *rows["sanitizer"], *speed.targets(rows)]
        out.write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")


def _failures(results: Row) -> list[str]:
    """The sections that raised an error, and the checks that failed."""
    failures = [name for name in SECTIONS if "error" in results.get(name, {})]
    for row in results["targets"]:
        # Targets of speed may be missed; their bounds are numbers, and those of checks are words.
        if row["holds"] is False and row["bound"].isalpha():
            failures.append(row["target"])
    return failures


if __name__ == "__main__":
    typer.run(main)
