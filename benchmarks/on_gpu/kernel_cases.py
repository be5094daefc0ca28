"""The table of kernels: a case is a choice for each argument, by the name with which a kernel declares it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import cycle, islice, product
from typing import Any

import torch

from benchmarks.on_gpu.exact import EXACT
from benchmarks.on_gpu.inputs import FLOATS, FP8, SHAPES, SMALL_SHAPES, SOURCES, Args, Draw, Shape, Tensor
from benchmarks.on_gpu.place import Gpu
from benchmarks.on_gpu.runner import Case
from ottava import kernels
from ottava.formats import mx_scale_shapes
from ottava.kernels import parts, use_backend

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
E4M3 = FP8[0]
Drawn = Callable[[Draw, Args, int], Any]
#: An argument's name -> what it may be, or what draws it: from the arguments that are there, and the case's number.
Arguments = dict[str, tuple[Any, ...] | Drawn]


def _one_of(number: int, count: int) -> int:
    """Which of ``count``; not in step with anything that cycles."""
    return (number * 2654435761 >> 9) % count


def _room(d: Draw, n: int, shape: Sequence[int], dtype: torch.dtype = U8) -> Tensor:
    return d.result(tuple(shape), dtype, (0, 1, 8)[_one_of(n, 3)])


def _pair(d: Draw, a: Args, n: int, direction: int) -> Any:
    """Room for codes and scales, or None."""
    shapes = a["x"].shape, mx_scale_shapes(a["x"].shape)[direction]
    return None if _one_of(n, 3) == 1 + direction else tuple(_room(d, n, shape) for shape in shapes)


# Many tensors at once: their shapes; what each counts as, and its format, follow from its number.
_LISTS: list[list[Shape]] = [[()], [(0,)], [(4097,)], [(3, 5), (0,), (1,), (129, 127), (7,), (2, 3, 41), (1024,)]]
_MATRICES: list[Shape] = [(1, 1), (7, 33), (32, 32), (64, 96), (5, 31), (40, 100), (129, 257), (3, 0), (256, 64)]


def _shard(d: Draw, i: int, shape: Shape, kind: int) -> Tensor:
    """Every other one is off a round address."""
    return d.floats((math.prod(shape) + i % 2,), FLOATS[i % 3], kind)[i % 2 :].view(shape)


def _ranges(seed: int) -> list[list[int]]:
    """Of each matrix the first element and the one after the last."""
    draw = Draw(seed)
    return [sorted(draw.integers(0, rows * columns + 1, (2,)).tolist()) for rows, columns in _MATRICES]


def _ranged(d: Draw, a: Args, direction: int) -> list[Any]:
    """Scales of whole matrices and room for their ranges, or None."""
    scales = (d.bits(mx_scale_shapes(shape)[direction], U8) for shape in _MATRICES)
    rooms = (d.result((x.numel(),), U8, i % 3) for i, x in enumerate(a["xs"]))
    return [pair if i % 3 != 1 + direction else None for i, pair in enumerate(zip(scales, rooms, strict=True))]


def _history(d: Draw, length: int, slots: int) -> Tensor:
    """Some slots without an amax in the first row, which are left alone; with an oracle in float64 none."""
    if d.plain:
        return d.values((length, slots), F32).abs() + 0.1
    history = d.bits((length, slots), F32).abs()
    history[0] *= d.integers(0, 3, (slots,)) > 0
    return history


_FLAGS = ("force_pow_2", "rowwise", "columnwise", "transposed", "two_dimensional", "floor", "most_recent")
COMMON: Arguments = dict.fromkeys(_FLAGS, (True, False)) | {
    "fp8_dtype": FP8,
    "epsilon": (0.0, 1e-2),
    "scale_rounding": ("up", "floor"),
    "dtype": FLOATS,
    "out_dtype": FLOATS,
    "scale": lambda d, a, n: d.scale(),
    "scale_inv": lambda d, a, n: d.scale() if _one_of(n, 4) else None,
    "amax": lambda d, a, n: torch.tensor(0.5),
    "saturated": lambda d, a, n: torch.tensor(7) if _one_of(n, 2) else None,
    "scales": lambda d, a, n: d.bits(mx_scale_shapes(a["data"].shape)[a["columnwise"]], U8),
}
_LISTED: Arguments = {
    "_shapes": (*_LISTS, [(n % 40 + 1,) for n in range(200)]),
    "_kind": (0, 1),
    "xs": lambda d, a, n: [_shard(d, i, shape, a["_kind"]) for i, shape in enumerate(a["_shapes"])],
    "dtypes": lambda d, a, n: [FLOATS[(i // 2) % 3] for i in range(len(a["xs"]))],
    "fp8_dtypes": lambda d, a, n: [FP8[i % 2] for i in range(len(a["xs"]))],
    "scales": lambda d, a, n: d.values((len(a["xs"]),), F32),
    "outs": lambda d, a, n: [d.result(x.shape, U8, i % 3) for i, x in enumerate(a["xs"])],
}
_RANGED: Arguments = _LISTED | {
    "_shapes": tuple(range(6)),
    "xs": lambda d, a, n: [_shard(d, n + i, (e - s,), a["_kind"]) for i, (s, e) in enumerate(_ranges(a["_shapes"]))],
    "shapes": lambda d, a, n: list(_MATRICES),
    "starts": lambda d, a, n: [start for start, _ in _ranges(a["_shapes"])],
    "two_dimensional": lambda d, a, n: [i % 2 == 1 for i in range(len(_MATRICES))],
    "rowwise": lambda d, a, n: _ranged(d, a, 0),
    "columnwise": lambda d, a, n: _ranged(d, a, 1),
}
#: Kernel -> its arguments that are not as usual. Those that begin with _ are not given to it.
OWN: dict[str, Arguments] = {
    "cast_parts": {
        "amax": lambda d, a, n: torch.tensor(0.5) if _one_of(n, 2) else None,
        "saturated": lambda d, a, n: torch.tensor(7) if _one_of(n, 2) else None,
    },
    "amax_out": {"out": lambda d, a, n: _room(d, n, (), F32)},
    "cast_out": {"out": lambda d, a, n: _room(d, n, a["x"].shape)},
    "transpose_out": {"out": lambda d, a, n: _room(d, n, a["data"].movedim(-1, 0).shape)},
    "decode_out": {"_to": FLOATS, "out": lambda d, a, n: _room(d, n, a["data"].shape, a["_to"])},
    "mx_decode": {"dtype": (*FLOATS, torch.float64)},
    "mx_decode_out": {"_to": FLOATS, "out": lambda d, a, n: _room(d, n, a["data"].shape, a["_to"])},
    "mx_quantize_out": {key: lambda d, a, n, i=i: _pair(d, a, n, i) for i, key in enumerate(("rowwise", "columnwise"))},
    "quantize_out": {
        "data": lambda d, a, n: _room(d, n, a["x"].shape) if _one_of(n, 3) != 1 else None,
        "transpose": lambda d, a, n: _room(d, n, a["x"].movedim(-1, 0).shape) if _one_of(n, 3) != 2 else None,
        **{name: lambda d, a, n: _room(d, n, (), F32) for name in ("scale", "scale_inv", "amax")},
    },
    "update_scales": {
        "_length": (1, 2, 16, 1024),
        "_counts": ((1,), (3, 1, 5), (0, 2), (3,) * 40, (300,)),
        "_last": (True, False),
        "scales": lambda d, a, n: [d.values((k,), F32).abs() for k in a["_counts"]],
        "histories": lambda d, a, n: [_history(d, a["_length"], k) for k in a["_counts"]],
        "maxima": lambda d, a, n: [(448.0, 57344.0, 28672.0)[i % 3] for i in range(sum(a["_counts"]))],
        "last": lambda d, a, n: d.bits((sum(a["_counts"]),), F32).abs() if a["_last"] and not d.plain else None,
    },
    # Small integers, whose sums are exact in any order: the bytes are those of one rounding.
    "scaled_mm": {
        "_size": ((0, 4, 3), (4, 0, 3), (4, 3, 0), (1, 1, 1), (3, 5, 7), (17, 33, 65), (64, 128, 80)),
        "_operand": FLOATS[:2],
        "_scaled": (True, False),
        "_biased": (True, False),
        "a": lambda d, a, n: d.integers(-2, 3, a["_size"][:2]).to(a["_operand"]),
        "b": lambda d, a, n: d.integers(-2, 3, a["_size"][:0:-1]).to(a["_operand"]).t(),
        "scale_a": lambda d, a, n: torch.tensor(0.25) if a["_scaled"] else None,
        "scale_b": lambda d, a, n: torch.tensor(2.0) if a["_scaled"] else None,
        "bias": lambda d, a, n: d.integers(-9, 9, (a["_size"][2],)).float() if a["_biased"] else None,
    },
    "multi_amax": _LISTED,
    "multi_cast": _LISTED,
    "mx_multi_amax": _RANGED,
    "mx_multi_cast": _RANGED,
}
#: Every kernel that ``ottava.kernels`` offers, and the forms in which layers call some.
KERNELS = sorted(
    name for name in {*kernels.__all__, *vars(parts)} if name in kernels.__all__ or name.endswith("_parts")
)
for _other in ("available_backends", "backend_for", "use_backend", "mx_amax_sizes", "HIGH_PRECISION"):
    KERNELS.remove(_other)
KERNELS = [name for name in KERNELS if not name.startswith("check_")]


def _asks(name: str, option: Args, dimensions: int) -> bool:
    """Whether a kernel can be asked for this."""
    matrix = name in ("cast_transpose", "transpose", "transpose_out", "quantize_out") or option.get("transposed")
    wanted = [option[key] for key in ("rowwise", "columnwise", "transposed") if key in option]
    free = name in ("quantize", "cast_amax", "mx_decode", "mx_decode_out")
    return (dimensions > 0 or not matrix) and (free or not wanted or any(wanted))


def kernel_cases(name: str, shapes: Sequence[Shape], each: int = 4, oracle: Any = "cpu") -> list[Case]:
    """A kernel's cases: for each first input ``each`` choices for the other arguments in turn.

    Random, special, ragged and unaligned inputs; for an ``oracle`` that is a function plain ones.

    Raises:
        KeyError: the table lacks an argument.
    """
    call, own, plain = getattr(kernels, name, None) or getattr(parts, name), OWN.get(name, {}), callable(oracle)
    names = [key for key in inspect.signature(call).parameters if key != "checked"]
    source, first = SOURCES.get(names[0]), names[0]
    needed = [*(key for key in own if key.startswith("_")), *names[source is not None :]]
    table = {key: own[key] if key in own else COMMON[key] for key in needed}
    choices = {key: value for key, value in table.items() if isinstance(value, tuple)}
    options = [dict(zip(choices, chosen, strict=True)) for chosen in product(*choices.values())]

    def make(draw: Draw, given: Any, option: Args, number: int) -> Args:
        draw.plain = plain
        arguments = ({first: given(draw)} if given else {}) | option
        for key, value in table.items():
            arguments[key] = arguments[key] if key in arguments else value(draw, arguments, number)  # type: ignore[operator]
        return {key: arguments[key] for key in names}

    turns, found = cycle(options), list[Case]()
    for label, dimensions, given in source(shapes, plain) if source else [("", 2, None)]:
        for option in islice(turns, min(each, len(options)) if source else len(options)):
            if _asks(name, option, dimensions):
                words = ", ".join(f"{key} {str(value)[:40]}" for key, value in option.items())
                drawn = partial(make, given=given, option=option, number=len(found))
                found.append(Case(f"{label} {words}", drawn, lambda a: call(**a), oracle))
    return found


def byte_cases(small: bool = False) -> dict[str, list[Case]]:
    """Of each kernel, whose bytes are to be the CPU backend's."""
    oracles, shapes = {"scaled_mm": "reference"}, SMALL_SHAPES if small else SHAPES
    return {name: kernel_cases(name, shapes, oracle=oracles.get(name, "cpu")) for name in KERNELS}


def exact_cases() -> dict[str, list[Case]]:
    """Kernels over elements against float64, for each dtype, format and option."""
    shapes, oracles = [(64, 96), (257, 131), (33, 40)], {name: lambda a, f=f: f(**a) for name, f in EXACT.items()}
    return {f"{name} against float64": kernel_cases(name, shapes, 99, oracle) for name, oracle in oracles.items()}


#: More than 2^31 elements: rows and columns that suit wide accesses, and ones that do not.
LARGE = [(65552, 32768), (65537, 32777)]


def _full(x: Tensor, value: float, *shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.full(shape, value, device=x.device, dtype=dtype)


def _mx_decode(x: Tensor) -> Tensor:
    return kernels.mx_decode(x, _full(x, 130, len(x), -(-x.shape[1] // 32), dtype=U8), E4M3, BF16)


# Name -> whether it takes codes, the call, and along which dimension of each result the rows of the input lie.
_LARGE: dict[str, tuple[bool, Callable[[Tensor], Any], tuple[int, ...]]] = {
    "cast": (False, lambda x: [kernels.cast(x, _full(x, 20.0), E4M3)], (0,)),
    "cast_transpose": (False, lambda x: kernels.cast_transpose(x, _full(x, 20.0), E4M3), (0, 1)),
    "quantize": (False, lambda x: kernels.quantize(x, E4M3, transposed=True)[:2], (0, 1)),
    "mx_quantize": (False, lambda x: kernels.mx_quantize(x, E4M3), (0, 0, 0, 0)),
    "transpose": (True, lambda x: [kernels.transpose(x)], (1,)),
    "decode": (True, lambda x: [kernels.decode(x, _full(x, 20.0), E4M3, BF16)], (0,)),
    "mx_decode": (True, lambda x: [_mx_decode(x)], (0,)),
}


def _equal(got: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    wrong = [n for n, (a, b) in enumerate(zip(got, expected, strict=True)) if not torch.equal(a, b)]
    return f"results {wrong} have other bytes" if wrong else None


def large_cases(place: Gpu, shape: Shape, step: int = 2048) -> dict[str, list[Case]]:
    """A matrix as a whole has the bytes of its slices of ``step`` rows, a multiple of 32, whose last is the CPU's.

    The slices' own bytes are checked elsewhere against the CPU's. Each has the whole's largest number, for its scale.
    """

    @cache
    def given(codes: bool) -> Tensor:
        x = torch.empty(shape, dtype=BF16, device=place.device)
        for rows in x.split(step):
            rows.copy_(torch.randn(rows.shape, device=place.device))
            rows[-1, -1] = 1000.0
        return kernels.cast(x, _full(x, 20.0), E4M3) if codes else x

    def sliced(a: Args, codes: bool, call: Callable[[Tensor], Any], dims: Sequence[int]) -> list[Tensor]:
        *slices, last = given(codes).split(step)
        with place.serving():
            made = [call(rows.clone()) for rows in slices]
        with use_backend("cpu"):
            made.append([tensor.to(place.device) for tensor in call(last.cpu())])
        return [torch.cat(pieces, dim) for pieces, dim in zip(zip(*made, strict=True), dims, strict=True)]

    found = {}
    for name, (codes, call, dims) in _LARGE.items():
        oracle = partial(sliced, codes=codes, call=call, dims=dims)
        case = Case("as its slices", lambda d: {}, lambda a, c=call, g=codes: c(given(g)), oracle, _equal)
        found[f"{name}, {shape[0]} x {shape[1]}"] = [case]
    return found
