"""What the compiled module is linked to, and what an import brings in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ottava
from ottava import _cpu


def test_the_compiled_module_needs_neither_torch_nor_cuda() -> None:
    binary = Path(_cpu.__file__).read_bytes()
    # The names of needed libraries stand in the file as they are; libgomp is torch's own OpenMP by name.
    assert b"libstdc++" in binary or b"libc++" in binary
    for name in (b"libtorch", b"libc10", b"libcuda", b"libcudart"):
        assert name not in binary, name


def test_the_package_shows_public_names_only() -> None:
    names = dir(ottava)
    assert [name for name in names if name.startswith("_")] == ["__version__"]
    assert not {"Any", "annotations", "importlib", "TYPE_CHECKING"} & set(names)
    assert {"convert", "autocast", "Quantizer", "distributed", "nn"} <= set(names)


def test_importing_what_users_need_does_not_import_the_compiler() -> None:
    code = "import ottava, sys; ottava.convert, ottava.autocast; print('torch._dynamo' in sys.modules)"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
