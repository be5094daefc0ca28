"""Writes the tables of the pages that help to choose a recipe.

``python -m benchmarks.choosing`` prints the tables of ``docs/which-recipe.md``, ``docs/memory.md``
and ``docs/speed.md``; ``--write`` puts them there. Errors and bytes are measured on the CPU, in
seconds, with random tensors from a fixed seed. No time is measured: the tables of speed are made
from the results that ``python -m benchmarks`` and ``python benchmarks/gpu.py`` have written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import ottava
import ottava_debug
from benchmarks.markdown import markdown
from benchmarks.sqnr import tensors

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- benchmarks.choosing -->", "<!-- end of benchmarks.choosing -->"
#: The recipes that are compared: those that need no options.
RECIPES = ("current", "delayed", "rowwise", "blockwise", "mxfp8")
SIZE = 512
HEAVY_TAILED = "lognormal, σ = 2"
# The size at which the table of CPUs shows large layers.
LARGE = 2048

Row = dict[str, object]


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def _step(layer: ottava.nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """The output, the gradient of the input, and the gradient of the weight of one step."""
    operand = x.clone().requires_grad_()
    layer.weight.grad = None
    y = layer(operand)
    y.backward(dy)
    results = [y.detach(), operand.grad, layer.weight.grad]
    return [result for result in results if result is not None]


def errors(recipe: str) -> list[float]:
    """Relative errors of the results of a step, in the Frobenius norm, for Gaussian operands.

    The second of two steps with the same operands is measured, because delayed scaling takes its
    scales from the first.
    """
    random = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(SIZE, SIZE, generator=random) for _ in range(3))
    layer = ottava.nn.Linear(SIZE, SIZE, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    exact = _step(layer, x, dy)
    layer.bind(recipe)
    _step(layer, x, dy)
    pairs = zip(_step(layer, x, dy), exact, strict=True)
    return [((result - right).norm() / right.norm()).item() for result, right in pairs]


def lost_elements(recipe: str) -> float:
    """The share of the elements of a heavy-tailed input that become zero, in the second step."""
    x = tensors()[HEAVY_TAILED]
    model = ottava.convert(torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE)).to(x.dtype), recipe)
    name = "underflows_of_nonzero%"
    with ottava_debug.statistics(model, [name], tensors=["activation"]) as statistics:
        for _ in range(2):
            model(x).sum().backward()
            statistics.step()
    return float(statistics.latest()["0", "activation", name]) / 100


def saved_bytes(recipe: ottava.Recipe | None) -> float:
    """Bytes that a bfloat16 layer saves for its backward pass, an element of input and weight."""
    layer = ottava.nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, requires_grad=True)
    saved: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        layer(x)
    return sum(saved.values()) / (x.numel() + layer.weight.numel())


def weight_bytes(recipe: ottava.Recipe) -> float:
    """Bytes of an FP8-primary weight, an element."""
    with ottava.quantized_model_init(recipe):
        weight = ottava.nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16).weight
    assert isinstance(weight, ottava.QuantizedTensor)
    return weight.nbytes / weight.numel()


def recipes_table() -> str:
    """Errors, lost elements and state of the recipes."""
    stateful = {spec.name for spec in ottava.list_recipes() if spec.stateful}
    rows: list[Row] = []
    for name in RECIPES:
        output, input_gradient, weight_gradient = map(_percent, errors(name))
        rows.append(
            {
                "recipe": f"`{name}`",
                "error of the output": output,
                "of the input's gradient": input_gradient,
                "of the weight's gradient": weight_gradient,
                "heavy-tailed input: become zero": _percent(lost_elements(name)),
                "saved bytes": saved_bytes(ottava.get_recipe(name)),
                "state": "yes" if name in stateful else "no",
            }
        )
    return markdown(rows)


def memory_table() -> str:
    """Bytes of what a layer saves and of FP8-primary weights."""
    variants: dict[str, tuple[str, dict[str, object]]] = {name: (name, {}) for name in RECIPES}
    variants["rowwise, wgrad_high_precision"] = ("rowwise", {"wgrad_high_precision": True})
    variants["mxfp8, with_2d_quantization"] = ("mxfp8", {"with_2d_quantization": True})
    high_precision: Row = {
        "recipe": "none, bfloat16",
        "saved for backward": saved_bytes(None),
        "weight, if FP8-primary": None,
    }
    rows = [high_precision]
    for name, (recipe, options) in variants.items():
        instance = ottava.get_recipe(recipe, **options)
        rows.append(
            {
                "recipe": name,
                "saved for backward": saved_bytes(instance),
                "weight, if FP8-primary": weight_bytes(instance),
            }
        )
    return markdown(rows)


def cpu_table() -> str:
    """Times of large and of small layers on the machines of the benchmarks with a fast BF16."""
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    rows: dict[str, Row] = {name: {"recipe": name} for name in RECIPES}
    for kind, result in results.items():
        if "no fast BF16" in kind:
            continue
        machine = result["cpu"].split(" ")[0].removesuffix("(R)")
        for title, section in result["sections"].items():
            if title.startswith("Linear"):
                column = f"{machine}: large layer, of BF16's time"
                for row in section:
                    if row["M = K = N"] == LARGE and row["layer"] in rows:
                        rows[row["layer"]][column] = row["times bf16"]
            if title.startswith("Host time"):
                column = f"{machine}: small layer, of nn.Linear's time"
                for row in section:
                    if row["step"] == "forward and backward" and row["recipe"] in rows:
                        rows[row["recipe"]][column] = row["times nn.Linear"]
    return markdown(list(rows.values()))


def gpu_table() -> str:
    """Times of eager layers on the GPU of the results, as multiples of a bfloat16 layer's."""
    results = json.loads((ROOT / "benchmarks" / "gpu_results.json").read_text(encoding="utf-8"))
    rows = []
    for name in RECIPES:
        row: Row = {"recipe": name}
        for size in results["linear"]["rows"]:
            seconds: Mapping[str, float] = size["seconds"]
            ratio = seconds[name] / seconds["bf16"] if name in seconds else None
            row[f"M = K = N = {size['name']}"] = ratio
        rows.append(row)
    return markdown(rows)


def speed_tables() -> str:
    """The tables of CPUs and of the GPU."""
    return (
        f"On CPUs (`python -m benchmarks`), forward and backward:\n\n{cpu_table()}\n\n"
        f"On one H100 (`python benchmarks/gpu.py`), forward and backward, of BF16's time:\n\n"
        f"{gpu_table()}"
    )


#: The function that makes the text between the marks, by page.
PAGES: Mapping[Path, Callable[[], str]] = {
    ROOT / "docs" / "which-recipe.md": recipes_table,
    ROOT / "docs" / "memory.md": memory_table,
    ROOT / "docs" / "speed.md": speed_tables,
}


def with_results(page: str, text: str) -> str:
    """The page with ``text`` between its marks."""
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main() -> None:
    """Print the tables, or write them into the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choosing", description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the tables of the pages")
    write = parser.parse_args().write
    for path, table in PAGES.items():
        if write:
            page = with_results(path.read_text(encoding="utf-8"), table())
            path.write_text(page, encoding="utf-8")
        else:
            print(f"{path.name}:\n\n{table()}\n")


if __name__ == "__main__":
    main()
