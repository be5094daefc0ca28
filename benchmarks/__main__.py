"""Runs every benchmark, writes ``benchmarks/results.json`` and ``docs/benchmarks.md``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

import torch

from benchmarks import imports, kernels, known_scale, linear, multi

ROOT = Path(__file__).parents[1]


# glibc gives large blocks back at once and faults their pages in again at the next use: that would slow the
# alternatives that make temporaries, and make ours look faster than it is. Read when a process starts.
_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def _keep_memory() -> None:
    """Start again with an allocator that keeps what was freed, unless that is already so."""
    if any(os.environ.get(name) != value for name, value in _ALLOCATOR.items()):
        os.environ.update(_ALLOCATOR)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _table(rows: list[dict[str, object]]) -> str:
    headings = list(rows[0])
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(_cell(row[h]) for h in headings) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kernel-size", type=int, default=4096)
    parser.add_argument("--linear-size", type=int, default=2048)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    _keep_memory()
    torch.set_num_threads(options.threads)
    from ottava.kernels import cpu

    sections = {
        f"Kernels, bf16 {options.kernel_size}²": kernels.measure(options.kernel_size, options.rounds),
        f"A known scale, bf16 {2 * options.kernel_size}²": known_scale.measure(2 * options.kernel_size, options.rounds),
        "Shards of float32 weights, quantized as bf16": multi.measure(options.rounds),
        f"Linear, forward and backward, {options.linear_size}³": linear.measure(options.linear_size, options.rounds),
        "Imports": imports.measure(options.rounds // 2),
    }
    machine = f"{options.threads} threads, {cpu.isa()}, {platform.machine()}, torch {torch.__version__}"
    page = [
        "# Benchmarks",
        "",
        "Written by `python -m benchmarks` (`nox -s bench`). Ratios are of medians in one process, alternatives run in",
        "turns, buffers reused, with an allocator that keeps freed memory (`MALLOC_MMAP_MAX_=0`): page faults would",
        "flatter the kernels. Memcpy is `Tensor.copy_` of as many bytes in all as the kernel reads and writes.",
        "",
        f"Measured on: {machine}.",
    ]
    for title, rows in sections.items():
        page += ["", f"## {title}", "", _table(rows)]
    text = "\n".join(page) + "\n"
    print(text)
    if not options.no_write:
        results = {"machine": machine, "sections": sections}
        (ROOT / "benchmarks" / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        (ROOT / "docs" / "benchmarks.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
