"""Combines numbers of several ranks by sum, minimum or maximum."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ottava.collectives import Ranks, all_reduce_max, all_reduce_sum

#: ``(operation, name)`` -> a number; the operation, ``sum``, ``min`` or ``max``, combines the
#: numbers of ranks with the same name.
Numbers = dict[tuple[str, str], float]
#: Operation -> its neutral element.
NEUTRAL = {"sum": 0.0, "min": math.inf, "max": -math.inf}
# Backends whose collectives take tensors on a CPU; "undefined" stands for a backend for each
# device.
_OF_CPU = ("gloo", "mpi", "undefined")


def put_together(numbers: Mapping[Any, Numbers], group: Any) -> dict[Any, Numbers]:
    """The combined numbers of all ranks of a group, each of which has to call this.

    Args:
        numbers: key -> numbers; keys are tuples of texts and numbers. Ranks may have different
            keys, as stages of a pipeline do.
        group: a process group; None is the default group.

    Returns:
        For each key of this rank the combined numbers of all ranks that have the key: sums in
        float64, and exact minima and maxima. NaN stays NaN.
    """
    flat = {(key, *name): number for key, own in numbers.items() for name, number in own.items()}
    names = _agreed(sorted(flat, key=repr), Ranks(group))
    device = _device(group)
    combined = _sums(flat, [name for name in names if name[1] == "sum"], group, device)
    combined |= _extremes(flat, [name for name in names if name[1] != "sum"], group, device)
    return {key: {name: combined[key, *name] for name in own} for key, own in numbers.items()}


def _agreed(names: list[Any], ranks: Ranks) -> list[Any]:
    """The names of all ranks, in the same order on each rank."""
    digests = ranks.gather(_digest(names))
    if len(set(digests)) == 1:
        return names
    return sorted({name for own in ranks.gather(names) for name in own}, key=repr)


def _digest(names: Sequence[Any]) -> str:
    return hashlib.blake2b(repr(names).encode(), digest_size=16).hexdigest()


def _device(group: Any) -> torch.device:
    """The device on which the collectives of a group take tensors."""
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
    """The minima and maxima over ranks, in one all-reduce(MAX).

    A minimum is the negative of a maximum of negatives. NaN is reduced as a separate flag, because
    backends do not define the maximum of NaN.
    """
    if not names:
        return {}
    signs = torch.tensor(
        [-1.0 if name[1] == "min" else 1.0 for name in names], dtype=torch.float64, device=device
    )
    own = [flat.get(name, NEUTRAL[name[1]]) for name in names]
    signed = torch.tensor(own, dtype=torch.float64, device=device) * signs
    is_nan = signed.isnan()
    packed = torch.stack([signed.masked_fill(is_nan, -math.inf), is_nan.double()])
    largest, any_nan = all_reduce_max(packed, group)
    extremes = (largest * signs).masked_fill(any_nan > 0, math.nan)
    return dict(zip(names, extremes.tolist(), strict=True))
