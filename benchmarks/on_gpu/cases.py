"""The table of what is checked: every kernel that ``ottava.kernels`` declares, on many inputs.

A case draws its inputs on the CPU and calls the kernel on them wherever they were put. Results are what the call
returns and whatever it writes into its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from benchmarks.on_gpu.inputs import FLOATS, FORMATS, SCALES, SHAPES, SMALL_SHAPES, VIEWS, Draw, Shape, hardest
from ottava import kernels
from ottava.kernels import parts

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One call of a kernel.

    Attributes:
        kernel: its name in ``ottava.kernels``.
        label: what tells the case from others.
        make: draws the inputs; of the same shapes and strides each time.
        call: runs the kernel on them, wherever they are.
        oracle: the backend whose bytes are right.
    """

    kernel: str
    label: str
    make: Callable[[Draw], Tensors]
    call: Callable[[Tensors], Sequence[torch.Tensor]]
    oracle: str = "cpu"


Inputs = tuple[str, Callable[[Draw], torch.Tensor], torch.dtype]


def sources(shapes: Sequence[Shape], least: int = 0) -> Iterator[Inputs]:
    """Label, input and dtype: for each shape and dtype contiguous values, and bits in one of the other views."""
    for dtype_name, dtype in FLOATS.items():
        views = cycle(name for name in VIEWS if name != "contiguous")
        for shape in shapes:
            if len(shape) < least:
                continue
            view = next(name for name in views if VIEWS[name][0] <= len(shape))
            for name, kind in (("contiguous", Draw.values), (view, Draw.bits)):
                place = VIEWS[name][1]

                def make(
                    draw: Draw, kind: Any = kind, place: Any = place, shape: Shape = shape, dtype: torch.dtype = dtype
                ) -> torch.Tensor:
                    made: torch.Tensor = place(lambda size: kind(draw, size, dtype), shape)
                    return made

                yield f"{dtype_name} {shape} {name} {kind.__name__}", make, dtype
        # Divisible by 256, and so both a line and a matrix.
        whole = hardest(dtype)
        yield f"{dtype_name} special, a line", lambda _, x=whole: x, dtype
        yield f"{dtype_name} special, a matrix", lambda _, x=whole: x.view(256, -1), dtype
        yield f"{dtype_name} special, a tall matrix", lambda _, x=whole: x[: len(x) // 255 * 255].view(-1, 255), dtype


def _transposed(shape: torch.Size) -> Shape:
    return (shape[-1], *shape[:-1])


class Table:
    """The cases of each kernel.

    Args:
        small: fewer and smaller ones, for where everything is slow.
    """

    def __init__(self, small: bool = False) -> None:
        self.shapes = SMALL_SHAPES if small else SHAPES
        self.scales = SCALES[:3] if small else SCALES

    def amax(self) -> Iterator[Case]:
        for label, x, _ in sources(self.shapes):
            yield Case("amax", label, lambda d, x=x: [x(d)], lambda t: [kernels.amax(t[0])])

    def amax_out(self) -> Iterator[Case]:
        def call(t: Tensors) -> Tensors:
            kernels.amax_out(t[0], t[1])
            return []

        for label, x, _ in sources(self.shapes):
            yield Case("amax_out", label, lambda d, x=x: [x(d), d.result((), torch.float32)], call)

    def scale_from_amax(self) -> Iterator[Case]:
        for shape in ((), (0,), (1,), (127,), (129,), (3, 1000)):
            for fmt, fp8 in FORMATS.items():
                for epsilon, power in ((0.0, False), (0.0, True), (1e-3, False)):
                    yield Case(
                        "scale_from_amax",
                        f"{shape} {fmt} epsilon {epsilon} powers {power}",
                        lambda d, shape=shape: [d.bits(shape, torch.float32).abs()],
                        lambda t, fp8=fp8, e=epsilon, p=power: kernels.scale_from_amax(t[0], fp8, e, p),
                    )

    def _casts(self, name: str, least: int, call: Callable[..., Any], out: bool = False) -> Iterator[Case]:
        scales = cycle(self.scales)
        for fmt, fp8 in FORMATS.items():
            for label, x, _ in sources(self.shapes, least):
                scale = next(scales)
                for shift in (0, 1) if out else (0,):

                    def make(d: Draw, x: Any = x, scale: float = scale, shift: int = shift) -> Tensors:
                        values = x(d)
                        return [values, d.scalar(scale), *([d.result(tuple(values.shape), shift=shift)] if out else [])]

                    yield Case(
                        name, f"{label} to {fmt}, scale {scale} {shift or ''}", make, lambda t, f=fp8: call(t, f)
                    )

    def cast(self) -> Iterator[Case]:
        yield from self._casts("cast", 0, lambda t, fp8: [kernels.cast(t[0], t[1], fp8)])

    def cast_out(self) -> Iterator[Case]:
        def call(t: Tensors, fp8: torch.dtype) -> Tensors:
            kernels.cast_out(t[0], t[1], fp8, t[2])
            return []

        yield from self._casts("cast_out", 0, call, out=True)

    def cast_transpose(self) -> Iterator[Case]:
        yield from self._casts("cast_transpose", 1, lambda t, fp8: kernels.cast_transpose(t[0], t[1], fp8))

    def cast_amax(self) -> Iterator[Case]:
        def call(t: Tensors, fp8: torch.dtype, rowwise: bool, transposed: bool) -> Any:
            saturated = t[3] if len(t) > 3 else None
            return kernels.cast_amax(t[0], t[1], t[2], fp8, saturated=saturated, transposed=transposed)

        yield from self._records("cast_amax", call, [(True, False, True), (True, True, True), (True, True, False)])

    def cast_parts(self) -> Iterator[Case]:
        def call(t: Tensors, fp8: torch.dtype, rowwise: bool, transposed: bool) -> Any:
            # Records and counts, or neither.
            amax, saturated = (t[2], t[3]) if len(t) > 3 else (None, None)
            made = parts.cast_parts(t[0], t[1], amax, saturated, fp8, rowwise, transposed)
            return [tensor for tensor in made if tensor is not None]

        layouts = [(True, True, True), (False, True, False), (False, True, True), (True, False, False)]
        yield from self._records("cast_parts", call, layouts)

    def _records(self, name: str, run: Callable[..., Any], layouts: list[tuple[bool, bool, bool]]) -> Iterator[Case]:
        """Layouts: with codes, with their transpose, with a counter."""
        scales = cycle(self.scales)
        for fmt, fp8 in FORMATS.items():
            for label, x, _ in sources(self.shapes):
                for rowwise, transposed, counted in layouts:
                    if transposed and "()" in label:
                        continue
                    scale = next(scales)

                    def make(d: Draw, x: Any = x, scale: float = scale, counted: bool = counted) -> Tensors:
                        counter = [torch.tensor(7)] if counted else []
                        return [x(d), d.scalar(scale), d.scalar(0.5), *counter]

                    def call(t: Tensors, fp8: Any = fp8, rowwise: bool = rowwise, transposed: bool = transposed) -> Any:
                        return run(t, fp8, rowwise, transposed)

                    asked = f"rows {rowwise}, transposed {transposed}, counted {counted}"
                    yield Case(name, f"{label} to {fmt}, scale {scale}, {asked}", make, call)

    def quantize(self) -> Iterator[Case]:
        def call(t: Tensors, fp8: Any, epsilon: float, power: bool, rowwise: bool, transposed: bool) -> Any:
            return kernels.quantize(t[0], fp8, epsilon, power, rowwise=rowwise, transposed=transposed)

        layouts = [(True, False), (True, True), (False, True), (False, False)]
        yield from self._quantizes("quantize", call, layouts)

    def quantize_parts(self) -> Iterator[Case]:
        def call(t: Tensors, *options: Any) -> Any:
            return [tensor for tensor in parts.quantize_parts(t[0], *options) if tensor is not None]

        yield from self._quantizes("quantize_parts", call, [(True, True), (False, True)])

    def _quantizes(self, name: str, run: Callable[..., Any], layouts: list[tuple[bool, bool]]) -> Iterator[Case]:
        """Layouts: with codes, with their transpose."""
        options = cycle([(0.0, False), (0.0, True), (1e-2, False)])
        for fmt, fp8 in FORMATS.items():
            for label, x, _ in sources(self.shapes):
                for rowwise, transposed in layouts:
                    if transposed and "()" in label:
                        continue
                    epsilon, power = next(options)
                    given = (fp8, epsilon, power, rowwise, transposed)
                    asked = f"rows {rowwise}, transposed {transposed}, epsilon {epsilon}, powers {power}"
                    yield Case(name, f"{label} to {fmt}, {asked}", lambda d, x=x: [x(d)], lambda t, g=given: run(t, *g))

    def quantize_out(self) -> Iterator[Case]:
        for fmt, fp8 in FORMATS.items():
            for label, x, _ in sources(self.shapes, 1):
                for rowwise, transposed, shift in (
                    (True, True, 0),
                    (True, True, 1),
                    (False, True, 0),
                    (True, False, 0),
                ):

                    def make(
                        d: Draw, x: Any = x, r: bool = rowwise, c: bool = transposed, shift: int = shift
                    ) -> Tensors:
                        values = x(d)
                        outs = [d.result(tuple(values.shape), shift=shift)] if r else []
                        outs += [d.result(_transposed(values.shape), shift=shift)] if c else []
                        return [values, *(d.result((), torch.float32) for _ in range(3)), *outs]

                    def call(t: Tensors, fp8: Any = fp8, r: bool = rowwise, c: bool = transposed) -> Tensors:
                        data, turned = t[4] if r else None, t[-1] if c else None
                        kernels.quantize_out(t[0], fp8, 0.0, False, data, turned, t[1], t[2], t[3])
                        return []

                    asked = f"rows {rowwise}, transposed {transposed} {shift or ''}"
                    yield Case("quantize_out", f"{label} to {fmt}, {asked}", make, call)

    def _codes(self, least: int = 0) -> Iterator[tuple[str, Callable[[Draw], torch.Tensor]]]:
        for shape in self.shapes:
            for name, (dimensions, place) in VIEWS.items():
                if max(dimensions, least) <= len(shape):
                    yield (
                        f"{shape} {name}",
                        lambda d, place=place, shape=shape: place(lambda size: d.bits(size, torch.uint8), shape),
                    )

    def transpose(self) -> Iterator[Case]:
        for label, x in self._codes(1):
            yield Case("transpose", label, lambda d, x=x: [x(d)], lambda t: [kernels.transpose(t[0])])

    def transpose_out(self) -> Iterator[Case]:
        def call(t: Tensors) -> Tensors:
            kernels.transpose_out(t[0], t[1])
            return []

        for label, x in self._codes(1):
            for shift in (0, 1):

                def make(d: Draw, x: Any = x, shift: int = shift) -> Tensors:
                    codes = x(d)
                    return [codes, d.result(_transposed(codes.shape), shift=shift)]

                yield Case("transpose_out", f"{label} {shift or ''}", make, call)

    def _decodes(self, name: str, out: bool) -> Iterator[Case]:
        factors = cycle([None, *self.scales])
        for fmt, fp8 in FORMATS.items():
            for dtype_name, dtype in FLOATS.items():
                for label, x in self._codes():
                    factor = next(factors)

                    def make(d: Draw, x: Any = x, factor: Any = factor, dtype: torch.dtype = dtype) -> Tensors:
                        codes = x(d)
                        outs = [d.result(tuple(codes.shape), dtype, 1)] if out else []
                        return [codes, *outs, *([] if factor is None else [d.scalar(factor)])]

                    def call(
                        t: Tensors, fp8: Any = fp8, dtype: Any = dtype, scaled: bool = factor is not None
                    ) -> Tensors:
                        scale_inv = t[-1] if scaled else None
                        if not out:
                            return [kernels.decode(t[0], scale_inv, fp8, dtype)]
                        kernels.decode_out(t[0], scale_inv, fp8, t[1])
                        return []

                    yield Case(name, f"{fmt} {label} to {dtype_name}, {factor}", make, call)

    def decode(self) -> Iterator[Case]:
        yield from self._decodes("decode", False)

    def decode_out(self) -> Iterator[Case]:
        yield from self._decodes("decode_out", True)

    def update_scales(self) -> Iterator[Case]:
        for length in (1, 2, 16, 1024):
            for counts in ([1], [3, 1, 5], [0, 2], [3] * 40, [300]):
                for most_recent, given in ((False, False), (True, False), (False, True)):
                    total = sum(counts)
                    maxima = [(448.0, 57344.0, 28672.0)[i % 3] for i in range(total)]

                    def make(d: Draw, length: int = length, counts: Any = counts, given: bool = given) -> Tensors:
                        scales = [d.values((n,), torch.float32).abs() for n in counts]
                        histories = [d.bits((length, n), torch.float32).abs() for n in counts]
                        for history in histories:
                            history[0] *= d.integers(0, 3, tuple(history[0].shape)) > 0
                        last = [d.bits((sum(counts),), torch.float32).abs()] if given else []
                        return [*scales, *histories, *last]

                    def call(
                        t: Tensors, n: int = len(counts), m: Any = maxima, r: bool = most_recent, g: bool = given
                    ) -> Tensors:
                        kernels.update_scales(t[:n], t[n : 2 * n], m, most_recent=r, last=t[-1] if g else None)
                        return []

                    label = f"{length} steps, slots {counts[:3]} of {len(counts)}, recent {most_recent}, given {given}"
                    yield Case("update_scales", label, make, call)

    def scaled_mm(self) -> Iterator[Case]:
        """Small integers, whose sums are exact in any order: the bytes are those of one rounding."""
        for m, k, n in ((0, 4, 3), (4, 0, 3), (4, 3, 0), (1, 1, 1), (3, 5, 7), (17, 33, 65), (64, 128, 80)):
            for operand in ("fp32", "bf16"):
                for out in FLOATS:
                    for scaled, biased in ((True, True), (True, False), (False, True), (False, False)):

                        def make(
                            d: Draw, size: Any = (m, k, n), dtype: Any = FLOATS[operand], b: bool = biased
                        ) -> Tensors:
                            m, k, n = size
                            a = d.integers(-2, 3, (m, k)).to(dtype)
                            other = d.integers(-2, 3, (n, k)).to(dtype).t()
                            bias = [d.integers(-9, 9, (n,)).float()] if b else []
                            return [a, other, d.scalar(0.25), d.scalar(2.0), *bias]

                        def call(t: Tensors, out: Any = FLOATS[out], s: bool = scaled, b: bool = biased) -> Tensors:
                            factors = (t[2], t[3]) if s else (None, None)
                            return [kernels.scaled_mm(t[0], t[1], *factors, t[4] if b else None, out)]

                        label = f"{(m, k, n)} {operand} to {out}, scaled {scaled}, bias {biased}"
                        yield Case("scaled_mm", label, make, call, "reference")
