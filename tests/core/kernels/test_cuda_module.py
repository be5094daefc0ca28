"""The compiled CUDA module where there is no GPU: what it is linked to, that it imports, what it says when called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import resources  # noqa: E402
from ottava.cli.doctor import Check, examine  # noqa: E402
from ottava.kernels import available_backends, backends, use_backend  # noqa: E402

try:
    from ottava import _cuda
except ImportError:
    _cuda = None  # type: ignore[assignment]

needs_module = pytest.mark.skipif(_cuda is None, reason="built without CUDA kernels")
CUDA_LINE = "backend cuda"


def line(name: str) -> Check:
    return next(check for check in examine() if check.name == name)


def test_it_is_built_where_nvcc_is() -> None:
    if os.environ.get("OTTAVA_CUDA", "auto").lower() == "off" or shutil.which("nvcc") is None:
        pytest.skip("no nvcc here, or OTTAVA_CUDA=off")
    assert _cuda is not None, "nvcc is there, but ottava was built without CUDA kernels"


@needs_module
def test_it_needs_no_driver_and_no_installed_cuda() -> None:
    linked = subprocess.run(["ldd", _cuda.__file__], capture_output=True, text=True, check=True).stdout
    assert "libstdc++" in linked
    for name in ("libcuda", "libcudart", "libtorch", "libc10", "libnv", "not found"):
        assert name not in linked, linked
    # Without the compiler's own library path either.
    code = "import sys, ottava; from ottava import _cuda; print(_cuda.targets, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{_cuda.targets} False"


@needs_module
def test_it_has_code_for_each_generation_and_ptx() -> None:
    if os.environ.get("CUDAARCHS"):
        pytest.skip("CUDAARCHS has named the targets of the build")
    # CUDA 12.8 is the first to know 10.0a; whoever built the module may have had an earlier one.
    known = resources.targets() if resources.find_tool("nvcc") else ["80", "89", "90a"]
    for target in (*(f"{name}-real" for name in known), "90-virtual"):
        assert target in _cuda.targets.split()
    binary = Path(_cuda.__file__).read_bytes()
    assert len(binary) < 20 << 20


@needs_module
def test_a_call_without_a_driver_is_a_typed_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code = (
        "from ottava import _cuda; from ottava.errors import BackendError\n"
        "try: _cuda.transpose(0, 1, 1, 0, 0, 0)\n"
        "except BackendError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the current device is unknown" in done.stdout or "cannot be used" in done.stdout


@pytest.mark.parametrize(
    ("said", "expected"),
    [("OTTAVA_CUDA was off", "OTTAVA_CUDA was off when it was built"), ("", "ottava._cuda is missing")],
)
def test_a_build_without_the_module_says_why(said: str, expected: str) -> None:
    code = (
        f"import sys; from ottava import _cpu; _cpu.without_cuda = {said!r}; sys.modules['ottava._cuda'] = None\n"
        "from ottava.kernels import available_backends; print(available_backends()['cuda'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"this build of ottava has no CUDA kernels: {expected}" in done.stdout
    assert "put its nvcc on PATH" in done.stdout
    assert "OTTAVA_CUDA=on" in done.stdout


def test_doctor_says_what_the_build_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ottava.cli.doctor._gpus", lambda: [])
    check = line(CUDA_LINE)
    assert check.ok
    assert check.detail.startswith(available_backends()["cuda"])
    assert "torch sees no GPU" in check.detail
    if _cuda is not None:
        assert _cuda.targets in check.detail


def test_doctor_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "this build of ottava has no CUDA kernels: why, and what to do"
    monkeypatch.setattr(backends, "_loaded", {k: v for k, v in backends._loaded.items() if k != "cuda"})
    monkeypatch.setattr(backends, "_failures", {"cuda": reason})
    monkeypatch.setattr(backends, "_warned", {"cuda"})
    monkeypatch.setattr(backends, "_chosen", {})
    monkeypatch.setattr("ottava.cli.doctor._gpus", lambda: [])
    check = line(CUDA_LINE)
    assert check.ok
    assert check.detail == f"{reason}; torch sees no GPU that would need them"
    monkeypatch.setattr("ottava.cli.doctor._self_test", lambda device: Check(device, True, ""))
    monkeypatch.setattr("ottava.cli.doctor._gpus", lambda: ["A GPU (9.0)"])
    check = line(CUDA_LINE)
    assert not check.ok
    assert check.detail == f"A GPU (9.0) would run the slow reference: {reason}"


def test_a_gpu_without_kernels_warns_once_and_is_served_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_loaded", {k: v for k, v in backends._loaded.items() if k != "cuda"})
    monkeypatch.setattr(backends, "_failures", {"cuda": "a reason"})
    monkeypatch.setattr(backends, "_warned", set())
    monkeypatch.setattr(backends, "_chosen", {})
    with pytest.warns(RuntimeWarning, match="'cuda' kernels cannot be loaded.*a reason"):
        assert backends.backend_for("cuda") == "reference"
    backends._chosen.clear()
    assert backends.backend_for("cuda") == "reference"
    assert backends.backend_for("cpu") == "cpu"


def test_asking_for_what_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_loaded", {k: v for k, v in backends._loaded.items() if k != "cuda"})
    monkeypatch.setattr(backends, "_failures", {"cuda": "a reason"})
    with pytest.raises(Exception, match=r"a reason.*leave out use_backend"), use_backend("cuda"):
        pass
