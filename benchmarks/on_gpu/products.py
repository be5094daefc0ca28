"""Products of quantized operands against float64, where bytes are not defined, and bytewise where they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from benchmarks.on_gpu.checks import Outcome
from benchmarks.on_gpu.inputs import Draw
from benchmarks.on_gpu.place import Gpu
from ottava.gemm import gemm
from ottava.kernels import use_backend

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [
    *((1, 1, 1), (3, 5, 7), (16, 16, 16), (17, 33, 65), (64, 48, 100), (128, 256, 512), (127, 129, 257)),
    *((1, 4097, 64), (512, 512, 1024), (0, 4, 3), (4, 0, 3), (4, 3, 0), (33, 32, 31)),
]
Kind = Literal["fprop", "dgrad", "wgrad"]
KINDS: tuple[Kind, ...] = ("fprop", "dgrad", "wgrad")

# ||result - exact|| / ||exact||. Tensor cores add FP8 products in fewer bits than float32 has; with fast accumulation
# the whole sum stays in them, 32 products a step, each of which may cut off what is below 2^-13 of it. A bfloat16
# result is rounded besides. MX blocks are multiplied as FP8 on some devices only.
_BOUND, _STEP = 2e-3, 2.0**-13
_ROUNDING = {torch.float32: 0.0, torch.bfloat16: 3e-3, torch.float16: 4e-4}


def current(fmt: torch.dtype, device: torch.device) -> Any:
    """A quantizer of the recipe."""
    from ottava_current import Float8CurrentScalingQuantizer

    return Float8CurrentScalingQuantizer(fmt)


def delayed(fmt: torch.dtype, device: torch.device) -> Any:
    """A quantizer of the recipe, with a scale that clamps nothing."""
    from ottava_delayed import Float8Quantizer

    return Float8Quantizer(torch.full((1,), 16.0, device=device), torch.zeros(1, device=device), fmt)


def mxfp8(fmt: torch.dtype, device: torch.device) -> Any:
    """A quantizer of the recipe."""
    from ottava_mxfp8 import MXFP8Quantizer

    return MXFP8Quantizer(fmt)


QUANTIZERS: dict[str, Callable[[torch.dtype, torch.device], Any]] = {
    "current": current,
    "delayed": delayed,
    "mxfp8": mxfp8,
}


def _shapes(kind: Kind, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return {"fprop": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[kind]


def _exact(a: Any, b: Any, kind: Kind) -> torch.Tensor:
    """The product of the operands' own values in float64, on the CPU."""
    with use_backend("cpu"):
        x, y = (t.to("cpu").dequantize(torch.float64) for t in (a, b))
    return {"fprop": lambda: x @ y.t(), "dgrad": lambda: x @ y, "wgrad": lambda: x.t() @ y}[kind]()


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    """``||got - exact|| / ||exact||``; infinite where ``got`` has a NaN, or shapes differ."""
    mine, theirs = got.detach().cpu().double(), exact.detach().cpu().double()
    if mine.shape != theirs.shape or not bool(mine.isfinite().all()):
        return float("inf")
    base = theirs.norm().item()
    return (mine - theirs).norm().item() / base if base else (mine - theirs).norm().item()


def _operands(place: Gpu, recipe: str, kind: Kind, a: torch.Tensor, b: torch.Tensor) -> tuple[Any, Any]:
    make, forward = QUANTIZERS[recipe], kind == "fprop"
    with place.serving():
        left = make(E4M3 if forward else E5M2, place.device)(place.put(a))
        return left, make(E4M3, place.device)(place.put(b))


def check(place: Gpu, recipe: str, *, shapes: Any = SHAPES, seconds: float = 1e9) -> Outcome:
    """All kinds of products of one recipe's operands: plain, with a bias, added to what is there, fast."""
    outcome = Outcome(f"products, {recipe}")
    deadline, worst = time.monotonic() + seconds, 0.0
    for number, (m, n, k) in enumerate(shapes):
        if time.monotonic() > deadline:
            outcome.left_out += 3 * (len(shapes) - number)
            break
        for kind in KINDS:
            draw = Draw(number)
            label = f"{kind} {(m, n, k)}"
            a, b = (torch.randn(s, generator=draw.generator).bfloat16() for s in _shapes(kind, m, n, k))
            try:
                left, right = _operands(place, recipe, kind, a, b)
                exact = _exact(left, right, kind)
                steps = -(-a.shape[0 if kind == "wgrad" else 1] // 32)
                for what, result, expected, bound in _variants(place, left, right, kind, exact, draw, steps):
                    far = distance(result, expected)
                    worst = max(worst, far / bound)
                    outcome.note(f"{label} {what}", None if far <= bound else f"{far:.2e}, allowed {bound:.2e}")
            except Exception as error:
                outcome.note(label, f"{type(error).__name__}: {error}")
    outcome.name += f" (at most {worst:.2f} of what is allowed)"
    return outcome


def _variants(place: Gpu, left: Any, right: Any, kind: Kind, exact: torch.Tensor, draw: Draw, steps: int) -> Any:
    bias = torch.randn(exact.shape[1], generator=draw.generator)
    start = torch.randn(exact.shape, generator=draw.generator)
    for dtype, rounding in _ROUNDING.items():
        for split in (True, False):
            with place.serving():
                result = gemm(left, right, kind, out_dtype=dtype, use_split_accumulator=split)
            yield f"{dtype}, split {split}", result, exact, _BOUND + rounding + (0 if split else steps * _STEP)
        for bias_dtype in (dtype, torch.float32):
            given = bias.to(bias_dtype)
            with place.serving():
                result = gemm(left, right, kind, out_dtype=dtype, bias=place.put(given))
            # The bias is large beside a product of few terms.
            yield f"{dtype}, bias {bias_dtype}", result, exact + given.double(), _BOUND + rounding
        out = place.put(start.to(dtype))
        with place.serving():
            gemm(left, right, kind, out=out, accumulate=True)
        yield f"{dtype}, added", out, exact + start.to(dtype).double(), _BOUND + rounding


def check_integers(place: Gpu) -> Outcome:
    """Operands whose sums are exact in any order and in few bits: every element equals the exact one."""
    outcome = Outcome("products of small integers")
    for recipe in ("delayed", "mxfp8"):
        for m, n, k in ((16, 16, 16), (17, 33, 65), (128, 48, 96), (5, 200, 130)):
            for kind in KINDS:
                draw = Draw(m)
                a, b = (draw.integers(-1, 2, s).bfloat16() for s in _shapes(kind, m, n, k))
                try:
                    left, right = _operands(place, recipe, kind, a, b)
                    exact = _exact(left, right, kind)
                    for dtype in _ROUNDING:
                        with place.serving():
                            result = gemm(left, right, kind, out_dtype=dtype).cpu().double()
                        other = int((result != exact).sum()) if result.shape == exact.shape else exact.numel()
                        outcome.note(f"{recipe} {kind} {(m, n, k)} {dtype}", f"{other} are wrong" if other else None)
                except Exception as error:
                    outcome.note(f"{recipe} {kind} {(m, n, k)}", f"{type(error).__name__}: {error}")
    return outcome


def _scaled(draw: Draw, shape: tuple[int, int], exponent: int, first: int) -> torch.Tensor:
    """Every other row times a power of two, in two steps: the power itself may be below float32's smallest."""
    x = torch.randn(shape, generator=draw.generator)
    x[first::2] *= 2.0 ** max(exponent, -100)
    x[first::2] *= 2.0 ** min(exponent + 100, 0)
    return x


def check_far_blocks(place: Gpu) -> Outcome:
    """MX blocks whose values, or whose products, float32 or bfloat16 do not hold."""
    outcome = Outcome("products of MX blocks beyond float32's range")
    for exponent, other in ((-140, 120), (120, -140), (-30, 20), (-126, 0), (118, -126)):
        for kind in KINDS:
            draw, label = Draw(exponent + 200), f"{kind} 2^{exponent} 2^{other}"
            shapes = _shapes(kind, 40, 33, 70)
            a, b = _scaled(draw, shapes[0], exponent, 0), _scaled(draw, shapes[1], other, 1)
            try:
                left, right = _operands(place, "mxfp8", kind, a, b)
                exact = _exact(left, right, kind).float().double()
                with place.serving():
                    result = gemm(left, right, kind, out_dtype=torch.float32).cpu().double()
                # Line by line: ordinary ones beside tiny ones would hide what is wrong with these.
                per_row = [distance(mine, theirs) for mine, theirs in zip(result, exact, strict=True)]
                worst = max(per_row)
                outcome.note(label, None if worst <= 1e-2 else f"a row is off by {worst:.2e}")
            except Exception as error:
                outcome.note(label, f"{type(error).__name__}: {error}")
    return outcome
