"""What FSDP2 keeps to itself: what it does with a module's parameters after the forward pass.

Nothing here is needed for a right result. Where FSDP's objects are not as they are known (torch 2.11 to 2.13),
quantized weights are gathered for both passes in each, and a flat copy of each shard stays in memory.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ottava.tensors.storage import QuantizedTensorStorage


class FlatValues(torch.Tensor):
    """A high-precision tensor like any other; only its type is another one.

    FSDP compares the storage of a shard with that of its flat view, unless the view's type says that it is special. A
    shard that is a quantized tensor has no storage to compare.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def flat_values(values: torch.Tensor) -> torch.Tensor:
    """``values``, as :class:`FlatValues` if they have one dimension and nothing is being traced."""
    if values.dim() != 1 or type(values) is not torch.Tensor or torch.compiler.is_compiling():
        return values
    return values.as_subclass(FlatValues)


# Module that owns a parameter -> the group of parameters that FSDP gathers it with.
_groups: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def _group_of(module: torch.nn.Module) -> Any:
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        state: Any = reference() if callable(reference) else reference
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                if parameter._module_info.module is module:
                    return group
    return None


def _drop_flat_copies(group: Any, module: torch.nn.Module) -> None:
    """FSDP flattens each shard; of a tensor without flat views that is a copy, in high precision. Nothing reads it."""
    for parameter in group.fsdp_params:
        shard = parameter._sharded_local_tensor
        quantized = parameter._module_info.module is module and isinstance(shard, QuantizedTensorStorage)
        if quantized and not isinstance(parameter._sharded_param_data, QuantizedTensorStorage):
            parameter._sharded_param_data = shard


def resharded_after_forward(module: Any) -> bool:
    """Whether the parameters of ``module`` are given up after the forward pass and gathered again for the backward."""
    try:
        group = _groups.get(module)
        group = None if group is None else group()
        if group is None:
            group = _group_of(module)
            if group is None:
                return False
            _groups[module] = weakref.ref(group)
        _drop_flat_copies(group, module)
        return bool(group._reshard_after_forward)
    except (AttributeError, ImportError, TypeError):
        return False
