"""``GridTensor``: quantized data with scales on a grid as a ``torch.Tensor``."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ottava.layout import as_matrix_shape
from ottava.tensors.grid import Direction, GridTensorStorage, in_order, zeros
from ottava.tensors.tensor import QuantizedTensor, blocks

# Those of a direction, in the order of the tensor -> those of a result; None where blocks do not
# allow it.
_Change = Callable[[Direction, bool], Direction | None]


def _viewed(
    function: Callable[..., torch.Tensor], tensor: torch.Tensor, *shape: tuple[int, ...]
) -> Any:
    """The view that ``function`` gives, if there is one."""
    try:
        return function(tensor, *shape)
    except (RuntimeError, ValueError):  # the latter while a graph is traced
        return None


class GridTensor(QuantizedTensor, GridTensorStorage):
    """Quantized data with scales on a grid, as a ``torch.Tensor`` of its nominal dtype.

    Views, slices, splits and transposes keep the class where they lie on the boundaries of blocks,
    in every direction held, and share the data; elsewhere they give a :class:`DequantizedView`.
    Arguments and errors: :class:`GridTensorStorage`'s, and those of every
    :class:`~ottava.QuantizedTensor`.
    """

    @classmethod
    def laid_out_like(cls, declared: dict[str, Any]) -> torch.Tensor | None:
        names = {inner.attribute: inner.argument for inner in cls.inner_tensors}
        rows, columns = (declared[names[name]] for name in cls.data_names)
        if rows is not None or columns is None:
            return rows  # type: ignore[no-any-return]
        # Transposed data alone lie in memory as a transposed tensor does.
        return in_order(
            (columns, declared[names[cls.scale_names[1]]]), cls.layout_of(declared), True
        )[0]

    # -- views: what shares a scale counts as one block, but one of all rows, or of all columns, may
    # be cut along them: the parts go on sharing its scale, and know it --

    def of_zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        """A tensor of this kind with the directions of this one, which no quantizer has to make."""
        held = [getattr(self, name) is not None for name in self.data_names]
        sides = [
            zeros(self.grid_layout, shape, bool(side), device) if there else None
            for side, there in enumerate(held)
        ]
        given = dict(
            zip(
                (inner.argument for inner in self.inner_tensors),
                self._arranged(*sides),
                strict=True,
            )
        )
        return type(self)(**(self.get_metadata() | given | {"shape": None, "dtype": dtype}))

    def changed(self, change: _Change, *, swap: bool = False, part: bool = False) -> Any:
        """This tensor with every direction changed; ``swap`` exchanges the two."""
        layout, rows = self.grid_layout, self.ordered(columnwise=False)
        made_of: list[Direction | None] = []
        kept: Direction | None = None
        for columnwise in (False, True):
            # One buffer that serves both usages is that of the rows.
            source = columnwise != swap and not layout.one_buffer
            held = self.ordered(columnwise=True) if source else rows
            made_of.append(None)
            if held is None or (layout.one_buffer and columnwise):
                continue
            result = change(held, source)
            stored = None if result is None else in_order(result, layout, columnwise, back=True)
            if layout.transposed and layout.square and rows is not None and source:
                # Columns that are made of rows are made again when they are asked for, unless they
                # lie as before.
                kept = stored if stored and columnwise and stored[0].is_contiguous() else None
            elif stored is None:
                return NotImplemented
            else:
                made_of[columnwise] = stored
        given = dict(
            zip(
                (inner.argument for inner in self.inner_tensors),
                self._arranged(*made_of),
                strict=True,
            )
        )
        if swap:
            given["values_from_columns"] = not self._values_from_columns
        made: Any = type(self)(**(self.get_metadata() | {"shape": None} | given))
        # The scale of a part of what has one is that of the rest too.
        fewer = made.numel() != self.numel()
        made.mark_view(self, part=part or (fewer and layout.block == (None, None)))
        if kept is not None and not fewer:
            made._put(made_of[0], kept)
        return made

    def reshaped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        old_columns, layout = (self.shape[-1] if self.dim() else 1), self.grid_layout
        whole = layout.block == (None, None)

        def change(held: Direction, columnwise: bool) -> Direction | None:
            data, scales = _viewed(function, held[0]), held[1]
            if data is None or whole:
                return None if data is None else (data, scales)
            columns = data.shape[-1] if data.dim() else 1
            if columns != old_columns and data.numel():
                rows, side = layout.block_of(columnwise, shared=True)
                # Rows of whole blocks may be joined and cut.
                if rows != 1 or side is None or columns % side or old_columns % side:
                    return None
            viewed = _viewed(
                torch.Tensor.view, scales, layout.grid(as_matrix_shape(data.shape), columnwise)
            )
            return None if viewed is None else (data, viewed)

        return self.changed(change)

    def narrowed(self, dim: int, start: int, stop: int) -> Any:
        layout, size, last = self.grid_layout, self.shape[dim], dim == self.dim() - 1
        if (start, stop) == (0, size):
            return self.changed(lambda held, _: held)
        at, step = int(last), 1 if last else math.prod(self.shape[dim + 1 : -1])
        place = start * step, stop * step, size * step

        def change(held: Direction, columnwise: bool) -> Direction | None:
            data, scales = held[0].narrow(dim, start, stop - start), held[1]
            if layout.block == (None, None):
                return data, scales
            # What shares a scale has to stay whole, whatever is stored of each block in it.
            block = layout.block_of(columnwise)
            span = blocks(block[at], *place)
            if span is None or blocks(layout.block_of(columnwise, shared=True)[at], *place) is None:
                return None
            if last:
                return data, scales[:, span]
            if block[0] is None or math.prod(self.shape[:dim]) == 1:
                return data, scales[span]
            view, grid = torch.Tensor.view, layout.grid(as_matrix_shape(data.shape), columnwise)
            entries = (
                _viewed(view, scales, (*self.shape[:-1], scales.shape[1]))
                if block[0] == 1
                else None
            )
            rows = (
                None
                if entries is None
                else _viewed(view, entries.narrow(dim, start, stop - start), grid)
            )
            return None if rows is None else (data, rows)

        # A write to the part with another scale would change what the rest means.
        spanned = any(
            layout.block_of(c)[at] is None and self.direction(columnwise=c) for c in (False, True)
        )
        return self.changed(change, part=spanned)

    def _share_freshness(self, other: QuantizedTensor) -> None:
        super()._share_freshness(other)
        if isinstance(other, GridTensor) and self._writes is other._writes:
            for name, kept in other._kept().items():
                setattr(self, name, kept)

    def for_usage(self, columnwise: bool) -> Direction:
        missing = (
            columnwise and not self.grid_layout.square and self.direction(columnwise=True) is None
        )
        initial, quantizer = self.get_high_precision_init_val(), self._quantizer
        # A weight that was made under no_grad: its initial values are quantized along columns, too,
        # unless they were given up, or the rows are not theirs any more, or columns were dropped.
        known = (
            quantizer is not None
            and not quantizer.columnwise_usage
            and not torch.compiler.is_compiling()
        )
        if missing and known and initial is not None:
            with torch.no_grad():
                made = quantizer.with_usage(True, True).quantize(initial.to(self.device))
            rows, held = made.direction(columnwise=False), self.direction(columnwise=False)
            if held is not None and all(map(torch.equal, rows, held)):
                self._put(held, made.direction(columnwise=True))
        return super().for_usage(columnwise)

    def _means_the_same(self, other: QuantizedTensor) -> bool:
        # What shares more scales may serve what shares fewer.
        mine = self.grid_layout
        return isinstance(other, GridTensor) and mine in (
            other.grid_layout,
            replace(other.grid_layout, shared=None),
        )
