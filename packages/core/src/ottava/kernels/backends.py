"""Chooses the backend that serves a kernel, which never changes numerics, only speed.

``reference`` is pure PyTorch and always available; ``cpu`` and ``cuda`` are compiled modules.
``OTTAVA_BACKEND`` in the environment forces one for the process, :func:`use_backend` for a block of
code.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from ottava.errors import BackendError
from ottava.kernels.checks import Outputs, Pairs, Shards, Tensor, Tensors


class Backend(Protocol):
    """The functions of a backend, which :mod:`ottava.kernels` describes.

    All of them write into ``out``, which is contiguous, and check nothing. ``text`` is the text of
    a layout.
    """

    def amax(self, x: Tensor, out: Tensor, /) -> None: ...
    def scale_from_amax(
        self,
        amax: Tensor,
        fp8_dtype: torch.dtype,
        epsilon: float,
        force_pow_2: bool,
        out: Outputs,
        /,
    ) -> None: ...
    def quantize(
        self,
        x: Tensor,
        fp8_dtype: torch.dtype,
        epsilon: float,
        force_pow_2: bool,
        out: Outputs,
        /,
    ) -> None: ...
    def cast_amax(
        self,
        x: Tensor,
        scale: Tensor,
        amax: Tensor | None,
        saturated: Tensor | None,
        fp8_dtype: torch.dtype,
        out: Outputs,
        /,
    ) -> None: ...
    def transpose(self, data: Tensor, out: Tensor, /) -> None: ...
    def update_scales(
        self,
        scales: Tensors,
        histories: Tensors,
        maxima: list[float],
        most_recent: bool,
        last: Tensor | None,
        /,
    ) -> None: ...
    def grid_scales(self, amax: Tensor, text: str, dtype: torch.dtype, out: Outputs, /) -> None: ...
    def grid_quantize(self, x: Tensor, text: str, out: Outputs, /) -> None: ...
    def grid_decode(
        self, data: Tensor, scales: Tensor | None, text: str, columnwise: bool, out: Tensor, /
    ) -> None: ...
    def grid_quantize_levels(
        self, x: Tensor, seed: Tensor | None, first_row: int, text: str, out: Outputs, /
    ) -> None: ...
    def grid_decode_levels(
        self,
        data: Tensor,
        scales: Tensor | None,
        amax: Tensor | None,
        text: str,
        columnwise: bool,
        out: Tensor,
        /,
    ) -> None: ...
    def grid_multi_amax(self, shards: Shards, texts: Sequence[str], out: Tensor, /) -> None: ...
    def grid_multi_cast(
        self, shards: Shards, texts: Sequence[str], rowwise: Pairs, columnwise: Pairs, /
    ) -> None: ...
    def epilogue32(
        self,
        sums: Tensor,
        scale_a: Tensor | None,
        scale_b: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
        /,
    ) -> None:
        """``sums * (scale_a * scale_b) + bias`` in float32, rounded once into ``out``.

        Both matrices are contiguous. On a CPU ``out`` may be ``sums``.
        """


# Backend name -> the types of devices that it serves, None for all. Earlier entries are preferred.
_SERVES: dict[str, tuple[str, ...] | None] = {"cuda": ("cuda",), "cpu": ("cpu",), "reference": None}
#: Backend name -> the hardware on which this project has run it, if that is not all of the hardware
#: that it serves (docs/gpu.md).
RUN_ON = {"cuda": "run by this project on compute capability 9.0 (H100) alone"}

_forced: str | None = None
_loaded: dict[str, Backend] = {}
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


def _load(name: str) -> Backend:
    """Import a backend.

    Raises:
        ImportError: it cannot be used here, for the reason that the error states.
    """
    backend: Backend
    # These are import statements, because the compiler can trace them, and the first kernel of a
    # process may be in compiled code.
    if name == "reference":
        from ottava.kernels import reference as backend
    elif name == "cpu":
        from ottava.kernels.cpu import BACKEND as backend
    else:
        from ottava.kernels.cuda import BACKEND as backend
    return backend


def _try_load(name: str) -> bool:
    """Load a backend once; False, with the reason in ``_failures``, if that is impossible."""
    if name in _loaded:
        return True
    if name in _failures:
        return False
    try:
        _loaded[name] = _load(name)
    except ImportError as error:
        _failures[name] = str(error)
        return False
    return True


def _warn_of_failure(name: str) -> None:
    """Warn, once for each backend, that the reference serves tensors in its place."""
    if name not in _warned:
        _warned.add(name)
        problem = f"the {name!r} kernels cannot be loaded and the slow reference serves instead"
        warnings.warn(f"ottava: {problem}: {_failures[name]}", RuntimeWarning, stacklevel=2)


def _check(name: str, origin: str, undo: str) -> str:
    """The name of a backend that can be loaded.

    Raises:
        BackendError: there is no such backend, or it cannot be loaded. ``origin`` and ``undo`` say
            where the name came from, and how to take it back.
    """
    if not isinstance(name, str) or name not in _SERVES:
        raise BackendError(
            f"unknown kernel backend {name!r} ({origin})",
            expected=f"one of {', '.join(sorted(_SERVES))}",
            remedy=f"correct the name, or {undo}",
        )
    if not _try_load(name):
        remedy = undo
        # The messages of the other backends contain the remedy.
        if name == "cpu":
            remedy = f"{undo}, or reinstall ottava with a C++ compiler at hand"
        raise BackendError(
            f"kernel backend {name!r} ({origin}) cannot be loaded: {_failures[name]}",
            expected="a backend that `ottava doctor` lists as available",
            remedy=remedy,
        )
    return name


def available_backends() -> dict[str, str]:
    """Every known backend with ``"available"``, or with the reason why it is not available."""
    return {name: _availability(name) for name in _SERVES}


def _availability(name: str) -> str:
    try:
        if _try_load(name):
            return "available"
    except BackendError as error:
        return str(error)
    return _failures[name]


def backend_for(device_type: str) -> str:
    """The name of the backend that serves tensors on ``device_type`` now.

    Raises:
        BackendError: the forced backend is unknown or cannot be loaded, or the environment asks the
            compiled backend for an instruction set that this machine lacks.
    """
    if device_type not in _chosen:
        _chosen[device_type] = _choose(device_type)
    return _chosen[device_type]


def _choose(device_type: str) -> str:
    """The forced backend if it serves this type of device, otherwise the first that does."""
    for name in (*_forced_names(), *_SERVES):
        device_types = _SERVES[name]
        if device_types is None or device_type in device_types:
            if _try_load(name):
                return name
            _warn_of_failure(name)
    raise AssertionError("the reference serves every device")


def _forced_names() -> tuple[str, ...]:
    """The backend that :func:`use_backend` or the environment forces, if one does."""
    if _forced is not None:
        return (_forced,)
    name = os.environ.get("OTTAVA_BACKEND")
    if not name:
        return ()
    return (_check(name, "OTTAVA_BACKEND", "unset OTTAVA_BACKEND"),)


def backend_module(device_type: str) -> Backend:
    """The backend that serves tensors on ``device_type`` now; errors as :func:`backend_for`."""
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
