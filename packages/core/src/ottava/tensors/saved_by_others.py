"""What safetensors writes of quantized tensors where other libraries save them: values in high
precision.

The format has one block of memory for a tensor, and a quantized tensor has several.
``ottava.checkpoint`` writes these under names of their own; ``save_pretrained`` of Transformers, or
``Accelerator.save_state``, write what is in a state dict as it is. Without this module, safetensors
would read the memory at ``data_ptr()`` as that of a plain tensor of the nominal dtype, which is
longer. It offers no public way to say what is to be written, so two of its functions are replaced
by ones that know quantized tensors. Transformers and huggingface_hub compare where tensors end,
which they are told in the same way.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch

from ottava.tensors.memory import holder_of
from ottava.tensors.storage import QuantizedTensorStorage


def _written(tensors: Any) -> Any:
    """What is written of a state dict: quantized tensors are dequantized, with one warning."""
    names = [name for name, value in tensors.items() if isinstance(value, QuantizedTensorStorage)]
    if not names:
        return tensors
    what = (
        f"{len(names)} quantized tensors, {names[0]!r} first, are written in high precision, "
        f"not as their bytes"
    )
    remedy = "to keep the bytes, save the model with ottava.checkpoint.save_model"
    warnings.warn(f"{what}; {remedy}", UserWarning, stacklevel=4)
    values = {name: tensors[name].detach().dequantize().contiguous() for name in names}
    return dict(tensors) | values


def _compared(tensors: Any) -> Any:
    """What is asked whether names share memory: in the place of quantized tensors those that hold
    their data."""
    held = {
        name: holder_of(value.inner_list())
        for name, value in tensors.items()
        if isinstance(value, QuantizedTensorStorage)
    }
    return dict(tensors) | {
        name: torch.empty(0) if tensor is None else tensor for name, tensor in held.items()
    }


#: Private functions of safetensors.torch, which take a state dict first -> what they are given in
#: its place.
_REPLACED: dict[str, Callable[[Any], Any]] = {
    "_flatten_as_ptr": _written,
    "_remove_duplicate_names": _compared,
}


def _with(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def changed(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = change(tensors) if isinstance(tensors, dict) else tensors
        return function(given, *args, **kwargs)

    return changed


def teach_safetensors() -> bool:
    """Replace the functions; False, and nothing is changed, where this safetensors has others."""
    if not all(hasattr(safetensors.torch, name) for name in _REPLACED):
        return False
    for name, change in _REPLACED.items():
        setattr(safetensors.torch, name, _with(getattr(safetensors.torch, name), change))
    return True


#: Whether quantized tensors may show where their data lies: safetensors would read more than there
#: is.
CAN_SHOW_MEMORY = teach_safetensors()

#: Modules whose private ``_end_ptr(tensor)`` reads the address of ``tensor.view(-1)[-1]``.
_ASK_FOR_ENDS = ("transformers.modeling_utils", "huggingface_hub.serialization._torch")


def teach_ends() -> None:
    """Let what is imported of these modules know where the data of a quantized tensor ends.

    A flat view of a tensor in blocks is a copy, whose address says nothing. Two names of one tied
    weight would have different ends, and be refused or saved as memory happened to be allocated.
    Called where a quantized tensor is asked for its memory, which those modules do first, because
    they may be imported after this one.
    """
    for name in _ASK_FOR_ENDS:
        module: Any = sys.modules.get(name)
        function = getattr(module, "_end_ptr", None)
        if function is not None and not hasattr(function, "_of_plain_tensors"):
            module._end_ptr = _with_ends(function)


def _with_ends(function: Callable[[Any], int]) -> Callable[[Any], int]:
    @functools.wraps(function)
    def end_of(tensor: Any) -> int:
        held = (
            holder_of(tensor.inner_list()) if isinstance(tensor, QuantizedTensorStorage) else None
        )
        return function(tensor) if held is None else held.data_ptr() + held.nbytes

    changed: Any = end_of
    changed._of_plain_tensors = function
    return end_of
