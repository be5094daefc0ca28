"""What the compiled module is linked to, and what an import brings in."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ottava
from ottava import _cpu
from tests.core import forking


def test_the_compiled_module_needs_neither_torch_nor_cuda() -> None:
    binary = Path(_cpu.__file__).read_bytes()
    # The names of needed libraries stand in the file as they are; libgomp is torch's own OpenMP by
    # name.
    assert b"libstdc++" in binary or b"libc++" in binary
    for name in (b"libtorch", b"libc10", b"libcuda", b"libcudart"):
        assert name not in binary, name


def test_the_package_shows_public_names_only() -> None:
    names = dir(ottava)
    assert [name for name in names if name.startswith("_")] == ["__version__"]
    assert not {"Any", "annotations", "importlib", "TYPE_CHECKING"} & set(names)
    assert {"convert", "autocast", "Quantizer", "distributed", "nn"} <= set(names)


@pytest.mark.xdist_group("forked processes")
def test_importing_what_users_need_does_not_import_the_compiler() -> None:
    code = (
        "import ottava, sys; ottava.convert, ottava.autocast; print('torch._dynamo' in sys.modules)"
    )
    found = forking.python(code)
    assert found.stdout.strip() == "False", found.stderr


STUB = Path(ottava.__file__).with_suffix(".pyi")


def stub_names() -> set[str]:
    """The names that the stub of the package imports."""
    imports: list[Any] = ast.parse(STUB.read_text()).body[:-1]
    return {alias.asname for node in imports for alias in node.names}


def test_the_stub_has_all_public_names_and_no_others() -> None:
    assert stub_names() | {"__version__"} == set(dir(ottava))
    assert (STUB.parent / "py.typed").exists()


@pytest.mark.slow
def test_the_types_of_public_names_are_told(tmp_path: Path) -> None:
    """To who checks the types of a program."""
    names = stub_names()
    right = "def width(layout: ottava.Layout) -> str: return ottava.__version__ + layout.text"
    used = [right, "ottava.get_recipe(3)", "ottava.absent"]
    imports = [f"from ottava import {name} as {name}" for name in sorted(names)]
    lines = ["import ottava", *imports, *used]
    (tmp_path / "program.py").write_text("\n".join(lines))
    # Reading torch takes four times as long as everything else.
    settings = "[mypy]\nstrict = true\n"
    settings += "[mypy-ottava.*]\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(settings)
    environment = dict(os.environ)
    if "site-packages" not in STUB.parts:
        environment["MYPYPATH"] = str(STUB.parents[1])
    options = ["--config-file", "mypy.ini", "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *options, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    told = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    assert told == [str(len(lines) - 1), str(len(lines))], done.stdout + done.stderr
