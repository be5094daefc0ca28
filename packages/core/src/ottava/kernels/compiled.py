"""The kernels that the compiled backends have in common.

Their modules, ``_cpu`` and ``_cuda``, take raw addresses, which this module reads from tensors. The
kernels of both have the same arguments, except for the last ones (:meth:`Compiled.place`) and for
scratch memory. :class:`ottava.kernels.backends.Backend` lists the kernels. A contiguous copy of an
input lives until the call returns.
"""

import functools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from ottava.errors import DTypeError
from ottava.formats import FP8, fp8_format
from ottava.kernels import reference
from ottava.kernels.checks import Outputs, Pairs, Shards, Tensor, Tensors
from ottava.kernels.levels import decodes_levels, native_levels, quantizes_levels
from ottava.layout import Block, Layout, as_matrix_shape

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT32_MAX = torch.finfo(torch.float32).max
_WHOLE: Block = None, None

#: Rows and columns of a stored block and of an area with one scale, 0 for all, and whether data of
#: the direction are stored as the transpose.
Direction = tuple[int, int, int, int, bool]
#: The address of a tensor, the code of its dtype, its size, and the code of the dtype to which the
#: elements are rounded first.
_Source = tuple[int, int, int, int]
#: Rows and columns of a matrix, and the position at which a shard of it starts.
_Place = tuple[int, int, int]


class ScaleRule(NamedTuple):
    """How scales are made: their format, whether they round to the floor, and the least amax."""

    e8m0: bool
    floor: bool
    epsilon: float


class NativeLayout(NamedTuple):
    """A layout as compiled modules take it.

    Attributes:
        layout: the layout.
        element: the code of the element format.
        rule: the rule for scales.
        directions: the blocks of rowwise and of columnwise data.
    """

    layout: Layout
    element: int
    rule: ScaleRule
    directions: tuple[Direction, Direction]


@functools.lru_cache(maxsize=1024)
def native_layout(text: str) -> NativeLayout:
    """The layout with this text."""
    layout = Layout.of(text)
    rule = ScaleRule(layout.scale is not torch.float32, layout.rounding == "floor", layout.epsilon)
    directions = _direction(layout, False), _direction(layout, True)
    return NativeLayout(layout, layout.format.code, rule, directions)


@functools.lru_cache(maxsize=1024)
def levels_plan(module: ModuleType, text: str) -> object:
    """A module's description of a layout that strips serve, made once for each layout."""
    return module.LevelsPlan(native_levels(Layout.of(text)))


def is_native(layout: Layout) -> bool:
    """Whether compiled modules know everything that a layout says."""
    if layout.format.code < 0 or layout.candidates or layout.rotation is not None:
        return False
    if layout.scale is torch.float32:
        return layout.rounding in ("nearest", "floor")
    return layout.scale is torch.float8_e8m0fnu and layout.rounding in ("up", "floor")


def _direction(layout: Layout, columnwise: bool) -> Direction:
    block = _sides(layout.block_of(columnwise))
    area = _sides(layout.block_of(columnwise, shared=True))
    return *block, *area, columnwise and layout.transposed


def _sides(block: Block) -> tuple[int, int]:
    """Rows and columns, 0 for all."""
    return block[0] or 0, block[1] or 0


def pointers(*tensors: Tensor | None) -> list[int]:
    """The addresses of the elements, 0 in place of None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


class Compiled:
    """A backend whose kernels are functions of a compiled module.

    Attributes:
        native: the module.
    """

    native: ModuleType

    def stream(self, x: Tensor) -> tuple[int, ...]:
        """The last arguments of a kernel that uses one thread on a CPU."""
        return ()

    def place(self, x: Tensor) -> tuple[int, ...]:
        """The last arguments of every other kernel: threads of a CPU, or a GPU and its stream."""
        return self.stream(x)

    def scratch_for(self, x: Tensor, layout: Layout | None = None) -> list[Tensor | None]:
        """Scratch memory of a reduction, or of a quantization on a grid; empty if it takes none."""
        return []

    def serves(self, layout: Layout, shards: bool = False) -> bool:
        """Whether the module has kernels for a grid, with ``shards`` those for many shards."""
        return is_native(layout)

    def amax(self, x: Tensor, out: Tensor) -> None:
        x, scratch = x.contiguous(), self.scratch_for(x)
        source = x.data_ptr(), DTYPE_CODES[x.dtype], x.numel()
        self.native.amax(*source, *pointers(*scratch, out), *self.place(x))

    def scale_from_amax(
        self, amax: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, out: Outputs
    ) -> None:
        amax = amax.contiguous()
        options = fp8_format(fp8_dtype).max, epsilon, force_pow_2
        self.native.scale_from_amax(
            amax.data_ptr(), amax.numel(), *options, *pointers(*out), *self.stream(amax)
        )

    def quantize(
        self, x: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, out: Outputs
    ) -> None:
        data, transpose, scale, scale_inv, amax = out
        x, scratch = x.contiguous(), self.scratch_for(x)
        addresses = pointers(*scratch, amax, scale, scale_inv, data, transpose)
        self.native.quantize(
            *_matrix(x),
            epsilon,
            force_pow_2,
            *addresses,
            fp8_format(fp8_dtype).code,
            *self.place(x),
        )

    def cast_amax(
        self,
        x: Tensor,
        scale: Tensor,
        amax: Tensor | None,
        saturated: Tensor | None,
        fp8_dtype: torch.dtype,
        out: Outputs,
    ) -> None:
        data, transpose, scale_inv = out
        x = x.contiguous()
        addresses = pointers(scale, amax, saturated, scale_inv, data, transpose)
        self.native.cast(*_matrix(x), *addresses, fp8_format(fp8_dtype).code, *self.place(x))

    def transpose(self, data: Tensor, out: Tensor) -> None:
        data = data.contiguous()
        shape = as_matrix_shape(data.shape)
        self.native.transpose(data.data_ptr(), *shape, out.data_ptr(), *self.place(data))

    def update_scales(
        self,
        scales: Tensors,
        histories: Tensors,
        maxima: list[float],
        most_recent: bool,
        last: Tensor | None,
    ) -> None:
        slots = [
            (scale.data_ptr(), history.data_ptr(), scale.numel())
            for scale, history in zip(scales, histories, strict=True)
        ]
        length = histories[0].shape[0]
        options = length, maxima, most_recent, *pointers(last)
        self.native.update_scales(slots, *options, *self.stream(scales[0]))

    # -- grids: the reference serves layouts and values for which the module has no kernel --

    def grid_scales(self, amax: Tensor, text: str, dtype: torch.dtype, out: Outputs) -> None:
        layout, element, rule, _ = native_layout(text)
        if layout.element not in FP8 or layout.finite_as == "input" or not is_native(layout):
            reference.grid_scales(amax, text, dtype, out)
        elif rule.e8m0:
            amax = amax.contiguous()
            options = element, rule.floor, *pointers(out[1]), *self.place(amax)
            self.native.mx_scale_from_amax(amax.data_ptr(), amax.numel(), *options)
        else:
            self.scale_from_amax(amax, layout.element_dtype, rule.epsilon, rule.floor, out)

    def grid_quantize(self, x: Tensor, text: str, out: Outputs) -> None:
        layout, element, rule, directions = native_layout(text)
        if not x.numel() or not self.serves(layout):
            self.grid_quantize_levels(x, None, 0, text, (*out[:2], None, *out[2:], None))
            return
        x, scratch = x.contiguous(), self.scratch_for(x, layout)
        largest = FLOAT32_MAX
        if layout.finite_as == "input":
            largest = torch.finfo(x.dtype).max
        data, scales, column_data, column_scales = out
        results = (
            _quantized_direction(directions[0], data, scales),
            _quantized_direction(directions[1], column_data, column_scales),
        )
        self.native.grid_quantize(
            *_matrix(x), element, *rule, largest, *results, *pointers(*scratch), *self.place(x)
        )

    def grid_decode(
        self, data: Tensor, scales: Tensor | None, text: str, columnwise: bool, out: Tensor
    ) -> None:
        layout, _, rule, _ = native_layout(text)
        per_tensor = layout.block == _WHOLE and not rule.e8m0
        if out.dtype is torch.float64:
            reference.grid_decode(data, scales, text, columnwise, out)
        elif layout.element in FP8 and (scales is None or per_tensor):
            self._decode(data, scales, text, out)
        elif scales is not None and self.serves(layout):
            self._decode_blocks(data, scales, text, columnwise, out)
        else:
            self.grid_decode_levels(data, scales, None, text, columnwise, out)

    # -- layouts with small elements, two levels of scales, rotation or choices --

    def grid_quantize_levels(
        self, x: Tensor, seed: Tensor | None, first_row: int, text: str, out: Outputs
    ) -> None:
        if not x.numel() or not quantizes_levels(Layout.of(text)):
            reference.grid_quantize_levels(x, seed, first_row, text, out)
            return
        plan, results = levels_plan(self.native, text), (pointers(*out[:3]), pointers(*out[3:]))
        self.quantize_levels(x.contiguous(), seed, first_row, plan, results)

    def quantize_levels(
        self,
        x: Tensor,
        seed: Tensor | None,
        first_row: int,
        plan: object,
        results: tuple[list[int], list[int]],
    ) -> None:
        """Quantize a contiguous tensor with elements by the module's ``plan`` of its layout.

        ``results`` are the addresses of data, scales and amaxes of rows and of columns.
        """
        raise NotImplementedError

    def grid_decode_levels(
        self,
        data: Tensor,
        scales: Tensor | None,
        amax: Tensor | None,
        text: str,
        columnwise: bool,
        out: Tensor,
    ) -> None:
        layout = Layout.of(text)
        if out.dtype is torch.float64 or not decodes_levels(layout):
            reference.grid_decode_levels(data, scales, amax, text, columnwise, out)
            return
        # The copies live until the kernel has run.
        data = data.contiguous()
        scales = None if scales is None else scales.contiguous()
        amax = None if amax is None else amax.contiguous()
        scales_address, amax_address = pointers(scales, amax)
        self.native.levels_decode(
            levels_plan(self.native, text),
            data.data_ptr(),
            *layout.stored_matrix(data.shape, columnwise),
            scales_address,
            *_sides(layout.stored_block(columnwise)),
            amax_address,
            columnwise and not layout.transposed,
            out.data_ptr(),
            DTYPE_CODES[out.dtype],
            *self.place(data),
        )

    def _decode(self, data: Tensor, scale_inv: Tensor | None, text: str, out: Tensor) -> None:
        """Decode FP8 data with one scale, or without any."""
        data = data.contiguous()
        if scale_inv is not None:
            scale_inv = scale_inv.contiguous()
        source = data.data_ptr(), native_layout(text).element, data.numel()
        result = out.data_ptr(), DTYPE_CODES[out.dtype], *self.place(data)
        self.native.decode(*source, *pointers(scale_inv), *result)

    def _decode_blocks(
        self, data: Tensor, scales: Tensor, text: str, columnwise: bool, out: Tensor
    ) -> None:
        """Decode data with a scale for each block."""
        layout, element, rule, _ = native_layout(text)
        data, scales = data.contiguous(), scales.contiguous()
        source = data.data_ptr(), element, *layout.stored_matrix(data.shape, columnwise)
        block = _sides(layout.stored_block(columnwise))
        result = out.data_ptr(), DTYPE_CODES[out.dtype], *self.place(data)
        self.native.grid_decode(*source, scales.data_ptr(), rule.e8m0, *block, *result)

    def epilogue32(
        self,
        sums: Tensor,
        scale_a: Tensor | None,
        scale_b: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        rows, columns = sums.shape
        bias_code = 0
        if bias is not None:
            bias = bias.contiguous()
            bias_code = DTYPE_CODES[bias.dtype]
        last = *pointers(scale_a, scale_b, bias), bias_code
        result = out.data_ptr(), DTYPE_CODES[out.dtype], *self.place(sums)
        self.native.epilogue32(sums.data_ptr(), rows, columns, last, *result)

    # -- many tensors in one call --

    def grid_multi_amax(self, shards: Shards, texts: Sequence[str], out: Tensor) -> None:
        layouts = [native_layout(text).layout for text in set(texts)]
        # The copies live until the kernel has run.
        copies = [x.contiguous() for x in shards.xs]
        sources = _sources(copies, shards)
        if _are_per_tensor(layouts):
            self.native.multi_amax(sources, out.data_ptr(), *self.place(out))
        elif all(self.serves(layout, shards=True) for layout in layouts):
            jobs = []
            for source, place, text in zip(sources, _places(shards), texts, strict=True):
                layout, _, _, (rows, columns) = native_layout(text)
                jobs.append((source, place, _area(rows), _area(columns), layout.square))
            self.native.grid_multi_amax(jobs, out.data_ptr(), out.numel(), *self.place(out))
        else:
            reference.grid_multi_amax(shards, texts, out)

    def grid_multi_cast(
        self, shards: Shards, texts: Sequence[str], rowwise: Pairs, columnwise: Pairs
    ) -> None:
        layouts = [native_layout(text).layout for text in set(texts)]
        # The copies live until the kernel has run.
        copies = [x.contiguous() for x in shards.xs]
        sources = _sources(copies, shards)
        if _are_per_tensor(layouts):
            self._multi_cast(sources, texts, rowwise, columnwise, copies[0])
        elif all(self.serves(layout, shards=True) for layout in layouts):
            jobs = list(_cast_jobs(sources, shards, texts, rowwise, columnwise))
            self.native.grid_multi_cast(jobs, *self.place(copies[0]))
        else:
            reference.grid_multi_cast(shards, texts, rowwise, columnwise)

    def _multi_cast(
        self,
        sources: list[_Source],
        texts: Sequence[str],
        rowwise: Pairs,
        columnwise: Pairs,
        placed: Tensor,
    ) -> None:
        """Cast shards of matrices with one scale each, on the device of ``placed``."""
        jobs = []
        scales = []
        for source, text, *pairs in zip(sources, texts, rowwise, columnwise, strict=True):
            for pair in pairs:
                if pair is not None:
                    scale, data = pair
                    jobs.append((source, native_layout(text).element, data.data_ptr()))
                    scales.append(scale)
        all_scales = placed
        # Without jobs the kernel reads no scale.
        if scales:
            all_scales = torch.cat(scales)
        self.native.multi_cast(jobs, all_scales.data_ptr(), *self.place(all_scales))


_CastDirection = tuple[tuple[int, int], int, int]
_CastJob = tuple[_Source, _Place, int, bool, _CastDirection, _CastDirection]


def _cast_jobs(
    sources: list[_Source],
    shards: Shards,
    texts: Sequence[str],
    rowwise: Pairs,
    columnwise: Pairs,
) -> Iterator[_CastJob]:
    arguments = zip(sources, _places(shards), texts, rowwise, columnwise, strict=True)
    for source, place, text, row_pair, column_pair in arguments:
        _, element, rule, (rows, columns) = native_layout(text)
        row_job = _cast_direction(rows, row_pair)
        column_job = _cast_direction(columns, column_pair)
        yield source, place, element, rule.e8m0, row_job, column_job


def _cast_direction(direction: Direction, pair: tuple[Tensor, Tensor] | None) -> _CastDirection:
    """The block, and the addresses of scales and data; 0 without the direction."""
    block = direction[0], direction[1]
    if pair is None:
        return block, 0, 0
    scales, data = pair
    return block, scales.data_ptr(), data.data_ptr()


def _quantized_direction(
    direction: Direction, data: Tensor | None, scales: Tensor | None
) -> tuple[int | bool, ...]:
    """The direction with the addresses of data and scales; empty if it is left out."""
    if data is None:
        return ()
    return *direction, *pointers(data, scales)


def _area(direction: Direction) -> tuple[int, int]:
    """Rows and columns of the area with one scale."""
    return direction[2], direction[3]


def _matrix(x: Tensor) -> tuple[int, int, int, int]:
    """The address of a contiguous tensor, the code of its dtype, rows and columns."""
    return x.data_ptr(), DTYPE_CODES[x.dtype], *as_matrix_shape(x.shape)


def _are_per_tensor(layouts: Sequence[Layout]) -> bool:
    """Whether all layouts have FP8 elements and one float32 scale for the tensor."""
    return all(
        layout.block == _WHOLE and layout.element in FP8 and layout.scale is torch.float32
        for layout in layouts
    )


def _sources(tensors: Tensors, shards: Shards) -> list[_Source]:
    """The sources of the shards, whose contiguous ``tensors`` are given.

    Raises:
        DTypeError: a tensor has no memory.
    """
    sources = []
    for x, dtype in zip(tensors, shards.dtypes, strict=True):
        address = x.data_ptr()
        if x.numel() and not address:
            raise DTypeError(
                f"a {type(x).__name__} has no memory to read",
                expected="a plain tensor",
                remedy="wait for it, or pass its values",
            )
        sources.append((address, DTYPE_CODES[x.dtype], x.numel(), DTYPE_CODES[dtype]))
    return sources


def _places(shards: Shards) -> list[_Place]:
    return [(*shape, start) for shape, start in zip(shards.shapes, shards.starts, strict=True)]
