"""Runs every benchmark, writes ``benchmarks/results.json`` and ``docs/benchmarks.md``."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

from benchmarks import imports, kernels, linear

ROOT = Path(__file__).parents[1]


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
    torch.set_num_threads(options.threads)
    from ottava.kernels import cpu

    sections = {
        f"Kernels, bf16 {options.kernel_size}²": kernels.measure(options.kernel_size, options.rounds),
        f"Linear, forward and backward, {options.linear_size}³": linear.measure(options.linear_size, options.rounds),
        "Imports": imports.measure(options.rounds // 2),
    }
    machine = f"{options.threads} threads, {cpu.isa()}, {platform.machine()}, torch {torch.__version__}"
    page = [
        "# Benchmarks",
        "",
        "Written by `python -m benchmarks` (`nox -s bench`). Ratios are of medians in one process, alternatives run in",
        "turns, buffers reused. Memcpy is `Tensor.copy_` of as many bytes in all as the kernel reads and writes.",
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
