"""The kind of machine that figures belong to.

A kind consists of the properties that change figures by more than a few percent, and no others.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_MACHINES = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "arm64"}
_SETS = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "portable": "portable kernels"}

# Environment variables of torch, oneDNN, MKL and this project that restrict a machine.
_FORCES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "OTTAVA_ISA",
    "OTTAVA_CPU_PRODUCT",
)


@dataclass(frozen=True)
class Kind:
    """A kind of machine and process.

    Attributes:
        machine: the architecture, as ``platform.machine()`` names it.
        isa: the instruction set of the kernels.
        fast_bf16: whether oneDNN supports BF16 on this machine.
        threads: the number of threads.
        forced: environment variables that restrict the machine, with their values.
        amx: whether the processor multiplies tiles of BF16, several times faster than vectors.
    """

    machine: str
    isa: str
    fast_bf16: bool
    threads: int
    forced: str = ""
    amx: bool = False

    def __str__(self) -> str:
        machine = _MACHINES.get(self.machine.lower(), self.machine)
        bf16 = ("BF16 by AMX" if self.amx else "fast BF16") if self.fast_bf16 else "no fast BF16"
        forced = f", forced by {self.forced}" if self.forced else ""
        return f"{machine}, {_SETS.get(self.isa, self.isa)}, {bf16}, {self.threads} threads{forced}"


def this_kind(threads: int) -> Kind:
    """The kind of this machine and process."""
    from ottava.kernels import cpu
    from ottava.torch_private import mkldnn_bf16_supported

    return Kind(
        platform.machine(),
        cpu.BACKEND.native.isa(),
        mkldnn_bf16_supported(),
        threads,
        forced=" ".join(f"{name}={os.environ[name]}" for name in _FORCES if os.environ.get(name)),
        # A variable that restricts oneDNN may exclude AMX. Then AMX does not count, and the
        # variable is in the kind's name.
        amx=not os.environ.get("ONEDNN_MAX_CPU_ISA") and "amx_bf16" in _cpuinfo("flags").split(),
    )


def _cpuinfo(field: str, path: Path = Path("/proc/cpuinfo")) -> str:
    """The value of a field for the first processor; empty where the system does not give it."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the system gives it, for information only."""
    return _cpuinfo("model name", path) or platform.processor() or "unknown"
