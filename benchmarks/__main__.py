"""Runs every benchmark, and writes the results and the page in the docs.

The results replace those of the same kind of machine in ``benchmarks/results.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import host, imports, kernels, layouts, linear, multi
from benchmarks.kind import cpu_model, this_kind
from benchmarks.markdown import markdown
from benchmarks.timing import Row, interleaved, measure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"

# By default glibc returns large blocks to the system at once, and the next use faults their pages
# in again. That would slow the alternatives that make temporaries, and so flatter our kernels.
# glibc reads these variables when a process starts.
_VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
# Without this variable, a run that is restricted to fewer instructions would use code that Inductor
# compiled earlier for all instructions of the machine.
_VARIABLES["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
_SMALL = (16, 64, 64)
_INTRODUCTION = """\
# Benchmarks

`python -m benchmarks` (`nox -s bench`) writes this page. It replaces the results of the kind of
machine that it runs on, and keeps the others. Ratios are of medians in one process, where the
alternatives run in turns and reuse their buffers. The allocator keeps freed memory
(`MALLOC_MMAP_MAX_=0`), because page faults would flatter the kernels. A copy (memcpy) is
`Tensor.copy_` of as many bytes in all as the kernel reads and writes. A table leaves out an
alternative that the machine does not have, that was not installed, or whose compiled code makes
other bytes than its eager code. Of an alternative that takes longer than 20 seconds a call, one
call was timed.
"""


def _start_alike() -> None:
    """Start this program again with the variables above, unless it has been started with them."""
    if any(os.environ.get(name) != value for name, value in _VARIABLES.items()):
        os.environ.update(_VARIABLES)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])


def page(results: dict[str, Any]) -> str:
    """The page in the docs: a section for each kind of machine, in the order of their names."""
    paragraphs = [_INTRODUCTION]
    for kind, result in sorted(results.items()):
        measured = f"Measured on {result['date']} with torch {result['torch']}, on {result['cpu']}."
        paragraphs += [f"## {kind}", measured]
        for title, rows in result["sections"].items():
            paragraphs += [f"### {title}", markdown(rows)]
    return "\n\n".join(paragraph.strip("\n") for paragraph in paragraphs) + "\n"


def merged(results: dict[str, Any], kind: str, result: dict[str, Any]) -> dict[str, Any]:
    """The results, with that of one kind of machine replaced."""
    return dict(sorted({**results, kind: result}.items()))


def sections(
    kernel_size: int, linear_sizes: list[int], rounds: int, at_most: float
) -> dict[str, list[Row]]:
    """Run all benchmarks; return the rows of each table by its title."""
    seconds = partial(interleaved, rounds=rounds, at_most=at_most, warmup=min(3, rounds))
    kernels.check_same_bytes(kernels.Set(torch.randn(256, 256).bfloat16()))
    # The times of a single round mean nothing, so compiling for it would be a waste.
    compiler = "inductor" if rounds > 1 else "eager"
    timed = [measure(timing, seconds) for timing in kernels.timings(kernel_size, compiler=compiler)]
    many = [measure(timing, seconds) for timing in multi.timings(multi.COUNT if rounds > 1 else 4)]
    product_size = 1024 if rounds > 1 else 64
    products = [measure(timing, seconds) for timing in layouts.timings(product_size)]
    layers = [measure(linear.timing(n, compiler=compiler), seconds) for n in linear_sizes]
    return {
        f"Kernels, bf16 {kernel_size}²": kernels.table(timed),
        "Shards of float32 weights, quantized as bf16": multi.table(many),
        f"Products of BF16 operands by layout, {product_size}³": layouts.table(products),
        "Linear without bias, forward and backward, BF16 in and out": linear.table(layers),
        f"Host time of a bound layer, {'x'.join(map(str, _SMALL))}, float32, one thread": _host(
            rounds
        ),
        **({"Imports": imports.measure(rounds // 2)} if rounds > 1 else {}),
    }


def _host(rounds: int) -> list[Row]:
    """The host's time for an eager step of a small layer, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return host.measure(
            _SMALL, torch.float32, torch.device("cpu"), rounds=10 * rounds, calls=10
        )
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kernel-size", type=int, default=4096)
    parser.add_argument("--linear-sizes", type=int, nargs="+", default=list(linear.SIZES))
    parser.add_argument(
        "--at-most", type=float, default=120.0, help="seconds for a row, after which three turns do"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, one turn; prints, writes nothing"
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument(
        "--page-only", action="store_true", help="write the page of the results that there are"
    )
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    if not options.page_only:
        _start_alike()
        torch.set_num_threads(options.threads)
        sizes = (options.kernel_size, options.linear_sizes, options.rounds, options.at_most)
        if options.quick:
            sizes = (256, [64], 1, 5.0)
        kind = str(this_kind(options.threads))
        result = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "torch": torch.__version__,
            "cpu": cpu_model(),
            "sections": sections(*sizes),
        }
        print(page({kind: result}))
        results = merged(results, kind, result)
    if not (options.quick or options.no_write):
        RESULTS.write_text(
            json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
