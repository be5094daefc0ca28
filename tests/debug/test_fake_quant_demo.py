"""The demo under FakeQuant and under current scaling: the same operands, and products that differ
by rounding alone.

Current scaling multiplies elements, and the sums by the scales; FakeQuant multiplies what scales
times elements round to in float32. For sums over ``K`` the two differ by at most ``γ · |a| · |b|``
with ``γ = 2 · (K + 4) · 2⁻²⁴``: one rounding for each operand, product and addition, and for the
scales and the bias (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 3.1).

Under BF16 autocast, ``u = 2⁻⁹`` for a rounding to bfloat16: both operands of FakeQuant are rounded
to it, and the results of both. That is ``4 · u · |a| · |b|`` besides, and a little for the products
of such errors.
"""

import nvdlfw_inspect.api as debug_api
import pytest
import torch

import ottava_debug
from ottava.debug import fake_quantize
from ottava_debug.operands import TENSORS
from ottava_debug.products import Inspection, Watch
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import SIZES
from ottava_demo.training import Trainee

FILE = """
as_current_scaling_does:
  enabled: True
  layers:
    layer_types: [qkv, proj, up, down]
  transformer_engine:
    FakeQuant:
      enabled: True
      gemms: [fprop, dgrad, wgrad]
      tensors_struct:
        - {tensor: activation, quant_format: FP8E4M3}
        - {tensor: weight, quant_format: FP8E4M3}
        - {tensor: gradient, quant_format: FP8E5M2}
"""
SHAPE = SIZES["tiny"]
pytestmark = pytest.mark.filterwarnings("ignore:only .* of the weights")


def trainee(recipe, dtype=torch.float32):
    return Trainee(recipe, size=SHAPE, dtype=dtype)


def batches():
    corpus, random = load_corpus(1 << 18), torch.Generator().manual_seed(0)
    while True:
        yield batch(corpus.train, SHAPE.batch, SHAPE.length, random)


def losses(run, steps):
    return torch.tensor([run.step(data) for data, _ in zip(batches(), range(steps), strict=False)])


class Keeps(Inspection):
    def __init__(self):
        self.taken = {}

    def observe(self, gemm, tensor, values, quantized):
        self.taken[gemm, tensor] = values.clone(), quantized


def of_a_step(run):
    """Layer -> what its products take and give in a step, after some."""
    data, kept = next(batches()), {}
    losses(run, 3)
    with Watch(
        lambda layer: kept.setdefault(layer.name, Keeps()) if layer.recipe is not None else None
    ):
        run.backward(data)
    return kept


@pytest.mark.parametrize(
    ("dtype", "unit"), [(torch.float32, 0.0), (None, 2.0**-9)], ids=["float32", "autocast"]
)
def test_each_product_differs_by_rounding_alone(initialize, dtype, unit):
    run = trainee("current", dtype)
    kept = of_a_step(run)
    layers = {
        layer.name: layer
        for layer in run.model.modules()
        if getattr(layer, "recipe", None) is not None
    }
    assert kept.keys() == layers.keys()
    assert len(kept) == 4
    initialize(FILE)
    for name, layer in layers.items():
        current, x = (
            kept[name].taken,
            kept[name].taken["fprop", "activation"][0].clone().requires_grad_(),
        )
        found = Keeps()
        region = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is None)
        with region, Watch(lambda layer, found=found: found):
            layer(x).backward(current["dgrad", "gradient"][0])
        for gemm, (left, right, result) in TENSORS.items():
            operands = []
            for tensor in (left, right):
                values, quantized = current[gemm, tensor]
                fake, none = found.taken[gemm, tensor]
                assert none is None
                # Bit for bit what the bytes and the scale of the other stand for, in the dtype of
                # the values.
                assert torch.equal(fake, quantized.dequantize(torch.float32).to(values.dtype))
                quant_format = "FP8E5M2" if tensor == "gradient" else "FP8E4M3"
                assert torch.equal(fake, fake_quantize(values, quant_format))
                operands.append(fake.double().abs())
            a, b = operands
            a, b = a.t() if gemm == "wgrad" else a, b.t() if gemm == "fprop" else b
            size = a @ b + (layer.bias.abs() if gemm == "fprop" else 0)
            bound = (2 * (a.shape[1] + 4) * 2.0**-24 + 4 * unit * (1 + 8 * unit)) * size
            difference = (
                found.taken[gemm, result][0].double() - current[gemm, result][0].double()
            ).abs()
            assert bool((difference <= bound).all()), (name, gemm, (difference / bound).max())


def test_losses_under_autocast_stay_together(initialize):
    expected = losses(trainee("current", None), 15)
    initialize(FILE)
    apart = (losses(trainee("current", None), 15) - expected).abs() / expected
    assert 0 < apart.max() < 3e-4


def test_losses_stay_together(initialize):
    expected, plain = losses(trainee("current"), 30), losses(trainee(None), 30)
    initialize(FILE)
    found = losses(trainee("current"), 30)
    apart, of_quantization = ((loss - expected).abs() / expected for loss in (found, plain))
    # Until a difference moves a value to the next element, there is nothing but rounding.
    assert apart[:5].max() < 5e-6
    assert apart.max() < 1e-3
    assert of_quantization[:5].max() > 20 * apart[:5].max()
    debug_api.step()


def test_from_python_it_is_the_same(initialize):
    initialize(FILE)
    expected = losses(trainee("current"), 3)
    debug_api.end_debug()
    run = trainee("current")
    with ottava_debug.fake_quant(
        run.model, "FP8E4M3", layers="blocks.*", tensors=["activation", "weight"]
    ):
        with ottava_debug.fake_quant(run.model, "FP8E5M2", layers="blocks.*", tensors=["gradient"]):
            assert torch.equal(losses(run, 3), expected)
