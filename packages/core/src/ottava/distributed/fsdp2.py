"""FSDP2's private attributes: which parameters it gathers together, and which gathers it repeats.

``fully_shard`` keeps one state for each module that it was called on. A state has groups of
parameters, and one collective gathers the parameters of a group. The outermost state knows all
others::

    state of the model ── group ── parameter ── this rank's shard
      │                     │          └─────── module that owns the parameter
      │                     └───── parameter …
      └─ state of a block ── group …

This is the only module that reads these objects. The protocols below list every attribute that it
reads; they were tested with torch 2.11 to 2.14. Results are right without them. In a version of
torch that has other names, each gather brings the data for both passes, the scales of each weight
are reduced separately, and a flat high-precision copy of each shard stays in memory.
"""

import contextlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ottava.tensors.storage import QuantizedTensorStorage
from ottava.torch_private import Private, local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Owner(Protocol):
    """The module that owns a parameter, and the modules that share it."""

    module: torch.nn.Module
    shared_modules: list[torch.nn.Module]
    param_name: str


class _Parameter(Protocol):
    """A parameter that FSDP shards."""

    sharded_param: torch.Tensor
    param_dtype: torch.dtype | None
    _orig_size: torch.Size
    _module_info: _Owner
    _param_fqn: str | None
    _sharded_local_tensor: torch.Tensor
    _sharded_param_data: torch.Tensor


class _ParameterGroup(Protocol):
    """Parameters that one collective gathers."""

    fsdp_params: list[_Parameter]
    reshard_after_backward: bool
    _reshard_after_forward: bool
    _use_post_forward_mesh: bool
    _all_gather_process_group: "ProcessGroup"


class _StateContext(Protocol):
    """What all states below an outermost state share."""

    all_states: "list[_State]"


class _State(Protocol):
    """What ``fully_shard`` keeps for a module."""

    _modules: Sequence[torch.nn.Module]
    _is_root: bool | None
    _auto_reshard_after_forward: bool
    _state_ctx: _StateContext


# The errors that a version of torch with other names raises.
_OTHER_NAMES = (AttributeError, ImportError, TypeError)
# Module that owns a parameter -> the group of the parameter, and the state that has the group.
_groups: weakref.WeakKeyDictionary[
    torch.nn.Module, tuple[weakref.ref[_ParameterGroup], weakref.ref[_State]]
] = weakref.WeakKeyDictionary()


def _states() -> list[_State]:
    from torch.distributed._composable_state import _module_state_mapping

    references: list[Private] = list(_module_state_mapping.values())
    # Some versions of torch map modules to weak references.
    states = [reference() if callable(reference) else reference for reference in references]
    return [state for state in states if state is not None]


def _groups_of(state: _State) -> list[_ParameterGroup]:
    groups: list[_ParameterGroup | None] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        # Some versions of torch have one group for each state.
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _owns_one_of(module: torch.nn.Module, group: _ParameterGroup) -> bool:
    return any(parameter._module_info.module is module for parameter in group.fsdp_params)


def _group_and_state(module: torch.nn.Module) -> tuple[_ParameterGroup, _State] | None:
    """The group of the parameters of ``module``, and the state that has it; None without FSDP."""
    references = _groups.get(module)
    if references is not None:
        group, state = references[0](), references[1]()
        if group is not None and state is not None:
            return group, state
    for state in _states():
        for group in _groups_of(state):
            if _owns_one_of(module, group):
                _groups[module] = weakref.ref(group), weakref.ref(state)
                return group, state
    return None


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether FSDP shards the parameters of ``module``, or of the module that it replaced.

    True where a version of torch does not say.
    """
    with contextlib.suppress(*_OTHER_NAMES):
        return any(
            owner._parameters is module._parameters
            for state in _states()
            for group in _groups_of(state)
            for parameter in group.fsdp_params
            for owner in _owners(parameter)
        )
    return True


def _owners(parameter: _Parameter) -> list[torch.nn.Module]:
    info = parameter._module_info
    return [info.module, *info.shared_modules]


def gathered_together(
    module: torch.nn.Module,
) -> list[tuple[torch.Tensor, torch.Size, torch.nn.Module]]:
    """The parameters that one collective gathers together with those of ``module``.

    Each is (this rank's shard, size of the whole parameter, module that owns it). The list is empty
    where a version of torch does not say.
    """
    with contextlib.suppress(*_OTHER_NAMES):
        group_and_state = _group_and_state(module)
        if group_and_state is not None:
            return [
                (local_tensor(p.sharded_param), p._orig_size, p._module_info.module)
                for p in group_and_state[0].fsdp_params
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
    module: torch.nn.Module
    dtype: torch.dtype | None = None
    resharded: bool | None = None


def gathered_over(module: torch.nn.Module, group: "ProcessGroup") -> list[GatheredWeight]:
    """All parameters whose shards lie on the ranks of ``group``, in the order of the modules.

    They are those below the outermost FSDP module around ``module``. The list is empty where a
    version of torch does not say.
    """
    with contextlib.suppress(*_OTHER_NAMES):
        return [
            GatheredWeight(
                name=parameter._param_fqn or parameter._module_info.param_name,
                shard=local_tensor(parameter.sharded_param),
                size=parameter._orig_size,
                module=parameter._module_info.module,
                dtype=parameter.param_dtype,
                resharded=bool(param_group._reshard_after_forward),
            )
            for param_group in _groups_around(module)
            if param_group._all_gather_process_group.group_name == group.group_name
            for parameter in param_group.fsdp_params
        ]
    return []


def _groups_around(module: torch.nn.Module) -> list[_ParameterGroup]:
    """The groups below the outermost FSDP module around ``module``."""
    group_and_state = _group_and_state(module)
    if group_and_state is None:
        return []
    own, state = group_and_state
    groups = [group for other in state._state_ctx.all_states for group in _groups_of(other)]
    # Before the first forward pass a state may not know the others.
    if not any(group is own for group in groups):
        return [own]
    return groups


def drop_flat_copies(module: torch.nn.Module) -> None:
    """Replace FSDP's flat copies of the quantized shards of ``module`` by the shards themselves.

    FSDP flattens each shard. For a tensor without flat views the result is a high-precision copy,
    which nothing reads.
    """
    with contextlib.suppress(*_OTHER_NAMES):
        group_and_state = _group_and_state(module)
        if group_and_state is None:
            return
        for parameter in group_and_state[0].fsdp_params:
            shard = parameter._sharded_local_tensor
            if parameter._module_info.module is not module:
                continue
            if not isinstance(shard, QuantizedTensorStorage):
                continue
            if not isinstance(parameter._sharded_param_data, QuantizedTensorStorage):
                parameter._sharded_param_data = shard


def resharded_to_fewer(module: torch.nn.Module) -> bool:
    """Whether the parameters of ``module`` are sharded over fewer ranks after the forward pass."""
    with contextlib.suppress(*_OTHER_NAMES):
        group_and_state = _group_and_state(module)
        if group_and_state is not None:
            return bool(group_and_state[0]._use_post_forward_mesh)
    return False


# FSDP sizes its buffers at the first gather, so that the answer at that time stays valid.
_resharded: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


def resharded_after_forward(module: torch.nn.Module) -> bool:
    """Whether FSDP gathers the parameters of ``module`` again for the backward pass.

    That is so where FSDP frees them after the forward pass, and False where it keeps them after the
    backward pass. The answer at the first gather stays.
    """
    if module not in _resharded:
        _resharded[module] = False
        with contextlib.suppress(*_OTHER_NAMES):
            _resharded[module] = _frees_after_forward(module)
    return _resharded[module]


def _frees_after_forward(module: torch.nn.Module) -> bool:
    group_and_state = _group_and_state(module)
    if group_and_state is None:
        return False
    group, state = group_and_state
    if not group._reshard_after_forward or not group.reshard_after_backward:
        return False
    return not _will_be_kept(state)


def _will_be_kept(state: _State) -> bool:
    """Whether FSDP will keep the parameters of ``state``, as it does by default for those of its
    outermost module.

    FSDP finds its outermost module in the first forward pass.
    """
    if state._is_root is not None or not state._auto_reshard_after_forward:
        return False
    inner = {
        id(below)
        for other in _states()
        if other is not state
        for module in getattr(other, "_modules", ())
        for below in module.modules()
    }
    return not any(id(module) in inner for module in state._modules)
