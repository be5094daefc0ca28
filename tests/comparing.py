"""Whole arrays compared byte for byte; what differs is named with its index, its input and its
bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

SHOWN = 5
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Result(NamedTuple):
    """The note of one of several results. It is put into words only where something differs,
    because a note may have whole tensors."""

    note: object
    number: int

    def __str__(self) -> str:
        return f"{self.note} result {self.number}".strip()


def assert_same(got: Any, expected: Any, inputs: Any = None, note: object = "") -> None:
    """The same dtype, shape and bytes; a NaN of a wide dtype equals any NaN.

    Tensors, arrays, numbers, None, and sequences of these. ``inputs`` are what the elements were
    made of: an array whose dimensions are the first of the result's, or a list with an entry for
    each place of the first dimension.
    """
    if isinstance(expected, tuple | list) and not all(isinstance(e, int | float) for e in expected):
        assert len(got) == len(expected), f"{note}: {len(got)} results, expected {len(expected)}"
        for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            assert_same(mine, theirs, inputs, _Result(note, i))
        return
    if expected is None or got is None:
        assert got is expected, f"{note}: got {got}, expected {expected}"
        return
    mine = _tensor(got)
    theirs = _tensor(expected, mine.dtype)
    assert mine.dtype == theirs.dtype, f"{note}: got {mine.dtype}, expected {theirs.dtype}"
    assert mine.shape == theirs.shape, (
        f"{note}: got the shape {tuple(mine.shape)}, expected {tuple(theirs.shape)}"
    )
    bits = _bits(mine), _bits(theirs)
    # They are equal almost always, which one operation tells.
    if torch.equal(*bits):
        return
    differs = bits[0] != bits[1]
    if mine.is_floating_point() and mine.element_size() > 1:
        differs &= ~(mine.isnan() & theirs.isnan())
    if differs.any():
        raise AssertionError(_message(mine, theirs, differs, inputs, note))


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Inside of the block, nothing of the state dict of a model changes."""
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    yield
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert_same(after[name], value, note=name)


def _tensor(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value, ndmin=1)).reshape(value.shape)
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value, dtype=dtype)
    return value.detach() if value.requires_grad else value


def _bits(values: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.bool or values.is_complex():
        return values
    return values.contiguous().view(BITS[values.element_size()])


def _one(value: torch.Tensor) -> str:
    if value.dtype == torch.bool or value.is_complex():
        return str(value.item())
    size = value.element_size()
    pattern = int(_bits(value.reshape(1))[0]) % (1 << 8 * size)
    return (
        f"{value.float().item() if value.is_floating_point() else value.item()} "
        f"(0x{pattern:0{2 * size}x})"
    )


def _message(
    mine: torch.Tensor, theirs: torch.Tensor, differs: torch.Tensor, inputs: Any, note: object
) -> str:
    lines = [f"{note}: {int(differs.sum())} of {differs.numel()} elements differ"]
    for place in differs.nonzero()[:SHOWN]:
        index = tuple(place.tolist())
        made_of = ""
        if isinstance(inputs, torch.Tensor | np.ndarray):
            table = _tensor(inputs)
            found = table[index[: table.dim()]]
            made_of = f" of {_one(found) if found.dim() == 0 else found.tolist()}"
        elif isinstance(inputs, Sequence):
            made_of = f" of {inputs[index[0]]}"
        lines.append(
            f"  at {list(index)}{made_of}: got {_one(mine[index])}, expected {_one(theirs[index])}"
        )
    return "\n".join(lines)
