"""Which bytes a columnwise GEMM operand is made of.

GPUs whose FP8 GEMM takes only the TN layout (Ada, Hopper) need a transposed copy for the columnwise usage;
everywhere else one buffer serves both usages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch

from ottava.errors import OptionError

Layout = Literal["transpose", "shared"]

_forced: Layout | None = None
_TN_ONLY_CAPABILITIES = ((8, 9), (9, 0))


@cache
def _cuda_is_tn_only(index: int) -> bool:
    return torch.cuda.get_device_capability(index) in _TN_ONLY_CAPABILITIES


def columnwise_is_transpose(device: torch.device) -> bool:
    """Whether tensors on ``device`` keep a transposed copy for their columnwise usage."""
    if _forced is not None:
        return _forced == "transpose"
    if device.type != "cuda":
        return False
    return _cuda_is_tn_only(torch.cuda.current_device() if device.index is None else device.index)


@contextmanager
def columnwise_layout(layout: Layout) -> Iterator[None]:
    """Force a layout inside a ``with`` block: Hopper's layout can be tested on a CPU with it.

    Raises:
        OptionError: it is no layout.
    """
    global _forced
    if layout not in ("transpose", "shared"):
        raise OptionError(f"columnwise layout {layout!r}", expected="transpose or shared")
    previous, _forced = _forced, layout
    try:
        yield
    finally:
        _forced = previous
