"""Whether the build makes the CUDA module: OTTAVA_CUDA, with nvcc and without it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import resources  # noqa: E402

CORE = ROOT / "packages" / "core"
NO_NVCC = {"CUDACXX": "/nowhere/nvcc"}


def reason(folder: Path) -> str:
    """What the module that is always built will say of the one that may be missing."""
    found = re.search(r'-DOTTAVA_WITHOUT_CUDA="?\\"(.*?)\\"', (folder / "build.ninja").read_text())
    assert found is not None
    return found[1]


def configure(folder: Path, *options: str, **variables: str) -> tuple[bool, str, bool]:
    """Whether CMake configures core, what it says, and whether there is a target for the module."""
    own = ("OTTAVA_CUDA", "CUDACXX", "CUDAARCHS")
    environment = {k: v for k, v in os.environ.items() if k not in own} | variables
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = ["cmake", "-G", "Ninja", "-S", str(CORE), "-B", str(folder), *options]
    command += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    rules = folder / "build.ninja"
    text = rules.read_text() if rules.exists() else ""
    return done.returncode == 0, " ".join((done.stdout + done.stderr).split()), "csrc/cuda/cast.cu" in text


def test_auto_without_nvcc_leaves_it_out_and_says_so(tmp_path: Path) -> None:
    done, said, built = configure(tmp_path, **NO_NVCC)
    assert done, said
    assert "ottava: without CUDA kernels (no nvcc that works found)" in said
    assert not built
    assert reason(tmp_path) == "no nvcc that works was found"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_an_nvcc_that_comes_later_is_found(tmp_path: Path) -> None:
    """In the folder of an earlier build, which CMake remembers much of."""
    assert not configure(tmp_path, **NO_NVCC)[2]
    done, said, built = configure(tmp_path)
    assert done, said
    assert built


def test_an_old_nvcc_is_left_alone(tmp_path: Path) -> None:
    """One that says that it is of CUDA 11."""
    given = [
        "-DCMAKE_CUDA_COMPILER_FORCED=TRUE",
        "-DCMAKE_CUDA_COMPILER_VERSION=11.8",
        "-DCMAKE_CUDA_COMPILER=/bin/true",
    ]
    done, said, built = configure(tmp_path / "auto", *given)
    assert done, said
    assert "nvcc is of CUDA 11.8, they take 12.0" in said
    assert not built
    assert reason(tmp_path / "auto") == "nvcc was older than CUDA 12.0"
    done, said, _ = configure(tmp_path / "on", *given, OTTAVA_CUDA="on")
    assert not done
    assert "nvcc is of CUDA 11.8; the kernels take 12.0 or later" in said


def test_on_without_nvcc_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    done, said, _ = configure(tmp_path, OTTAVA_CUDA="on", **NO_NVCC)
    assert not done
    assert "OTTAVA_CUDA is on, but there is no nvcc that works" in said
    assert "CUDACXX" in said
    assert "OTTAVA_CUDA=off" in said


@pytest.mark.parametrize("by_option", [True, False])
def test_off(tmp_path: Path, by_option: bool) -> None:
    options, variables = (["-DOTTAVA_CUDA=OFF"], {}) if by_option else ([], {"OTTAVA_CUDA": "off"})
    done, said, built = configure(tmp_path, *options, **variables)
    assert done, said
    assert "OTTAVA_CUDA=off" in said
    assert not built
    assert reason(tmp_path) == "OTTAVA_CUDA was off"


def test_another_value_is_refused(tmp_path: Path) -> None:
    done, said, _ = configure(tmp_path, OTTAVA_CUDA="maybe")
    assert not done
    assert "OTTAVA_CUDA is 'maybe'; expected on, off or auto" in said


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_auto_with_nvcc_builds_it_for_all_generations(tmp_path: Path) -> None:
    done, said, built = configure(tmp_path)
    assert done, said
    assert built
    assert reason(tmp_path) == ""
    rules = (tmp_path / "build.ninja").read_text()
    for target in (*(f"sm_{name}" for name in resources.targets()), "compute_90"):
        assert target in rules
    assert "-fmad=false" in rules
    assert "fast_math" not in rules
    assert "cudart_static" in rules
    by_option = configure(tmp_path / "option", "-DCMAKE_CUDA_ARCHITECTURES=90a-real", CUDAARCHS="80-real")
    assert by_option[0]
    assert "ottava: CUDA kernels for 90a-real" in by_option[1]
    by_variable = configure(tmp_path / "variable", CUDAARCHS="80-real;90-virtual")
    assert by_variable[0]
    assert "ottava: CUDA kernels for 80-real 90-virtual" in by_variable[1]
