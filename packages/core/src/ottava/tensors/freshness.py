"""Derived tensors (transposes) that are never read when stale.

Aliases of one buffer share a :class:`WriteCount`; every in-place write counts. A :class:`DerivedTensor` remembers the
count and the version of the buffer that it was computed from, so its validity belongs to it and not to
whoever holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class WriteCount:
    """Counts the in-place writes to one buffer, shared by all its aliases."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


def _version(source: torch.Tensor | None) -> int:
    # Also catches a user's own in-place write to the buffer; inference tensors have no version.
    if source is None or torch.compiler.is_compiling() or source.is_inference():
        return 0
    return source._version


class DerivedTensor:
    """A tensor computed from a buffer, with the state of the buffer that it was computed from."""

    __slots__ = ("_count", "_source", "_version", "tensor")

    def __init__(self, tensor: torch.Tensor, source: torch.Tensor | None, writes: WriteCount) -> None:
        self.tensor = tensor
        self.refresh(source, writes)

    def refresh(self, source: torch.Tensor | None, writes: WriteCount) -> None:
        """Declare the tensor up to date with ``source`` as it is now; aliases that share this object see it."""
        self._source = source
        self._count = writes.value
        self._version = _version(source)

    def fresh(self, source: torch.Tensor | None, writes: WriteCount) -> bool:
        """Whether it was computed from ``source`` and nothing was written to it since."""
        return self._source is source and self._count == writes.value and self._version == _version(source)


def bump_version(tensor: torch.Tensor) -> None:
    """Tell autograd of a write below its level, so that a backward pass that saved the old values refuses."""
    if not torch.compiler.is_compiling() and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def bump_versions(tensors: Sequence[torch.Tensor]) -> None:
    """:func:`bump_version` of many tensors, none of them made in inference mode."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)
