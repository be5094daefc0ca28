"""Shows what the CUDA compiler reports of each kernel.

``python -m benchmarks.resources`` prints registers, spills, stack frame and shared memory of every
kernel for every target; ``--write`` writes the table to ``docs/gpu_resources.md``. It needs no GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.checkout import find_tool

ROOT = Path(__file__).resolve().parents[1]
CUDA = ROOT / "packages" / "core" / "csrc" / "cuda"
PAGE = ROOT / "docs" / "gpu_resources.md"
#: Compute capability as nvcc names it -> the first release of nvcc that supports it.
TARGETS = {"80": (11, 0), "89": (11, 8), "90a": (12, 0), "100a": (12, 8)}
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Xptxas", "-v", "-cubin"]

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SHORT = (
    (r"\bottava::(cuda::)?", ""),
    (r"\(anonymous namespace\)::", ""),
    (r"\bunsigned char\b", "uint8"),
)


@dataclass(frozen=True)
class Kernel:
    """One kernel for one target; sizes in bytes."""

    file: str
    name: str
    target: str
    registers: int
    spilled: int
    stack: int
    shared: int


def sources() -> list[Path]:
    """The files that the build compiles, from its own list."""
    listed = re.findall(r"/(\w+\.cu)\b", (CUDA / "kernels.cmake").read_text(encoding="utf-8"))
    return [CUDA / name for name in listed]


def _nvcc() -> str:
    nvcc = find_tool("nvcc")
    if nvcc is None:
        raise FileNotFoundError("nvcc not found; install the CUDA toolkit, or put nvcc on PATH")
    return nvcc


def release() -> str:
    """The release of nvcc, such as ``13.0``."""
    text = subprocess.run([_nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else "99.0"


def targets() -> list[str]:
    """The targets that this nvcc supports."""
    own = tuple(int(number) for number in release().split("."))
    return [name for name, first in TARGETS.items() if own >= first]


def demangled(names: Iterable[str]) -> dict[str, str]:
    """The name of each kernel in the sources, by its mangled name.

    It is the mangled name itself where there is no c++filt.
    """
    mangled = list(names)
    program = find_tool("c++filt") or find_tool("cu++filt")
    if program is None or not mangled:
        return {name: name for name in mangled}
    process = subprocess.run(
        [program], input="\n".join(mangled), capture_output=True, text=True, check=True
    )
    lines = process.stdout.splitlines()
    return {name: _short(text) for name, text in zip(mangled, lines, strict=True)}


def _short(text: str) -> str:
    """The struct of ``void ottava::cuda::grid<Struct<...> >(Struct<...>)``."""
    match = re.match(r"void (?:\w+::)*grid<(.*)>\(", text)
    name = (match[1] if match else text).strip()
    for pattern, by in _SHORT:
        name = re.sub(pattern, by, name)
    return re.sub(r" +>", ">", name).replace("(bool)1", "true").replace("(bool)0", "false")


def parse(file: str, output: str) -> list[Kernel]:
    """The kernels in the output of ``ptxas -v`` for one file and target; names are mangled."""
    kernels: list[Kernel] = []
    entry: tuple[str, str] | None = None
    frame = (0, 0, 0)
    for line in output.splitlines():
        if match := _ENTRY.search(line):
            entry, frame = (match[1], match[2]), (0, 0, 0)
        elif match := _FRAME.search(line):
            frame = (int(match[1]), int(match[2]), int(match[3]))
        elif (match := _USED.search(line)) and entry is not None:
            shared = _SHARED.search(line)
            spilled = frame[1] + frame[2]
            kernels.append(
                Kernel(
                    file, *entry, int(match[1]), spilled, frame[0], int(shared[1]) if shared else 0
                )
            )
            entry = None
    return kernels


def compile_one(source: Path, target: str, folder: Path) -> list[Kernel]:
    """Compile one file for one target, and return its kernels.

    Raises:
        RuntimeError: it does not compile; the message has nvcc's output.
    """
    cubin = folder / f"{source.stem}.{target}.cubin"
    machine = f"-gencode=arch=compute_{target},code=sm_{target}"
    process = subprocess.run(
        [_nvcc(), *FLAGS, machine, "-o", str(cubin), str(source)], capture_output=True, text=True
    )
    if process.returncode:
        raise RuntimeError(f"{source.name} for sm_{target}:\n{process.stderr[-4000:]}")
    return parse(source.name, process.stderr + process.stdout)


def measure(requested: list[str] | None = None, workers: int = 2) -> list[Kernel]:
    """Every kernel of every file for the requested targets, by default all that nvcc supports."""
    selection = targets() if requested is None else requested
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):
        jobs = [
            pool.submit(compile_one, source, target, Path(folder))
            for source in sources()
            for target in selection
        ]
        kernels = [kernel for job in jobs for kernel in job.result()]
    names = demangled({kernel.name for kernel in kernels})
    return [replace(kernel, name=names[kernel.name]) for kernel in kernels]


def table(kernels: list[Kernel]) -> str:
    """A table with one line for each kernel and one column for each target.

    Cells have registers, and stack and spills if there are any; the last column is shared memory.
    """
    columns = [target for target in TARGETS if any(k.target == target for k in kernels)]
    lines = ["| file | kernel | " + " | ".join(f"sm_{c}" for c in columns) + " | shared memory |"]
    lines += ["|---" * (len(columns) + 3) + "|"]
    by_kernel: dict[tuple[str, str], dict[str, Kernel]] = {}
    for kernel in kernels:
        by_kernel.setdefault((kernel.file, kernel.name), {})[kernel.target] = kernel
    for (file, name), by_target in sorted(by_kernel.items()):
        cells = [_cell(by_target.get(column)) for column in columns]
        shared = max(kernel.shared for kernel in by_target.values())
        lines.append(f"| {file} | `{name}` | {' | '.join(cells)} | {shared} |")
    return "\n".join(lines)


def _cell(kernel: Kernel | None) -> str:
    if kernel is None:
        return "-"
    if not (kernel.stack or kernel.spilled):
        return str(kernel.registers)
    return f"{kernel.registers}, {kernel.stack} of stack, {kernel.spilled} spilled"


def page(results: list[Kernel]) -> str:
    """The page in the docs."""
    spilling = sum(1 for k in results if k.spilled or k.stack)
    words = (
        f"{spilling or 'none'} of the results {'has' if spilling < 2 else 'have'} a stack "
        f"frame or spills"
    )
    kernels = len({(k.file, k.name) for k in results})
    targets_count = len({k.target for k in results})
    return "\n".join(
        [
            "# Registers and shared memory of the CUDA kernels",
            "",
            "Written by `python -m benchmarks.resources --write`: what the compiler "
            f"(nvcc {release()}) says of",
            "each kernel. Numbers are registers of a thread for each target, and bytes of shared "
            "memory of a block.",
            f"{kernels} kernels for {targets_count} targets: {words}.",
            "",
            table(results),
            "",
        ]
    )


def main() -> int:
    """Compile, print and write; returns 1 if a kernel spills."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resources", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    kernels = measure(workers=options.workers)
    text = page(kernels)
    print(text)
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    return 1 if any(k.spilled or k.stack for k in kernels) else 0


if __name__ == "__main__":
    sys.exit(main())
