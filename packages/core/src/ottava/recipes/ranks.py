"""Whether the ranks of a training agree on what they reduce together."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ottava.collectives import Ranks, all_gather, find_group, process_groups_ready
from ottava.errors import UsageError, listed
from ottava.recipes.state import RecipeState


def check_alike(states: Sequence[RecipeState], group: Any) -> None:
    """Compare the layers and the options of recipes that reduce amaxes, in one small all-gather.

    Raises:
        UsageError: on all ranks, if they differ: each would take amaxes of other layers, or wait for them for ever.
    """
    if not process_groups_ready() or dist.get_world_size(group) == 1:
        return
    # Functions are at another address in each process.
    parts: list[Any] = [part for state in states for part in state.parts() if part.recipe.reduces_amaxes]
    lines = [f"{part._layer_name or 'a layer'}: {re.sub(r' at 0x[0-9a-f]+', '', repr(part.recipe))}" for part in parts]
    if not lines:
        return
    device = next((buffer.device for part in parts for buffer in part.buffers()), None)
    digest = torch.tensor(list(hashlib.sha256("\n".join(lines).encode()).digest()), dtype=torch.uint8, device=device)
    if bool((all_gather(digest, group) == digest).all()):
        return
    of_ranks = Ranks(find_group(group)).gather(lines)
    first = of_ranks[0]
    rank = next(rank for rank, other in enumerate(of_ranks) if other != first)
    other = of_ranks[rank]
    mine, theirs = [line for line in first if line not in other], [line for line in other if line not in first]
    what = "they ran in another order"
    if mine or theirs:
        what = f"rank 0 has {listed(mine) or 'nothing else'}, rank {rank} {listed(theirs) or 'nothing else'}"
    raise UsageError(
        f"the ranks of the group reduce amaxes of other layers: {what}",
        expected="the same layers and the same options of their recipe on all ranks",
        remedy="give layers that only some ranks have a group of these ranks, by autocast(amax_reduction_group=...)",
    )
