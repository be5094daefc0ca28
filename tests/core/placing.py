"""Kernels at any address: their results, and whether what lies beside them is left alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ottava.kernels.table import Operation
from tests.comparing import assert_same

Tensor = torch.Tensor
#: Elements beyond a boundary of 64 bytes, of sources and of results.
OFFSETS = [(0, 0), (1, 0), (0, 1), (8, 3), (3, 8), (1, 1)]
_turns = itertools.cycle(OFFSETS)
_NOTHING: Mapping[int, Tensor] = {}


def junk(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
    """Bytes 0xA5 at ``offset`` elements beyond a boundary of 64 bytes, in a room of the same."""
    count = math.prod(shape) * dtype.itemsize
    room = torch.full((count + 192,), 0xA5, dtype=torch.uint8)
    first = -room.data_ptr() % 64 + offset * dtype.itemsize
    return room[first : first + count].view(dtype).view(shape)


def at(x: Tensor, offset: int) -> Tensor:
    """The same values there."""
    return junk(tuple(x.shape), x.dtype, offset).copy_(x)


@contextmanager
def running_on(threads: int) -> Iterator[None]:
    """Inside, kernels run on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_alone(part: Tensor) -> bool:
    """Whether the room beside a part still has its bytes."""
    room = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
    first = part.storage_offset() * part.element_size()
    rest = torch.cat([room[:first], room[first + part.numel() * part.element_size() :]])
    return bool((rest == 0xA5).all())


def check(
    row: Operation,
    arguments: tuple[Any, ...],
    expected: tuple[Tensor | None, ...],
    note: object,
    written: Mapping[int, Tensor] = _NOTHING,
) -> None:
    """A row's results in given buffers are the expected ones, and sometimes those of a call, too.

    Args:
        expected: None for each result that the caller does not ask for.
        written: the argument's number -> what it holds afterwards; all others stay as they are.
    """
    source, result = next(_turns)
    for placed in (True,) if source else (True, False):
        given = [at(a, source) if isinstance(a, Tensor) else a for a in arguments]
        if placed:
            outs = [e if e is None else junk(tuple(e.shape), e.dtype, result) for e in expected]
            row.into(outs, *given)
            assert_same(outs, expected, note=(note, source, result))
            assert all(is_alone(out) for out in outs if out is not None), note
        else:
            made = row(*given)  # type: ignore[operator]
            nothing = torch.empty(0, dtype=torch.uint8)
            wanted = [nothing if e is None else e for e in expected]
            assert_same([made] if isinstance(made, Tensor) else made, wanted, note=note)
        for number, (argument, before) in enumerate(zip(given, arguments, strict=True)):
            if isinstance(argument, Tensor):
                assert_same(argument, written.get(number, before), note=(note, number))
                assert is_alone(argument), (note, number)
