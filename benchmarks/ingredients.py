"""Measures what each ingredient of the recipes in four bits does, on random tensors and on tensors
of a training. :mod:`benchmarks.ingredient_pictures` draws the results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.markdown import markdown
from benchmarks.rounding import LAYERS, trained
from benchmarks.timing import Row
from ottava import GridQuantizer, Layout
from ottava.layout import Rotation
from ottava_mx import MXQuantizer
from ottava_nvfp4 import NVFP4Quantizer

Tensor = torch.Tensor
_SIGNS = 0x2D5A96F1A7E8D7E84B1D63C95F80E2A7
_ROWS, _COLUMNS = 512, 1024


def _nvfp4(**options: Any) -> Layout:
    return NVFP4Quantizer(**options).layout


def _mxfp4(**options: Any) -> Layout:
    return MXQuantizer(**options).layout


def _one_level(scale: Any) -> Layout:
    """NVFP4's blocks with one level of scales."""
    return Layout("E2M1", (1, 16), scale, columnwise="transposed")


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(random: torch.Generator) -> Tensor:
    return torch.randn(_ROWS, _COLUMNS, generator=random)


def decoded(x: Tensor, layout: Layout, columnwise: bool = False) -> Tensor:
    """What a direction of the quantized tensor stands for, float64, of the shape of ``x``."""
    quantizer = GridQuantizer(layout, rowwise=not columnwise, columnwise=columnwise)
    return quantizer(x).dequantize(torch.float64)


def rotated(layout: Layout, size: int) -> Layout:
    """The layout with a transform of its rowwise data, in groups of ``size``."""
    return replace(layout, rotation=Rotation(size, _SIGNS & ((1 << size) - 1), "rowwise"))


def relative_error(values: Tensor, exact: Tensor) -> float:
    """Of the Frobenius norm."""
    return ((values - exact).norm() / exact.norm()).item()


def sqnr(values: Tensor, exact: Tensor) -> float:
    """The ratio of signal to noise in dB."""
    return -20 * math.log10(relative_error(values, exact))


# -- two levels of scales --

#: Name -> layout; the tensor is multiplied by powers of two.
LEVELS: Mapping[str, Layout] = {
    "E4M3 alone": _one_level(torch.float8_e4m3fn),
    "UE5M3 alone": _one_level("UE5M3"),
    "NVFP4: E4M3 below float32": _nvfp4(),
    "MXFP4: E8M0": _mxfp4(),
}
EXPONENTS = range(-32, 25)


def second_level() -> dict[str, list[float]]:
    """Relative errors of a normal tensor at each size, by the name of the layout."""
    x = _normal(_generator())
    return {
        name: [relative_error(decoded(x * 2.0**e, layout), x.double() * 2.0**e) for e in EXPONENTS]
        for name, layout in LEVELS.items()
    }


# -- rotations --

#: Name -> layout, and the size of the groups of its rotation.
ROTATED: Mapping[str, tuple[Layout, int]] = {
    "INT8, one scale for a row": (Layout(torch.int8, (1, None), columnwise="transposed"), 128),
    "INT4, 1 × 32": (Layout("INT4", (1, 32), columnwise="transposed"), 32),
    "MXFP4": (_mxfp4(), 32),
    "NVFP4": (_nvfp4(), 16),
}
FRACTIONS = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2)
SIZES = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100)


def outliers(fraction: float, size: float) -> Tensor:
    """A normal tensor, of which a random fraction is multiplied by ``size``."""
    random = _generator()
    x = _normal(random)
    return torch.where(torch.rand(x.shape, generator=random) < fraction, x * size, x)


def _plain_and_rotated(x: Tensor, name: str) -> tuple[float, float]:
    """SQNR without and with the rotation."""
    layout, size = ROTATED[name]
    exact = x.double()
    return sqnr(decoded(x, layout), exact), sqnr(decoded(x, rotated(layout, size)), exact)


def _shapes() -> dict[str, Tensor]:
    """Tensors by what their groups of 16 look like."""
    random = _generator()
    student = _normal(random) / sum(_normal(random) ** 2 / 3 for _ in range(3)).sqrt()
    every_16th = torch.arange(_COLUMNS) % 16 == 0

    def one_in_16(size: float) -> Tensor:
        return torch.where(every_16th, size * _normal(random).sign(), _normal(random))

    return {
        "normal": _normal(random),
        "uniform": 2 * torch.rand(_ROWS, _COLUMNS, generator=random) - 1,
        "±6 once in 16, ±5 elsewhere": torch.where(every_16th, 6.0, 5.0) * _normal(random).sign(),
        "Student's t, 3 degrees": student,
        "normal, 1 % 10 times larger": outliers(0.01, 10),
        "normal, 1 % 100 times larger": outliers(0.01, 100),
        "normal, ±10 once in 16": one_in_16(10),
        "normal, ±30 once in 16": one_in_16(30),
    }


_WAYS = ("plain", "rotated", "random rounding")


def _shape_row(name: str, x: Tensor) -> Row:
    """SQNR of NVFP4, plain and rotated, and what becomes of elements that would become zero.

    Plain NVFP4 rounds an element to zero if it is smaller than a 24th of its block's amax (0.25
    where 6 is the amax), but for the rounding of the scale. What is kept of these is the slope of
    the decoded values over the exact ones: 0 if all are zero, 1 if the errors have nothing to do
    with the values.
    """
    exact = x.double()
    blocks = exact.abs().view(_ROWS, -1, 16)
    small = (blocks < blocks.amax(-1, keepdim=True) / 24).view_as(exact)
    layouts = (_nvfp4(), rotated(_nvfp4(), 16), _nvfp4(stochastic_rounding=True))
    torch.manual_seed(0)
    values = [decoded(x, layout) for layout in layouts]
    energy = exact[small].square().sum()
    return {
        "tensor": name,
        "sqnr": [sqnr(v, exact) for v in values],
        "small_percent": 100 * small.double().mean().item(),
        "kept": [((v * exact)[small].sum() / energy).item() if energy else None for v in values],
    }


def _wgrad_rows(tensors: Mapping[str, Tensor]) -> list[Row]:
    """Relative errors of ``wgrad`` for layers of a training, in four bits, plain and rotated."""
    rows = []
    for kind in LAYERS:
        x, dy = (tensors[f"{kind} {part}"].float() for part in ("input", "gradient"))
        exact = dy.double().t() @ x.double()
        row: Row = {"layer": kind}
        for rounding, stochastic in (("nearest", False), ("random", True)):
            for name, with_rht in (("plain", False), ("rotated", True)):
                torch.manual_seed(0)
                inputs = decoded(x, _nvfp4(with_rht=with_rht), columnwise=True)
                layout = _nvfp4(with_rht=with_rht, stochastic_rounding=stochastic)
                gradients = decoded(dy, layout, columnwise=True)
                row[f"{rounding}, {name}"] = relative_error(gradients.t() @ inputs, exact)
        rows.append(row)
    return rows


def rotations(steps: int = 60) -> Row:
    """SQNR against the fraction and the size of outliers, of NVFP4 for shapes, and of ``wgrad``."""
    return {
        "fractions": {
            name: [_plain_and_rotated(outliers(f, 10), name) for f in FRACTIONS] for name in ROTATED
        },
        "sizes": {
            name: [_plain_and_rotated(outliers(0.01, s), name) for s in SIZES] for name in ROTATED
        },
        "shapes": [_shape_row(name, x) for name, x in _shapes().items()],
        "wgrad": _wgrad_rows(trained(steps)),
    }


def rotations_text(results: Row) -> str:
    """The tables of the page."""
    at = FRACTIONS.index(0.01)
    layouts = [
        {"layout": name, "plain": rows[at][0], "rotated": rows[at][1]}
        for name, rows in results["fractions"].items()
    ]
    shapes = [
        {
            "NVFP4 of": row["tensor"],
            "plain": row["sqnr"][0],
            "rotated": row["sqnr"][1],
            "small elements": f"{row['small_percent']:.1f} %",
            **{
                f"kept, {name}": None if slope is None else f"{100 * slope:.0f} %"
                for name, slope in zip(_WAYS, row["kept"], strict=True)
            },
        }
        for row in results["shapes"]
    ]
    products = [
        {
            key: f"{100 * cell:.1f} %" if isinstance(cell, float) else cell
            for key, cell in row.items()
        }
        for row in results["wgrad"]
    ]
    return f"""\
SQNR in dB, where a hundredth of the elements is ten times larger:

{markdown(layouts, "{:.1f}")}

SQNR in dB of NVFP4 for other tensors. *Small elements* are below a 24th of their block's amax, so
that rounding to nearest makes nearly all of them zero. *Kept* is the slope of their decoded values
over the exact ones:

{markdown(shapes, "{:.1f}")}

Relative error of `wgrad` in NVFP4, for two layers of a small GPT after 60 steps of training in
BF16, with the gradient rounded to nearest or at random:

{markdown(products)}"""


# -- random rounding --

ROUNDINGS = 256
STEPS = 1024


def _mean_of_roundings(x: Tensor, stochastic: bool) -> Tensor:
    """The mean of so many roundings of one row, whose amax is 6 so that its scale is exact."""
    several = x.expand(ROUNDINGS, -1)
    return decoded(several, _nvfp4(stochastic_rounding=stochastic)).mean(0)


def random_rounding() -> Row:
    """Means of roundings against values, and errors of sums of small gradients.

    The gradients of a sum are normal numbers around small means. One in 16 is 20 times as large,
    so that a block's scale is too coarse for the others.
    """
    torch.manual_seed(0)
    # 15 values and one 6 in each block, so that all scales are 1.
    values = torch.linspace(0, 6, 240).view(16, 15)
    x = torch.cat([torch.full((16, 1), 6.0), values], 1).flatten()
    means = {
        name: _mean_of_roundings(x, stochastic).view(16, 16)[:, 1:].flatten().tolist()
        for name, stochastic in (("nearest", False), ("random", True))
    }
    random = _generator()
    mean = torch.randn(64, 256, generator=random)
    mean[:, ::16] *= 20
    sums = {name: torch.zeros(64, 256, dtype=torch.float64) for name in ("exact", *means)}
    errors: dict[str, list[float]] = {name: [] for name in means}
    for step in range(STEPS):
        gradient = mean + 0.5 * torch.randn(mean.shape, generator=random)
        sums["exact"] += gradient
        for name in means:
            sums[name] += decoded(gradient, _nvfp4(stochastic_rounding=name == "random"))
        if (step + 1) & step == 0:  # powers of two
            for name in means:
                small = torch.arange(256) % 16 != 0
                errors[name].append(relative_error(sums[name][:, small], sums["exact"][:, small]))
    return {"values": values.flatten().tolist(), "means": means, "errors": errors}


# -- squares for weights --

SQUARES: Mapping[str, Layout] = {
    "NVFP4, 1 × 16": _nvfp4(),
    "NVFP4, 16 × 16": _nvfp4(with_2d_quantization=True),
    "MXFP4, 1 × 32": _mxfp4(),
    "MXFP4, 32 × 32": _mxfp4(with_2d_quantization=True),
}
PATCH = 48


def squares() -> Row:
    """Errors of a normal weight in both directions, and the difference between the directions."""
    weight = _normal(_generator())
    exact = weight.double()
    rows, patches = [], {}
    for name, layout in SQUARES.items():
        forward, backward = decoded(weight, layout), decoded(weight, layout, columnwise=True)
        rows.append(
            {
                "layout": name,
                "forward": relative_error(forward, exact),
                "backward": relative_error(backward, exact),
                "difference": ((forward - backward).norm() / exact.norm()).item(),
            }
        )
        patches[name] = (forward - backward)[:PATCH, :PATCH].tolist()
    return {"rows": rows, "patches": patches}


# -- 4-over-6 --

FOUR_OVER_SIX: Mapping[str, Layout] = {
    "without": _nvfp4(),
    "MAE": _nvfp4(four_over_six=True),
    "MSE": _nvfp4(four_over_six=True, four_over_six_error="MSE"),
    "MAE, bound 448": _nvfp4(four_over_six=True, four_over_six_bound=448),
}


def four_over_six() -> Row:
    """Relative errors of the blocks of a normal tensor, and means over all elements."""
    x = _normal(_generator())
    exact = x.double()
    blocks, rows = {}, []
    for name, layout in FOUR_OVER_SIX.items():
        values = decoded(x, layout)
        errors = (values - exact).view(_ROWS, -1, 16)
        blocks[name] = (errors.norm(dim=-1) / exact.view_as(errors).norm(dim=-1)).flatten().tolist()
        rows.append(
            {
                "4-over-6": name,
                "mean error": errors.abs().mean().item() / exact.abs().mean().item(),
                "root mean square": relative_error(values, exact),
            }
        )
    return {"blocks": blocks, "rows": rows}


def four_over_six_text(results: Row) -> str:
    """The table of the page, in percent of the tensor's mean magnitude and root mean square."""
    return markdown(
        [
            {key: f"{100 * cell:.2f} %" if isinstance(cell, float) else cell
             for key, cell in row.items()}
            for row in results["rows"]
        ]
    )  # fmt: skip
