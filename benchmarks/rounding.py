"""Compares the two roundings of MX scales on random tensors and on tensors of a training."""

from __future__ import annotations

import math
import platform
from functools import partial
from pathlib import Path

import torch

from benchmarks.markdown import markdown
from benchmarks.timing import Row
from ottava import Layout, kernels
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import Size
from ottava_demo.training import Trainee

BLOCK = 32
FORMATS = {"E4M3": (torch.float8_e4m3fn, 448.0), "E5M2": (torch.float8_e5m2, 57344.0)}
RULES = ("up", "floor")
DRAWS, STEPS = 5, 60
SIZE = Size(layers=2, width=256, heads=4, length=128, batch=16)
LAYERS = {"attention": "blocks.1.qkv", "MLP": "blocks.1.down"}
# 2^(127 - byte) for every byte of a scale except NaN's, exact in float64.
_INVERSE = torch.tensor([2.0 ** (127 - code) for code in range(255)], dtype=torch.float64)


def synthetic(seed: int) -> dict[str, torch.Tensor]:
    """Random tensors by name, BF16."""
    random = torch.Generator().manual_seed(seed)
    normal, *logs = (torch.randn(1024, 1024, generator=random) for _ in range(3))
    tensors = {"Gaussian": normal}
    for sigma, log in zip((1, 3), logs, strict=True):
        signs = torch.randint(0, 2, log.shape, generator=random) * 2 - 1
        tensors[f"lognormal, σ = {sigma}"] = (sigma * log).exp() * signs
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def trained(steps: int) -> dict[str, torch.Tensor]:
    """Weights, inputs and output gradients of two layers in the step after a training, BF16."""
    data, random = load_corpus().train, torch.Generator().manual_seed(0)
    batches = partial(batch, data, SIZE.batch, SIZE.length, random)
    trainee = Trainee(None, size=SIZE)
    for _ in range(steps):
        trainee.step(batches())
    tensors: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        tensors[name] = tensor.detach().to(torch.bfloat16).flatten(0, -2).contiguous()

    def watch(kind: str, layer: torch.nn.Module) -> None:
        def hook(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            keep(f"{kind} input", inputs[0])
            output.register_hook(lambda grad: keep(f"{kind} gradient", grad))

        keep(f"{kind} weight", layer.get_parameter("weight"))
        layer.register_forward_hook(hook)

    for kind, path in LAYERS.items():
        watch(kind, trainee.model.get_submodule(path))
    trainee.backward(batches())
    names = [f"{kind} {part}" for part in ("weight", "input", "gradient") for kind in LAYERS]
    return {name: tensors[name] for name in names}


def _percent(mask: torch.Tensor) -> float:
    return 100.0 * mask.double().mean().item()


def compare(x: torch.Tensor, format_name: str = "E4M3", rows: int = 1) -> Row:
    """Compare both rules on one tensor, in float64, in blocks of ``rows`` × 32.

    An element is clamped if, divided by its scale, it is larger than the format's largest value.
    """
    dtype, largest = FORMATS[format_name]
    exact = x.double()
    squares = exact.square()
    row: Row = {
        "format": format_name,
        "block": f"{rows} x {BLOCK}",
        "energy_in_ten_elements_percent": 100
        * (squares.flatten().topk(10).values.sum() / squares.sum()).item(),
    }
    for rule in RULES:
        shared = (rows, BLOCK) if rows > 1 else None
        layout = Layout(dtype, (1, BLOCK), torch.float8_e8m0fnu, rule, shared=shared)
        data, scales, _, _ = kernels.grid_quantize(x, layout, columnwise=False)
        decoded = kernels.grid_decode(data, scales, layout, torch.float32).double()
        inverse = _INVERSE[scales.long()].repeat_interleave(BLOCK, 1)
        clamped = exact.abs() * inverse > largest
        noise = (exact - decoded).square().sum()
        blocks = clamped.view(len(x) // rows, rows, -1, BLOCK)
        row[rule] = {
            "sqnr_db": 10 * math.log10((squares.sum() / noise).item()),
            "clamped_percent": _percent(clamped),
            "clamped_blocks_percent": _percent(blocks.any(3).any(1)),
            "zeroed_percent": _percent((decoded == 0) & (exact != 0)),
        }
    assert not row["up"]["clamped_percent"], "an element is clamped, and its scale was rounded up"
    return row


def measure(quick: bool = False) -> Row:
    """Compare the rules on every tensor; weights and gradients are compared in two ways."""
    draws = [synthetic(seed) for seed in range(1 if quick else DRAWS)]
    rows: list[Row] = []
    for name in draws[0]:
        several = [compare(draw[name]) for draw in draws]
        for rule in RULES:
            figures = sorted(row[rule]["sqnr_db"] for row in several)
            several[0][rule]["sqnr_range_db"] = [figures[0], figures[-1]]
        rows.append({"tensor": name, **several[0]})
    for name, x in trained(1 if quick else STEPS).items():
        rows.append({"tensor": name, **compare(x)})
        if name.endswith("weight"):
            rows.append({"tensor": name, **compare(x, rows=BLOCK)})
        if name.endswith("gradient"):
            rows.append({"tensor": name, **compare(x, "E5M2")})
    return {"machine": f"{platform.machine()}, torch {torch.__version__}", "rows": rows}


def _sqnr(figures: Row) -> str:
    low, high = figures.get("sqnr_range_db", (0.0, 0.0))
    if high - low > 1:
        return f"{low:.1f} to {high:.1f} dB"
    return f"{figures['sqnr_db']:.1f} dB"


def table(results: Row) -> str:
    """The table of the page."""
    return markdown(
        [
            {
                "tensor": row["tensor"],
                "elements": row["format"],
                "block": row["block"].replace("x", "×"),
                "SQNR up": _sqnr(row["up"]),
                "SQNR floor": _sqnr(row["floor"]),
                "clamped, up": f"{row['up']['clamped_percent']:g}",
                "clamped, floor": f"{row['floor']['clamped_percent']:.2f} %",
                "blocks that clamp, floor": f"{row['floor']['clamped_blocks_percent']:.1f} %",
            }
            for row in results["rows"]
        ]
    )


def draw(results: Row, out: Path) -> None:
    """Draw a pair of bars for each row."""
    from matplotlib import pyplot as plt

    rows: list[Row] = results["rows"]
    figure, axes = plt.subplots(figsize=(9, 8), layout="constrained")
    for rule, offset, color in (("up", -0.2, "#0072b2"), ("floor", 0.2, "#e69f00")):
        heights = [index + offset for index in range(len(rows))]
        lengths = [row[rule]["sqnr_db"] for row in rows]
        axes.barh(heights, lengths, height=0.38, color=color, label=rule)
        for row, height, length in zip(rows, heights, lengths, strict=True):
            low, high = row[rule].get("sqnr_range_db", (length, length))
            if high > low:
                axes.plot((low, high), (height, height), "k|-", linewidth=1.2, markersize=6)
            text = f"{length:.2f}"
            if rule == "floor":
                text += f"   {row[rule]['clamped_percent']:.2f} % clamped"
            axes.text(max(length, high) + 0.4, height, text, va="center", fontsize=9)
    names = [f"{row['tensor']}\n{row['format']}, {row['block'].replace('x', '×')}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.32 * max(row[rule]["sqnr_db"] for row in rows for rule in RULES))
    axes.set_xlabel(
        f"signal to quantization noise (dB), higher is better; black: range of {DRAWS} random "
        f"tensors"
    )
    axes.set_title("MX scales by the rules up and floor; up clamps nothing", pad=28)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=130)
    plt.close(figure)
