"""Whether the build makes the CUDA module, and for what: OTTAVA_CUDA, with and without an nvcc and
a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest

from benchmarks import resources

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages" / "core"
DECIDE = CORE / "csrc" / "cuda" / "decide.cmake"
NO_NVCC = {"CUDACXX": "/nowhere/nvcc"}
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
OLD_NVCC = [
    "-DCMAKE_CUDA_COMPILER_FORCED=TRUE",
    "-DCMAKE_CUDA_COMPILER_VERSION=11.8",
    "-DCMAKE_CUDA_COMPILER=/bin/true",
]


def program(folder: Path, name: str, *lines: str, code: int = 0) -> Path:
    """A program that prints these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines), f"exit {code}"]))
    path.chmod(0o755)
    return path


def reason(folder: Path) -> str:
    """What the module that is always built will say of the one that may be missing."""
    found = re.search(r'-DOTTAVA_WITHOUT_CUDA="?\\"(.*?)\\"', (folder / "build.ninja").read_text())
    assert found is not None
    return found[1].replace("\\", "")


def configure(
    folder: Path, *options: str, gpus: tuple[str, ...] = (), **variables: str
) -> tuple[bool, str, str]:
    """Whether CMake configures core where there are these GPUs, what it says, and the targets of
    the CUDA module."""
    own = ("OTTAVA_CUDA", "CUDACXX", "CUDAARCHS", "CMAKE_ARGS")
    environment = {k: v for k, v in os.environ.items() if k not in own} | variables
    tools = folder.with_name(f"{folder.name}-tools")
    program(tools, "nvidia-smi", *(gpus or ("No devices were found",)), code=0 if gpus else 6)
    environment["PATH"] = os.pathsep.join(
        [str(tools), str(Path(sys.executable).parent), environment["PATH"]]
    )
    # What an earlier run in this folder was told is forgotten.
    command = ["cmake", "-G", "Ninja", "-S", str(CORE), "-B", str(folder)]
    command += [
        "-UOTTAVA_CUDA",
        "-UCMAKE_CUDA_COMPILER*",
        *options,
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    said = " ".join((done.stdout + done.stderr).split())
    targets = re.search(r"ottava: CUDA kernels for ([\w -]+?) --", said)
    rules = folder / "build.ninja"
    text = rules.read_text() if rules.exists() else ""
    if done.returncode == 0:
        # Otherwise the rules of an earlier run lie there still.
        assert ("csrc/cuda/cast.cu" in text) == (targets is not None)
    return done.returncode == 0, said, targets[1] if targets else ""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that tests share, because CMake looks for a C++ compiler in each new one."""
    return tmp_path_factory.mktemp("builds") / "build"


#: GPUs, options, variables; the reason that the module states, and the remedy.
LEFT_OUT: dict[str, tuple[tuple[str, ...], list[str], dict[str, str], str, str]] = {
    "neither": ((), [], NO_NVCC, "there was no nvcc, and nvidia-smi saw no GPU",
                "put the nvcc of CUDA 12.0 or later on PATH"),
    "no GPU": ((), OLD_NVCC, {}, "nvidia-smi saw no GPU",
               "reinstall ottava from source with OTTAVA_CUDA=on"),
    "no nvcc": (("9.0",), [], NO_NVCC, "there was a GPU but no nvcc that works",
                "put the nvcc of CUDA 12.0"),
    "old nvcc": (("9.0",), OLD_NVCC, {}, "there was a GPU but nvcc was of CUDA 11.8",
                 "put the nvcc of CUDA 12.0"),
    "old GPUs": (("7.5", "6.1"), OLD_NVCC, {},
                 "the GPU is of compute capability 6.1 and 7.5 and the kernels take 8.0", "on"),
    "off": (("9.0",), [], {"OTTAVA_CUDA": "off"}, "OTTAVA_CUDA was off", "without it"),
    "off by option": (("9.0",), ["-DOTTAVA_CUDA=OFF"], {}, "OTTAVA_CUDA was off", "without it"),
}  # fmt: skip
#: Options and variables; what the error says.
REFUSED: dict[str, tuple[list[str], dict[str, str], str]] = {
    "on without nvcc": ([], {"OTTAVA_CUDA": "on", **NO_NVCC},
                        "OTTAVA_CUDA is on, but there is no nvcc that works"),
    "on with an old nvcc": (OLD_NVCC, {"OTTAVA_CUDA": "on"}, "nvcc is of CUDA 11.8"),
    "maybe": ([], {"OTTAVA_CUDA": "maybe"}, "OTTAVA_CUDA is 'maybe'; expected on, off or auto"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_OUT)
def test_it_is_left_out_and_the_build_says_why(build: Path, case: str) -> None:
    gpus, options, variables, said, remedy = LEFT_OUT[case]
    done, output, targets = configure(build, *options, gpus=gpus, **variables)
    assert done, output
    assert f"ottava: without CUDA kernels ({said}" in output
    assert targets == ""
    compiled_in = reason(build)
    assert compiled_in.startswith(f"when it was built, {said}")
    assert remedy in compiled_in.partition(": ")[2]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_built_is_an_error_with_a_remedy(build: Path, case: str) -> None:
    options, variables, said = REFUSED[case]
    done, output, _ = configure(build, *options, gpus=("9.0",), **variables)
    assert not done
    assert said in output
    if case != "maybe":
        assert "OTTAVA_CUDA=off" in output


@pytest.mark.slow
@needs_nvcc
def test_an_nvcc_and_a_gpu_are_found_when_they_come_later(tmp_path: Path) -> None:
    """All in one folder, of which CMake remembers much."""
    folder = tmp_path / "build"
    assert configure(folder, **NO_NVCC)[2] == ""
    done, said, targets = configure(folder, gpus=("9.0",))
    assert done, said
    assert (targets, reason(folder)) == ("90a-real", "")
    rules = (folder / "build.ninja").read_text()
    assert set(re.findall(r"sm_\w+|code=\[?compute_\w+", rules)) == {"sm_90a"}
    assert "-fmad=false" in rules
    assert "fast_math" not in rules
    assert "cudart_static" in rules
    named = {"CUDAARCHS": "80-real;90-virtual"}
    assert configure(folder, gpus=("8.9", "8.0", "7.5"))[2] == "80-real 89-real"
    assert configure(folder, gpus=("9.0",), **named)[2] == "80-real 90-virtual"
    assert configure(folder)[2] == ""
    # Whatever GPU is here, or none.
    every = [*(f"{name}-real" for name in resources.targets()), "90-virtual"]
    for gpus in ((), ("8.9",)):
        assert configure(folder, gpus=gpus, OTTAVA_CUDA="on")[2].split() == every
    assert configure(folder, OTTAVA_CUDA="on", **named)[2] == "80-real 90-virtual"
    option = "-DCMAKE_CUDA_ARCHITECTURES=90a-real"
    assert configure(tmp_path / "named", option, OTTAVA_CUDA="on", **named)[2] == "90a-real"


def ask(folder: Path, calls: list[str]) -> list[list[str]]:
    """What functions of decide.cmake put into A and B."""
    blocks = [f'{call}\nmessage("<${{A}}|${{B}}>")\nunset(A)\nunset(B)' for call in calls]
    script = folder / "ask.cmake"
    script.write_text("\n".join([f"include({DECIDE})", *blocks]))
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    assert cmake is not None
    done = subprocess.run([cmake, "-P", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [found.split("|") for found in re.findall("<(.*)>", done.stderr)]


#: What nvidia-smi prints and returns; None where there is none.
GPUS: list[tuple[list[str] | None, int, str]] = [
    (["9.0"], 0, "9.0"),
    (["10.0", "9.0", "8.6", "9.0"], 0, "8.6;9.0;10.0"),
    (["7.5", "8.0"], 0, "8.0"),
    (["7.5"], 0, ""),
    ([], 0, ""),
    (["NVIDIA-SMI has failed because it could not communicate with driver 12.0"], 9, ""),
    (["[N/A]"], 0, ""),
    (None, 0, ""),
]


def test_gpus_are_those_that_nvidia_smi_names(tmp_path: Path) -> None:
    calls = []
    for number, (lines, code, _) in enumerate(GPUS):
        folder = tmp_path / str(number)
        path = str(folder)
        if lines is not None:
            program(folder, "nvidia-smi", *lines, code=code)
            path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        calls.append(f'set(ENV{{PATH}} "{path}")\nottava_gpus(A B)')
    for (found, why_not), (lines, _, expected) in zip(ask(tmp_path, calls), GPUS, strict=True):
        assert found == expected, lines
        assert why_not, lines
        assert lines is not None or why_not == "nvidia-smi saw no GPU"


def test_targets_are_those_that_nvcc_knows(tmp_path: Path) -> None:
    """The driver compiles PTX for a GPU that is younger than the toolkit."""
    known = [f"compute_{number}" for number in (75, 80, 86, 89, 90, 100, 103)]
    nvcc = program(tmp_path, "nvcc", *known)
    targets = {
        "9.0": "90a-real",
        "8.0;8.6;8.9": "80-real;86-real;89-real",
        "10.0": "100a-real",
        "12.0;12.1": "90-virtual",
        "9.0;13.0": "90a-real;90-virtual",
    }
    answers = ask(tmp_path, [f'ottava_targets(A {nvcc} "{one}")' for one in targets])
    assert [answer[0] for answer in answers] == list(targets.values())
