"""What kind of machine figures belong to: what makes them differ by more than a few percent, and no
more than that."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_MACHINES = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "arm64"}
_SETS = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "portable": "portable kernels"}

# Variables of torch, oneDNN, MKL and this project that have a machine taken for a lesser one.
_FORCES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "OTTAVA_ISA",
    "OTTAVA_CPU_PRODUCT",
)


@dataclass(frozen=True)
class Kind:
    """Architecture, the kernels' instruction set, how torch multiplies BF16, threads, and what
    forces that.

    Attributes:
        amx: whether the processor multiplies tiles of BF16, several times faster than by vectors.
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
    """Of this machine and process."""
    from ottava.kernels import cpu
    from ottava.torch_private import mkldnn_bf16_supported

    forced = " ".join(f"{name}={os.environ[name]}" for name in _FORCES if os.environ.get(name))
    # What holds oneDNN to fewer instructions may hold it to those without AMX; it stands in the
    # kind's name then.
    amx = not os.environ.get("ONEDNN_MAX_CPU_ISA") and "amx_bf16" in _cpuinfo("flags").split()
    return Kind(
        platform.machine(), cpu.BACKEND.native.isa(), mkldnn_bf16_supported(), threads, forced, amx
    )


def _cpuinfo(field: str, path: Path = Path("/proc/cpuinfo")) -> str:
    """Of the first processor; empty where the system does not say."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next(
        (
            line.partition(":")[2].strip()
            for line in lines
            if line.partition(":")[0].strip() == field
        ),
        "",
    )


def cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the system gives it, for information."""
    return _cpuinfo("model name", path) or platform.processor() or "unknown"
