"""The measures of a loss are those of their definitions, in float64."""

from __future__ import annotations

import math

import pytest
import torch

import ottava
from ottava.errors import DTypeError, ShapeError, UsageError
from ottava.formats import Format
from ottava_debug import compare
from ottava_debug.measures import exponents
from tests.debug import by_hand


def test_a_direction_has_measures_of_its_own() -> None:
    x = torch.randn(64, 64) * torch.logspace(-4, 0, 64)
    quantizer = ottava.get_recipe("mxfp8").quantizer("weight")
    columns = compare(x, quantizer.with_usage(False, True)(x))
    assert columns == compare(x, quantizer(x), columnwise=True) != compare(x, quantizer(x))


@pytest.mark.parametrize(
    ("fp8_format", "largest", "beyond"),
    [(Format.E4M3, 448.0, 480.0), (Format.E5M2, 57344.0, 65536.0)],
)
def test_saturation_counts_values_that_rounding_would_not_make_the_largest(
    fp8_format: Format, largest: float, beyond: float
) -> None:
    recipe = ottava.get_recipe("delayed", fp8_format=fp8_format)
    # The scale is 1 before a step.
    quantizer = recipe.quantizer(ottava.QuantizerRole("linear", "weight"))
    half = (largest + beyond) / 2
    x = torch.tensor([largest, half, -half * 1.001, beyond, 10 * largest, 1.0, 0.0, math.nan])
    quantized = quantizer.quantize(x)
    assert (quantized.dequantize().abs() == largest).sum() == 5
    assert compare(x, quantized).saturation == pytest.approx(100 * 3 / 7)
    # A plain tensor does not tell, unless nothing is lost.
    assert compare(x, quantized.dequantize()).saturation is None
    assert compare(x, x.nan_to_num()).saturation == 0


def test_saturation_of_integers() -> None:
    layout = ottava.Layout(torch.int8, (None, None), columnwise="same")
    quantizer = ottava.tensors.GridQuantizer(layout)
    x = torch.tensor([[1.0, -1.0, 0.5, 0.0]])
    quantized = quantizer.quantize(x)
    assert compare(x, quantized).saturation == 0
    larger = torch.tensor([[1.0, -1.01, 0.5, 0.0]])
    assert compare(larger, quantized).saturation == 25


INF, NAN = math.inf, math.nan
# Values and quantized values -> count, not_finite, amax, underflow, SQNR, cosine.
BY_DEFINITION = {
    "four values": (
        ([1.0, -0.25, 0.0, 4.0], [1.0, 0.0, 0.0, 3.0]),
        (4, 0, 4.0, 100 / 3, 10 * math.log10(17.0625 / 1.0625), 13 / math.sqrt(170.625)),
    ),
    "not finite": (
        ([1.0, INF, -2.0, NAN, 0.0], [1.0, 7.0, -1.5, 7.0, 0.0]),
        (5, 2, 2.0, 0.0, 10 * math.log10(5 / 0.25), 4 / math.sqrt(5 * 3.25)),
    ),
    "nothing": (([], []), (0, 0, 0.0, 0.0, INF, 1.0)),
    "zeros": (([0.0, 0.0], [0.0, 0.0]), (2, 0, 0.0, 0.0, INF, 1.0)),
    "nothing finite": (([NAN, INF], [NAN, 1.0]), (2, 2, 0.0, 0.0, INF, 1.0)),
    "becomes infinite": (([1.0, 2.0], [1.0, INF]), (2, 0, 2.0, 0.0, -INF, 0.0)),
    "becomes NaN": (([1.0, 2.0], [1.0, NAN]), (2, 0, 2.0, 0.0, -INF, 0.0)),
    "zeros that do not stay": (([0.0, 0.0], [1.0, 2.0]), (2, 0, 0.0, 0.0, -INF, 0.0)),
    "all zeroed": (([1.0, 2.0], [0.0, 0.0]), (2, 0, 2.0, 100.0, 0.0, 0.0)),
}


@pytest.mark.parametrize("case", BY_DEFINITION)
def test_measures_by_their_definitions(case: str) -> None:
    (values, quantized), expected = BY_DEFINITION[case]
    found = compare(torch.tensor(values), torch.tensor(quantized))
    measured = (
        *(found.count, found.not_finite, found.amax),
        *(found.underflow, found.sqnr, found.cosine),
    )
    assert measured == pytest.approx(expected)
    assert found.saturation == (0 if found.sqnr == INF else None)


def test_exponents() -> None:
    x = torch.tensor([1.0, 1.99, 2.0, -0.5, 0.0, 2.0**-149, 3 * 2.0**-149, -3e38, 0.75])
    assert exponents(x) == {-149: 1, -148: 1, -1: 2, 0: 2, 1: 1, 127: 1}
    many = torch.randn(50_000)
    assert exponents(many) == by_hand.exponents(many)
    assert exponents(torch.tensor([0.0, math.inf, -math.inf, math.nan])) == {}


def test_arguments_that_are_refused() -> None:
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
