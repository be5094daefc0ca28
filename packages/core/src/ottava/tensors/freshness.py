"""What is derived from a tensor's bytes and kept (transposes, operands of products), and never read when stale.

Aliases of one buffer share a :class:`GemmCache`; every in-place write counts. What is kept remembers the count and the
version of the buffer that it was computed from, so its validity belongs to it and not to whoever holds it.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ottava.torch_private import version_of


def _version(source: torch.Tensor | None) -> int:
    # Also catches a user's own in-place write to the buffer; inference tensors have no version.
    if source is None or torch.compiler.is_compiling() or source.is_inference():
        return 0
    return version_of(source)


class DerivedTensor:
    """A tensor computed from a buffer, with the state of the buffer that it was computed from."""

    __slots__ = ("_source", "_state", "tensor")

    def __init__(self, tensor: torch.Tensor, source: torch.Tensor | None, writes: "GemmCache") -> None:
        self.tensor = tensor
        self.refresh(source, writes)

    def refresh(self, source: torch.Tensor | None, writes: "GemmCache") -> None:
        """Declare the tensor up to date with ``source`` as it is now; aliases that share this object see it."""
        self._source, self._state = source, (writes.writes, _version(source))

    def fresh(self, source: torch.Tensor | None, writes: "GemmCache") -> bool:
        """Whether it was computed from ``source`` and nothing was written to it since."""
        return self._source is source and self._state == (writes.writes, _version(source))


class GemmCache:
    """What products keep of an operand, and the count of writes to it, shared by all aliases.

    Attributes:
        entries: by whether it serves the columnwise usage: the state of the tensors that it was made of, these tensors,
            whose addresses are nobody else's while they are held, and what was made.
        writes: how often the operand was written to in place, through whichever alias: what is kept is outdated by one.
    """

    # Most operands are multiplied once and keep nothing: an object that sets nothing is made without Python.
    _entries: dict[bool, tuple[Hashable, Sequence[torch.Tensor], Any]] | None = None
    writes = 0

    @property
    def entries(self) -> dict[bool, tuple[Hashable, Sequence[torch.Tensor], Any]]:
        if self._entries is None:
            self._entries = {}
        return self._entries

    def get(
        self, columnwise: bool, tensors: Sequence[torch.Tensor], make: Callable[[], Any], option: Any = None
    ) -> Any:
        """What ``make`` gives, made again when ``tensors`` are others or were written to, or ``option`` is another."""
        found = [(t.data_ptr(), t.shape, t.stride(), _version(t)) for t in tensors]
        state = (*found, self.writes, option)
        kept = self.entries.get(columnwise)
        if kept is None or kept[0] != state:
            kept = self.entries[columnwise] = (state, tensors, make())
        return kept[2]


def bump_version(tensor: torch.Tensor) -> None:
    """Tell autograd of a write below its level, so that a backward pass that saved the old values refuses."""
    bump_versions([tensor])


def bump_versions(tensors: Sequence[torch.Tensor]) -> None:
    """:func:`bump_version` of many tensors; those made in inference mode have no version."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])
