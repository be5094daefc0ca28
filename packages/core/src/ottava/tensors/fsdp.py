"""What FSDP2 keeps to itself: what it does with a module's parameters after the forward pass.

All that is private in FSDP2 is asked for here, of objects that differ between versions. Nothing of it is needed for a
right result. Where the objects are not as they are known (torch 2.11 to 2.14), quantized weights are gathered for both
passes in each, each weight's scales are reduced by themselves, and a flat copy of each shard stays in memory.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import local_tensor

# Module that owns a parameter -> the group of parameters that FSDP gathers it with, and the state that has the group.
_groups: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def _states() -> list[Any]:
    from torch.distributed._composable_state import _module_state_mapping

    return [reference() if callable(reference) else reference for reference in list(_module_state_mapping.values())]


def _find_group(module: torch.nn.Module) -> tuple[Any, Any]:
    for state in _states():
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                if parameter._module_info.module is module:
                    return group, state
    return None, None


def _group_and_state(module: Any) -> tuple[Any, Any]:
    known = _groups.get(module)
    group, state = (None, None) if known is None else (known[0](), known[1]())
    if group is None or state is None:
        group, state = _find_group(module)
        if group is not None:
            _groups[module] = (weakref.ref(group), weakref.ref(state))
    return group, state


def _group_of(module: Any) -> Any:
    return _group_and_state(module)[0]


def sharded_modules() -> list[torch.nn.Module]:
    """The modules that ``fully_shard`` was called for.

    Where FSDP's own list is not as it is known, all objects are looked through: that is asked once for a layer.
    """
    known: list[torch.nn.Module] = []
    with contextlib.suppress(AttributeError, ImportError, TypeError):
        known = [module for state in _states() for module in getattr(state, "_modules", ())]
    if known:
        return known
    from torch.distributed.fsdp import FSDPModule

    # By their types: isinstance() would run what objects of others say of their class.
    return [found for found in gc.get_objects() if issubclass(type(found), FSDPModule)]


def _will_be_kept(state: Any) -> bool:
    """Whether FSDP is yet to find out that this is its outermost module, whose parameters it keeps by default."""
    if state._is_root is not None or not state._auto_reshard_after_forward:
        return False
    own = state._modules
    others = [module for other in _states() if other is not state for module in getattr(other, "_modules", ())]
    return not any(inner is module for outer in others for inner in outer.modules() for module in own)


@dataclass(frozen=True)
class GatheredParameter:
    """A parameter that FSDP gathers: this rank's shard, the size of the whole, and the module that owns it."""

    shard: torch.Tensor
    size: torch.Size
    module: Any


def gathered_together(module: Any) -> list[GatheredParameter]:
    """The parameters that are gathered in one collective with those of ``module``, if that can be known."""
    try:
        group = _group_of(module)
        return [
            GatheredParameter(local_tensor(known.sharded_param), known._orig_size, known._module_info.module)
            for known in (() if group is None else group.fsdp_params)
        ]
    except (AttributeError, ImportError, TypeError):
        return []


def drop_flat_copies(module: Any) -> None:
    """FSDP flattens each shard; of a tensor without flat views that is a copy, in high precision. Nothing reads it."""
    with contextlib.suppress(AttributeError, ImportError, TypeError):
        group = _group_of(module)
        for parameter in () if group is None else group.fsdp_params:
            shard = parameter._sharded_local_tensor
            quantized = parameter._module_info.module is module and isinstance(shard, QuantizedTensorStorage)
            if quantized and not isinstance(parameter._sharded_param_data, QuantizedTensorStorage):
                parameter._sharded_param_data = shard


def asked_by_fsdp(depth: int = 2) -> bool:
    """Whether the caller's caller is FSDP.

    It compares the storage of a shard with that of its flat view. A quantized tensor has no storage, and whoever else
    asks for it (tracing does) has to learn that.
    """
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("torch.distributed.fsdp.")


def resharded_to_fewer(module: Any) -> bool:
    """Whether the parameters of ``module`` are sharded over fewer ranks after the forward pass."""
    try:
        return bool(_group_of(module)._use_post_forward_mesh)
    except (AttributeError, ImportError, TypeError):
        return False


# What was found at the first gather: FSDP makes the memory for all gathers then.
_resharded: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def resharded_after_forward(module: Any) -> bool:
    """Whether the parameters of ``module`` are given up after the forward pass and gathered again for the backward.

    False as well where they are kept after the backward pass. What is said at the first gather stays.
    """
    if not isinstance(module, torch.nn.Module):
        return False
    if module not in _resharded:
        try:
            group, state = _group_and_state(module)
            given_up = group is not None and bool(group._reshard_after_forward and group.reshard_after_backward)
            _resharded[module] = given_up and not _will_be_kept(state)
        except (AttributeError, ImportError, TypeError):
            _resharded[module] = False
    return _resharded[module]
