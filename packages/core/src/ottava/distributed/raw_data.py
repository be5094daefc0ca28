"""The bytes of quantized weights: moved into a buffer of the optimizer, and gathered by it.

An optimizer that shards its master weights, as ZeRO does, holds the bytes of all weights in one
buffer (:func:`replace_raw_data`), gathers the buffer after each step, and then rebuilds the tensors
that derive from the bytes (:func:`post_all_gather_processing`).
"""

from collections.abc import Sequence

import torch

from ottava.distributed.shards import check_bytes, check_kind, check_places
from ottava.errors import ShapeError, UsageError
from ottava.tensors import QuantizedTensorStorage
from ottava.tensors.declaration import InnerTensor
from ottava.torch_private import local_tensor

#: A quantized weight, or another parameter, which stays unchanged.
Weight = QuantizedTensorStorage | torch.Tensor


def post_all_gather_processing(model_weights: Sequence[Weight] | Weight) -> None:
    """Rebuild the tensors that derive from the bytes of weights (transposes), after the bytes were
    gathered.

    Tensors that are not quantized, or have no derived tensors, stay unchanged.

    Raises:
        DTypeError: an entry is not a tensor.
    """
    weights: Sequence[object] = [model_weights]
    if isinstance(model_weights, (list, tuple)):
        weights = model_weights
    for weight in weights:
        check_kind(weight, (torch.Tensor, QuantizedTensorStorage), "a weight", "a list of tensors")
    with torch.no_grad():
        for local in map(local_tensor, weights):
            if isinstance(local, QuantizedTensorStorage):
                local.rebuild_derived(force=True)
                local.rebuilds_derived = True


def replace_raw_data(
    tensor: QuantizedTensorStorage, new_raw_data: torch.Tensor | Sequence[torch.Tensor]
) -> None:
    """Move the elements of a quantized tensor into a buffer, such as a range of one for all
    weights.

    The values, and everything else about the tensor, stay the same. Aliases of the tensor keep the
    old bytes.

    Args:
        new_raw_data: contiguous, uint8 (or the 8-bit float dtype of the elements), with as many
            bytes as the tensor's data: one for each element, or for two elements of four bits. A
            tensor with rowwise and columnwise data takes two buffers, or one to move its rowwise
            data alone.

    Raises:
        DTypeError, ShapeError, DeviceError: a buffer is not as above. All are ValueErrors, and
            nothing has been written.
        UsageError: the tensor has no elements, they are not contiguous, or it is a view.
    """
    check_kind(
        tensor, QuantizedTensorStorage, "the tensor", "a quantized tensor, which has raw data"
    )
    buffers = list(new_raw_data) if isinstance(new_raw_data, (list, tuple)) else [new_raw_data]
    if tensor._whole is not None:
        raise UsageError(
            f"this {type(tensor).__name__} is a view of another",
            "a whole tensor",
            "give the whole one",
        )
    raw = tensor.raw_inner()
    if not 1 <= len(buffers) <= len(raw):
        raise ShapeError(
            f"{len(buffers)} buffers",
            expected=f"one for each of {', '.join(i.argument for i in raw)}",
        )
    moves: list[tuple[InnerTensor, torch.Tensor, torch.Tensor]] = []
    for inner, buffer in zip(raw, buffers, strict=False):
        data: torch.Tensor = getattr(tensor, inner.attribute)
        name = f"the buffer for {inner.argument!r}"
        memory = check_bytes(buffer, tensor, inner, data.numel(), name)
        if not data.is_contiguous():
            raise UsageError(
                "the data of the tensor is not contiguous", expected="a tensor that is no view"
            )
        moves.append((inner, data, memory.detach().view(data.dtype).view(data.shape)))
    check_places([target for *_, target in moves], [data for _, data, _ in moves])
    with torch.no_grad():
        for inner, data, target in moves:
            # Writing through ``.data`` leaves the version of the buffer as it is, because the
            # transposes of other tensors in the buffer stay valid.
            target.data.copy_(data)
            tensor.replace_inner(inner, target)
