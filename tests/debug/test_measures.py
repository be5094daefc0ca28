"""What tensors lose, against NumPy's arithmetic and by definition."""

import math

import numpy as np
import pytest
import torch

import ottava
from benchmarks.installed import recipes
from ottava.errors import DTypeError, ShapeError, UsageError
from ottava.formats import Format
from ottava_debug import measures
from ottava_debug.measures import compare


def expected(x, q):
    """The definitions, written once more: SQNR, cosine and underflow of arrays of float64."""
    x, q = x.double().numpy().ravel(), q.double().numpy().ravel()
    kept = np.isfinite(x)
    x, q = x[kept], q[kept]
    return (
        10 * np.log10(np.sum(x**2) / np.sum((x - q) ** 2)),
        np.dot(x, q) / (np.linalg.norm(x) * np.linalg.norm(q)),
        100 * np.mean(q[x != 0] == 0),
    )


# More than one chunk, and a ragged one at the end.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", [name for name in recipes() if name != "custom"])
def test_measures_are_those_of_the_definitions(recipe, dtype):
    torch.manual_seed(0)
    x = (torch.randn(96, 352) * torch.logspace(-4, 0, 352)).to(dtype)
    for columnwise in (False, True):
        quantizer = (
            ottava.get_recipe(recipe).quantizer("weight").with_usage(not columnwise, columnwise)
        )
        quantized = quantizer.quantize(x)
        sqnr, cosine, underflow = expected(x, quantized.dequantize(torch.float32))
        both = ottava.get_recipe(recipe).quantizer("weight").quantize(x)
        for found in (compare(x, quantized), compare(x, both, columnwise=columnwise)):
            assert found.count == x.numel()
            assert found.not_finite == 0
            assert found.amax == x.abs().max().item()
            assert found.sqnr == pytest.approx(sqnr, rel=1e-12)
            assert found.cosine == pytest.approx(cosine, rel=1e-12)
            assert found.underflow == pytest.approx(underflow, abs=1e-12)
            assert found.saturation == 0


def test_each_measure_by_itself():
    x = torch.tensor([1.0, -0.25, 0.0, 4.0])
    q = torch.tensor([1.0, 0.0, 0.0, 3.0])
    found = compare(x, q)
    assert found.amax == 4.0
    assert found.underflow == pytest.approx(100 / 3)
    assert found.sqnr == pytest.approx(10 * math.log10(17.0625 / 1.0625))
    assert found.cosine == pytest.approx(13 / math.sqrt(17.0625 * 10))


@pytest.mark.parametrize(
    ("fp8_format", "largest", "next_one"),
    [(Format.E4M3, 448.0, 480.0), (Format.E5M2, 57344.0, 65536.0)],
)
def test_saturation_counts_what_rounding_would_not_have_made_the_largest(
    fp8_format, largest, next_one
):
    recipe = ottava.get_recipe("delayed", fp8_format=fp8_format)
    # Its scale is 1 before it has seen anything.
    quantizer = recipe.quantizer(ottava.QuantizerRole("linear", "weight"))
    half = (largest + next_one) / 2
    x = torch.tensor([largest, half, -half * 1.001, next_one, 10 * largest, 1.0, 0.0, float("nan")])
    quantized = quantizer.quantize(x)
    assert (quantized.dequantize().abs() == largest).sum() == 5
    assert compare(x, quantized).saturation == pytest.approx(100 * 3 / 7)
    # Of a plain tensor it cannot be told, unless nothing is lost.
    assert measures.compare(x, quantized.dequantize()).saturation is None
    assert measures.compare(x, x.nan_to_num()).saturation == 0


def test_values_that_are_not_finite_are_counted_and_left_out():
    x = torch.tensor([1.0, float("inf"), -2.0, float("nan"), 0.0])
    found = compare(x, torch.tensor([1.0, 7.0, -1.5, 7.0, 0.0]))
    assert (found.count, found.not_finite, found.amax) == (5, 2, 2.0)
    assert found.sqnr == pytest.approx(10 * math.log10(5 / 0.25))
    assert measures.exponents(x) == {0: 1, 1: 1}


@pytest.mark.parametrize(
    "x", [torch.zeros(0, 4), torch.zeros(3, 4), torch.full((2,), float("nan"))]
)
def test_of_nothing_nothing_is_lost(x):
    found = compare(x, x)
    assert (found.amax, found.underflow, found.saturation, found.sqnr, found.cosine) == (
        0,
        0,
        0,
        math.inf,
        1,
    )
    assert measures.exponents(x) == {}


def test_noise_without_bound():
    x = torch.tensor([1.0, 2.0])
    for q in (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, float("nan")])):
        assert (compare(x, q).sqnr, compare(x, q).cosine) == (-math.inf, 0)
    assert (compare(x * 0, x).sqnr, compare(x * 0, x).cosine) == (-math.inf, 0)
    lost = compare(x, x * 0)
    assert (lost.sqnr, lost.cosine, lost.underflow) == (0, 0, 100)


def test_exponents_are_those_of_the_bits():
    x = torch.tensor([1.0, 1.99, 2.0, -0.5, 0.0, 2.0**-149, 3 * 2.0**-149, -3e38, 0.75])
    assert measures.exponents(x) == {-149: 1, -148: 1, -1: 2, 0: 2, 1: 1, 127: 1}
    many = torch.randn(50_000)
    _, powers = np.frexp(many.numpy())
    counted = dict(
        zip(*(found.tolist() for found in np.unique(powers - 1, return_counts=True)), strict=True)
    )
    assert measures.exponents(many) == counted


def test_what_is_no_pair_of_tensors_is_refused():
    x = torch.ones(4, 32)
    with pytest.raises(ShapeError, match=r"\(4,\)"):
        compare(x, torch.ones(4))
    with pytest.raises(DTypeError, match="list"):
        compare(x, [1.0])
    with pytest.raises(DTypeError, match="float64"):
        compare(x.double(), x)
    quantizer = ottava.get_recipe("mxfp8").quantizer("weight").with_usage(True, False)
    with pytest.raises(UsageError, match="columnwise"):
        compare(x, quantizer.quantize(x), columnwise=True)


def test_tensors_that_are_added_are_measured_as_one():
    torch.manual_seed(0)
    x = torch.randn(3, 64, 64) * torch.tensor([1.0, 1e-3, 50.0]).view(3, 1, 1)
    quantizer = ottava.get_recipe("current").quantizer("weight")
    parts = [quantizer.quantize(part) for part in x]
    comparison = measures.Comparison()
    for part, quantized in zip(x, parts, strict=True):
        comparison.add(part, quantized)
    found, whole = (
        comparison.measures(),
        compare(x, torch.stack([part.dequantize() for part in parts])),
    )
    assert found.saturation == 0
    for name in ("count", "not_finite", "amax", "underflow", "sqnr", "cosine"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-12)
