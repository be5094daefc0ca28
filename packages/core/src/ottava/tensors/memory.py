"""The memory that a quantized tensor shows to torch and other libraries: that of an inner tensor.

A quantized tensor is a wrapper that owns no memory. Other code asks tensors for addresses in order
to tell them apart: optimizers are mapped to the shards of a model by them, and shared weights are
found by them. So a quantized tensor answers with the address of its first inner tensor, which
differs for different weights, and is the same for aliases. The bytes of elements lie there, not
values of the tensor's dtype.
"""

from collections.abc import Iterable

import torch
from torch.utils.dlpack import from_dlpack

from ottava.torch_private import dispatch_modes


def holder_of(inner: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The first inner tensor that is not None, if it has memory; else None.

    Tensors that stand for others, such as those of the compiler, and tensors on the meta device
    have no memory.
    """
    first = next((tensor for tensor in inner if tensor is not None), None)
    if first is None or first.is_meta or type(first) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return first


def storage_of(holder: torch.Tensor) -> torch.UntypedStorage | None:
    """A storage around the same memory as that of ``holder``: its address, its bytes, and its
    lifetime.

    It is another object, because the compiler takes two tensors of one storage for views of each
    other, which a quantized tensor and its inner tensor are not. It cannot be resized.

    Returns:
        None where a dispatch mode runs, as the compiler does: the mode would take the ops that make
        the storage for ops of the user's.
    """
    if dispatch_modes():
        return None
    as_bytes = torch.empty(0, dtype=torch.uint8, device=holder.device)
    as_bytes.set_(holder.untyped_storage())
    return from_dlpack(as_bytes).untyped_storage()
