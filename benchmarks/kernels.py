"""Times kernels against the same arithmetic in plain torch, and against a copy of as many bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.timing import Row, Run, Timing
from ottava import Layout, kernels
from ottava.kernels import table as operations

E4M3 = torch.float8_e4m3fn
TENSOR = Layout(E4M3, (None, None))
MX = Layout(E4M3, (1, 32), torch.float8_e8m0fnu, "up")
MX_SQUARES = Layout(E4M3, (1, 32), torch.float8_e8m0fnu, "up", shared=(32, 32))
#: Layouts with float32 scales, by the names of their rows in the table. The last belongs to no
#: recipe, and no unrolled kernel is compiled for it.
GRIDS = {
    "1 × 128": Layout(E4M3, (1, 128), rounding="floor", columnwise="transposed", finite_as="input"),
    "128 × 128": Layout(
        E4M3, (128, 128), rounding="floor", columnwise="transposed", finite_as="input"
    ),
    "by row": Layout(E4M3, (1, None)),
    "INT8, 8 × 64": Layout(torch.int8, (8, 64), rounding="floor"),
}
Tensor = torch.Tensor
Buffers = tuple[Tensor, Tensor]
Kernel = tuple[Callable[[int], float], Callable[["Set"], Any], Callable[["Set"], Any] | None]


@dataclass
class Set:
    """The memory of one call: an input, and room for the results."""

    x: Tensor
    out: Tensor = field(init=False)
    turned: Tensor = field(init=False)
    rows: Buffers = field(init=False)
    columns: Buffers = field(init=False)

    def __post_init__(self) -> None:
        device, shape = self.x.device, self.x.shape
        self.out, self.turned, row_codes, column_codes = (
            self.x.new_empty(shape, dtype=torch.uint8) for _ in range(4)
        )
        # The scales are near that of 1, like the scales of such values.
        sizes = [MX.scale_shape(shape, columnwise) for columnwise in (False, True)]
        scales = [torch.randint(110, 130, size, dtype=torch.uint8, device=device) for size in sizes]
        self.rows, self.columns = (row_codes, scales[0]), (column_codes, scales[1])
        self.decoded = torch.empty_like(self.x)
        # At this scale nothing is clamped, because counting clamped elements takes a second pass.
        self.scale = torch.tensor(50.0, device=device)
        self.amax = torch.zeros((), device=device)
        self.own_scale, self.inverse, self.own_amax = (
            torch.zeros((), device=device) for _ in range(3)
        )
        self.saturated = torch.zeros((), dtype=torch.int64, device=device)
        self.codes = kernels.cast(self.x, self.scale, E4M3)
        self.grids = {
            name: list(kernels.grid_quantize(self.x, layout)) for name, layout in GRIDS.items()
        }


def _torch_cast(s: Set) -> None:
    s.out.copy_((s.x.float() * s.scale).clamp(-448.0, 448.0).to(E4M3).view(torch.uint8))


def _torch_cast_transpose(s: Set) -> None:
    _torch_cast(s)
    s.turned.copy_(s.out.t())


def _torch_quantize(s: Set) -> None:
    amax = s.x.abs().amax().float()
    s.out.copy_((s.x.float() * (448.0 / amax)).clamp(-448.0, 448.0).to(E4M3).view(torch.uint8))


def _torch_quantize_transpose(s: Set) -> None:
    _torch_quantize(s)
    s.turned.copy_(s.out.t())


def _torch_blocks(blocks: Tensor, dim: int, codes: Tensor, scales: Tensor, finite: bool) -> None:
    magnitude = blocks.abs()
    if not finite:
        magnitude = torch.where(magnitude.isnan(), 0, magnitude)
    bits = (magnitude.amax(dim, keepdim=True).float() * (1 / 448)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    scale = (exponent + torch.where(exponent > 0, mantissa > 0, mantissa > 0x400000)).clamp(max=254)
    multiplier = torch.where(scale == 254, 0x400000, (254 - scale) << 23).view(torch.float32)
    scales.copy_(scale.squeeze(dim))
    values = blocks.float() * multiplier
    encoded = values.clamp(-448.0, 448.0).to(E4M3).view(torch.uint8)
    codes.copy_(
        (encoded if finite else torch.where(values.isnan(), 0x7F, encoded)).view(codes.shape)
    )


def torch_mx(x: Tensor, rowwise: Buffers, columnwise: Buffers, finite: bool = False) -> None:
    """MX quantization along rows and columns in plain torch, with the same bytes as the kernel.

    With ``finite`` they are the same only for inputs without NaN.
    """
    rows, columns = x.shape
    _torch_blocks(x.view(rows, columns // 32, 32), 2, *rowwise, finite)
    _torch_blocks(x.view(rows // 32, 32, columns), 1, *columnwise, finite)


def _torch_mx(s: Set) -> None:
    torch_mx(s.x, s.rows, s.columns)


def _torch_mx_finite(s: Set) -> None:
    torch_mx(s.x, s.rows, s.columns, True)


def _torch_mx_decode(s: Set) -> None:
    blocks = s.codes.view(E4M3).to(s.x.dtype).view(*s.rows[1].shape, 32)
    scales = s.rows[1].view(torch.float8_e8m0fnu).to(s.x.dtype)
    torch.mul(blocks, scales.unsqueeze(2), out=s.decoded.view(blocks.shape))


def torch_grid(x: Tensor, layout: Layout, outputs: list[Tensor]) -> None:
    """Quantization on a grid of float32 scales in plain torch, along rows and columns.

    The bytes are those of the kernel for every finite input.
    """
    limit = 127.0 if layout.element == torch.int8 else 448.0
    finite = torch.finfo(x.dtype if layout.finite_as == "input" else torch.float32).max
    for columnwise, (data, scales) in enumerate((outputs[:2], outputs[2:])):
        sides = zip(layout.block_of(bool(columnwise)), x.shape, strict=True)
        high, wide = (min(side or size, size) for side, size in sides)
        blocks = x.view(x.shape[0] // high, high, x.shape[1] // wide, wide)
        amax = blocks.abs().amax((1, 3), keepdim=True).float()
        scale = torch.div(torch.full((), limit, device=x.device), amax)
        scale = torch.where(scale.isinf(), finite, scale)
        if layout.rounding == "floor":
            scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
        scale = torch.where(amax == 0, 1.0, scale)
        values = blocks.float() * scale
        if layout.element == torch.int8:
            encoded = values.round().clamp(-limit, limit).to(torch.int8).view(torch.uint8)
        else:
            encoded = values.clamp(-limit, limit).to(E4M3).view(torch.uint8)
        transposed = columnwise and layout.transposed
        scale_inv = scale.reciprocal()[:, 0, :, 0]
        for out, result in ((data, encoded.view(x.shape)), (scales, scale_inv)):
            out.copy_(result.t() if transposed else result)


def _quantize(s: Set, data: bool, turned: bool) -> None:
    out, out_t = s.out if data else None, s.turned if turned else None
    operations.quantize.into(
        [out, out_t, s.own_scale, s.inverse, s.own_amax], s.x, E4M3, 0.0, False, data, turned
    )


def _record(s: Set, transposed: bool) -> Any:
    return kernels.cast_amax(
        s.x, s.scale, s.amax, E4M3, saturated=s.saturated, transposed=transposed
    )


def _mx(s: Set, rows: Buffers | None, columns: Buffers | None, layout: Layout = MX) -> None:
    outputs = [*(rows or (None, None)), *(columns or (None, None))]
    operations.grid_quantize.into(outputs, s.x, layout.text, rows is not None, columns is not None)


def _mx_decode(s: Set, columnwise: bool) -> None:
    scales = (s.columns if columnwise else s.rows)[1]
    operations.grid_decode.into([s.decoded], s.codes, scales, MX.text, columnwise, s.decoded.dtype)


def _grid(name: str) -> Kernel:
    """The row of one of ``GRIDS``, along rows and columns; bytes of scales are negligible."""
    layout = GRIDS[name]
    return (
        lambda b: b + 2,
        lambda s: operations.grid_quantize.into(s.grids[name], s.x, layout.text, True, True),
        lambda s: torch_grid(s.x, layout, s.grids[name]),
    )


_BLOCKS = 1 / 32
#: Name -> three functions: the bytes that are read and written for an element of b bytes, each
#: once; our kernel; and the same in plain torch, or None.
KERNELS: dict[str, Kernel] = {
    "cast": (
        lambda b: b + 1,
        lambda s: operations.cast_amax.into([s.out, None, None], s.x, s.scale, None, None, E4M3),
        _torch_cast,
    ),
    "cast, transpose": (
        lambda b: b + 2,
        lambda s: kernels.cast_transpose(s.x, s.scale, E4M3),
        _torch_cast_transpose,
    ),
    "cast recording amax": (lambda b: b + 1, lambda s: _record(s, False), None),
    "cast recording amax, transpose": (lambda b: b + 2, lambda s: _record(s, True), None),
    "amax": (
        lambda b: b,
        lambda s: operations.amax.into([s.own_amax], s.x),
        lambda s: s.x.abs().amax(),
    ),
    "current scaling": (lambda b: 2 * b + 1, lambda s: _quantize(s, True, False), _torch_quantize),
    "current scaling, transpose": (
        lambda b: 2 * b + 2,
        lambda s: _quantize(s, True, True),
        _torch_quantize_transpose,
    ),
    "current scaling, transpose alone": (
        lambda b: 2 * b + 1,
        lambda s: _quantize(s, False, True),
        None,
    ),
    "MX, rows and columns": (
        lambda b: b + 2 + 2 * _BLOCKS,
        lambda s: _mx(s, s.rows, s.columns),
        _torch_mx,
    ),
    "MX, rows and columns, torch without NaN": (
        lambda b: b + 2 + 2 * _BLOCKS,
        lambda s: _mx(s, s.rows, s.columns),
        _torch_mx_finite,
    ),
    "MX, rows": (lambda b: b + 1 + _BLOCKS, lambda s: _mx(s, s.rows, None), None),
    "MX, columns": (lambda b: b + 1 + _BLOCKS, lambda s: _mx(s, None, s.columns), None),
    "MX, squares": (
        lambda b: b + 2 + 2 * _BLOCKS,
        lambda s: _mx(s, s.rows, s.columns, MX_SQUARES),
        None,
    ),
    "MX, decode": (lambda b: b + 1 + _BLOCKS, lambda s: _mx_decode(s, False), _torch_mx_decode),
    "MX, decode columns": (lambda b: b + 1 + _BLOCKS, lambda s: _mx_decode(s, True), None),
    **{f"{name}, rows and columns": _grid(name) for name in GRIDS},
    "decode": (
        lambda b: b + 1,
        lambda s: operations.grid_decode.into(
            [s.decoded], s.codes, None, TENSOR.text, False, s.decoded.dtype
        ),
        lambda s: s.decoded.copy_(s.codes.view(E4M3)),
    ),
    "transpose": (
        lambda b: 2,
        lambda s: operations.transpose.into([s.turned], s.codes),
        lambda s: s.turned.copy_(s.codes.t()),
    ),
}


def copies(moved: float, count: int, device: torch.device) -> Run:
    """``count`` copies that move ``moved`` bytes each, half of them read and half written."""
    size = max(1, int(moved / 2))
    pairs = [
        [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
        for _ in range(count)
    ]
    return lambda: [target.copy_(source) for source, target in pairs]


def _compiled(plain: Callable[[Set], Any], s: Set, compiler: str) -> Callable[[Set], Any]:
    """``plain`` compiled by ``torch.compile``.

    Raises:
        RuntimeError: its results differ from those of ``plain``, so its time would mean nothing.
    """
    compiled = torch.compile(plain, backend=compiler, dynamic=False)
    other = copy.deepcopy(s)
    for each in (s, other):
        for result in (
            each.out,
            each.turned,
            each.rows[0],
            each.columns[0],
            each.decoded,
            *tree_leaves(each.grids),
        ):
            result.zero_()
    results = [
        [call(each), *tree_leaves(vars(each))] for call, each in ((plain, s), (compiled, other))
    ]
    if not all(torch.equal(a, b) for a, b in zip(*results, strict=True) if isinstance(a, Tensor)):
        raise RuntimeError("torch.compile makes other bytes of this on this machine")
    return compiled


def check_same_bytes(s: Set) -> None:
    """Check that the alternatives make the same bytes, MX blocks of NaN and infinities included.

    Raises:
        AssertionError: they do not.
    """
    hard = s.x.clone()
    hard.view(-1)[:: s.x.numel() // 97] = float("nan")
    hard.view(-1)[1 :: s.x.numel() // 89] = float("-inf")
    for values, finite in ((s.x, True), (hard, False)):
        own = [tensor.clone() for pair in (s.rows, s.columns) for tensor in pair]
        operations.grid_quantize.into([*s.rows, *s.columns], values, MX.text, True, True)
        torch_mx(values, (own[0], own[1]), (own[2], own[3]), finite)
        assert all(torch.equal(a, b) for a, b in zip((*s.rows, *s.columns), own, strict=True))
    for name, layout in GRIDS.items():
        plain = [tensor.clone().zero_() for tensor in s.grids[name]]
        torch_grid(s.x, layout, plain)
        assert all(torch.equal(a, b) for a, b in zip(s.grids[name], plain, strict=True)), name
    _torch_cast(s)
    assert torch.equal(s.out, s.codes)


def timings(
    n: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    *,
    sets: int = 1,
    compiler: str = "inductor",
    peers: bool = True,
    only: tuple[str, ...] = (),
) -> list[Timing]:
    """A timing for each kernel on ``[n, n]``.

    Args:
        n: rows and columns of the input.
        dtype: dtype of the input.
        device: where to run.
        sets: every run makes a call on each of so many sets of memory.
        compiler: the backend of torch.compile.
        peers: whether plain torch is timed too.
        only: names of the kernels to time; all by default.
    """
    memory = [Set(torch.randn(n, n, device=device).to(dtype)) for _ in range(sets)]

    def on_all(call: Callable[[Set], Any]) -> Run:
        return lambda: [call(s) for s in memory]

    rows = []
    for name, (moved, ours, plain) in KERNELS.items():
        if only and name not in only:
            continue
        total = moved(dtype.itemsize) * n * n
        runs: dict[str, Callable[[], Run]] = {"ottava": lambda ours=ours: on_all(ours)}
        if peers and plain:
            runs["eager"] = lambda plain=plain: on_all(plain)
            runs["compile"] = lambda plain=plain: on_all(_compiled(plain, memory[0], compiler))
        runs["copy"] = lambda total=total: copies(total, sets, memory[0].x.device)
        rows.append(Timing(name, runs, total, calls=sets))
    return rows


def table(rows: list[Row]) -> list[Row]:
    """Milliseconds, ratios, and the share of a copy's bandwidth that a kernel reaches."""
    table_rows = []
    for row in rows:
        seconds = row["seconds"]
        ours = seconds["ottava"]
        ratios = {
            name: seconds[name] / ours if name in seconds else None
            for name in ("eager", "compile", "copy")
        }
        table_rows.append(
            {
                "kernel": row["name"],
                "milliseconds": 1e3 * ours,
                "times eager": ratios["eager"],
                "times compile": ratios["compile"],
                "of a copy's bandwidth": ratios["copy"],
            }
        )
    return table_rows
