"""Numbers of several ranks, put together: by sum, minimum or maximum."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ottava.collectives import Ranks, all_reduce_max, all_reduce_sum

#: ``(how, name)`` -> a number, which is put together with others of its name by ``sum``, ``min`` or
#: ``max``.
Numbers = dict[tuple[str, str], float]
#: How numbers are put together -> what changes nothing.
NEUTRAL = {"sum": 0.0, "min": math.inf, "max": -math.inf}
# Backends whose collectives take tensors on a CPU; "undefined" is one that has a backend for each
# device.
_OF_CPU = ("gloo", "mpi", "undefined")


def put_together(numbers: Mapping[Any, Numbers], group: Any) -> dict[Any, Numbers]:
    """The numbers of all ranks of a group. Each rank has to call it.

    Args:
        numbers: by keys, tuples of texts and numbers. Ranks may have different keys, as stages of a
            pipeline do.
        group: a process group; None is the default group.

    Returns:
        For each key of this rank the numbers of all ranks that have it: sums in float64, and exact
        minima and maxima. NaN stays NaN.
    """
    flat = {
        (key, *name): number for key, found in numbers.items() for name, number in found.items()
    }
    names = _agreed(sorted(flat, key=repr), Ranks(group))
    device = _device(group)
    found = _sums(flat, [name for name in names if name[1] == "sum"], group, device)
    found |= _extremes(flat, [name for name in names if name[1] != "sum"], group, device)
    return {key: {name: found[key, *name] for name in own} for key, own in numbers.items()}


def _agreed(names: list[Any], ranks: Ranks) -> list[Any]:
    """The names of all ranks in one order."""
    digests = ranks.gather(_digest(names))
    if len(set(digests)) == 1:
        return names
    return sorted({name for own in ranks.gather(names) for name in own}, key=repr)


def _digest(names: Sequence[Any]) -> str:
    return hashlib.blake2b(repr(names).encode(), digest_size=16).hexdigest()


def _device(group: Any) -> torch.device:
    """Where the collectives of a group take tensors."""
    backend = str(dist.get_backend(group))
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or any(name in backend for name in _OF_CPU):
        return torch.device("cpu")
    return accelerator


def _sums(
    flat: Mapping[Any, float], names: list[Any], group: Any, device: torch.device
) -> dict[Any, float]:
    if not names:
        return {}
    own = torch.tensor([flat.get(name, 0.0) for name in names], dtype=torch.float64, device=device)
    return dict(zip(names, all_reduce_sum(own, group).tolist(), strict=True))


def _extremes(
    flat: Mapping[Any, float], names: list[Any], group: Any, device: torch.device
) -> dict[Any, float]:
    """Minima as the negatives of maxima. What a maximum of NaN is, backends do not say: NaN is told
    beside it."""
    if not names:
        return {}
    signs = torch.tensor(
        [-1.0 if name[1] == "min" else 1.0 for name in names], dtype=torch.float64, device=device
    )
    own = [flat.get(name, NEUTRAL[name[1]]) for name in names]
    signed = torch.tensor(own, dtype=torch.float64, device=device) * signs
    unknown = signed.isnan()
    sent = torch.stack([signed.masked_fill(unknown, -math.inf), unknown.double()])
    largest, nowhere = all_reduce_max(sent, group)
    found = (largest * signs).masked_fill(nowhere > 0, math.nan)
    return dict(zip(names, found.tolist(), strict=True))
