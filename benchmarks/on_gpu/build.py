"""A checkout made importable with nothing installed: CMake builds the modules, a folder stands for the packages.

Imports neither torch nor ottava.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "packages"
MODULES = ("_cpu", "_cuda")

# Machine code for a compute capability, where it is more than the capability's own number.
_SPECIFIC = {(9, 0): "90a-real", (10, 0): "100a-real"}


class BuildError(RuntimeError):
    """A tool is missing, or a build failed; the message has the end of its output."""


def architecture(capability: tuple[int, int]) -> str:
    """What CMake calls the machine code for a GPU."""
    major, minor = capability
    return _SPECIFIC.get(capability, f"{major}{minor}-real")


def find_tool(name: str) -> str | None:
    """A program on PATH, beside this Python, or in the usual places of a CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    places += [str(Path(home) / folder) for home in homes if home for folder in ("bin", "compute-sanitizer")]
    return shutil.which(name, path=os.pathsep.join(places))


def _run(command: list[str], log: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n{done.stdout}\n")
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-40:])
        raise BuildError(f"{' '.join(command[:3])} ... failed with {done.returncode}; all of it is in {log}\n{tail}")


def compile_modules(folder: Path, *, cuda: str, architectures: str | None = None) -> list[Path]:
    """``_cpu`` and, unless ``cuda`` is ``"off"``, ``_cuda``, in ``folder``; what is up to date there is kept.

    Args:
        cuda: what CMake gets as ``OTTAVA_CUDA``: on, off or auto.
        architectures: what it gets as ``CMAKE_CUDA_ARCHITECTURES``; the build's own list otherwise.

    Raises:
        BuildError: there is no cmake or no pybind11, or the build failed.
    """
    cmake, ninja, nvcc = (find_tool(name) for name in ("cmake", "ninja", "nvcc"))
    try:
        pybind11 = importlib.import_module("pybind11")
    except ImportError:
        pybind11 = None
    missing = [name for name, found in (("cmake", cmake), ("pybind11", pybind11)) if not found]
    if cuda == "on" and not nvcc:
        missing.append("nvcc")
    if missing or cmake is None or pybind11 is None:
        raise BuildError(f"{', '.join(missing)} not found; install it, or build ottava otherwise and give --no-build")
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    log.unlink(missing_ok=True)
    configure = [cmake, "-S", str(PACKAGES / "core"), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DOTTAVA_CUDA={cuda}"]
    configure += [f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"] if architectures else []
    configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    environment = dict(os.environ)
    if nvcc and cuda != "off":
        environment.setdefault("CUDACXX", nvcc)
    _run(configure, log, environment)
    _run([cmake, "--build", str(folder), "--parallel", str(os.cpu_count() or 2)], log, environment)
    wanted = MODULES if cuda == "on" else MODULES[:1]
    made = {name: next(iter(folder.glob(f"{name}.*so")), None) for name in MODULES}
    if any(made[name] is None for name in wanted):
        raise BuildError(f"the build left no {' or no '.join(n for n in wanted if made[n] is None)}; see {log}")
    return [path for path in made.values() if path is not None]


def _link(source: Path, target: Path) -> None:
    """A symbolic link, or a copy where the file system has none."""
    try:
        target.symlink_to(source, target_is_directory=source.is_dir())
    except OSError:
        shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)


def _metadata(package: Path, site: Path, version: str) -> None:
    """What an installation leaves for ``importlib.metadata``: name, version and entry points."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project.get("version", version)
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    groups = project.get("entry-points", {})
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{k} = {v}" for k, v in entries.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def assemble(site: Path, modules: list[Path]) -> None:
    """A folder for ``sys.path`` in which the packages lie as if they were installed; made anew."""
    shutil.rmtree(site, ignore_errors=True)
    (site / "ottava").mkdir(parents=True)
    for entry in sorted((PACKAGES / "core" / "src" / "ottava").iterdir()):
        # Modules of another build may lie in the sources.
        if entry.name != "__pycache__" and entry.suffix != ".so":
            _link(entry, site / "ottava" / entry.name)
    for module in modules:
        _link(module, site / "ottava" / module.name)
    core = tomllib.loads((PACKAGES / "core" / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    for package in sorted(PACKAGES.iterdir()):
        if not (package / "pyproject.toml").exists():
            continue
        _metadata(package, site, core)
        for source in sorted((package / "src").iterdir()):
            if package.name != "core" and (source / "__init__.py").exists():
                _link(source, site / source.name)


def use(site: Path) -> None:
    """Import from ``site``, whatever else is installed.

    Raises:
        BuildError: it is not a folder that :func:`assemble` has made.
    """
    if not (site / "ottava").is_dir():
        raise BuildError(f"{site} has no folder ottava; give one that --build-only printed")
    sys.path.insert(0, str(site))
    # An editable installation brings a finder that is asked before sys.path is.
    for finder in list(sys.meta_path):
        if finder is not importlib.machinery.PathFinder and finder.find_spec("ottava", None, None) is not None:
            sys.meta_path.remove(finder)
    importlib.invalidate_caches()
