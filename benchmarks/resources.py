"""What the CUDA compiler reports of each kernel: registers, spills, stack frame, shared memory."""

from __future__ import annotations

import concurrent.futures
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.checkout import ROOT, find_tool
from benchmarks.markdown import markdown
from benchmarks.timing import Row

CUDA = ROOT / "packages" / "core" / "csrc" / "cuda"
#: Compute capability as nvcc names it -> the first release of nvcc that supports it.
TARGETS = {"80": (11, 0), "89": (11, 8), "90a": (12, 0), "100a": (12, 8)}
#: Targets and files of a quick run.
QUICK = (["80"], [CUDA / "data.cu"])
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Xptxas", "-v", "-cubin"]

_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for 'sm_(?P<target>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers"
    r"(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.S,
)
#: What is left out of names, or written shorter.
_SHORT = (
    (r"\bottava::(cuda::)?|\(anonymous namespace\)::", ""),
    (r"\bunsigned char\b", "uint8"),
    (r" +>", ">"),
    (r"\(bool\)1", "true"),
    (r"\(bool\)0", "false"),
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

    def __str__(self) -> str:
        if not (self.stack or self.spilled):
            return str(self.registers)
        return f"{self.registers}, {self.stack} of stack, {self.spilled} spilled"


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
    output = subprocess.run(
        [program], input="\n".join(mangled), capture_output=True, text=True, check=True
    ).stdout
    return {name: _short(text) for name, text in zip(mangled, output.splitlines(), strict=True)}


def _short(text: str) -> str:
    """The struct of ``void ottava::cuda::grid<Struct<...> >(Struct<...>)``."""
    match = re.match(r"void (?:\w+::)*grid<(.*)>\(", text)
    name = (match[1] if match else text).strip()
    for pattern, replacement in _SHORT:
        name = re.sub(pattern, replacement, name)
    return name


def parse(file: str, output: str) -> list[Kernel]:
    """The kernels in the output of ``ptxas -v`` for one file and target; names are mangled."""
    return [
        Kernel(
            file,
            match["name"],
            match["target"],
            registers=int(match["registers"]),
            spilled=int(match["stores"]) + int(match["loads"]),
            stack=int(match["stack"]),
            shared=int(match["shared"] or 0),
        )
        for match in _KERNEL.finditer(output)
    ]


def _compile(source: Path, target: str, folder: str) -> list[Kernel]:
    """Compile one file for one target, and return its kernels.

    Raises:
        RuntimeError: it does not compile; the message has nvcc's output.
    """
    machine = f"-gencode=arch=compute_{target},code=sm_{target}"
    cubin = str(Path(folder) / f"{source.stem}.{target}.cubin")
    command = [_nvcc(), *FLAGS, machine, "-o", cubin, str(source)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{source.name} for sm_{target}:\n{process.stderr[-4000:]}")
    return parse(source.name, process.stderr + process.stdout)


def measure(requested: list[str] | None = None, files: list[Path] | None = None) -> list[Kernel]:
    """Every kernel of the files, by default all, for the targets, by default all of this nvcc."""
    selection = [
        (source, target) for source in files or sources() for target in requested or targets()
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        jobs = [pool.submit(_compile, source, target, folder) for source, target in selection]
        kernels = [kernel for job in jobs for kernel in job.result()]
    names = demangled({kernel.name for kernel in kernels})
    return [replace(kernel, name=names[kernel.name]) for kernel in kernels]


def text(kernels: list[Kernel]) -> str:
    """What the page says, with a line for each kernel and a column for each target."""
    columns = [target for target in TARGETS if any(k.target == target for k in kernels)]
    rows: dict[tuple[str, str], Row] = {}
    for file, name in sorted({(k.file, k.name) for k in kernels}):
        by_target = {k.target: k for k in kernels if (k.file, k.name) == (file, name)}
        rows[file, name] = {
            "file": file,
            "kernel": f"`{name}`",
            **{f"sm_{column}": by_target.get(column) for column in columns},
            "shared memory": max(kernel.shared for kernel in by_target.values()),
        }
    spilling = sum(1 for k in kernels if k.spilled or k.stack)
    return (
        f"{len(rows)} kernels for {len(columns)} targets by nvcc {release()}; {spilling or 'none'} "
        f"of the {len(kernels)} results with a stack frame or spills.\n\n"
        f"{markdown(list(rows.values()))}"
    )
