"""Makes a checkout importable without installing it.

CMake builds the compiled modules, and a folder of links takes the place of installed packages. This
module imports neither torch nor ottava.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / "packages"
# CMake's names of machine code for compute capabilities that need more than their number.
_SPECIFIC = {(9, 0): "90a-real", (10, 0): "100a-real"}


class BuildError(RuntimeError):
    """A tool is missing, or a build failed; the message has the end of its output."""


def architecture(capability: tuple[int, int]) -> str:
    """CMake's name of the machine code for a GPU of this compute capability.

    Raises:
        BuildError: there are no kernels for such a GPU.
    """
    if capability < (8, 0):
        raise BuildError(
            f"the CUDA kernels are for compute capability 8.0 and later; this GPU has {capability}"
        )
    return _SPECIFIC.get(capability, "{}{}-real".format(*capability))


def find_tool(name: str) -> str | None:
    """The path of a program on PATH, beside this Python, or in the usual folders of a CUDA toolkit.

    None if there is none.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    folders += [
        str(Path(home) / folder)
        for home in homes
        if home
        for folder in ("bin", "compute-sanitizer")
    ]
    return shutil.which(name, path=os.pathsep.join(folders))


def compile_modules(folder: Path, architectures: str | None = None) -> list[Path]:
    """Build ``_cpu`` and ``_cuda`` in ``folder``, unless they are up to date.

    Args:
        folder: the build folder.
        architectures: the value of ``CMAKE_CUDA_ARCHITECTURES``; None builds for every GPU.

    Returns:
        The paths of the two modules.

    Raises:
        BuildError: a tool is missing, or the build failed.
    """
    cmake, ninja, nvcc = (find_tool(name) for name in ("cmake", "ninja", "nvcc"))
    if not (cmake and nvcc):
        raise BuildError(
            "cmake or nvcc not found; install it, or build ottava otherwise and give --no-build"
        )
    pybind11 = importlib.import_module("pybind11").get_cmake_dir()
    configure = [
        cmake,
        "-S",
        str(PACKAGES / "core"),
        "-B",
        str(folder),
        "-DCMAKE_BUILD_TYPE=Release",
    ]
    # OTTAVA_CUDA=on is needed, because by default the build leaves CUDA out if it sees no GPU.
    configure += [
        f"-Dpybind11_DIR={pybind11}",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DOTTAVA_CUDA=on",
    ]
    configure += [f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"] if architectures else []
    configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    folder.mkdir(parents=True, exist_ok=True)
    for command in (
        configure,
        [cmake, "--build", str(folder), "--parallel", str(os.cpu_count() or 2)],
    ):
        process = subprocess.run(
            command, capture_output=True, text=True, env={"CUDACXX": nvcc} | os.environ
        )
        if process.returncode:
            raise BuildError(
                f"{' '.join(command)} failed\n{(process.stdout + process.stderr)[-6000:]}"
            )
    return [next(folder.glob(f"{name}.*so")) for name in ("_cpu", "_cuda")]


def version_of(module: Path) -> str:
    """The version that a module states, read as hatch reads it, without an import."""
    statement = re.search(r'^__version__ = "(.+)"$', module.read_text(encoding="utf-8"), re.M)
    if statement is None:
        raise BuildError(f'{module} states no version; expected a line __version__ = "..."')
    return statement[1]


def assemble(site: Path, modules: list[Path]) -> None:
    """Make ``site`` anew, a folder for ``sys.path`` with links to the packages.

    They look as if they were installed.
    """
    shutil.rmtree(site, ignore_errors=True)
    (site / "ottava").mkdir(parents=True)
    # The sources may contain compiled modules of another build, which are left out.
    sources = [
        p
        for p in (PACKAGES / "core/src/ottava").iterdir()
        if p.name != "__pycache__" and p.suffix != ".so"
    ]
    for path in (*sources, *modules):
        (site / "ottava" / path.name).symlink_to(path)
    for file in sorted(PACKAGES.glob("*/pyproject.toml")):
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
        project = settings["project"]
        name = project["name"]
        version = version_of(file.parent / settings["tool"]["hatch"]["version"]["path"])
        # importlib.metadata reads name, version and entry points from this folder.
        (info := site / f"{name.replace('-', '_')}-{version}.dist-info").mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
        )
        groups = project.get("entry-points", {}).items()
        texts = [
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items())
            for group, entries in groups
        ]
        (info / "entry_points.txt").write_text("".join(texts), encoding="utf-8")
        for source in (
            path.parent
            for path in file.parent.glob("src/*/__init__.py")
            if file.parent.name != "core"
        ):
            (site / source.name).symlink_to(source)


def use(site: Path) -> None:
    """Make Python import the packages from ``site``, even if others are installed.

    Raises:
        BuildError: ``site`` is not a folder that :func:`assemble` has made.
    """
    if not (site / "ottava").is_dir():
        raise BuildError(f"{site} has no folder ottava; give one that --build-only printed")
    sys.path.insert(0, str(site))
    # The finder of an editable installation comes before sys.path, so it is removed.
    for finder in list(sys.meta_path):
        if (
            finder is not importlib.machinery.PathFinder
            and finder.find_spec("ottava", None, None) is not None
        ):
            sys.meta_path.remove(finder)
    importlib.invalidate_caches()
