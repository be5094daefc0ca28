"""What FSDP2 does with a module's parameters after the forward pass: it tells no hook of it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

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


def resharded_after_forward(module: Any) -> bool:
    """Whether the parameters of ``module`` are given up after the forward pass and gathered again for the backward.

    FSDP keeps this to itself. Where its objects are not as they are known (torch 2.11 to 2.13), the answer is False,
    with which everything is gathered in every pass.
    """
    try:
        group = _groups.get(module)
        group = None if group is None else group()
        if group is None:
            group = _group_of(module)
            if group is None:
                return False
            _groups[module] = weakref.ref(group)
        return bool(group._reshard_after_forward)
    except (AttributeError, ImportError, TypeError):
        return False
