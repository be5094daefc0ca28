"""The cases of the kernels on MX blocks, and on many tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch

from benchmarks.on_gpu.cases import Case, Table, Tensors, sources
from benchmarks.on_gpu.inputs import FLOATS, FORMATS, Draw, Shape
from ottava import kernels
from ottava.formats import mx_scale_shapes
from ottava.kernels import parts

# Rowwise, columnwise, square blocks, rounding of scales.
_LAYOUTS = [
    (True, True, False, "up"),
    (True, False, False, "floor"),
    (False, True, False, "up"),
    (True, True, True, "up"),
    (False, True, True, "floor"),
    (True, False, True, "up"),
    (True, True, False, "floor"),
]
_MATRICES = [(1, 1), (7, 33), (32, 32), (64, 96), (5, 31), (40, 100), (129, 257), (3, 0), (256, 64)]


def _ranges(draw: Draw, size: int) -> tuple[int, int]:
    start = int(draw.integers(0, size + 1, ())) if size else 0
    return start, int(draw.integers(start, size + 1, ())) if size else 0


class BlockTable(Table):
    """All cases."""

    def mx_scale_from_amax(self) -> Iterator[Case]:
        for shape in ((), (0,), (1,), (129,), (300, 1000)):
            for fmt, fp8 in FORMATS.items():
                for rounding in ("up", "floor"):
                    yield Case(
                        "mx_scale_from_amax",
                        f"{shape} {fmt} {rounding}",
                        lambda d, shape=shape: [d.bits(shape, torch.float32).abs()],
                        lambda t, fp8=fp8, rounding=rounding: [kernels.mx_scale_from_amax(t[0], fp8, rounding)],
                    )

    def mx_quantize(self) -> Iterator[Case]:
        def call(t: Tensors, fp8: torch.dtype, layout: Any) -> Any:
            rows, columns, square, rounding = layout
            options = {"two_dimensional": square, "scale_rounding": rounding}
            return kernels.mx_quantize(t[0], fp8, rowwise=rows, columnwise=columns, **options)

        yield from self._mx_quantizes("mx_quantize", call)

    def mx_quantize_parts(self) -> Iterator[Case]:
        def call(t: Tensors, fp8: torch.dtype, layout: Any) -> Any:
            made = parts.mx_quantize_parts(t[0], fp8, *layout[:3], layout[3] == "floor")
            return [tensor for pair in made if pair is not None for tensor in pair]

        yield from self._mx_quantizes("mx_quantize_parts", call)

    def _mx_quantizes(self, name: str, run: Callable[..., Any]) -> Iterator[Case]:
        layouts = cycle(_LAYOUTS)
        for fmt, fp8 in FORMATS.items():
            for label, x, _ in sources(self.shapes):
                for _ in range(2):
                    given = (fp8, next(layouts))
                    yield Case(
                        name, f"{label} to {fmt}, {given[1]}", lambda d, x=x: [x(d)], lambda t, g=given: run(t, *g)
                    )

    def mx_quantize_out(self) -> Iterator[Case]:
        layouts, shifts = cycle(_LAYOUTS), cycle((0, 1, 8))
        for fmt, fp8 in FORMATS.items():
            for label, x, _ in sources(self.shapes):
                layout, shift = next(layouts), next(shifts)

                def make(d: Draw, x: Any = x, layout: Any = layout, shift: int = shift) -> Tensors:
                    values, made = x(d), []
                    for wanted, scales in zip(layout[:2], mx_scale_shapes(values.shape), strict=True):
                        made += [d.result(s, shift=shift) for s in (tuple(values.shape), scales) if wanted]
                    return [values, *made]

                def call(t: Tensors, fp8: Any = fp8, layout: Any = layout) -> Tensors:
                    rows, columns, square, rounding = layout
                    pairs = (t[1], t[2]) if rows else None, (t[-2], t[-1]) if columns else None
                    kernels.mx_quantize_out(t[0], fp8, *pairs, two_dimensional=square, scale_rounding=rounding)
                    return []

                yield Case("mx_quantize_out", f"{label} to {fmt}, {layout} {shift or ''}", make, call)

    def _mx_decodes(self, name: str, out: bool) -> Iterator[Case]:
        dtypes, directions = FLOATS if out else FLOATS | {"fp64": torch.float64}, cycle((False, True, True))
        for fmt, fp8 in FORMATS.items():
            for dtype_name, dtype in dtypes.items():
                for label, x in self._codes():
                    columnwise = next(directions)

                    def make(d: Draw, x: Any = x, columnwise: bool = columnwise, dtype: Any = dtype) -> Tensors:
                        codes = x(d)
                        scales = d.bits(mx_scale_shapes(codes.shape)[columnwise], torch.uint8)
                        return [codes, scales, *([d.result(tuple(codes.shape), dtype, 1)] if out else [])]

                    def call(t: Tensors, fp8: Any = fp8, dtype: Any = dtype, columnwise: bool = columnwise) -> Tensors:
                        if not out:
                            return [kernels.mx_decode(t[0], t[1], fp8, dtype, columnwise=columnwise)]
                        kernels.mx_decode_out(t[0], t[1], fp8, t[2], columnwise=columnwise)
                        return []

                    yield Case(name, f"{fmt} {label} to {dtype_name}, columnwise {columnwise}", make, call)

    def mx_decode(self) -> Iterator[Case]:
        yield from self._mx_decodes("mx_decode", False)

    def mx_decode_out(self) -> Iterator[Case]:
        yield from self._mx_decodes("mx_decode_out", True)

    def _lists(self) -> Iterator[tuple[str, Callable[[Draw], Tensors], list[torch.dtype], list[torch.dtype]]]:
        """Label, tensors, the dtypes that they count as, formats: one, a few ragged ones, many."""
        floats, formats = list(FLOATS.values()), list(FORMATS.values())
        sizes: list[list[Shape]] = [
            [()],
            [(0,)],
            [(4097,)],
            [(3, 5), (0,), (1,), (129, 127), (7,), (2, 3, 41), (1024,)],
        ]
        sizes += [[(n % 40 + 1,) for n in range(200)]] if len(self.shapes) > 20 else []
        for shapes in sizes:
            for kind in (Draw.values, Draw.bits):

                def make(d: Draw, shapes: Any = shapes, kind: Any = kind) -> Tensors:
                    made = []
                    for i, shape in enumerate(shapes):
                        # Every other one off a round address.
                        flat = kind(d, (sum(1 for _ in range(i % 2)) + torch.Size(shape).numel(),), floats[i % 3])
                        made.append(flat[i % 2 :].view(shape))
                    return made

                dtypes = [floats[(i // 2) % 3] for i in range(len(shapes))]
                yield f"{len(shapes)} {kind.__name__}", make, dtypes, [formats[i % 2] for i in range(len(shapes))]

    def multi_amax(self) -> Iterator[Case]:
        for label, xs, dtypes, _ in self._lists():
            yield Case("multi_amax", label, xs, lambda t, dtypes=dtypes: [kernels.multi_amax(t, dtypes)])

    def multi_cast(self) -> Iterator[Case]:
        for label, xs, dtypes, formats in self._lists():
            count = len(dtypes)

            def make(d: Draw, xs: Any = xs, count: int = count) -> Tensors:
                values = xs(d)
                outs = [d.result(tuple(x.shape), shift=i % 3) for i, x in enumerate(values)]
                return [*values, d.values((count,), torch.float32), *outs]

            def call(t: Tensors, n: int = count, dtypes: Any = dtypes, formats: Any = formats) -> Tensors:
                kernels.multi_cast(t[:n], dtypes, t[n], formats, t[n + 1 :])
                return []

            yield Case("multi_cast", label, make, call)

    def _shards(self) -> Iterator[tuple[str, list[Shape], list[int], list[int], list[torch.dtype]]]:
        """Label, matrices, where each range begins and how long it is, dtypes of the shards."""
        floats = list(FLOATS.values())
        for seed in range(6):
            draw = Draw(seed)
            matrices = _MATRICES if seed else _MATRICES[:1]
            ranges = [_ranges(draw, rows * cols) for rows, cols in matrices]
            starts, counts = [a for a, _ in ranges], [b - a for a, b in ranges]
            yield (
                f"ranges {seed}",
                list(matrices),
                starts,
                counts,
                [floats[(i + seed) % 3] for i in range(len(matrices))],
            )

    def mx_multi_amax(self) -> Iterator[Case]:
        for label, matrices, starts, counts, dtypes in self._shards():
            for kind in (Draw.values, Draw.bits):
                squares = [i % 2 == 1 for i in range(len(matrices))]

                def make(d: Draw, kind: Any = kind, counts: Any = counts, dtypes: Any = dtypes) -> Tensors:
                    return [kind(d, (n,), dtype) for n, dtype in zip(counts, dtypes, strict=True)]

                def call(t: Tensors, shapes: Any = matrices, starts: Any = starts, squares: Any = squares) -> Tensors:
                    return [kernels.mx_multi_amax(t, [torch.bfloat16] * len(t), shapes, starts, squares)]

                yield Case("mx_multi_amax", f"{label} {kind.__name__}", make, call)

    def mx_multi_cast(self) -> Iterator[Case]:
        formats = list(FORMATS.values())
        for label, matrices, starts, counts, dtypes in self._shards():
            count = len(matrices)
            wanted = [((i % 3 != 1), (i % 3 != 2)) for i in range(count)]

            def make(
                d: Draw, shapes: Any = matrices, counts: Any = counts, dtypes: Any = dtypes, wanted: Any = wanted
            ) -> Tensors:
                made = [d.values((n,), dtype) for n, dtype in zip(counts, dtypes, strict=True)]
                for i, (shape, size, asked) in enumerate(zip(shapes, counts, wanted, strict=True)):
                    for scales, taken in zip(mx_scale_shapes(shape), asked, strict=True):
                        made += [d.bits(scales, torch.uint8), d.result((size,), shift=i % 3)] if taken else []
                return made

            def call(
                t: Tensors, shapes: Any = matrices, starts: Any = starts, wanted: Any = wanted, n: int = count
            ) -> Tensors:
                rest = iter(t[n:])
                pairs = [[(next(rest), next(rest)) if taken else None for taken in asked] for asked in wanted]
                fp8 = [formats[i % 2] for i in range(n)]
                rows, columns = [p[0] for p in pairs], [p[1] for p in pairs]
                kernels.mx_multi_cast(t[:n], [torch.bfloat16] * n, shapes, starts, fp8, rows, columns)
                return []

            yield Case("mx_multi_cast", label, make, call)


#: What ``ottava.kernels`` exports that is no kernel.
NOT_KERNELS = {
    "HIGH_PRECISION",
    "available_backends",
    "backend_for",
    "check_epsilon",
    "check_high_precision",
    "check_scale_rounding",
    "mx_amax_sizes",
    "use_backend",
}

#: Every kernel, by name, and the forms in which layers call some.
KERNELS = sorted({*kernels.__all__, *(name for name in vars(parts) if name.endswith("_parts"))} - NOT_KERNELS)


def cases(kernel: str, small: bool = False) -> list[Case]:
    """What one kernel is checked on; nothing for one that the table does not have, which counts as a failure."""
    return list(getattr(BlockTable(small), kernel, tuple)())
