"""The table of cases of kernels.

A case is a choice for each argument, by the name with which a kernel declares it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice, product
from typing import Any

import torch

from benchmarks.on_gpu.runner import (
    FLOATS,
    FP8,
    Args,
    Case,
    Draw,
    Shape,
    Tensor,
    Tensors,
    framed,
    tensors,
)
from ottava import Layout, kernels
from ottava.kernels import for_layers, products
from ottava.kernels.table import OPERATIONS
from ottava.layout import Rotation, grid_of

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
SMALL_SHAPES: list[Shape] = [
    (), (0,), (1,), (0, 5), (3, 0), (3, 5), (16, 16), (33, 65), (129, 127), (2, 3, 41),
]  # fmt: skip
SHAPES: list[Shape] = [
    *SMALL_SHAPES,
    (7,), (4097,), (1, 1), (1, 31), (8, 8), (15, 17), (31, 33), (32, 32), (63, 65), (64, 64),
    (127, 129), (128, 128), (128, 136), (136, 128), (255, 256), (1, 4097), (4097, 1), (257, 1023),
    (512, 384), (2, 0, 3), (3, 40, 32), (1000, 1000), (4097, 129), (2048, 2056),
]  # fmt: skip
Make = Callable[[Shape], Tensor]
#: Name of a memory layout -> the number of dimensions that it needs, and a function that makes a
#: tensor of a shape with this layout.
VIEWS: dict[str, tuple[int, Callable[[Make, Shape], Tensor]]] = {
    "contiguous": (0, lambda make, s: make(s)),
    "unaligned": (0, lambda make, s: make((math.prod(s) + 1,))[1:].view(s)),
    "transposed": (2, lambda make, s: make((*s[:-2], s[-1], s[-2])).transpose(-1, -2)),
    "strided": (1, lambda make, s: make((*s[:-1], 2 * s[-1]))[..., ::2]),
    "cut": (1, lambda make, s: make((*s[:-1], s[-1] + 3))[..., : s[-1]]),
    "expanded": (2, lambda make, s: make((*(1 for _ in s[:-1]), s[-1])).expand(s)),
}


def _hardest(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a 16-bit dtype.

    For float32, every value whose low 17 bits are zero, and both neighbours of each. Among them are
    all FP8 values, the ties between them, and the neighbours of ties.
    """
    if dtype != F32:
        return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    leading = torch.arange(1 << 15, dtype=torch.int64) << 17
    bits = torch.cat([leading, leading + 1, (leading - 1).clamp(min=0)])
    return bits.to(torch.uint32).view(dtype)


E8M0 = torch.float8_e8m0fnu
#: The MX layout of a case that makes no choice.
MX = Layout(FP8[0], (1, 32), E8M0, "up")
_MX = tuple(
    Layout(element, (1, 32), E8M0, rule, shared=shared)
    for element, rule, shared in product(FP8, ("up", "floor"), (None, (32, 32)))
)
_BANDS = Layout(FP8[0], (1, 128), rounding="floor", finite_as="input", columnwise="transposed")
_SQUARES = Layout(FP8[0], (128, 128), columnwise="transposed")
#: The layouts of the recipes, and some that no recipe has.
LAYOUTS = (
    *_MX,
    Layout(FP8[0], (None, None)),
    Layout(FP8[1], (1, None), epsilon=0.5),
    _BANDS,
    _SQUARES,
    Layout(torch.int8, (8, 64), rounding="floor"),
)
_ROTATION = Rotation(32, 0xA7E8_1234, "both")


def _nvfp4(block: tuple[int, int] = (1, 16), **fields: Any) -> Layout:
    fields = {"second_level": "tensor", "columnwise": "transposed"} | fields
    return Layout("E2M1", block, torch.float8_e4m3fn, **fields)


#: Layouts with small elements, two levels of scales, rotation or choices: each part once.
LEVELS = (
    _nvfp4(rotation=Rotation(16, 0xA7E8), stochastic=True),
    _nvfp4((16, 16), stochastic=True),
    _nvfp4((16, 16), candidates=(1.0, 1.5), bound=256.0),
    _nvfp4(candidates=(1.0, 1.5), error="MSE"),
    _nvfp4(second_level="row", rotation=_ROTATION),
    _nvfp4((128, 128), candidates=(1.0, 1.5)),
    Layout("E2M1", (1, 32), E8M0, "even", columnwise="transposed", shared=(32, 32)),
    Layout("E2M3", (1, 32), E8M0, "floor", stochastic=True),
    Layout("E3M2", (8, 16), "UE5M3", second_level="tensor", candidates=(1.0, 1.5, 0.25)),
    Layout("MXINT8", (1, 64), E8M0, "nearest", columnwise="transposed", rotation=_ROTATION),
    Layout("INT4", (2, 128), columnwise="transposed", stochastic=True, finite_as="input"),
    Layout(FP8[0], (1, 32), torch.float8_e4m3fn, second_level="row"),
)
# Special kernels serve calls whose layouts are all MX, or all have one scale for a tensor.
_ALIKE = {"mx": _MX, "tensors": tuple(Layout(f, (None, None)) for f in FP8), "any": ()}
#: Label, number of dimensions, and a function that draws the input.
Source = tuple[str, int, Callable[[Draw], Any]]
# Shapes of many tensors in one call. Their dtypes and formats follow from their positions.
_LISTS: list[list[Shape]] = [
    [()],
    [(0,)],
    [(4097,)],
    [(3, 5), (0,), (1,), (129, 127), (7,), (2, 3, 41), (1024,)],
    [(n % 40 + 1,) for n in range(200)],
    [(33153,), (256, 64), (40, 100), (160,)],
]


def _viewed(view: str, shape: Shape, dtype: torch.dtype, kind: Callable[..., Tensor]) -> Source:
    label, place = f"{str(dtype)[6:]} {shape} {view} {kind.__name__}", VIEWS[view][1]
    return label, len(shape), lambda draw: place(lambda size: kind(draw, size, dtype), shape)


def _numbers(shapes: Sequence[Shape]) -> Iterator[Source]:
    """Inputs of each dtype.

    Each shape has contiguous values, and any bits in one of the other memory layouts. Then come the
    special values.
    """
    for dtype in FLOATS:
        views = cycle(name for name in VIEWS if name != "contiguous")
        yield from (_viewed("contiguous", shape, dtype, Draw.values) for shape in shapes)
        for shape in shapes:
            view = next(name for name in views if VIEWS[name][0] <= len(shape))
            yield _viewed(view, shape, dtype, Draw.bits)
        # The number of values is divisible by 256, so they can be a vector or a matrix.
        x = _hardest(dtype)
        for special in (x, x.view(256, -1), x[: len(x) // 255 * 255].view(-1, 255)):
            label = f"{str(dtype)[6:]} special {tuple(special.shape)}"
            yield label, special.dim(), lambda _, special=special: special


def _data(shapes: Sequence[Shape]) -> Iterator[Source]:
    for shape, view in product(shapes, VIEWS):
        if VIEWS[view][0] <= len(shape):
            yield _viewed(view, shape, U8, Draw.bits)


def _amaxes(_: Sequence[Shape]) -> Iterator[Source]:
    for shape in ((), (0,), (1,), (127,), (129,), (3, 1000)):
        yield str(shape), len(shape), lambda d, shape=shape: d.bits(shape, F32).abs()


def _lists(_: Sequence[Shape]) -> Iterator[Source]:
    """Inputs of many tensors; every other tensor is unaligned."""
    for many, kind in product(_LISTS, (Draw.values, Draw.bits)):
        makes = [
            _viewed(("contiguous", "unaligned")[i % 2], shape, FLOATS[i % 3], kind)[2]
            for i, shape in enumerate(many)
        ]
        label = f"{len(many)} from {many[0]} {kind.__name__}"
        yield label, 2, lambda d, makes=makes: [make(d) for make in makes]


#: The name of a kernel's first argument -> a function that gives its inputs.
SOURCES: dict[str, Callable[[Sequence[Shape]], Iterable[Source]]] = {
    "x": _numbers,
    "data": _data,
    "amax": _amaxes,
    "xs": _lists,
}
#: An argument's name -> its possible values, or a function that draws it from the arguments before
#: it and the case's number.
Arguments = dict[str, tuple[Any, ...] | Callable[[Draw, Args, int], Any]]


def _one_of(number: int, count: int) -> int:
    """A number below ``count`` for a case, out of step with everything that cycles."""
    return (number * 2654435761 >> 9) % count


def _pairs(d: Draw, a: Args, n: int, direction: int) -> Any:
    """For each shard None, or the scales of its whole matrix and memory for its data."""
    pairs = []
    for i, (x, shape, layout) in enumerate(zip(a["xs"], a["shapes"], a["layouts"], strict=True)):
        scales = d.bits(layout.grid(shape, bool(direction)), layout.stored_scale)
        pair = scales, framed((x.numel(),), U8, i % 3)
        pairs.append(pair if i % 3 != 1 + direction else None)
    return pairs


def _text(layout: Layout | str) -> str:
    return layout if isinstance(layout, str) else layout.text


def _scales_of(d: Draw, a: Args, _: int) -> Tensor:
    layout = Layout.of(_text(a["layout"]))
    shape, columnwise = a["data"].shape, a["columnwise"]
    grid = grid_of(layout.stored_matrix(shape, columnwise), layout.stored_block(columnwise))
    return d.bits(grid, layout.stored_scale)


def _second_level(d: Draw, a: Args, _: int) -> Tensor:
    """The amaxes of the second level of stored data."""
    layout, columnwise = Layout.of(a["layout"]), a["columnwise"]
    rows, columns = layout.stored_matrix(a["data"].shape, columnwise)
    if layout.second_level == "tensor":
        return d.values((), F32).abs()
    by_column = columnwise and not layout.transposed
    return d.values((columns if by_column else rows,), F32).abs()


def _matrix(i: int, shard: Tensor) -> Shape:
    """The shape of a matrix that contains the shard, or is as large."""
    columns = (1, 33, 32, 96, 31, 100, 257)[i % 7]
    return -(-shard.numel() // columns) + i % 3, columns


def _start(n: int, shard: Tensor, shape: Shape) -> int:
    return _one_of(n, math.prod(shape) - shard.numel() + 1)


def _history(d: Draw, length: int, slots: int) -> Tensor:
    """A history of amaxes; slots without an amax in the first row must not change."""
    history = d.bits((length, slots), F32).abs()
    history[0] *= d.integers(0, 3, (slots,)) > 0
    return history


#: The choices for arguments of all kernels. Flags, which are not listed, are true and false.
COMMON: Arguments = {
    "fp8_dtype": FP8,
    "epsilon": (0.0, 1e-2),
    "layout": LAYOUTS,
    "text": tuple(layout.text for layout in LAYOUTS),
    "dtype": FLOATS,
    "out_dtype": FLOATS,
    "scale": lambda d, a, n: d.scale(),
    "scale_inv": lambda d, a, n: d.scale() if _one_of(n, 4) else None,
    "amax": lambda d, a, n: torch.tensor(0.5),
    "saturated": lambda d, a, n: torch.tensor(7) if _one_of(n, 2) else None,
    "scales": _scales_of,
    "rowwise": partial(_pairs, direction=0),
    "columnwise": partial(_pairs, direction=1),
    "dtypes": lambda d, a, n: [FLOATS[(i // 2) % 3] for i in range(len(a["xs"]))],
    "layouts": lambda d, a, n: list(
        islice(cycle(_ALIKE[a["_alike"]] or LAYOUTS[n % 5 :]), len(a["xs"]))
    ),
    "shapes": lambda d, a, n: [_matrix(n + i, x) for i, x in enumerate(a["xs"])],
    "starts": lambda d, a, n: [
        _start(n + i, x, a["shapes"][i]) for i, x in enumerate(a["xs"])
    ],
}  # fmt: skip
#: Kernel -> its own choices for arguments. Names that begin with _ are not arguments of the kernel;
#: other choices depend on them.
OWN: dict[str, Arguments] = {
    "for_layers.cast": {
        "amax": lambda d, a, n: torch.full((), 0.5) if _one_of(n, 2) else None,
    },
    "for_layers.cast_slot": {
        "slot": (0, 2),
        "buffers": lambda d, a, n: {
            "scale": torch.stack([d.scale() for _ in range(3)]),
            "amax_history": torch.full((4, 3), 0.5),
            "saturated": torch.full((3,), 7),
        },
    },
    "grid_decode": {"dtype": (*FLOATS, torch.float64), "amax": (None,)},
    "grid_decode_levels": {
        "layout": tuple(layout for layout in LEVELS if layout.second_level != "none"),
        "amax": _second_level,
    },
    "grid_quantize_levels": {
        "layout": LEVELS,
        "first_row": lambda d, a, n: (0, 1, 2**40 + 3)[n % 3],
        "seed": lambda d, a, n: (
            d.integers(-(2**63), 2**63 - 1, ())
            if Layout.of(_text(a["layout"])).stochastic
            else None
        ),
    },
    "grid_scales": {"dtype": lambda d, a, n: FLOATS[n % 3]},
    "grid_multi_amax": {"_alike": tuple(_ALIKE)},
    "grid_multi_cast": {"_alike": tuple(_ALIKE)},
    "update_scales": {
        "_length": (1, 2, 16, 1024),
        "_counts": ((1,), (3, 1, 5), (0, 2), (3,) * 40, (300,)),
        "_last": (True, False),
        "scales": lambda d, a, n: [d.values((k,), F32).abs() for k in a["_counts"]],
        "histories": lambda d, a, n: [_history(d, a["_length"], k) for k in a["_counts"]],
        "maxima": lambda d, a, n: [
            (448.0, 57344.0, 28672.0)[i % 3] for i in range(sum(a["_counts"]))
        ],
        "last": lambda d, a, n: d.bits((sum(a["_counts"]),), F32).abs() if a["_last"] else None,
    },
    # Operands are small integers, whose sums are exact in any order, so results are rounded once.
    "products.product": {
        "_size": (
            (0, 4, 3), (4, 0, 3), (4, 3, 0), (1, 1, 1), (3, 5, 7), (17, 33, 65), (64, 128, 80),
        ),
        "_operand": FLOATS[:2],
        "_scaled": (True, False),
        "_biased": (True, False),
        "a": lambda d, a, n: d.integers(-2, 3, a["_size"][:2]).to(a["_operand"]),
        "b": lambda d, a, n: d.integers(-2, 3, a["_size"][:0:-1]).to(a["_operand"]).t(),
        "scale_a": lambda d, a, n: torch.tensor(0.25) if a["_scaled"] else None,
        "scale_b": lambda d, a, n: torch.tensor(2.0) if a["_scaled"] else None,
        "bias": lambda d, a, n: (
            d.integers(-9, 9, (a["_size"][2],)).float() if a["_biased"] else None
        ),
    },
}  # fmt: skip


# The forms of kernels that layers and products call.
_FORMS = ("products.product", *(f"for_layers.{name}" for name in (
    "cast", "cast_slot", "grid_quantize", "quantize",
)))  # fmt: skip
_NO_KERNELS = (
    "available_backends",
    "backend_for",
    "draw_seed",
    "fixed_seed",
    "grid_amax_sizes",
    "use_backend",
)
#: Every kernel of ``ottava.kernels``, these forms, and those that write into given outputs.
KERNELS = sorted(
    name
    for name in {*kernels.__all__, *_FORMS, *(f"{name} into" for name in OPERATIONS)}
    if name not in (*_NO_KERNELS, "HIGH_PRECISION") and not name.startswith("check_")
)


def _is_callable(name: str, option: Args, dimensions: int) -> bool:
    """Whether a kernel can be called with these options."""
    # A transpose, and data with two elements in a byte, have a dimension.
    kernel = name.split()[0]
    matrix = kernel in ("cast_transpose", "transpose", "grid_decode_levels")
    matrix = matrix or option.get("transposed")
    wanted = [option[key] for key in ("rowwise", "columnwise", "transposed") if key in option]
    free = kernel in ("quantize", "cast_amax", "grid_decode", "grid_decode_levels")
    return (dimensions > 0 or not matrix) and (free or not wanted or any(wanted))


def _kernel(name: str) -> tuple[Callable[..., Any], dict[str, str], Arguments]:
    """A kernel by its name, the declared types of its arguments, and choices of its own."""
    if not name.endswith(" into"):
        module, _, short = name.rpartition(".")
        call = getattr({"": kernels, "for_layers": for_layers, "products": products}[module], short)
        return call, {k: p.annotation for k, p in inspect.signature(call).parameters.items()}, {}
    row = OPERATIONS[name.removesuffix(" into")]

    def outputs(d: Draw, a: Args, n: int) -> list[Tensor | None]:
        on_meta = [
            a[key].to("meta") if isinstance(a[key], Tensor) else a[key] for key in row.arguments
        ]
        results = row.outputs(*on_meta)
        shift = (0, 1, 8)[_one_of(n, 3)]
        return [
            None if x is None else framed(x.shape, x.dtype, shift)
            for x in ([results] if isinstance(results, Tensor) else results)
        ]

    def into(outputs: list[Tensor | None], **arguments: Any) -> None:
        row.into(outputs, *arguments.values())

    kinds = dict.fromkeys((*row.arguments, "outputs"), "")
    flags = ("force_pow_2", "rowwise", "columnwise", "transposed")
    kinds |= {key: "bool" for key in kinds if key in flags}
    layouts = OWN.get(row.name, {}).get("layout", LAYOUTS)
    texts = tuple(layout.text for layout in layouts)  # type: ignore[union-attr]
    return into, kinds, {"outputs": outputs, "layout": texts}


def kernel_cases(
    name: str, shapes: Sequence[Shape], each: int = 4, oracle: str = "cpu"
) -> list[Case]:
    """The cases of a kernel.

    Each first input is combined with ``each`` choices for the other arguments in turn. Inputs are
    random, special, ragged and unaligned.

    Raises:
        KeyError: the table lacks an argument.
    """
    call, kinds, drawers = _kernel(name)
    own = OWN.get(name.removesuffix(" into"), {}) | drawers
    first, *others = kinds
    flags = {key: (True, False) for key, kind in kinds.items() if kind == "bool"}
    source, values = SOURCES.get(first), COMMON | flags | own
    needed = [*(key for key in own if key.startswith("_")), *([] if source else [first]), *others]
    table = {key: values[key] for key in needed}
    choices = {key: value for key, value in table.items() if isinstance(value, tuple)}
    options = [
        dict(zip(choices, combination, strict=True)) for combination in product(*choices.values())
    ]

    def make(draw: Draw, source_of: Any, option: Args, number: int) -> Args:
        arguments = ({first: source_of(draw)} if source_of else {}) | option
        for key, value in table.items():
            if key not in arguments:
                draw_value: Any = value
                arguments[key] = draw_value(draw, arguments, number)
        return {key: arguments[key] for key in kinds}

    turns, cases = cycle(options), list[Case]()
    for label, dimensions, source_of in source(shapes) if source else [("", 2, None)]:
        for option in islice(turns, min(each, len(options)) if source else len(options)):
            if _is_callable(name, option, dimensions):
                words = ", ".join(f"{key} {str(value)[:40]}" for key, value in option.items())
                arguments = partial(make, source_of=source_of, option=option, number=len(cases))
                cases.append(Case(f"{label} {words}", arguments, lambda a: call(**a), oracle))
    return cases


def byte_cases(small: bool = False) -> dict[str, list[Case]]:
    """The cases of each kernel, whose bytes must be those of the CPU backend."""
    oracles, shapes = {"products.product": "reference"}, SMALL_SHAPES if small else SHAPES
    return {name: kernel_cases(name, shapes, oracle=oracles.get(name, "cpu")) for name in KERNELS}


#: Shapes with more than 2^31 elements; the sizes of one suit wide accesses, those of the other not.
LARGE = [(65552, 32768), (65537, 32777)]
#: Kernel -> its options, and the dimension of each of its first results along which the rows of the
#: input lie.
_LARGE: dict[str, tuple[Args, tuple[int, ...]]] = {
    "cast": ({"fp8_dtype": FP8[0]}, (0,)),
    "cast_transpose": ({"fp8_dtype": FP8[0]}, (0, 1)),
    "quantize": ({"fp8_dtype": FP8[0], "transposed": True}, (0, 1)),
    "grid_quantize": ({"layout": MX}, (0, 0, 0, 0)),
    "grid_quantize in 1 x 128": (
        {"layout": Layout(FP8[0], (1, 128), columnwise="transposed")},
        (0, 0, 1, 1),
    ),
    "grid_quantize in 128 x 128": ({"layout": _SQUARES}, (0, 0, 1, 1)),
    "grid_quantize_levels": ({"layout": _nvfp4()}, (0, 0)),
    "transpose": ({}, (1,)),
    "decode": ({"fp8_dtype": FP8[0], "dtype": BF16}, (0,)),
    "grid_decode": ({"layout": MX, "dtype": BF16}, (0,)),
}


def _large(name: str, shape: Shape, step: int) -> Case:
    call, (options, dims), (rows, columns) = getattr(kernels, name.split()[0]), _LARGE[name], shape
    parameters = inspect.signature(call).parameters

    def make(d: Draw) -> Args:
        x, codes = d.values((step, columns), BF16), d.integers(0, 127, (step, columns), U8)
        x[0, 0] = 3000.0  # the largest number, for the scale, of the last rows too
        values = {
            "x": x,
            "data": codes,
            "scales": torch.full((step, -(-columns // 32)), 130, dtype=U8),
            "scale": torch.tensor(20.0),
            "scale_inv": torch.tensor(20.0),
        }
        return {key: value for key, value in values.items() if key in parameters}

    def repeated(a: Args, count: int) -> Tensors:
        arguments = {
            key: x.repeat(-(-count // step), 1)[:count] if x.dim() else x for key, x in a.items()
        }
        return tensors(call(**arguments, **options))[: len(dims)]

    def compare(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
        for i, dim in enumerate(dims):
            one, end = (expected[n].to(actual[i].device) for n in (i, len(dims) + i))
            if not torch.equal(actual[i], torch.cat([*[one] * (rows // step), end], dim)):
                return f"result {i} has other bytes"
        return None

    def once(a: Args) -> list[Tensors]:
        return [repeated(a, count) for count in (step, rows % step)]

    return Case("repeated", make, partial(repeated, count=rows), once, compare)


def large_cases(shapes: Sequence[Shape] = LARGE, step: int = 1920) -> dict[str, list[Case]]:
    """Cases of large tensors that repeat the same rows.

    Their bytes must repeat those that the CPU backend gives for the rows once. ``step`` is the
    number of these rows, a multiple of 128. It must not divide the rows of 2^31 elements.
    """
    return {
        f"{name}, {shape[0]} x {shape[1]}": [_large(name, shape, step)]
        for shape in shapes
        for name in _LARGE
    }
