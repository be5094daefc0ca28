"""Quantized tensors in safetensors files that other libraries save: their values in high precision.

The format has one block of memory for a tensor, and a quantized tensor has several.
``ottava.checkpoint`` writes these under names of their own; ``save_pretrained`` of Transformers, or
``Accelerator.save_state``, write the entries of a state dict as they are. Without this module,
safetensors would read the memory at ``data_ptr()`` as that of a plain tensor of the nominal dtype,
which is longer. It has no public way to write something else, so two of its functions are replaced
by ones that know quantized tensors. Transformers and huggingface_hub compare where tensors end; one
function of each is replaced in the same way.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec, TypeVar

import safetensors.torch
import torch

from ottava.tensors.memory import holder_of
from ottava.tensors.storage import QuantizedTensorStorage

#: Entries of a state dict by name, most of them tensors.
StateDict = Mapping[str, object]
ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")


def _dequantized(tensors: StateDict) -> StateDict:
    """A state dict in which quantized tensors are dequantized, with one warning."""
    quantized = _quantized_tensors(tensors)
    if not quantized:
        return tensors
    warnings.warn(
        f"{len(quantized)} quantized tensors, {next(iter(quantized))!r} first, are written in "
        "high precision, not as their bytes; to keep the bytes, save the model with "
        "ottava.checkpoint.save_model",
        UserWarning,
        stacklevel=4,
    )
    values: dict[str, torch.Tensor] = {}
    for name, tensor in quantized.items():
        if isinstance(tensor, torch.Tensor):
            values[name] = tensor.detach().dequantize().contiguous()
    return dict(tensors) | values


def _with_holders(tensors: StateDict) -> StateDict:
    """A state dict with the inner tensors whose memory quantized tensors show, in their place."""
    holders: dict[str, torch.Tensor] = {}
    for name, tensor in _quantized_tensors(tensors).items():
        holder = holder_of(tensor.inner_list())
        holders[name] = torch.empty(0) if holder is None else holder
    return dict(tensors) | holders


def _quantized_tensors(tensors: StateDict) -> dict[str, QuantizedTensorStorage]:
    return {
        name: value for name, value in tensors.items() if isinstance(value, QuantizedTensorStorage)
    }


#: Private functions of safetensors.torch, which take a state dict first -> what changes it before.
_CHANGES: dict[str, Callable[[StateDict], StateDict]] = {
    "_flatten_as_ptr": _dequantized,  # writes tensors
    "_remove_duplicate_names": _with_holders,  # finds names that share memory
}


def _with(
    function: Callable[Concatenate[StateDict, ParametersT], ResultT],
    change: Callable[[StateDict], StateDict],
) -> Callable[Concatenate[StateDict, ParametersT], ResultT]:
    @functools.wraps(function)
    def changed(
        tensors: StateDict, /, *args: ParametersT.args, **kwargs: ParametersT.kwargs
    ) -> ResultT:
        if isinstance(tensors, dict):
            tensors = change(tensors)
        return function(tensors, *args, **kwargs)

    return changed


def teach_safetensors() -> bool:
    """Replace the functions; False, and nothing is changed, where this safetensors has others."""
    if not all(hasattr(safetensors.torch, name) for name in _CHANGES):
        return False
    for name, change in _CHANGES.items():
        setattr(safetensors.torch, name, _with(getattr(safetensors.torch, name), change))
    return True


#: Whether quantized tensors may show where their data lies: safetensors would read more than there
#: is.
CAN_SHOW_MEMORY = teach_safetensors()

#: Modules whose private ``_end_ptr(tensor)`` reads the address of ``tensor.view(-1)[-1]``.
_ASK_FOR_ENDS = ("transformers.modeling_utils", "huggingface_hub.serialization._torch")


def teach_ends() -> None:
    """Let those of these modules that are imported know where the data of a quantized tensor ends.

    A flat view of a tensor in blocks is a copy, whose address says nothing. Two names of one tied
    weight would have different ends, and be refused or saved as memory happened to be allocated.
    Called where a quantized tensor is asked for its memory, which those modules do first, because
    they may be imported after this one.
    """
    for name in _ASK_FOR_ENDS:
        module = sys.modules.get(name)
        function: Callable[[object], int] | None = getattr(module, "_end_ptr", None)
        if module is not None and function is not None and not isinstance(function, _EndOfData):
            setattr(module, "_end_ptr", _EndOfData(function))  # noqa: B010


class _EndOfData:
    """``_end_ptr`` of a module, for quantized tensors, too.

    Args:
        of_plain_tensors: the module's own function.
    """

    def __init__(self, of_plain_tensors: Callable[[object], int]) -> None:
        self._of_plain_tensors = of_plain_tensors

    def __call__(self, tensor: object) -> int:
        if isinstance(tensor, QuantizedTensorStorage):
            holder = holder_of(tensor.inner_list())
            if holder is not None:
                return holder.data_ptr() + holder.nbytes
        return self._of_plain_tensors(tensor)
