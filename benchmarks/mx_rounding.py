"""Measures error and saturation of the two roundings of MX scales.

``python -m benchmarks.mx_rounding`` needs matplotlib, and draws ``docs/_static/mx_rounding.png``.
Three tensors are random. The others come from a short BF16 training of the demo's model: weights,
inputs and output gradients of one attention and one MLP layer. Blocks run along rows. An element is
clamped if, divided by its scale, it is larger than the format's largest value.

The SQNR is that of the whole tensor. If a few elements have most of the energy, as in the wider
lognormal, it says only how exact these are. "Blocks alike" is therefore the SQNR after all blocks
were scaled to the same energy.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ottava import Layout, kernels
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import Size
from ottava_demo.training import Trainee

ROOT = Path(__file__).parents[1]
BLOCK = 32
FORMATS = {"E4M3": (torch.float8_e4m3fn, 448.0), "E5M2": (torch.float8_e5m2, 57344.0)}
RULES = ("up", "floor")
DRAWS = 5
SIZE, STEPS = Size(layers=2, width=256, heads=4, length=128, batch=16), 60
LAYERS = {"attention": "blocks.1.qkv", "MLP": "blocks.1.down"}
# 2^(127 - byte) for every byte of a scale except NaN's, exact in float64.
_INVERSE = torch.tensor([2.0 ** (127 - code) for code in range(255)], dtype=torch.float64)

Row = dict[str, Any]


def synthetic(seed: int) -> dict[str, torch.Tensor]:
    """Random tensors by name, BF16."""
    random = torch.Generator().manual_seed(seed)
    normal, *logs = (torch.randn(1024, 1024, generator=random) for _ in range(3))
    tensors = {"Gaussian": normal}
    for sigma, log in zip((1, 3), logs, strict=True):
        signs = torch.randint(0, 2, log.shape, generator=random) * 2 - 1
        tensors[f"lognormal, σ = {sigma}"] = (sigma * log).exp() * signs
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def trained() -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Tensors of the step after a short training, BF16, and its first and last loss."""
    data, random = load_corpus().train, torch.Generator().manual_seed(0)
    trainee = Trainee(None, size=SIZE)
    losses = [trainee.step(batch(data, SIZE.batch, SIZE.length, random)) for _ in range(STEPS)]
    tensors: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        tensors[name] = tensor.detach().to(torch.bfloat16).flatten(0, -2).contiguous()

    def watch(kind: str, layer: torch.nn.Module) -> None:
        def hook(
            _: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
        ) -> None:
            keep(f"{kind} input", inputs[0])
            output.register_hook(lambda grad: keep(f"{kind} gradient", grad))

        layer.register_forward_hook(hook)

    for kind, path in LAYERS.items():
        layer = trainee.model.get_submodule(path)
        keep(f"{kind} weight", layer.get_parameter("weight"))
        watch(kind, layer)
    losses.append(trainee.backward(batch(data, SIZE.batch, SIZE.length, random)))
    ordered = {
        f"{kind} {what}": tensors[f"{kind} {what}"]
        for what in ("weight", "input", "gradient")
        for kind in LAYERS
    }
    return ordered, {"first": losses[0], "last": losses[-1]}


def _blocks(mask: torch.Tensor, rows: int) -> torch.Tensor:
    """Whether each block of ``rows`` x 32 has a marked element."""
    m, k = mask.shape
    return mask.view(m // rows, rows, k // BLOCK, BLOCK).any(3).any(1)


def _energy(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The sum of squares of each block of ``rows`` x 32."""
    m, k = x.shape
    return x.square().view(m // rows, rows, k // BLOCK, BLOCK).sum((1, 3))


def _percent(mask: torch.Tensor) -> float:
    return 100.0 * mask.double().mean().item()


def compare(x: torch.Tensor, format_name: str, *, two_dimensional: bool = False) -> Row:
    """Compare both rules on one tensor, in float64."""
    dtype, largest = FORMATS[format_name]
    rows = BLOCK if two_dimensional else 1
    exact = x.double()
    energy = exact.square().flatten()
    row: Row = {
        "format": format_name,
        "block": f"{rows} x {BLOCK}",
        "elements": x.numel(),
        "energy_in_ten_elements_percent": 100
        * (energy.topk(10).values.sum() / energy.sum()).item(),
    }
    signal = _energy(exact, rows)
    scales, clamped, noise = {}, {}, {}
    for rule in RULES:
        layout = Layout(
            dtype,
            (1, BLOCK),
            torch.float8_e8m0fnu,
            rule,
            shared=(BLOCK, BLOCK) if two_dimensional else None,
        )
        data, scales[rule], _, _ = kernels.grid_quantize(x, layout, columnwise=False)
        decoded = kernels.grid_decode(data, scales[rule], layout, torch.float32).double()
        inverse = _INVERSE[scales[rule].long()].repeat_interleave(BLOCK, 1)
        clamped[rule] = over = exact.abs() * inverse > largest
        assert bool((decoded[over].abs() * inverse[over] == largest).all()), (
            "a clamped element is not the largest value"
        )
        error = (exact - decoded).abs()
        noise[rule] = _energy(error, rows)
        row[rule] = {
            "sqnr_db": 10 * math.log10((signal.sum() / noise[rule].sum()).item()),
            "blocks_alike_sqnr_db": -10
            * math.log10((noise[rule] / signal)[signal > 0].mean().item()),
            "clamped_percent": _percent(over),
            "clamped_blocks_percent": _percent(_blocks(over, rows)),
            "largest_clamp_error_percent": 100 * (error[over] / exact[over].abs()).max().item()
            if over.any()
            else 0.0,
            "clamped_error_share_percent": 100
            * (error[over].square().sum() / noise[rule].sum()).item(),
            "zeroed_percent": _percent((decoded == 0) & (exact != 0)),
        }
    assert not clamped["up"].any(), "an element is clamped although its scale was rounded up"
    # The rules differ exactly in the blocks that one of them clamps, by a factor of two.
    differ = scales["up"].int() - scales["floor"].int()
    hit = _blocks(clamped["floor"], rows)
    assert torch.equal(differ, hit.repeat_interleave(rows, 0).int()), (
        "the rules differ elsewhere than in clamped blocks"
    )
    gain = 10 * (noise["up"] / noise["floor"])[hit].log10()
    row["largest_gain_of_floor_in_a_block_db"] = gain.max().item() if gain.numel() else 0.0
    return row


def measure() -> tuple[list[Row], dict[str, float]]:
    """Compare the rules on every tensor; weights and gradients are compared in two ways."""
    real, losses = trained()
    rows: list[Row] = []
    draws = [
        {name: compare(x, "E4M3") for name, x in synthetic(seed).items()} for seed in range(DRAWS)
    ]
    for name, row in draws[0].items():
        for rule in RULES:
            result = sorted(draw[name][rule]["sqnr_db"] for draw in draws)
            row[rule]["sqnr_range_db"] = [result[0], result[-1]]
        rows.append({"tensor": name, **row})
    for name, x in real.items():
        rows.append({"tensor": name, **compare(x, "E4M3")})
        if name.endswith("weight"):
            rows.append({"tensor": name, **compare(x, "E4M3", two_dimensional=True)})
        if name.endswith("gradient"):
            rows.append({"tensor": name, **compare(x, "E5M2")})
    return rows, losses


def _sqnr(result: Row) -> str:
    low, high = result.get("sqnr_range_db", (0.0, 0.0))
    return f"{result['sqnr_db']:.2f}" + (f" ({low:.2f} to {high:.2f})" if high else "")


def table(rows: list[Row]) -> str:
    """The rows as a table in Markdown."""
    headings = (
        "tensor",
        "format",
        "block",
        "SQNR up (dB)",
        "SQNR floor (dB)",
        "blocks alike, up / floor (dB)",
        "clamped up (%)",
        "clamped floor (%)",
        "blocks with a clamp, floor (%)",
        "zeroed up / floor (%)",
    )
    lines = ["| " + " | ".join(headings) + " |", "|---|---|---|" + "---:|" * (len(headings) - 3)]
    for row in rows:
        up, floor = row["up"], row["floor"]
        cells = (
            row["tensor"],
            row["format"],
            row["block"].replace("x", "×"),
            _sqnr(up),
            _sqnr(floor),
            f"{up['blocks_alike_sqnr_db']:.2f} / {floor['blocks_alike_sqnr_db']:.2f}",
            f"{up['clamped_percent']:g}",
            f"{floor['clamped_percent']:.2f}",
            f"{floor['clamped_blocks_percent']:.1f}",
            f"{up['zeroed_percent']:.2f} / {floor['zeroed_percent']:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[Row], out: Path) -> None:
    """Draw a pair of bars for each row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 8), layout="constrained")
    for index, row in enumerate(rows):
        for rule, offset, color in (("up", -0.2, "#0072b2"), ("floor", 0.2, "#e69f00")):
            result = row[rule]
            label = rule if index == 0 else None
            axes.barh(index + offset, result["sqnr_db"], height=0.38, color=color, label=label)
            low, high = result.get("sqnr_range_db", [result["sqnr_db"]] * 2)
            if high > low:
                axes.plot(
                    (low, high),
                    [index + offset] * 2,
                    color="black",
                    linewidth=1.2,
                    marker="|",
                    markersize=6,
                )
            text = f"{result['sqnr_db']:.2f}"
            if rule == "floor":
                text += f"   {result['clamped_percent']:.2f} % clamped"
            axes.text(
                max(result["sqnr_db"], high) + 0.4, index + offset, text, va="center", fontsize=9
            )
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


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mx_rounding", description=__doc__)
    parser.add_argument(
        "--threads", type=int, default=1, help="more is slower where cores are shared"
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--fragment", type=Path, help="where to write the table besides")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    rows, losses = measure()
    text = table(rows)
    print(text)
    worst = max(row["floor"]["largest_clamp_error_percent"] for row in rows)
    print(
        f"In brackets: range of {DRAWS} random tensors. Largest relative error of a clamped "
        f"element: {worst:.1f} %"
    )
    gain = max(row["largest_gain_of_floor_in_a_block_db"] for row in rows)
    print(f"In no block is floor better by more than {gain:.2g} dB")
    print(f"Training of {STEPS} steps: loss {losses['first']:.2f} to {losses['last']:.2f}")
    if not options.no_write:
        machine = f"{options.threads} thread(s), {platform.machine()}, torch {torch.__version__}"
        training = {"steps": STEPS, "size": vars(SIZE), "layers": LAYERS, "loss": losses}
        results = {
            "machine": machine,
            "python": platform.python_version(),
            "training": training,
            "rows": rows,
        }
        (ROOT / "benchmarks" / "mx_rounding.json").write_text(
            json.dumps(results, indent=1) + "\n", encoding="utf-8"
        )
        draw(rows, ROOT / "docs" / "_static" / "mx_rounding.png")
        if options.fragment is not None:
            options.fragment.write_text(text + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
