"""Builds, checks and times the CUDA backend in one call: ``python benchmarks/gpu.py`` on a machine
with a GPU.

Runs from a checkout, with nothing installed but torch, pluggy, typer, rich, numpy, pyyaml, cmake,
ninja, pybind11 and nvcc, and without a network. Writes JSON and ends with a table of the targets.
Exit code 0: every check passed (targets of speed may be missed all the same), 1: one failed, or a
section did, 2: there is no GPU that torch can use.
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
# As a script: the modules beside this one are benchmarks.kernels and the like, not kernels.
sys.path[:] = [
    str(ROOT),
    *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "benchmarks")),
]

from benchmarks import checkout  # noqa: E402
from benchmarks.markdown import markdown  # noqa: E402

Row = dict[str, Any]
#: Section -> its part of the time. In this order; what one leaves over goes to the next.
SECTIONS = {
    "bytes": 0.22,
    "products": 0.05,
    "kernels": 0.14,
    "linear": 0.28,
    "host": 0.03,
    "demo": 0.12,
}
SECTIONS |= {"large": 0.05, "layers": 0.11, "sanitizer": 0.2}
_CHECKS = ("bytes", "products", "large", "layers")

# memcheck's and racecheck's last line; and what the checks say of themselves.
_SUMMARY, _CASES = (
    re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)"),
    re.compile(r"(\d+) checks done"),
)
#: What is to be seen, the tool that sees it, and its part of the time.
_TOOLS = (
    ("planted", "memcheck", 0.2),
    ("memcheck", "memcheck", 0.4),
    ("racecheck", "racecheck", 0.4),
)


def _build() -> Path:
    """The kernels for this GPU, or, without one, for every GPU; the folder to import from."""
    import torch

    architectures = (
        checkout.architecture(torch.cuda.get_device_capability(0))
        if torch.cuda.is_available()
        else None
    )
    folder = ROOT / "build" / "gpu" / f"{sys.implementation.cache_tag}-{architectures or 'all'}"
    checkout.assemble(folder / "site", checkout.compile_modules(folder, architectures))
    return folder / "site"


def inside(tool: str, seconds: float, site: str) -> None:
    """What runs under compute-sanitizer: a few checks of every kernel; for ``planted`` a call
    beyond memory's end."""
    if site:
        checkout.use(Path(site))
    import torch

    from benchmarks.on_gpu import kernel_cases, runner

    if tool == "planted":
        from ottava import _cuda

        # One row more than there is memory for.
        x, out = (
            torch.randn(4096, device="cuda"),
            torch.empty(4096, dtype=torch.uint8, device="cuda"),
        )
        scale, stream = torch.ones((), device="cuda"), torch.cuda.current_stream().cuda_stream
        _cuda.cast(
            x.data_ptr(), 0, 2, 4096, scale.data_ptr(), 0, 0, 0, out.data_ptr(), 0, 0, 0, stream
        )
        torch.cuda.synchronize()
        return
    table, modes = kernel_cases.byte_cases(small=True), ("some bytes", "bytes")
    found = list(runner.run(table, runner.Gpu(), modes, seconds=seconds))
    print(sum(outcome.cases for outcome in found), "checks done")
    sys.exit(not all(outcome.passed for outcome in found))


def _sanitizer(site: Path | None, seconds: float) -> Iterator[Row]:
    """Targets: the checks of the ottava in ``site`` are clean for each tool, and memcheck finds a
    planted error."""
    # Each allocation by itself: beyond its end nothing is there.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    found = checkout.find_tool("compute-sanitizer") or "false"
    for name, tool, limit in _TOOLS:
        code = (
            f"from benchmarks import gpu; gpu.inside({name!r}, {limit * seconds / 2}, "
            f"{str(site or '')!r})"
        )
        looked = [
            "--tool",
            tool,
            "--kernel-name",
            "kns=ottava",
            sys.executable,
            "-c",
            code,
        ]  # not at torch's kernels
        # timeout ends the tool's whole process group: what it has started would go on using the
        # GPU.
        command = ["timeout", "-s", "KILL", f"{limit * seconds + 1:.0f}", found, *looked]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        text = done.stdout + done.stderr
        errors, cases = (
            [int(number) for number in _SUMMARY.findall(text)],
            sum(map(int, _CASES.findall(text))),
        )
        words = (
            f"{errors or 'no summary of'} errors, {cases} cases, exit {done.returncode} of "
            f"{Path(found).name}"
        )
        # Without a summary the tool is not there or was not done. The exit code is the program's
        # where that failed.
        planted = name == "planted"
        known = any(errors) or (bool(errors) and (planted or (cases > 0 and done.returncode == 0)))
        row = {
            "target": name,
            "bound": "found" if planted else "clean",
            "measured": words,
            "output": text[-2000:],
        }
        yield row | {"holds": any(errors) is planted if known else None}


def _rows(section: str, seconds: float, place: Any, seed: int, site: Path | None) -> Iterator[Row]:
    """What comes of a section, as it comes; so are failures of checks printed."""
    from benchmarks.on_gpu import kernel_cases, model_cases, runner, speed

    tiny = place.rehearsal
    tables = {
        "bytes": lambda: kernel_cases.byte_cases(tiny),
        "products": lambda: kernel_cases.exact_cases() | model_cases.product_cases(tiny),
        "layers": lambda: model_cases.layer_cases(place, tiny),
        "large": lambda: kernel_cases.large_cases(*(([(300, 41)], 128) if tiny else ())),
    }
    if section in tables:
        modes = runner.MODES if section == "bytes" else ("",)
        for outcome in runner.run(
            tables[section](), place, tuple(modes), seed=seed, seconds=seconds
        ):
            print(
                *(f"FAILED {outcome.name}: {failure}\n" for failure in outcome.failures),
                sep="",
                end="",
                flush=True,
            )
            yield vars(outcome) | {"passed": outcome.passed}
    elif section != "sanitizer":
        yield from getattr(speed, f"{section}_rows")(place, seconds)
    elif not tiny:
        yield from _sanitizer(site, seconds)


def _print(title: str, rows: list[Row]) -> None:
    hidden = ("seconds", "errors", "output", "moved", "flops")
    flat = [
        {k: v for k, v in (row | row.get("seconds", {})).items() if k not in hidden} for row in rows
    ]
    print(f"\n{title}\n\n{markdown(flat, '{:.4g}')}", flush=True)


def _summary(rows: dict[str, list[Row]]) -> list[Row]:
    """Every check and target, and whether it holds: None where it was not looked at, or not at all
    of it."""
    from benchmarks.on_gpu import speed

    made: list[Row] = []
    for name in _CHECKS:
        total = {
            key: sum(row[key] for row in rows[name]) for key in ("cases", "failed", "left_out")
        }
        words = "{cases} checks, {failed} failed, {left_out} left out".format(**total)
        holds = (
            False
            if not all(row["passed"] for row in rows[name])
            else None
            if total["left_out"]
            else True
        )
        made.append(
            {
                "target": name,
                "bound": "all",
                "measured": words,
                "holds": holds if rows[name] else None,
            }
        )
    return [*made, *rows["sanitizer"], *speed.targets(rows)]


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
    chosen = only.split(",") if only else list(SECTIONS)
    if unknown := sorted(set(chosen) - set(SECTIONS)):
        raise typer.BadParameter(
            f"{','.join(unknown)}: expected some of {', '.join(SECTIONS)}", param_hint="--only"
        )
    import torch
    from torch.utils.collect_env import get_env_info

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
    import ottava
    from benchmarks.on_gpu.runner import Gpu, Rehearsal

    git = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    environment = {
        "sources": git.stdout.strip(),
        "ottava": ottava.__version__,
        "torch": torch.__version__,
    }
    environment |= {} if rehearse else get_env_info()._asdict()
    out = out or (Path(os.devnull) if rehearse else ROOT / "benchmarks" / "gpu_results.json")
    seed = int(time.time()) % 100_000 if seed < 0 else seed
    results: Row = {"rehearsal": rehearse, "environment": environment, "seed": seed}
    place, rows = Rehearsal() if rehearse else Gpu(), {name: list[Row]() for name in SECTIONS}
    for section in (
        left := {name: part for name, part in SECTIONS.items() if name in chosen}
    ).copy():
        start, parts = time.monotonic(), sum(left.values())
        share = max(0.0, begin + budget_s - start) * left.pop(section) / parts
        results[section] = {"rows": rows[section], "share": share}
        try:
            rows[section].extend(_rows(section, share, place, seed, site))
        except Exception as error:
            traceback.print_exc()
            results[section]["error"] = f"{type(error).__name__}: {error}"
        results[section]["seconds"] = time.monotonic() - start
        _print(f"{section}: {time.monotonic() - start:.1f} s of {share:.0f}", rows[section])
        results["targets"] = _summary(rows)
        out.write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")
    _print("targets", results["targets"])
    # Targets of speed, whose bounds are numbers, may be missed.
    failed = [name for name in SECTIONS if "error" in results.get(name, {})]
    failed += [
        row["target"]
        for row in results["targets"]
        if row["holds"] is False and row["bound"].isalpha()
    ]
    print(f"failed: {', '.join(failed) or 'nothing'}; {time.monotonic() - begin:.0f} s")
    print("A rehearsal on the CPU: no figure above means anything." if rehearse else "")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
