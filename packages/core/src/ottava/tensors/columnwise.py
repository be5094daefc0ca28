"""Which bytes a columnwise GEMM operand is made of."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from ottava.errors import OptionError
from ottava.kernels.products import capability_of_index

#: What :func:`columnwise_layout` asks for.
forced: str | None = None
# GPUs whose FP8 GEMM takes only the TN layout (Ada, Hopper, and Blackwell of compute capability 12) need a transposed
# copy for the columnwise usage; everywhere else one buffer serves both usages.
_TN_ONLY_CAPABILITIES = (89, 90, 120, 121)


def columnwise_is_transpose(device: torch.device) -> bool:
    """Whether tensors on ``device`` keep a transposed copy for their columnwise usage."""
    if forced is not None:
        return forced == "transpose"
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return capability_of_index(index) in _TN_ONLY_CAPABILITIES


@contextmanager
def columnwise_layout(layout: Literal["transpose", "shared"]) -> Iterator[None]:
    """Force a layout inside a ``with`` block: Hopper's layout can be tested on a CPU with it.

    Raises:
        OptionError: it is no layout.
    """
    global forced
    if layout not in ("transpose", "shared"):
        raise OptionError(f"columnwise layout {layout!r}", expected="transpose or shared")
    previous, forced = forced, layout
    try:
        yield
    finally:
        forced = previous
