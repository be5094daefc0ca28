"""Measures sections of the benchmarks, and writes what the docs say of them."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import cpu_model, this_kind
from benchmarks.markdown import markdown, with_part
from benchmarks.sections import FOLDER, KEPT, PARTS, RESULTS, TIMED, Settings, load

DOCS = FOLDER.parent / "docs"
# By default glibc returns large blocks to the system at once, and the next use faults their pages
# in again. That would slow the alternatives that make temporaries, and so flatter our kernels.
# glibc reads these variables when a process starts.
_VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
# Without this variable, a run that is restricted to fewer instructions would use code that Inductor
# compiled earlier for all instructions of the machine.
_VARIABLES["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
_VARIABLES["MPLBACKEND"] = "Agg"
_INTRODUCTION = """\
# Benchmarks

`python -m benchmarks` (`nox -s bench`) writes this page. It replaces the results of the kind of
machine that it runs on, and keeps the others. Ratios are of medians in one process, where the
alternatives run in turns and reuse their buffers. The allocator keeps freed memory
(`MALLOC_MMAP_MAX_=0`), because page faults would flatter the kernels. A copy (memcpy) is
`Tensor.copy_` of as many bytes in all as the kernel reads and writes. A table leaves out an
alternative that the machine does not have, that was not installed, or whose compiled code makes
other bytes than its eager code. Of an alternative that takes longer than 20 seconds a call, one
call was timed. Host time is that of the fastest of many bursts of calls."""


def _start_alike() -> None:
    """Start this program again with the variables above, unless it has been started with them."""
    if any(os.environ.get(name) != value for name, value in _VARIABLES.items()):
        os.environ.update(_VARIABLES)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])


def page(results: dict[str, Any]) -> str:
    """The page of benchmarks: a section for each kind of machine, in the order of their names."""
    paragraphs = [_INTRODUCTION]
    for kind, result in sorted(results.items()):
        measured = f"Measured on {result['date']} with torch {result['torch']}, on {result['cpu']}."
        paragraphs += [f"## {kind}", measured]
        for title, rows in result["sections"].items():
            paragraphs += [f"### {title}", markdown(rows)]
    return "\n\n".join(paragraphs) + "\n"


def _write_json(path: Path, results: Any) -> None:
    text = json.dumps(results, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def run_timed(names: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Measure sections of the page of benchmarks, and print them.

    Returns:
        The results of all kinds of machines, with that of this one replaced.
    """
    kind = str(this_kind(settings.threads))
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "cpu": cpu_model(),
        "sections": dict(TIMED[name].measure(settings) for name in names),
    }
    print(page({kind: result}))
    return dict(sorted({**load(RESULTS), kind: result}.items()))


def run_part(name: str, settings: Settings, *, docs: Path, kept: bool, write: bool) -> None:
    """Make the parts of a section; without ``write`` the text is printed and a picture discarded.

    Args:
        name: the section.
        settings: how it is run.
        docs: the folder of the pages.
        kept: whether the parts are made of the results that are kept.
        write: whether pages, pictures and results are replaced.
    """
    part = PARTS[name]
    torch.set_num_threads(part.threads or settings.threads)
    results = load(part.results) if kept and part.results else part.measure(settings)
    if part.page:
        text = part.text(results)
        print(f"{part.page}:\n\n{text}\n")
        if write:
            path = docs / part.page
            path.write_text(with_part(path.read_text("utf-8"), name, text), encoding="utf-8")
    if part.draw:
        with tempfile.TemporaryDirectory() as folder:
            picture = (docs / "_static" if write else Path(folder)) / part.picture
            part.draw(results, picture)
            print(f"{name}: a picture of {picture.stat().st_size} bytes")
    if part.results and write and not kept:
        _write_json(part.results, results)


def main(arguments: Sequence[str] | None = None, docs: Path = DOCS) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"The sections of the page of benchmarks are {', '.join(TIMED)}. They are written "
        "if all of them are measured, which is the default; some of them are only printed, because "
        "the figures of a kind of machine are of one run. The other sections write a table or a "
        f"picture of another page: {', '.join(PARTS)}.",
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="see below")
    parser.add_argument("--threads", type=int, default=2, help="2 by default")
    parser.add_argument("--rounds", type=int, default=15, help="the number of turns; 15 by default")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one turn; only prints")
    parser.add_argument("--no-write", action="store_true", help="only print")
    parser.add_argument(
        "--page-only", action="store_true", help="write what is made of the results that are kept"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - {*TIMED, *PARTS}:
        parser.error(f"no section {', '.join(unknown)}; expected {', '.join([*TIMED, *PARTS])}")
    kept, write = options.page_only, not (options.quick or options.no_write)
    settings = Settings(options.rounds, options.quick, options.threads)
    if not kept:
        _start_alike()
    names = options.sections or [*TIMED, *(KEPT if kept else ())]
    timed = [name for name in TIMED if name in names]
    if timed:
        results = load(RESULTS) if kept else run_timed(timed, settings)
        if write and (kept or len(timed) == len(TIMED)):
            _write_json(RESULTS, results)
            (docs / "benchmarks.md").write_text(page(results), encoding="utf-8")
    for name in names:
        if name in PARTS:
            run_part(name, settings, docs=docs, kept=kept, write=write)


if __name__ == "__main__":
    main()
