"""A matrix of more than 2^31 elements: what is far from its beginning has the bytes that it has near one.

The expected bytes come from the same kernels on slices of a few million elements, whose own bytes are checked elsewhere
against the CPU's. The last rows are compared with the CPU's here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.on_gpu.checks import Outcome, difference
from benchmarks.on_gpu.place import Gpu, poisoned
from ottava import kernels
from ottava.kernels import use_backend

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
#: More than 2^31 elements: rows and columns that suit wide accesses, and ones that do not.
SHAPES = [(65552, 32768), (65537, 32777)]

Tensors = tuple[torch.Tensor, ...]
# What of a result rows of the input have made.
Part = Callable[[torch.Tensor, int, int], torch.Tensor]


def _rows(result: torch.Tensor, first: int, last: int) -> torch.Tensor:
    return result[first:last]


def _columns(result: torch.Tensor, first: int, last: int) -> torch.Tensor:
    return result[:, first:last]


def _blocks(result: torch.Tensor, first: int, last: int) -> torch.Tensor:
    return result[first // 32 : -(-last // 32)]


def _scalar(x: torch.Tensor) -> torch.Tensor:
    return torch.full((), 20.0, device=x.device)


def _mx_decode(codes: torch.Tensor) -> Tensors:
    scales = torch.full((codes.shape[0], -(-codes.shape[1] // 32)), 130, dtype=torch.uint8, device=codes.device)
    return (kernels.mx_decode(codes, scales, E4M3, BF16),)


#: Name -> whether it takes codes, the call, and what of its results belongs to some rows.
KINDS: dict[str, tuple[bool, Callable[[torch.Tensor], Tensors], tuple[Part, ...]]] = {
    "cast": (False, lambda x: (kernels.cast(x, _scalar(x), E4M3),), (_rows,)),
    "cast_transpose": (False, lambda x: kernels.cast_transpose(x, _scalar(x), E4M3), (_rows, _columns)),
    "mx_quantize": (False, lambda x: kernels.mx_quantize(x, E4M3), (_rows, _rows, _rows, _blocks)),
    "transpose": (True, lambda codes: (kernels.transpose(codes),), (_columns,)),
    "decode": (True, lambda codes: (kernels.decode(codes, _scalar(codes), E4M3, BF16),), (_rows,)),
    "mx_decode": (True, _mx_decode, (_rows,)),
}


def _slices(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """First and last row; the first is a multiple of 32, so that blocks along columns stay whole."""
    for first in range(0, rows, size):
        yield first, min(first + size, rows)


def _random(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    x = torch.empty(shape, dtype=BF16, device=device)
    for first, last in _slices(shape[0], 4096):
        x[first:last] = torch.randn(last - first, shape[1], device=device)
    # The largest lies where an index of 32 bits does not come.
    x[-1, -1] = 1000.0
    return x


def _check_kind(place: Gpu, name: str, given: torch.Tensor, step: int) -> Outcome:
    _, run, parts = KINDS[name]
    rows = given.shape[0]
    outcome = Outcome(f"{name}, {rows} x {given.shape[1]}")
    with place.serving(), poisoned():
        whole = run(given)
    for first, last in _slices(rows, step):
        with place.serving():
            expected = run(given[first:last].clone())
        for number, (mine, theirs, part) in enumerate(zip(whole, expected, parts, strict=True)):
            same = torch.equal(part(mine, first, last), theirs)
            outcome.note(f"rows {first} to {last}, result {number}", None if same else "bytes differ")
    first = (rows - 1) // 32 * 32
    with use_backend("cpu"):
        expected = run(given[first:].cpu())
    for number, (mine, theirs, part) in enumerate(zip(whole, expected, parts, strict=True)):
        outcome.note(f"last rows, result {number}", difference(part(mine, first, rows).cpu(), theirs))
    return outcome


def _check_scaling(place: Gpu, x: torch.Tensor) -> Outcome:
    """Current scaling is an amax, a scale and a cast."""
    outcome = Outcome(f"quantize, {x.shape[0]} x {x.shape[1]}")
    with place.serving():
        data, turned, scale, _, amax = kernels.quantize(x, E4M3, transposed=True)
        expected = kernels.cast_transpose(x, scale, E4M3)
        again = kernels.amax(x)
    outcome.note("amax", None if amax.item() == again.item() == 1000.0 else f"{amax.item()} and {again.item()}")
    for name, mine, theirs in zip(("codes", "transpose"), (data, turned), expected, strict=True):
        outcome.note(name, None if torch.equal(mine, theirs) else "bytes differ")
    return outcome


def check(place: Gpu, shape: tuple[int, int], step: int = 2048) -> list[Outcome]:
    """Every kernel over elements on one matrix of ``shape``, in slices of ``step`` rows, a multiple of 32."""
    x = _random(shape, place.device)
    with place.serving():
        codes = kernels.cast(x, _scalar(x), E4M3)
    outcomes = []
    runs: dict[str, Callable[[], Outcome]] = {
        name: lambda name=name, given=codes if kind[0] else x: _check_kind(place, name, given, step)
        for name, kind in KINDS.items()
    }
    for name, run in (runs | {"quantize": lambda: _check_scaling(place, x)}).items():
        try:
            outcomes.append(run())
        except Exception as error:
            outcomes.append(Outcome(f"{name}, {shape[0]} x {shape[1]}"))
            outcomes[-1].note(name, f"{type(error).__name__}: {error}")
    return outcomes
