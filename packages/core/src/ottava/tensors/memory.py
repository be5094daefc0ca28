"""The memory of a quantized tensor, as torch and other libraries ask for it: that of the tensor
that holds its data.

A quantized tensor is a wrapper that owns no memory. Other code asks tensors for addresses in order
to tell them apart: optimizers are mapped to the shards of a model by them, and shared weights are
found by them. So a quantized tensor answers with the address of its first inner tensor that is
held: it differs for different weights, and is the same for aliases. What lies there are codes, not
values of the tensor's dtype.
"""

from collections.abc import Iterable

import torch
from torch.utils.dlpack import from_dlpack

from ottava.torch_private import dispatch_modes


def holder_of(inner: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The first inner tensor that is held and has memory; None where there is none.

    Tensors that stand for others, such as those of the compiler, and tensors on the meta device
    have none.
    """
    for tensor in inner:
        if tensor is not None:
            is_real = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
            return tensor if is_real else None
    return None


def storage_of(holder: torch.Tensor) -> torch.UntypedStorage | None:
    """A storage around the same memory as that of ``holder``: its address, its bytes, and its
    lifetime.

    It is another object, because the compiler takes two tensors of one storage for views of each
    other, which a quantized tensor and the tensor that it holds are not. It cannot be resized. None
    where a dispatch mode runs, which would take its making for an op of the user's; the compiler
    asks in one.
    """
    if dispatch_modes():
        return None
    as_bytes = torch.empty(0, dtype=torch.uint8, device=holder.device).set_(
        holder.untyped_storage()
    )
    return from_dlpack(as_bytes).untyped_storage()
