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

ROOT = Path(__file__).resolve().parents[1]
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
    folders = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            folders += [str(Path(home) / "bin"), str(Path(home) / "compute-sanitizer")]
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
    # OTTAVA_CUDA=on is needed, because by default the build leaves CUDA out if it sees no GPU.
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "pybind11_DIR": importlib.import_module("pybind11").get_cmake_dir(),
        "Python_EXECUTABLE": sys.executable,
        "OTTAVA_CUDA": "on",
    }
    if architectures:
        options["CMAKE_CUDA_ARCHITECTURES"] = architectures
    configure = [cmake, "-S", str(PACKAGES / "core"), "-B", str(folder)]
    if ninja:
        configure += ["-G", "Ninja"]
        options["CMAKE_MAKE_PROGRAM"] = ninja
    configure += [f"-D{name}={value}" for name, value in options.items()]
    build = [cmake, "--build", str(folder), "--parallel", str(os.cpu_count() or 2)]
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"CUDACXX": nvcc} | os.environ
    for command in (configure, build):
        process = subprocess.run(command, capture_output=True, text=True, env=environment)
        if process.returncode:
            output = (process.stdout + process.stderr)[-6000:]
            raise BuildError(f"{' '.join(command)} failed\n{output}")
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
    core = PACKAGES / "core/src/ottava"
    (site / "ottava").mkdir(parents=True)
    # The sources may contain compiled modules of another build, which are left out.
    sources = (p for p in core.iterdir() if p.name != "__pycache__" and p.suffix != ".so")
    for path in (*sources, *modules):
        (site / "ottava" / path.name).symlink_to(path)
    for init in PACKAGES.glob("*/src/*/__init__.py"):
        if init.parent != core:
            (site / init.parent.name).symlink_to(init.parent)
    for file in PACKAGES.glob("*/pyproject.toml"):
        _write_metadata(site, file)


def _write_metadata(site: Path, file: Path) -> None:
    """Write the folder from which importlib.metadata reads name, version and entry points."""
    settings = tomllib.loads(file.read_text(encoding="utf-8"))
    project = settings["project"]
    name = project["name"]
    version = version_of(file.parent / settings["tool"]["hatch"]["version"]["path"])
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    lines = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (folder / "entry_points.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


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
        if finder is importlib.machinery.PathFinder:
            continue
        if finder.find_spec("ottava", None, None) is not None:
            sys.meta_path.remove(finder)
    importlib.invalidate_caches()
