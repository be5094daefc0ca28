"""What the compiled backends have in common: their modules take raw addresses; this module gets
them of tensors.

``_cpu`` and ``_cuda`` have the same kernels with nearly the same arguments; how they differ,
:mod:`ottava.kernels.cpu` and :mod:`ottava.kernels.cuda` say. What the functions do, the table of
kernels says. What is made contiguous here is kept until the call is over.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ottava.errors import DTypeError
from ottava.formats import FP8, element_format, fp8_format
from ottava.kernels import reference
from ottava.kernels.checks import Maybe, Outputs, Pairs, Shards, Tensor, Tensors
from ottava.layout import Block, Layout, as_matrix_shape

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT32_MAX = torch.finfo(torch.float32).max
_ABSENT = None, None


def pointers(*tensors: Maybe) -> list[int]:
    """The addresses of the elements, 0 without a tensor."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


class Compiled:
    """The kernels of a compiled module, which is ``native``."""

    native: Any

    def stream(self, x: Tensor) -> tuple[int, ...]:
        """What a call ends with for a kernel that runs in one thread of a CPU."""
        return ()

    def place(self, x: Tensor) -> tuple[int, ...]:
        """What a call ends with for every other kernel."""
        return self.stream(x)

    def scratch_for(self, x: Tensor, layout: Layout | None = None) -> list[Tensor | None]:
        """Scratch memory of a reduction, or of a quantization on a grid, where the module takes
        any."""
        return []

    def serves(self, layout: Layout, shards: bool = False) -> bool:
        """Whether the module has kernels for a grid, or those on many shards."""
        return True

    def amax(self, x: Tensor, out: Tensor) -> None:
        x, scratch = x.contiguous(), self.scratch_for(x)
        source = x.data_ptr(), DTYPE_CODES[x.dtype], x.numel()
        self.native.amax(*source, *pointers(*scratch, out), *self.place(x))

    def scale_from_amax(
        self, amax: Tensor, fp8_dtype: torch.dtype, epsilon: float, floor: bool, out: Tensors
    ) -> None:
        amax, options = amax.contiguous(), (fp8_format(fp8_dtype).max, epsilon, floor)
        self.native.scale_from_amax(
            amax.data_ptr(), amax.numel(), *options, *pointers(*out), *self.stream(amax)
        )

    def quantize(
        self, x: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, out: Outputs
    ) -> None:
        data, transpose, scale, scale_inv, amax = out
        x, fmt, scratch = x.contiguous(), fp8_format(fp8_dtype).code, self.scratch_for(x)
        addresses = pointers(*scratch, amax, scale, scale_inv, data, transpose)
        source = x.data_ptr(), DTYPE_CODES[x.dtype], *as_matrix_shape(x.shape)
        self.native.quantize(*source, epsilon, force_pow_2, *addresses, fmt, *self.place(x))

    def cast_amax(
        self,
        x: Tensor,
        scale: Tensor,
        amax: Maybe,
        saturated: Maybe,
        fp8_dtype: torch.dtype,
        out: Outputs,
    ) -> None:
        data, transpose, scale_inv = out
        x, fmt = x.contiguous(), fp8_format(fp8_dtype).code
        addresses = pointers(scale, amax, saturated, scale_inv, data, transpose)
        self.native.cast(
            x.data_ptr(),
            DTYPE_CODES[x.dtype],
            *as_matrix_shape(x.shape),
            *addresses,
            fmt,
            *self.place(x),
        )

    def transpose(self, data: Tensor, out: Tensor) -> None:
        data = data.contiguous()
        self.native.transpose(
            data.data_ptr(), *as_matrix_shape(data.shape), out.data_ptr(), *self.place(data)
        )

    def update_scales(
        self,
        scales: Tensors,
        histories: Tensors,
        maxima: list[float],
        most_recent: bool,
        last: Maybe,
    ) -> None:
        slots = [
            (s.data_ptr(), h.data_ptr(), s.numel()) for s, h in zip(scales, histories, strict=True)
        ]
        rest = histories[0].shape[0], maxima, most_recent, *pointers(last)
        self.native.update_scales(slots, *rest, *self.stream(scales[0]))

    # On grids: of layouts that the module serves.

    def grid_scales(self, amax: Tensor, text: str, dtype: torch.dtype, out: Outputs) -> None:
        layout, code, (e8m0, floor, epsilon), _ = known(text)
        scales: Any = out
        if layout.element not in FP8 or layout.finite_as == "input":
            reference.grid_scales(amax, text, dtype, out)
        elif not e8m0:
            self.scale_from_amax(amax, layout.element, epsilon, floor, scales)
        else:
            amax = amax.contiguous()
            options = code, floor, *pointers(out[1]), *self.place(amax)
            self.native.mx_scale_from_amax(amax.data_ptr(), amax.numel(), *options)

    def grid_quantize(self, x: Tensor, text: str, out: Outputs) -> None:
        layout, code, rule, sides = known(text)
        if not x.numel() or not self.serves(layout):
            reference.grid_quantize(x, text, out)
            return
        x, scratch = x.contiguous(), self.scratch_for(x, layout)
        largest = torch.finfo(x.dtype).max if layout.finite_as == "input" else FLOAT32_MAX
        pairs = zip(sides, (out[:2], out[2:]), strict=True)
        results = [
            () if data is None else (*side, *pointers(data, scales))
            for side, (data, scales) in pairs
        ]
        source = x.data_ptr(), DTYPE_CODES[x.dtype], *as_matrix_shape(x.shape), code
        self.native.grid_quantize(
            *source, *rule, largest, *results, *pointers(*scratch), *self.place(x)
        )

    def grid_decode(
        self, data: Tensor, scales: Maybe, text: str, columnwise: bool, out: Tensor
    ) -> None:
        layout, code, (e8m0, *_), _ = known(text)
        bare = layout.element in FP8 and (scales is None or (layout.block == _ABSENT and not e8m0))
        if out.dtype is torch.float64 or not (bare or (scales is not None and self.serves(layout))):
            reference.grid_decode(data, scales, text, columnwise, out)
            return
        data, scales = data.contiguous(), None if scales is None else scales.contiguous()
        to = out.data_ptr(), DTYPE_CODES[out.dtype], *self.place(data)
        if bare:
            self.native.decode(data.data_ptr(), code, data.numel(), *pointers(scales), *to)
            return
        sizes, block = (
            layout.stored_matrix(data.shape, columnwise),
            _block(layout.stored_block(columnwise)),
        )
        self.native.grid_decode(data.data_ptr(), code, *sizes, *pointers(scales), e8m0, *block, *to)

    def epilogue32(
        self, sums: Tensor, scale_a: Maybe, scale_b: Maybe, bias: Maybe, out: Tensor
    ) -> None:
        """``sums * (scale_a * scale_b) + bias`` in float32, rounded once into ``out``, which on a
        CPU may be ``sums``; both are contiguous matrices."""
        (rows, columns), bias = sums.shape, None if bias is None else bias.contiguous()
        last = *pointers(scale_a, scale_b, bias), 0 if bias is None else DTYPE_CODES[bias.dtype]
        to = out.data_ptr(), DTYPE_CODES[out.dtype], *self.place(sums)
        self.native.epilogue32(sums.data_ptr(), rows, columns, last, *to)

    # On many tensors: one call for all of them.

    def grid_multi_amax(self, shards: Shards, texts: Sequence[str], out: Tensor) -> None:
        layouts, held = [known(text)[0] for text in set(texts)], [x.contiguous() for x in shards.xs]
        sources = _sources(held, shards)
        if _are_per_tensor(layouts):
            self.native.multi_amax(sources, out.data_ptr(), *self.place(out))
        elif all(self.serves(layout, shards=True) for layout in layouts):
            jobs = []
            for source, place, text in zip(sources, _places(shards), texts, strict=True):
                layout, _, _, (row, column) = known(text)
                # The blocks that have a scale in common.
                jobs.append((source, place, row[2:4], column[2:4], layout.square))
            self.native.grid_multi_amax(jobs, out.data_ptr(), out.numel(), *self.place(out))
        else:
            reference.grid_multi_amax(shards, texts, out)

    def grid_multi_cast(
        self, shards: Shards, texts: Sequence[str], rowwise: Pairs, columnwise: Pairs
    ) -> None:
        layouts, held = [known(text)[0] for text in set(texts)], [x.contiguous() for x in shards.xs]
        given = zip(
            _sources(held, shards), _places(shards), texts, rowwise, columnwise, strict=True
        )
        if _are_per_tensor(layouts):
            found = [
                (of, known(text)[1], *p)
                for of, _, text, *both in given
                for p in both
                if p is not None
            ]
            scales = torch.cat([scale for *_, scale, _ in found]) if found else held[0]
            tensors = [(source, code, out.data_ptr()) for source, code, _, out in found]
            self.native.multi_cast(tensors, scales.data_ptr(), *self.place(scales))
        elif all(self.serves(layout, shards=True) for layout in layouts):
            jobs = []
            for source, place, text, *both in given:
                _, code, rule, sides = known(text)
                pairs = zip(sides, both, strict=True)
                how = [(side[:2], *pointers(*(pair or _ABSENT))) for side, pair in pairs]
                jobs.append((source, place, code, rule[0], *how))
            self.native.grid_multi_cast(jobs, *self.place(held[0]))
        else:
            reference.grid_multi_cast(shards, texts, rowwise, columnwise)


def _are_per_tensor(layouts: Sequence[Layout]) -> bool:
    return all(
        one.block == _ABSENT and one.element in FP8 and one.scale is torch.float32
        for one in layouts
    )


def _block(block: Block) -> tuple[int, int]:
    """Rows and columns, 0 for all."""
    return block[0] or 0, block[1] or 0


@functools.lru_cache(maxsize=1024)
def known(text: str) -> tuple[Layout, int, tuple[bool, bool, float], list[tuple[Any, ...]]]:
    """A layout, and what modules are told of it: elements, the rule for scales, and of both
    directions the blocks."""
    layout = Layout.of(text)
    sides = [
        (
            *_block(layout.block_of(side)),
            *_block(layout.block_of(side, shared=True)),
            side and layout.transposed,
        )
        for side in (False, True)
    ]
    rule = layout.scale is not torch.float32, layout.rounding == "floor", layout.epsilon
    return layout, element_format(layout.element).code, rule, sides


def _sources(held: Tensors, shards: Shards) -> list[tuple[int, int, int, int]]:
    """For each its address, the code of its dtype, its size, and the code of the dtype that its
    elements count as."""
    codes, given = DTYPE_CODES, zip(held, shards.dtypes, strict=True)
    sources = [(x.data_ptr(), codes[x.dtype], x.numel(), codes[dtype]) for x, dtype in given]
    for x, (address, _, count, _) in zip(held, sources, strict=True):
        if count and not address:
            what, remedy = (
                f"a {type(x).__name__} has no memory to read",
                "wait for it, or pass its values",
            )
            raise DTypeError(what, expected="a plain tensor", remedy=remedy)
    return sources


def _places(shards: Shards) -> list[tuple[int, int, int]]:
    """Rows and columns of each matrix, and the element that its shard begins with."""
    return [(*shape, start) for shape, start in zip(shards.shapes, shards.starts, strict=True)]
