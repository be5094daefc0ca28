"""The demo under the tools: fake quantization is current scaling up to rounding, and a suggested
recipe file mends a model with outliers.

Current scaling multiplies elements, and the sums by the scales; FakeQuant multiplies what scales
times elements round to in float32. For sums over ``K`` the two differ by at most ``γ · |a| · |b|``
with ``γ = 2 · (K + 4) · 2⁻²⁴``: one rounding for each operand, product and addition, and for the
scales and the bias (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 3.1).

Under BF16 autocast, ``u = 2⁻⁹`` for a rounding to bfloat16: both operands of FakeQuant are rounded
to it, and the results of both. That is ``4 · u · |a| · |b|`` besides, and a little for the products
of such errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava_debug
from benchmarks.analysis import plant
from ottava.debug import fake_quantize
from ottava_debug import Watch
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import SIZES, Size
from ottava_demo.training import Trainee
from tests.debug.by_hand import TENSORS, Operands

TINY = SIZES["tiny"]
pytestmark = pytest.mark.filterwarnings("ignore:only .* of the weights")


def batches(size: Size, number: int, seed: int = 0) -> Iterator[torch.Tensor]:
    corpus, random = load_corpus(1 << 18), torch.Generator().manual_seed(seed)
    for _ in range(number):
        yield batch(corpus.train, size.batch, size.length, random)


def fake_quantized(model: torch.nn.Module) -> ExitStack:
    """FakeQuant in the formats of current scaling."""
    stack = ExitStack()
    for name, tensors in (("FP8E4M3", ["activation", "weight"]), ("FP8E5M2", ["gradient"])):
        run = ottava_debug.fake_quant(model, name, layers="blocks.*", tensors=tensors)
        stack.enter_context(run)
    return stack


@pytest.mark.parametrize(
    ("dtype", "unit"), [(torch.float32, 0.0), (None, 2.0**-9)], ids=["float32", "autocast"]
)
def test_each_product_differs_by_rounding_alone(dtype: torch.dtype | None, unit: float) -> None:
    trainee = Trainee("current", size=TINY, dtype=dtype)
    trainee.step(next(batches(TINY, 1)))
    kept: dict[Any, Operands] = {}
    with Watch(lambda layer: kept.setdefault(layer, Operands()) if layer.recipe else None):
        trainee.backward(next(batches(TINY, 1)))
    assert len(kept) == 4
    for layer, operands in kept.items():
        current, found = operands.taken, Operands()
        x = current["fprop", "activation"][0].clone().requires_grad_()
        region = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is None)
        with region, fake_quantized(trainee.model), Watch(lambda _, found=found: found):
            layer(x).backward(current["dgrad", "gradient"][0])
        for gemm, (left, right, result) in TENSORS.items():
            sides = []
            for tensor in (left, right):
                values, quantized = current[gemm, tensor]
                fake, none = found.taken[gemm, tensor]
                assert none is None
                assert torch.equal(fake, quantized.dequantize(torch.float32).to(values.dtype))
                name = "FP8E5M2" if tensor == "gradient" else "FP8E4M3"
                assert torch.equal(fake, fake_quantize(values, name))
                sides.append(fake.double().abs())
            a, b = sides
            a, b = a.t() if gemm == "wgrad" else a, b.t() if gemm == "fprop" else b
            size = a @ b + (layer.bias.abs() if gemm == "fprop" else 0)
            bound = (2 * (a.shape[1] + 4) * 2.0**-24 + 4 * unit * (1 + 8 * unit)) * size
            found_result, own_result = found.taken[gemm, result][0], current[gemm, result][0]
            difference = (found_result.double() - own_result.double()).abs()
            assert bool((difference <= bound).all()), (layer.name, gemm)


SMALL = Size(layers=1, width=64, heads=4, length=64, batch=8)


def test_the_suggested_file_mends_a_model_with_outliers(tmp_path: Path) -> None:
    """One huge weight in each of two layers multiplies an input that is always zero.

    In high precision it changes nothing. With one scale for the tensor the other weights become
    zeros.
    """

    def gradients(recipe: str | None) -> torch.Tensor:
        trainee = Trainee(recipe, size=SMALL, seed=0)
        plant(trainee.model, {0: (1e5, 1e5)})
        trainee.backward(next(batches(SMALL, 1)))
        return torch.cat(
            [p.grad.flatten() for p in trainee.model.parameters() if p.grad is not None]
        )

    trainee = Trainee(None, size=SMALL, seed=0)
    plant(trainee.model, {0: (1e5, 1e5)})
    report = ottava_debug.analyze(
        model=trainee.model,
        data=batches(SMALL, 2, seed=2),
        loss="cross_entropy",
        recipes=["current"],
    )
    complaints = report.complaints("current")
    assert set(complaints) == {"blocks.0.qkv", "blocks.0.up"}
    assert all(reasons[0].startswith("weight: underflow") for reasons in complaints.values())
    file = tmp_path / "suggested.yaml"
    ottava_debug.write_suggestion(report, file)
    uniform, suggested, exact = map(gradients, ("current", str(file), None))
    assert (suggested - exact).norm() < 0.2 * exact.norm() < (uniform - exact).norm()
