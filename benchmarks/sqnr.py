"""Measures SQNR of current, rowwise, blockwise and MXFP8 on heavy-tailed tensors.

``python -m benchmarks.sqnr`` prints the tables of ``docs/numerics.md``; ``--write`` puts them
there. The tensors are random with a fixed seed, 512 × 512 in bfloat16, and are quantized along rows
to E4M3. Each tensor has two figures. The SQNR of the whole tensor depends on its largest elements.
The other counts the relative errors of all elements alike, and so shows what happens to small
elements beside large ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch

import ottava
from benchmarks.markdown import markdown

PAGE = Path(__file__).parents[1] / "docs" / "numerics.md"
BEGIN, END = "<!-- benchmarks.sqnr -->", "<!-- end of benchmarks.sqnr -->"
SIZE = 512
# Column of the table -> the recipe, its options, and the role of the quantizer.
SCHEMES: Mapping[str, tuple[str, dict[str, object], str]] = {
    "current": ("current", {}, "input"),
    "rowwise": ("rowwise", {}, "input"),
    "blockwise 128 × 128": ("blockwise", {}, "weight"),
    "blockwise 1 × 128": ("blockwise", {}, "input"),
    "the same, any scale": ("blockwise", {"force_pow_2_scales": False}, "input"),
    "MXFP8 1 × 32": ("mxfp8", {}, "input"),
}


def tensors() -> dict[str, torch.Tensor]:
    """Random tensors by name."""
    random = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(SIZE, SIZE, generator=random, dtype=torch.float64)

    signs = [normal().sign() for _ in range(2)]
    # Student's t with 3 degrees of freedom, whose tails fall with the fourth power.
    student = normal() / ((normal() ** 2 + normal() ** 2 + normal() ** 2) / 3).sqrt()
    outliers, rows = normal(), normal()
    outliers[:, 17::128] *= 1e5
    rows *= torch.exp(3 * torch.randn(SIZE, 1, generator=random, dtype=torch.float64))
    values = {
        "Gaussian": normal(),
        "Student's t, 3 degrees": student,
        "lognormal, σ = 1": normal().exp() * signs[0],
        "lognormal, σ = 2": (2 * normal()).exp() * signs[1],
        "Gaussian, 4 columns 10⁵ times larger": outliers,
        "Gaussian, rows of lognormal size, σ = 3": rows,
    }
    return {name: tensor.bfloat16() for name, tensor in values.items()}


def figures(x: torch.Tensor, scheme: str) -> tuple[float, float]:
    """SQNR in dB of the whole tensor, and of the mean square of relative errors."""
    recipe, options, role = SCHEMES[scheme]
    quantizer = ottava.get_recipe(recipe, **options).quantizer(role).with_usage(True, False)
    exact = x.double()
    squares, errors = exact**2, (quantizer(x).dequantize(torch.float32).double() - exact) ** 2
    ratios = errors.sum() / squares.sum(), (errors / squares)[squares > 0].mean()
    whole, alike = (-10 * torch.log10(ratio).item() for ratio in ratios)
    return whole, alike


def text() -> str:
    """The text between the marks of the page."""
    by_tensor = {
        name: {scheme: figures(x, scheme) for scheme in SCHEMES} for name, x in tensors().items()
    }
    wholes, alike = (
        markdown(
            [
                {"tensor": name, **{s: pair[at] for s, pair in row.items()}}
                for name, row in by_tensor.items()
            ],
            "{:.1f}",
        )
        for at in (0, 1)
    )
    return f"\nOf whole tensors:\n\n{wholes}\n\nWhere every element counts alike:\n\n{alike}\n\n"


def with_results(page: str) -> str:
    """The page with new tables."""
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return f"{before}{BEGIN}\n{text()}{END}{after}"


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sqnr", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"replace the tables of {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(with_results(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(text())


if __name__ == "__main__":
    main()
