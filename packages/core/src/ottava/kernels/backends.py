"""Chooses the backend that serves a kernel, which never changes numerics, only speed.

``reference`` is pure PyTorch and always available; ``cpu`` and ``cuda`` are compiled modules.
``OTTAVA_BACKEND`` in the environment forces one for the process, :func:`use_backend` for a block of
code.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ottava.errors import BackendError

# Backend name -> the types of devices that it serves, None for all. Earlier entries are preferred.
_SERVES: dict[str, tuple[str, ...] | None] = {"cuda": ("cuda",), "cpu": ("cpu",), "reference": None}
#: Backend name -> the hardware on which this project has run it, if that is not all of the hardware
#: that it serves (docs/gpu.md).
RUN_ON = {"cuda": "run by this project on compute capability 9.0 (H100) alone"}

_forced: str | None = None
_loaded: dict[str, Any] = {}
_failures: dict[str, str] = {}
_warned: set[str] = set()
# Type of device -> the backend that serves it. An entry is made on first use, which reads the
# environment, so that later calls of kernels are short.
_chosen: dict[str, str] = {}
#: The number of changes of settings by which kernels and products are chosen. Code that keeps a
#: choice compares this number, because a choice from before the last change may be wrong.
changes = 0


def changed() -> None:
    """Count a change of a setting by which kernels or products are chosen."""
    global changes
    changes += 1


def _try_load(name: str, *, needed: bool = False) -> Any:
    """The backend, or None if it cannot be loaded.

    With ``needed``, because a tensor is to be processed, the first failure causes a warning.
    """
    if name not in _loaded and name not in _failures:
        found: Any
        try:
            # These are import statements, because the compiler can trace them, and the first kernel
            # of a process may be in compiled code.
            if name == "reference":
                from ottava.kernels import reference as found
            elif name == "cpu":
                from ottava.kernels.cpu import BACKEND as found
            else:
                from ottava.kernels.cuda import BACKEND as found
            _loaded[name] = found
        except ImportError as error:
            _failures[name] = str(error)
    if needed and name in _failures and name not in _warned:
        _warned.add(name)
        what = f"the {name!r} kernels cannot be loaded and the slow reference serves instead"
        warnings.warn(f"ottava: {what}: {_failures[name]}", RuntimeWarning, stacklevel=2)
    return _loaded.get(name)


def _check(name: str, origin: str, undo: str) -> str:
    if not isinstance(name, str) or name not in _SERVES:
        expected, remedy = f"one of {', '.join(sorted(_SERVES))}", f"correct the name, or {undo}"
        raise BackendError(
            f"unknown kernel backend {name!r} ({origin})", expected=expected, remedy=remedy
        )
    if _try_load(name) is None:
        what = f"kernel backend {name!r} ({origin}) cannot be loaded: {_failures[name]}"
        # The messages of the other backends contain the remedy.
        remedy = (
            f"{undo}, or reinstall ottava with a C++ compiler at hand" if name == "cpu" else undo
        )
        raise BackendError(
            what, expected="a backend that `ottava doctor` lists as available", remedy=remedy
        )
    return name


def available_backends() -> dict[str, str]:
    """Every known backend with ``"available"``, or with the reason why it is not available."""
    found = {}
    for name in _SERVES:
        try:
            found[name] = "available" if _try_load(name) is not None else _failures[name]
        except BackendError as error:
            found[name] = str(error)
    return found


def backend_for(device_type: str) -> str:
    """The name of the backend that serves tensors on ``device_type`` now.

    Raises:
        BackendError: the forced backend is unknown or cannot be loaded, or the environment asks the
            compiled backend for an instruction set that this machine lacks.
    """
    if device_type not in _chosen:
        asked = os.environ.get("OTTAVA_BACKEND")
        wanted = _forced or (
            _check(asked, "OTTAVA_BACKEND", "unset OTTAVA_BACKEND") if asked else None
        )
        # The last backend serves every device, so the loop always finds one.
        for name in _SERVES if wanted is None else (wanted, *_SERVES):
            serves = _SERVES[name]
            if (serves is None or device_type in serves) and _try_load(
                name, needed=True
            ) is not None:
                _chosen[device_type] = name
                break
    return _chosen[device_type]


def backend_module(device_type: str) -> Any:
    """The object whose methods are the kernels for ``device_type``, by the names of the table."""
    return _loaded[_chosen.get(device_type) or backend_for(device_type)]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend inside a ``with`` block, for tensors on the devices that it serves.

    Raises:
        BackendError: the name is unknown or the backend cannot be loaded.
    """
    _check(name, "use_backend", "leave out use_backend")
    previous = _forced
    try:
        _force(name)
        yield
    finally:
        _force(previous)


def _force(name: str | None) -> None:
    global _forced
    _forced = name
    _chosen.clear()
    changed()
