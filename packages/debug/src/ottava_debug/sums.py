"""Sums over tensors. Those of microbatches, steps and ranks are combined into sums over all of
them."""

import hashlib
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ottava.collectives import Ranks, all_reduce_max, all_reduce_sum

#: ``(operation, name)`` -> a number; the operation, ``sum``, ``min`` or ``max``, combines the
#: numbers of two tensors.
Sums = dict[tuple[str, Any], float]

# Operation -> its neutral element.
_NEUTRAL = {"sum": 0.0, "min": math.inf, "max": -math.inf}
# Backends whose collectives take tensors on a CPU; "undefined" stands for a backend for each
# device.
_OF_CPU = ("gloo", "mpi", "undefined")


def _least(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else min(a, b)


def _most(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


_OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "sum": operator.add,
    "min": _least,
    "max": _most,
}


def add(sums: Sums, others: Sums) -> None:
    """Combine ``sums``, in place, with those of another tensor."""
    for key, other in others.items():
        sums[key] = _OPERATIONS[key[0]](sums[key], other) if key in sums else other


def by_name(sums: Sums) -> dict[Any, float]:
    """Name -> the number."""
    return {name: number for (_, name), number in sums.items()}


def over_ranks(own: Mapping[Any, Sums], group: Any) -> dict[Any, Sums]:
    """The combined sums of all ranks of a group, each of which has to call this.

    Args:
        own: key -> sums; keys are tuples of texts and numbers. Ranks may have different keys, as
            stages of a pipeline do.
        group: a process group; None is the default group.

    Returns:
        For each key of this rank the combined sums of all ranks that have the key: sums in float64,
        and exact minima and maxima. NaN stays NaN.
    """
    flat = {(key, *name): number for key, sums in own.items() for name, number in sums.items()}
    names = _names_of_all(sorted(flat, key=repr), Ranks(group))
    device = _device(group)
    combined = _added([name for name in names if name[1] == "sum"], flat, group, device)
    combined |= _extremes([name for name in names if name[1] != "sum"], flat, group, device)
    result: dict[Any, Sums] = {key: {} for key in own}
    for (key, operation, name), number in combined.items():
        if key in result:
            result[key][operation, name] = number
    return result


def _names_of_all(names: list[Any], ranks: Ranks) -> list[Any]:
    """The names of all ranks, in the same order on each rank."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=16).hexdigest()
    if len(set(ranks.gather(digest))) == 1:
        return names
    return sorted({name for own in ranks.gather(names) for name in own}, key=repr)


def _device(group: Any) -> torch.device:
    """The device on which the collectives of a group take tensors."""
    backend = str(dist.get_backend(group))
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or any(name in backend for name in _OF_CPU):
        return torch.device("cpu")
    return accelerator


def _added(
    names: list[Any], flat: Mapping[Any, float], group: Any, device: torch.device
) -> dict[Any, float]:
    if not names:
        return {}
    own = torch.tensor([flat.get(name, 0.0) for name in names], dtype=torch.float64, device=device)
    return dict(zip(names, all_reduce_sum(own, group).tolist(), strict=True))


def _extremes(
    names: list[Any], flat: Mapping[Any, float], group: Any, device: torch.device
) -> dict[Any, float]:
    """The minima and maxima over ranks, in one all-reduce(MAX).

    A minimum is the negative of a maximum of negatives. NaN is reduced as a separate flag, because
    backends do not define the maximum of NaN.
    """
    if not names:
        return {}
    own = [flat.get(name, _NEUTRAL[name[1]]) for name in names]
    signs = torch.tensor([-1.0 if name[1] == "min" else 1.0 for name in names]).to(device).double()
    signed = torch.tensor(own, dtype=torch.float64, device=device) * signs
    is_nan = signed.isnan()
    packed = torch.stack([signed.masked_fill(is_nan, -math.inf), is_nan.double()])
    largest, any_nan = all_reduce_max(packed, group)
    extremes = (largest * signs).masked_fill(any_nan > 0, math.nan)
    return dict(zip(names, extremes.tolist(), strict=True))
