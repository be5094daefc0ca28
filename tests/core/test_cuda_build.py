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
ALL = (
    [*(f"{name}-real" for name in resources.targets()), "90-virtual"]
    if shutil.which("nvcc")
    else []
)


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
    command = ["cmake", "-G", "Ninja", "-S", str(CORE), "-B", str(folder), *options]
    command += [
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
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tests share the folder of a build, because CMake looks for a C++ compiler in each new
    one."""
    return tmp_path_factory.mktemp("builds")


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


def shared_folder(folders: Path, options: list[str]) -> Path:
    return folders / "-".join(["build", *options]).replace("/", "")


@pytest.mark.parametrize("case", LEFT_OUT)
def test_it_is_left_out_and_the_build_says_why(folders: Path, case: str) -> None:
    gpus, options, variables, said, remedy = LEFT_OUT[case]
    folder = shared_folder(folders, options)
    done, output, targets = configure(folder, *options, gpus=gpus, **variables)
    assert done, output
    assert f"ottava: without CUDA kernels ({said}" in output
    assert targets == ""
    compiled_in = reason(folder)
    assert compiled_in.startswith(f"when it was built, {said}")
    assert remedy in compiled_in.partition(": ")[2]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_built_is_an_error_with_a_remedy(folders: Path, case: str) -> None:
    options, variables, said = REFUSED[case]
    folder = shared_folder(folders, options)
    done, output, _ = configure(folder, *options, gpus=("9.0",), **variables)
    assert not done
    assert said in output
    if case != "maybe":
        assert "OTTAVA_CUDA=off" in output


@pytest.mark.slow
@needs_nvcc
def test_a_gpu_gets_its_own_code_and_both_are_found_when_they_come_later(tmp_path: Path) -> None:
    """All in one folder, of which CMake remembers much: first neither, then each alone, then both,
    then other GPUs."""
    folder = tmp_path / "build"
    missing = (
        "there was no nvcc, and nvidia-smi saw no GPU",
        "there was a GPU but no nvcc",
        "nvidia-smi saw no GPU",
    )
    for (gpus, variables), why in zip(
        (((), NO_NVCC), (("9.0",), NO_NVCC), ((), {})), missing, strict=True
    ):
        done, said, targets = configure(folder, gpus=gpus, **variables)
        assert done, said
        assert targets == ""
        assert reason(folder).startswith(f"when it was built, {why}")
    done, said, targets = configure(folder, gpus=("9.0",))
    assert done, said
    assert targets == "90a-real"
    assert reason(folder) == ""
    rules = (folder / "build.ninja").read_text()
    assert set(re.findall(r"sm_\w+|code=\[?compute_\w+", rules)) == {"sm_90a"}
    assert "-fmad=false" in rules
    assert "fast_math" not in rules
    assert "cudart_static" in rules
    assert configure(folder, gpus=("8.9", "8.0", "8.9", "7.5"))[2] == "80-real 89-real"
    assert (
        configure(folder, gpus=("9.0",), CUDAARCHS="80-real;90-virtual")[2] == "80-real 90-virtual"
    )
    assert configure(folder, gpus=())[2] == ""


@needs_nvcc
@pytest.mark.slow
def test_on_builds_it_for_all_generations_or_those_named(tmp_path: Path) -> None:
    done, said, targets = configure(tmp_path / "all", OTTAVA_CUDA="on")
    assert done, said
    assert targets.split() == ALL
    rules = (tmp_path / "all" / "build.ninja").read_text()
    for target in (*(f"sm_{name}" for name in resources.targets()), "compute_90"):
        assert target in rules
    # Whatever GPU is here.
    assert configure(tmp_path / "all", gpus=("8.9",), OTTAVA_CUDA="on")[2].split() == ALL
    by_variable = configure(tmp_path / "all", OTTAVA_CUDA="on", CUDAARCHS="80-real;90-virtual")
    assert by_variable[2] == "80-real 90-virtual", by_variable[1]
    by_option = configure(
        tmp_path / "all", "-DCMAKE_CUDA_ARCHITECTURES=90a-real", OTTAVA_CUDA="on", CUDAARCHS="80"
    )
    assert by_option[2] == "90a-real", by_option[1]


def ask(folder: Path, call: str, **variables: str) -> str:
    """What a function of decide.cmake answers."""
    script = folder / "ask.cmake"
    script.write_text(f'include({DECIDE})\n{call}\nmessage("<${{A}}|${{B}}>")')
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    assert cmake is not None
    done = subprocess.run(
        [cmake, "-P", str(script)], capture_output=True, text=True, env=os.environ | variables
    )
    assert done.returncode == 0, done.stderr
    found = re.search("<(.*)>", done.stderr)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("lines", "code", "found"),
    [
        (["9.0"], 0, "9.0"),
        (["10.0", "9.0", "8.6", "9.0"], 0, "8.6;9.0;10.0"),
        (["7.5", "8.0"], 0, "8.0"),
        (["7.5"], 0, ""),
        ([], 0, ""),
        (["NVIDIA-SMI has failed because it could not communicate with driver 12.0"], 9, ""),
        (["[N/A]"], 0, ""),
    ],
)
def test_gpus_are_those_that_nvidia_smi_names(
    tmp_path: Path, lines: list[str], code: int, found: str
) -> None:
    program(tmp_path / "bin", "nvidia-smi", *lines, code=code)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    capabilities, _, why_not = ask(tmp_path, "ottava_gpus(A B)", PATH=path).partition("|")
    assert capabilities == found
    assert why_not


def test_without_nvidia_smi_there_is_no_gpu(tmp_path: Path) -> None:
    assert ask(tmp_path, "ottava_gpus(A B)", PATH=str(tmp_path)) == "|nvidia-smi saw no GPU"


@pytest.mark.parametrize(
    ("capabilities", "targets"),
    [
        ("9.0", "90a-real"),
        ("8.0;8.6;8.9", "80-real;86-real;89-real"),
        ("10.0", "100a-real"),
        ("12.0;12.1", "90-virtual"),
        ("9.0;13.0", "90a-real;90-virtual"),
    ],
)
def test_targets_are_those_that_nvcc_knows(tmp_path: Path, capabilities: str, targets: str) -> None:
    """The driver compiles PTX for a GPU that is younger than the toolkit."""
    known = [f"compute_{number}" for number in (75, 80, 86, 89, 90, 100, 103)]
    nvcc = program(tmp_path, "nvcc", *known)
    assert ask(tmp_path, f'ottava_targets(A {nvcc} "{capabilities}")') == f"{targets}|"
