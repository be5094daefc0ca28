"""The private attributes of FSDP2: which parameters it gathers together, and whether it keeps them
after the forward pass.

This is the only module that reads them. They were tested with torch 2.11 to 2.14. Results are right
without them: in a version that has other names, the data for both passes is gathered in each pass,
the scales of each weight are reduced separately, and a flat high-precision copy of each shard stays
in memory.
"""

import contextlib
import weakref
from typing import Any, NamedTuple

import torch

from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import local_tensor

# The errors that a version of torch with other names raises.
_OTHER_NAMES = (AttributeError, ImportError, TypeError)
# Module that owns a parameter -> weak references to the group of parameters that FSDP gathers with
# it, and to the FSDP state that has the group.
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
    """The group of parameters that FSDP gathers with those of ``module``, and the state that has
    the group; (None, None) without FSDP."""
    references = _groups.get(module)
    if references is not None:
        group, state = references[0](), references[1]()
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
    """Whether FSDP will find that ``state`` is of its outermost module, and then keep the
    parameters, as it does by default.

    FSDP finds its outermost module in the first forward pass.
    """
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
    """Whether FSDP shards the parameters of ``module``, or of the module that it replaced.

    True where a version of torch does not say.
    """
    with contextlib.suppress(*_OTHER_NAMES):
        for state in _states():
            parameters = [
                parameter
                for group in _groups_of(state)
                for parameter in getattr(group, "fsdp_params", ())
            ]
            for parameter in parameters:
                info = parameter._module_info
                owners = [info.module, *info.shared_modules]
                if any(owner._parameters is module._parameters for owner in owners):
                    return True
        return False
    return True


def gathered_together(module: Any) -> list[tuple[torch.Tensor, torch.Size, Any]]:
    """The parameters that one collective gathers together with those of ``module``.

    Each is (this rank's shard, size of the whole parameter, module that owns it). The list is empty
    where a version of torch does not say.
    """
    with contextlib.suppress(*_OTHER_NAMES):
        parameters = _group_and_state(module)[0].fsdp_params
        return [
            (local_tensor(p.sharded_param), p._orig_size, p._module_info.module) for p in parameters
        ]
    return []


class GatheredWeight(NamedTuple):
    """A parameter that FSDP gathers.

    Attributes:
        name: the name of the parameter.
        shard: this rank's shard.
        size: the size of the whole parameter.
        module: the module that owns the parameter.
        dtype: the dtype that FSDP casts the parameter to; None for no cast.
        resharded: whether FSDP frees the gathered parameter after the forward pass.
    """

    name: str
    shard: torch.Tensor
    size: torch.Size
    module: Any
    dtype: torch.dtype | None = None
    resharded: bool | None = None


def gathered_over(module: Any, group: Any) -> list[GatheredWeight]:
    """All parameters below the outermost FSDP module around ``module`` whose shards lie on the
    ranks of ``group``, in the order of the modules.

    The list is empty where a version of torch does not say.
    """
    weights: list[GatheredWeight] = []
    with contextlib.suppress(*_OTHER_NAMES):
        own, state = _group_and_state(module)
        param_groups = [g for other in state._state_ctx.all_states for g in _groups_of(other)]
        if not any(param_group is own for param_group in param_groups):
            param_groups = [own]
        for param_group in param_groups:
            if param_group._all_gather_process_group.group_name != group.group_name:
                continue
            for parameter in param_group.fsdp_params:
                info = parameter._module_info
                weights.append(
                    GatheredWeight(
                        name=parameter._param_fqn or info.param_name,
                        shard=local_tensor(parameter.sharded_param),
                        size=parameter._orig_size,
                        module=info.module,
                        dtype=parameter.param_dtype,
                        resharded=bool(param_group._reshard_after_forward),
                    )
                )
        return weights
    return []


def drop_flat_copies(module: Any) -> None:
    """Replace FSDP's flat copies of the quantized shards of ``module`` by the shards themselves.

    FSDP flattens each shard. For a tensor without flat views the result is a high-precision copy,
    which nothing reads.
    """
    with contextlib.suppress(*_OTHER_NAMES):
        for parameter in _group_and_state(module)[0].fsdp_params:
            shard = parameter._sharded_local_tensor
            quantized = parameter._module_info.module is module and isinstance(
                shard, QuantizedTensorStorage
            )
            if quantized and not isinstance(parameter._sharded_param_data, QuantizedTensorStorage):
                parameter._sharded_param_data = shard


def resharded_to_fewer(module: Any) -> bool:
    """Whether the parameters of ``module`` are sharded over fewer ranks after the forward pass."""
    with contextlib.suppress(*_OTHER_NAMES):
        return bool(_group_and_state(module)[0]._use_post_forward_mesh)
    return False


# The answer at the first gather stays valid, because FSDP allocates the memory of all gathers then.
_resharded: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def resharded_after_forward(module: Any) -> bool:
    """Whether FSDP frees the parameters of ``module`` after the forward pass and gathers them again
    for the backward pass.

    False as well where FSDP keeps the parameters after the backward pass. The answer at the first
    gather stays.
    """
    if not isinstance(module, torch.nn.Module):
        return False
    if module not in _resharded:
        _resharded[module] = False
        with contextlib.suppress(*_OTHER_NAMES):
            group, state = _group_and_state(module)
            freed = group._reshard_after_forward and group.reshard_after_backward
            _resharded[module] = bool(freed) and not _will_be_kept(state)
    return _resharded[module]
