"""Times kernels against the same arithmetic in plain torch, and against a copy of as many bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Set:
    """The memory of one call: an input, and room for the results."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.out, self.turned, row_codes, column_codes = (
            x.new_empty(x.shape, dtype=torch.uint8) for _ in range(4)
        )
        # The scales are near that of 1, like the scales of such values.
        row_scales, column_scales = (
            torch.randint(
                110, 130, MX.scale_shape(x.shape, columnwise), dtype=torch.uint8, device=x.device
            )
            for columnwise in (False, True)
        )
        self.rows, self.columns = (row_codes, row_scales), (column_codes, column_scales)
        self.decoded = torch.empty_like(x)
        # At this scale nothing is clamped, because counting clamped elements takes a second pass.
        self.scale = torch.tensor(50.0, device=x.device)
        self.amax, self.own_scale, self.inverse, self.own_amax = (
            torch.zeros((), device=x.device) for _ in range(4)
        )
        self.saturated = torch.zeros((), dtype=torch.int64, device=x.device)
        self.codes = kernels.cast(x, self.scale, E4M3)
        self.grids = {
            name: list(kernels.grid_quantize(x, layout)) for name, layout in GRIDS.items()
        }


def _torch_cast(s: Set, scale: Tensor, turned: bool = False) -> None:
    s.out.copy_((s.x.float() * scale).clamp(-448.0, 448.0).to(E4M3).view(torch.uint8))
    if turned:
        s.turned.copy_(s.out.t())


def _torch_scale(x: Tensor) -> Tensor:
    return 448.0 / x.abs().amax().float()


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
    if not finite:
        encoded = torch.where(values.isnan(), 0x7F, encoded)
    codes.copy_(encoded.view(codes.shape))


def torch_mx(x: Tensor, rowwise: Buffers, columnwise: Buffers, finite: bool = False) -> None:
    """MX quantization along rows and columns in plain torch, with the same bytes as the kernel.

    With ``finite`` they are the same only for inputs without NaN.
    """
    rows, columns = x.shape
    _torch_blocks(x.view(rows, columns // 32, 32), 2, *rowwise, finite)
    _torch_blocks(x.view(rows // 32, 32, columns), 1, *columnwise, finite)


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
            values = values.round()
        encoded = values.clamp(-limit, limit).to(layout.element).view(torch.uint8)
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


def _mx(s: Set, rows: bool, columns: bool, layout: Layout = MX) -> None:
    nothing = (None, None)
    outputs = [*(s.rows if rows else nothing), *(s.columns if columns else nothing)]
    operations.grid_quantize.into(outputs, s.x, layout.text, rows, columns)


def _decode(s: Set, scales: Tensor | None, layout: Layout, columnwise: bool = False) -> None:
    operations.grid_decode.into(
        [s.decoded], s.codes, scales, layout.text, columnwise, s.decoded.dtype
    )


class Kernel(NamedTuple):
    """What is timed.

    Attributes:
        inputs: how often a call reads or writes an element of the input's dtype.
        others: bytes that it reads and writes for an element besides.
        ours: our kernel.
        plain: the same in plain torch, if that is timed.
    """

    inputs: int
    others: float
    ours: Callable[[Set], Any]
    plain: Callable[[Set], Any] | None = None


def _grid(name: str) -> Kernel:
    """The row of one of ``GRIDS``, along rows and columns; bytes of scales are negligible."""
    text = GRIDS[name].text
    return Kernel(
        1,
        2,
        lambda s: operations.grid_quantize.into(s.grids[name], s.x, text, True, True),
        lambda s: torch_grid(s.x, GRIDS[name], s.grids[name]),
    )


_BLOCKS = 1 / 32
KERNELS: dict[str, Kernel] = {
    "cast": Kernel(
        1,
        1,
        lambda s: operations.cast_amax.into([s.out, None, None], s.x, s.scale, None, None, E4M3),
        lambda s: _torch_cast(s, s.scale),
    ),
    "cast, transpose": Kernel(
        1,
        2,
        lambda s: kernels.cast_transpose(s.x, s.scale, E4M3),
        lambda s: _torch_cast(s, s.scale, True),
    ),
    "cast recording amax": Kernel(1, 1, lambda s: _record(s, False)),
    "cast recording amax, transpose": Kernel(1, 2, lambda s: _record(s, True)),
    "amax": Kernel(
        1, 0, lambda s: operations.amax.into([s.own_amax], s.x), lambda s: s.x.abs().amax()
    ),
    "current scaling": Kernel(
        2,
        1,
        lambda s: _quantize(s, True, False),
        lambda s: _torch_cast(s, _torch_scale(s.x)),
    ),
    "current scaling, transpose": Kernel(
        2,
        2,
        lambda s: _quantize(s, True, True),
        lambda s: _torch_cast(s, _torch_scale(s.x), True),
    ),
    "current scaling, transpose alone": Kernel(2, 1, lambda s: _quantize(s, False, True)),
    "MX, rows and columns": Kernel(
        1,
        2 + 2 * _BLOCKS,
        lambda s: _mx(s, True, True),
        lambda s: torch_mx(s.x, s.rows, s.columns),
    ),
    "MX, rows and columns, torch without NaN": Kernel(
        1,
        2 + 2 * _BLOCKS,
        lambda s: _mx(s, True, True),
        lambda s: torch_mx(s.x, s.rows, s.columns, finite=True),
    ),
    "MX, rows": Kernel(1, 1 + _BLOCKS, lambda s: _mx(s, True, False)),
    "MX, columns": Kernel(1, 1 + _BLOCKS, lambda s: _mx(s, False, True)),
    "MX, squares": Kernel(1, 2 + 2 * _BLOCKS, lambda s: _mx(s, True, True, MX_SQUARES)),
    "MX, decode": Kernel(1, 1 + _BLOCKS, lambda s: _decode(s, s.rows[1], MX), _torch_mx_decode),
    "MX, decode columns": Kernel(1, 1 + _BLOCKS, lambda s: _decode(s, s.columns[1], MX, True)),
    **{f"{name}, rows and columns": _grid(name) for name in GRIDS},
    "decode": Kernel(
        1,
        1,
        lambda s: _decode(s, None, TENSOR),
        lambda s: s.decoded.copy_(s.codes.view(E4M3)),
    ),
    "transpose": Kernel(
        0,
        2,
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


def _results(s: Set, call: Callable[[Set], Any]) -> list[Tensor]:
    """What a call gives and writes into a set whose results are zero before."""
    for result in tree_leaves([s.out, s.turned, s.rows[0], s.columns[0], s.decoded, s.grids]):
        result.zero_()
    return [leaf for leaf in tree_leaves([call(s), vars(s)]) if isinstance(leaf, Tensor)]


def _compiled(plain: Callable[[Set], Any], s: Set, compiler: str) -> Callable[[Set], Any]:
    """``plain`` compiled by ``torch.compile``.

    Raises:
        RuntimeError: its results differ from those of ``plain``, so its time would mean nothing.
    """
    compiled = torch.compile(plain, backend=compiler, dynamic=False)
    results = _results(copy.deepcopy(s), plain), _results(s, compiled)
    if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
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
        rows, columns = copy.deepcopy((s.rows, s.columns))
        operations.grid_quantize.into([*s.rows, *s.columns], values, MX.text, True, True)
        torch_mx(values, rows, columns, finite)
        pairs = zip((*s.rows, *s.columns), (*rows, *columns), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    for name, layout in GRIDS.items():
        plain = [tensor.clone().zero_() for tensor in s.grids[name]]
        torch_grid(s.x, layout, plain)
        assert all(torch.equal(a, b) for a, b in zip(s.grids[name], plain, strict=True)), name
    _torch_cast(s, s.scale)
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
    for name in only or KERNELS:
        kernel = KERNELS[name]
        total = (kernel.inputs * dtype.itemsize + kernel.others) * n * n
        runs: dict[str, Callable[[], Run]] = {"ottava": lambda call=kernel.ours: on_all(call)}
        if peers and kernel.plain:
            runs["eager"] = lambda call=kernel.plain: on_all(call)
            runs["compile"] = lambda call=kernel.plain: on_all(_compiled(call, memory[0], compiler))
        runs["copy"] = lambda total=total: copies(total, sets, memory[0].x.device)
        rows.append(Timing(name, runs, calls=sets))
    return rows


def table(rows: list[Row]) -> list[Row]:
    """Milliseconds, ratios, and the share of a copy's bandwidth that a kernel reaches."""
    table_rows = []
    for row in rows:
        ours = row["seconds"]["ottava"]
        ratios = {name: seconds / ours for name, seconds in row["seconds"].items()}
        table_rows.append(
            {
                "kernel": row["name"],
                "milliseconds": 1e3 * ours,
                "times eager": ratios.get("eager"),
                "times compile": ratios.get("compile"),
                "of a copy's bandwidth": ratios.get("copy"),
            }
        )
    return table_rows
