"""What the compiled module is linked to."""

from __future__ import annotations

from pathlib import Path

from ottava import _cpu


def test_the_compiled_module_needs_neither_torch_nor_cuda() -> None:
    binary = Path(_cpu.__file__).read_bytes()
    # The names of needed libraries stand in the file as they are; libgomp is torch's own OpenMP by name.
    assert b"libstdc++" in binary or b"libc++" in binary
    for name in (b"libtorch", b"libc10", b"libcuda", b"libcudart"):
        assert name not in binary, name
