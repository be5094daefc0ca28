"""A package with plugins, as an installer would leave it, found while a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.core.fake_plugins import distribution, installed


@contextmanager
def published(folder: Path, name: str, **modules: str) -> Iterator[None]:
    """The distribution ``name`` in ``folder``, with the source of its modules; the first one is the
    entry point."""
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    distribution(folder, name, f"[ottava]\nmain = {next(iter(modules))}\n", version="1.0")
    with installed(folder):
        yield
