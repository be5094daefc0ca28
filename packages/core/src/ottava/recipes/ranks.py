"""The ranks that begin a step together: whether they have the same layers, and which they are."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ottava.collectives import Disagreement, Group, check_alike, group_of_this_rank, spans_ranks
from ottava.errors import UsageError, stable_repr
from ottava.recipes.state import RecipeState

_OTHER_LAYERS = Disagreement(
    "the ranks of the group reduce amaxes of other layers",
    "the same layers and the same options of their recipe on all ranks",
    "give layers that only some ranks have a group of these ranks, by "
    "autocast(amax_reduction_group=...)",
)


def compare_layers(states: Sequence[RecipeState], group: Group) -> None:
    """Compare the layers whose amaxes are reduced, and the options of their recipes.

    Ranks that differ would use the amaxes of each other's layers, or wait for ever. The comparison
    is one small all-gather. A rank that reduces nothing takes part, because the others may reduce.

    Args:
        group: process group, or its name; None is the default group, if there is one.

    Raises:
        UsageError: the ranks differ; on all of them.
    """
    if not spans_ranks(group):
        return
    parts = [part for state in states for part in state.parts()]
    lines = [_line(part) for part in parts if part.recipe.reduces_amaxes]
    check_alike(lines, group, _device_of(parts), _OTHER_LAYERS)


def _device_of(states: Sequence[RecipeState]) -> torch.device | None:
    """The device of the first buffer; None without any."""
    for state in states:
        if isinstance(state, torch.nn.Module):
            for buffer in state.buffers():
                return buffer.device
    return None


def _line(state: RecipeState) -> str:
    """The layer, the tensors and the recipe of a state, in words that are the same in each
    process."""
    name = state._roles[0].name or "a layer"
    tensors = ", ".join(role.tensor_type for role in state._roles)
    return f"{name} ({tensors}): {stable_repr(state.recipe)}"


def group_in_pipeline(states: Sequence[RecipeState], ranks: int) -> Group:
    """The group over which a pipeline's stage reduces amaxes, where no group was given.

    Ranks of other stages have other layers, so that the default group will not do.

    Args:
        ranks: the number of ranks of the pipeline.

    Returns:
        A group of this rank alone, or None where nothing is reduced.

    Raises:
        UsageError: several ranks may have the same stage, and no group says which.
    """
    reduces = any(part.recipe.reduces_amaxes for state in states for part in state.parts())
    if ranks < 2 or not reduces or not spans_ranks(None):
        return None
    world = dist.get_world_size()
    if ranks == world:
        return group_of_this_rank()
    raise UsageError(
        f"the layers are in a pipeline of {ranks} of {world} ranks, and reduce amaxes over all",
        "the group of the ranks that have the same stage",
        "call schedule.step(...) in a block of ottava.autocast(amax_reduction_group=group)",
    )
