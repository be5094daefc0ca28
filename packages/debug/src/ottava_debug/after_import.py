"""Imports one module as soon as another one has been imported."""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


def follow(module: str, follower: str) -> None:
    """Import ``follower`` as soon as ``module`` is imported, or now if it has been imported."""
    if module in sys.modules:
        importlib.import_module(follower)
    else:
        sys.meta_path.insert(0, _Finder(module, follower))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module through Python's own finder, and loads it by a :class:`_Loader`."""

    def __init__(self, module: str, follower: str) -> None:
        self._module = module
        self._follower = follower

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._follower)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module, then imports another one."""

    def __init__(self, loader: importlib.abc.Loader, follower: str) -> None:
        self._loader = loader
        self._follower = follower

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        importlib.import_module(self._follower)
