"""The CUDA kernels without a GPU: their module compiled as C++, and the backend on top of it,
serving CPU tensors.

The module runs the threads of each block one after the other (csrc/sequential.h); everything above
it, the launches with their grids and the Python of the backend, is what runs on a GPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import ottava
from ottava.kernels import backends

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "packages" / "core" / "csrc", Path(__file__).parent / "csrc")


def _fingerprint(*extra: str) -> str:
    digest = hashlib.sha256(" ".join((sys.version, *extra)).encode())
    for folder in SOURCES:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(*options: str) -> Path:
    """The compiled module, made once for each state of its sources."""
    folder = (
        Path(tempfile.gettempdir()) / f"ottava-sequential-{os.getuid()}-{_fingerprint(*options)}"
    )
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = list(folder.glob("_sequential*.so"))
        if not found:
            import pybind11

            build = folder / "build"
            configure = [
                "cmake",
                "-G",
                "Ninja",
                "-S",
                str(SOURCES[1]),
                "-B",
                str(build),
                "-DOTTAVA_SEQUENTIAL=ON",
            ]
            configure += [
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                f"-DPython_EXECUTABLE={sys.executable}",
            ]
            environment = os.environ | {
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            }
            for command in (
                [*configure, *options],
                ["cmake", "--build", str(build), "--parallel", "2"],
            ):
                done = subprocess.run(command, capture_output=True, text=True, env=environment)
                assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
            (made,) = build.glob("_sequential*.so")
            found = [made.rename(folder / made.name)]
    return found[0]


@cache
def module() -> ModuleType:
    """The module, imported."""
    # Options of the build, for the sanitizers.
    path = build(*os.environ.get("OTTAVA_GRID_BUILD", "").split())
    spec = importlib.util.spec_from_file_location("_sequential", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@cache
def backend() -> Any:
    """The kernels of ``ottava.kernels.cuda`` on top of that module; the real one, if there is one,
    is left alone."""
    real = sys.modules.pop("ottava.kernels.cuda", None)
    native = (getattr(ottava, "_cuda", None), sys.modules.get("ottava._cuda"))
    ottava._cuda = sys.modules["ottava._cuda"] = module()  # type: ignore[attr-defined]
    try:
        made = importlib.import_module("ottava.kernels.cuda").BACKEND
        made.stream = lambda x: (0, 0)
        del sys.modules["ottava.kernels.cuda"]
    finally:
        sys.modules.pop("ottava._cuda")
        del ottava._cuda  # type: ignore[attr-defined]
        if native[0] is not None:
            ottava._cuda = native[0]  # type: ignore[attr-defined]
        if native[1] is not None:
            sys.modules["ottava._cuda"] = native[1]
        if real is not None:
            sys.modules["ottava.kernels.cuda"] = real
    return made


@contextmanager
def serving_cpu() -> Iterator[Any]:
    """Inside, the CUDA backend serves CPU tensors."""
    before = backends._loaded.get("cuda"), backends._SERVES["cuda"]
    backends._loaded["cuda"], backends._SERVES["cuda"] = backend(), ("cuda", "cpu")
    try:
        with backends.use_backend("cuda"):
            yield backend()
    finally:
        backends._SERVES["cuda"] = before[1]
        backends._loaded.pop("cuda")
        if before[0] is not None:
            backends._loaded["cuda"] = before[0]
