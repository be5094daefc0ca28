"""What FSDP2 keeps to itself, asked for here and nowhere else: which parameters it gathers together, and what it does
with them after the forward pass.

The names are those of torch 2.11 to 2.14, with which they were tried. No right result needs them. Where a version has
other ones, quantized weights are gathered for both passes in each pass, the scales of each weight are reduced by
themselves, and a flat copy of each shard in high precision stays in memory.
"""

import contextlib
import weakref
from typing import Any

import torch

from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import local_tensor

# What a version of torch with other names raises.
_OTHERWISE = (AttributeError, ImportError, TypeError)
# Module that owns a parameter -> the group of parameters that FSDP gathers it with, and the state that has the group.
_groups: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def _states() -> list[Any]:
    from torch.distributed._composable_state import _module_state_mapping

    return [reference() if callable(reference) else reference for reference in list(_module_state_mapping.values())]


def _group_and_state(module: Any) -> tuple[Any, Any]:
    known = _groups.get(module)
    group, state = (None, None) if known is None else (known[0](), known[1]())
    if group is not None and state is not None:
        return group, state
    for state in _states():
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            if any(parameter._module_info.module is module for parameter in getattr(group, "fsdp_params", ())):
                _groups[module] = weakref.ref(group), weakref.ref(state)
                return group, state
    return None, None


def _will_be_kept(state: Any) -> bool:
    """Whether FSDP is yet to find out that this is its outermost module, whose parameters it keeps by default."""
    if state._is_root is not None or not state._auto_reshard_after_forward:
        return False
    own = state._modules
    others = [module for other in _states() if other is not state for module in getattr(other, "_modules", ())]
    return not any(inner is module for outer in others for inner in outer.modules() for module in own)


def gathered_together(module: Any) -> list[tuple[torch.Tensor, torch.Size, Any]]:
    """The parameters that are gathered in one collective with those of ``module``, if that can be known: of each this
    rank's shard, the size of the whole, and the module that owns it."""
    with contextlib.suppress(*_OTHERWISE):
        all_of = _group_and_state(module)[0].fsdp_params
        return [(local_tensor(p.sharded_param), p._orig_size, p._module_info.module) for p in all_of]
    return []


def drop_flat_copies(module: Any) -> None:
    """FSDP flattens each shard; of a tensor without flat views that is a copy, in high precision. Nothing reads it."""
    with contextlib.suppress(*_OTHERWISE):
        for parameter in _group_and_state(module)[0].fsdp_params:
            shard = parameter._sharded_local_tensor
            quantized = parameter._module_info.module is module and isinstance(shard, QuantizedTensorStorage)
            if quantized and not isinstance(parameter._sharded_param_data, QuantizedTensorStorage):
                parameter._sharded_param_data = shard


def resharded_to_fewer(module: Any) -> bool:
    """Whether the parameters of ``module`` are sharded over fewer ranks after the forward pass."""
    with contextlib.suppress(*_OTHERWISE):
        return bool(_group_and_state(module)[0]._use_post_forward_mesh)
    return False


# The answer of the first gather holds for good, because FSDP allocates the memory of all gathers then.
_resharded: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def resharded_after_forward(module: Any) -> bool:
    """Whether the parameters of ``module`` are given up after the forward pass and gathered again for the backward;
    False as well where they are kept after the backward pass. What is said at the first gather stays."""
    if not isinstance(module, torch.nn.Module):
        return False
    if module not in _resharded:
        _resharded[module] = False
        with contextlib.suppress(*_OTHERWISE):
            group, state = _group_and_state(module)
            given_up = group._reshard_after_forward and group.reshard_after_backward
            _resharded[module] = bool(given_up) and not _will_be_kept(state)
    return _resharded[module]
