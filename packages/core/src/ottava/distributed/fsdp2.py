"""What FSDP2 keeps to itself, asked for here and nowhere else: which parameters it gathers
together, and what it does with them after the forward pass.

The names are those of torch 2.11 to 2.14, with which they were tried. No right result needs them.
Where a version has other ones, quantized weights are gathered for both passes in each pass, the
scales of each weight are reduced by themselves, and a flat copy of each shard in high precision
stays in memory.
"""

import contextlib
import weakref
from typing import Any, NamedTuple

import torch

from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import local_tensor

# What a version of torch with other names raises.
_OTHERWISE = (AttributeError, ImportError, TypeError)
# Module that owns a parameter -> the group of parameters that FSDP gathers it with, and the state
# that has the group.
_groups: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def _states() -> list[Any]:
    from torch.distributed._composable_state import _module_state_mapping

    return [
        reference() if callable(reference) else reference
        for reference in list(_module_state_mapping.values())
    ]


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    return [getattr(state, "_fsdp_param_group", None)] if groups is None else list(groups)


def _group_and_state(module: Any) -> tuple[Any, Any]:
    known = _groups.get(module)
    group, state = (None, None) if known is None else (known[0](), known[1]())
    if group is not None and state is not None:
        return group, state
    for state in _states():
        for group in _groups_of(state):
            if any(
                parameter._module_info.module is module
                for parameter in getattr(group, "fsdp_params", ())
            ):
                _groups[module] = weakref.ref(group), weakref.ref(state)
                return group, state
    return None, None


def _will_be_kept(state: Any) -> bool:
    """Whether FSDP is yet to find out that this is its outermost module, whose parameters it keeps
    by default."""
    if state._is_root is not None or not state._auto_reshard_after_forward:
        return False
    own = state._modules
    others = [
        module
        for other in _states()
        if other is not state
        for module in getattr(other, "_modules", ())
    ]
    return not any(
        inner is module for outer in others for inner in outer.modules() for module in own
    )


def shards(module: torch.nn.Module) -> bool:
    """Whether FSDP shards the parameters of ``module``, or of the one whose place it took; True
    where that cannot be known."""
    with contextlib.suppress(*_OTHERWISE):
        for state in _states():
            for parameter in [
                one for group in _groups_of(state) for one in getattr(group, "fsdp_params", ())
            ]:
                info = parameter._module_info
                owners = [info.module, *info.shared_modules]
                if any(owner._parameters is module._parameters for owner in owners):
                    return True
        return False
    return True


def gathered_together(module: Any) -> list[tuple[torch.Tensor, torch.Size, Any]]:
    """The parameters that are gathered in one collective with those of ``module``, if that can be
    known: of each this rank's shard, the size of the whole, and the module that owns it."""
    with contextlib.suppress(*_OTHERWISE):
        all_of = _group_and_state(module)[0].fsdp_params
        return [
            (local_tensor(p.sharded_param), p._orig_size, p._module_info.module) for p in all_of
        ]
    return []


class GatheredWeight(NamedTuple):
    """A parameter that FSDP gathers: its name, this rank's shard, the size of the whole, the module
    that owns it, the dtype that it is cast to, if any, and whether it is given up after the forward
    pass."""

    name: str
    shard: torch.Tensor
    size: torch.Size
    module: Any
    dtype: torch.dtype | None = None
    resharded: bool | None = None


def gathered_over(module: Any, group: Any) -> list[GatheredWeight]:
    """All parameters below the outermost FSDP module around ``module`` whose shards lie on the
    ranks of ``group``, in the order of the modules, if that can be known."""
    found: list[GatheredWeight] = []
    with contextlib.suppress(*_OTHERWISE):
        own, state = _group_and_state(module)
        groups = [group for other in state._state_ctx.all_states for group in _groups_of(other)]
        for together in groups if any(one is own for one in groups) else [own]:
            if together._all_gather_process_group.group_name != group.group_name:
                continue
            for one in together.fsdp_params:
                name = one._param_fqn or one._module_info.param_name
                shard, owner = local_tensor(one.sharded_param), one._module_info.module
                given_up = bool(together._reshard_after_forward)
                found.append(
                    GatheredWeight(name, shard, one._orig_size, owner, one.param_dtype, given_up)
                )
        return found
    return []


def drop_flat_copies(module: Any) -> None:
    """FSDP flattens each shard; of a tensor without flat views that is a copy, in high precision.
    Nothing reads it."""
    with contextlib.suppress(*_OTHERWISE):
        for parameter in _group_and_state(module)[0].fsdp_params:
            shard = parameter._sharded_local_tensor
            quantized = parameter._module_info.module is module and isinstance(
                shard, QuantizedTensorStorage
            )
            if quantized and not isinstance(parameter._sharded_param_data, QuantizedTensorStorage):
                parameter._sharded_param_data = shard


def resharded_to_fewer(module: Any) -> bool:
    """Whether the parameters of ``module`` are sharded over fewer ranks after the forward pass."""
    with contextlib.suppress(*_OTHERWISE):
        return bool(_group_and_state(module)[0]._use_post_forward_mesh)
    return False


# The answer of the first gather holds for good, because FSDP allocates the memory of all gathers
# then.
_resharded: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def resharded_after_forward(module: Any) -> bool:
    """Whether the parameters of ``module`` are given up after the forward pass and gathered again
    for the backward; False as well where they are kept after the backward pass. What is said at the
    first gather stays."""
    if not isinstance(module, torch.nn.Module):
        return False
    if module not in _resharded:
        _resharded[module] = False
        with contextlib.suppress(*_OTHERWISE):
            group, state = _group_and_state(module)
            given_up = group._reshard_after_forward and group.reshard_after_backward
            _resharded[module] = bool(given_up) and not _will_be_kept(state)
    return _resharded[module]
