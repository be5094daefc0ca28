"""The compiled CUDA module where there is no GPU: what it is linked to, that it imports, what it
says when called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import resources  # noqa: E402
from benchmarks.checkout import compile_modules  # noqa: E402
from ottava.cli import doctor  # noqa: E402
from ottava.cli.doctor import Check, examine  # noqa: E402
from ottava.kernels import backends, use_backend  # noqa: E402

try:
    from ottava import _cuda
except ImportError:
    _cuda = None  # type: ignore[assignment]

# Compiling it for one target takes over a minute.
needs_module = pytest.mark.slow if _cuda is None else lambda test: test
CUDA_LINE = "backend cuda"


def line(name: str) -> Check:
    return next(check for check in examine() if check.name == name)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed module, or one that is built here."""
    if _cuda is not None:
        return Path(_cuda.__file__)
    if resources.find_tool("nvcc") is None:
        pytest.skip("no nvcc here")
    built = compile_modules(tmp_path_factory.mktemp("build"), "90-virtual")
    return next(path for path in built if path.name.startswith("_cuda"))


def call(module: Path, code: str) -> str:
    """What a process prints that has this module, and no torch."""
    first = (
        f"import ottava; ottava.__path__.append({str(module.parent)!r}); from ottava import _cuda\n"
    )
    done = subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_is_built_where_it_was_asked_for() -> None:
    asked = os.environ.get("OTTAVA_CUDA", "auto").lower()
    if (
        asked == "off"
        or (asked == "auto" and not torch.cuda.is_available())
        or resources.find_tool("nvcc") is None
    ):
        pytest.skip("no nvcc here, or nothing that asks for CUDA kernels")
    assert _cuda is not None, "nvcc and a GPU are there, but ottava was built without CUDA kernels"


@needs_module
def test_it_needs_no_driver_and_no_installed_cuda(module: Path) -> None:
    linked = subprocess.run(["ldd", str(module)], capture_output=True, text=True, check=True).stdout
    assert "libstdc++" in linked
    for name in ("libcuda", "libcudart", "libtorch", "libc10", "libnv", "not found"):
        assert name not in linked, linked
    # Without the compiler's own library path either.
    assert call(module, "import sys; print('torch' in sys.modules)") == "False"


@needs_module
def test_it_says_what_it_has_code_for(module: Path) -> None:
    targets = call(module, "print(_cuda.targets)").split()
    asked = os.environ.get("OTTAVA_CUDA", "").lower()
    if _cuda is None:
        assert targets == ["90-virtual"]
    elif asked == "on" and not os.environ.get("CUDAARCHS"):
        # CUDA 12.8 is the first to know 10.0a; whoever built the module may have had an earlier
        # one.
        known = resources.targets() if resources.find_tool("nvcc") else ["80", "89", "90a"]
        assert {*(f"{name}-real" for name in known), "90-virtual"} <= set(targets)
    assert targets
    assert len(module.read_bytes()) < 20 << 20


@needs_module
def test_a_call_without_a_driver_is_a_typed_error(module: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said = call(
        module,
        "from ottava.errors import BackendError\n"
        "try: _cuda.transpose(0, 1, 1, 0, 0, 0)\n"
        "except BackendError as error: print(error)",
    )
    assert "the current device is unknown" in said or "cannot be used" in said


# Targets of a module, the GPUs that torch sees, and what comes of it.
SERVED = [
    ("90a-real", [], "served"),
    ("90a-real", [(9, 0)], "served"),
    ("80-real", [(8, 0), (8, 9)], "served"),
    ("80-real 90-virtual", [(12, 0)], "served"),
    ("89-real", [(8, 0)], "were built for 89-real; here it is 8.0: reinstall ottava from source"),
    ("90a-real", [(10, 0)], "were built for 90a-real; here it is 10.0"),
    ("100a-real", [(10, 3)], "here it is 10.3"),
    ("100f", [(10, 3)], "served"),
    ("90a-virtual", [(10, 0)], "here it is 10.0"),
    ("90-virtual", [(8, 9)], "here it is 8.9"),
    ("89-real", [(8, 9), (9, 0)], "here it is 8.9, 9.0"),
    ("native", [(9, 0)], "served"),
    (
        "75 80-real",
        [(7, 5), (8, 0)],
        "are for compute capability 8.0 and later; here it is 7.5, 8.0; hide",
    ),
]
STAND_IN = f"""
import json, sys, types, torch, ottava
answers = []
for targets, gpus, _ in {SERVED!r}:
    ottava._cuda = sys.modules["ottava._cuda"] = types.SimpleNamespace(
        targets=targets, cast=None, scratch_floats=0
    )
    torch.cuda.is_available = lambda: gpus != []
    torch.cuda.device_count = lambda: len(gpus)
    torch.cuda.get_device_capability = lambda index: gpus[index]
    sys.modules.pop("ottava.kernels.cuda", None)
    try:
        import ottava.kernels.cuda
        answers.append("served")
    except ImportError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def test_a_gpu_that_it_has_no_code_for_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", STAND_IN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (targets, gpus, said), answer in zip(SERVED, json.loads(done.stdout), strict=True):
        assert said in answer, (targets, gpus, answer)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "when it was built, OTTAVA_CUDA was off: build it",
            "when it was built, OTTAVA_CUDA was off: build it",
        ),
        ("", "ottava._cuda is missing: reinstall ottava from source"),
    ],
)
def test_a_build_without_the_module_says_why(said: str, expected: str) -> None:
    code = (
        f"import sys; from ottava import _cpu; _cpu.without_cuda = {said!r}; "
        f"sys.modules['ottava._cuda'] = None\n"
        "from ottava.kernels import available_backends; print(available_backends()['cuda'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"this build of ottava has no CUDA kernels: {expected}"


@pytest.mark.parametrize("gpus", [[], ["A GPU (9.0)"]])
def test_doctor_says_what_was_built_and_where_it_has_run(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str]
) -> None:
    monkeypatch.setattr("ottava.cli.doctor._gpus", lambda: gpus)
    monkeypatch.setattr("ottava._cuda", SimpleNamespace(targets="90a-real"), raising=False)
    check = doctor._backend("cuda", "available")
    assert check.ok
    assert (
        check.detail == f"built for 90a-real; {backends.RUN_ON['cuda']}; "
        f"{gpus[0] if gpus else 'torch sees no GPU'}"
    )
    assert "compute capability 9.0 (H100)" in check.detail


def test_doctor_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "this build of ottava has no CUDA kernels: why, and what to do"
    monkeypatch.setattr(
        backends, "_loaded", {k: v for k, v in backends._loaded.items() if k != "cuda"}
    )
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


def test_a_gpu_without_kernels_warns_once_and_is_served_by_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        backends, "_loaded", {k: v for k, v in backends._loaded.items() if k != "cuda"}
    )
    monkeypatch.setattr(backends, "_failures", {"cuda": "a reason"})
    monkeypatch.setattr(backends, "_warned", set())
    monkeypatch.setattr(backends, "_chosen", {})
    with pytest.warns(RuntimeWarning, match="'cuda' kernels cannot be loaded.*a reason"):
        assert backends.backend_for("cuda") == "reference"
    backends._chosen.clear()
    assert backends.backend_for("cuda") == "reference"
    assert backends.backend_for("cpu") == "cpu"


def test_asking_for_what_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backends, "_loaded", {k: v for k, v in backends._loaded.items() if k != "cuda"}
    )
    monkeypatch.setattr(backends, "_failures", {"cuda": "a reason"})
    with pytest.raises(Exception, match=r"a reason.*leave out use_backend"), use_backend("cuda"):
        pass
