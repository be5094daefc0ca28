"""A package with plugins, as an installer would leave it, found while a test runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ottava.recipes import registry


@contextmanager
def published(folder: Path, name: str, **modules: str) -> Iterator[None]:
    """The distribution ``name`` in ``folder``, with the source of its modules; the first one is the
    entry point."""
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ottava]\nmain = {next(iter(modules))}\n")
    sys.path.insert(0, str(folder))
    registry.reload()
    yield
    sys.path.remove(str(folder))
    for module in modules:
        sys.modules.pop(module, None)
    registry.reload()
