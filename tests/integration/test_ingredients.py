"""What the page about four bits concludes from measurements holds for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import ablation, ingredient_pictures, ingredients
from benchmarks.sections import PARTS, load


def kept(name: str) -> Any:
    results = PARTS[name].results
    assert results
    return load(results)


def test_the_block_decodes_to_its_elements_times_both_scales() -> None:
    block = ingredient_pictures.block()
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    elements = [numbers[code % 8] * (-1) ** (code // 8) for code in block["codes"]]
    values = torch.tensor(elements) * block["scale"] * block["amax"] / (448 * 6)
    torch.testing.assert_close(values, torch.tensor(block["decoded"]))
    pairs = zip(block["codes"][::2], block["codes"][1::2], strict=True)
    assert block["bytes"] == [even + 16 * odd for even, odd in pairs]


def test_the_second_level_makes_the_error_independent_of_the_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingredients, "EXPONENTS", (-20, 0, 16))
    errors = ingredients.second_level()
    for name, (small, middle, large) in errors.items():
        assert middle < 0.12, name
        if "alone" not in name:
            assert small == pytest.approx(middle, abs=1e-3) == large
    assert errors["E4M3 alone"][0] == errors["UE5M3 alone"][0] == 1
    assert errors["E4M3 alone"][2] > 0.9 > 0.1 > errors["UE5M3 alone"][2]


def test_random_rounding_keeps_means_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingredients, "STEPS", 256)
    results = ingredients.random_rounding()
    values = torch.tensor(results["values"], dtype=torch.float64)
    worst = {
        name: (torch.tensor(means, dtype=torch.float64) - values).abs().max().item()
        for name, means in results["means"].items()
    }
    assert worst["nearest"] == pytest.approx(1, abs=0.05)  # of 5, beside 4 and 6
    # There a rounding has a standard deviation of 1, and the mean of 256 one of 1/16.
    assert worst["random"] < 5 / 16
    errors = results["errors"]
    assert errors["random"][0] > errors["nearest"][0]
    assert errors["random"][-1] == pytest.approx(errors["random"][0] / 16, rel=0.5)
    assert errors["nearest"][-1] > 3 * errors["random"][-1]


def test_squares_make_the_weights_of_both_passes_one() -> None:
    rows = {row["layout"]: row for row in ingredients.squares()["rows"]}
    for lines, square in (("NVFP4, 1 × 16", "NVFP4, 16 × 16"), ("MXFP4, 1 × 32", "MXFP4, 32 × 32")):
        assert rows[square]["difference"] == 0 < rows[lines]["difference"]
        assert rows[square]["forward"] > rows[lines]["forward"]


def test_rotation_loses_for_nvfp4_and_gains_for_the_others() -> None:
    results = kept("rotations")
    for measured in ("fractions", "sizes"):
        for name, pairs in results[measured].items():
            gains = [rotated - plain for plain, rotated in pairs]
            assert (max(gains) < 0.1) if name == "NVFP4" else (min(gains) > -0.1), name
    shapes = {row["tensor"]: row for row in results["shapes"]}
    plain, rotated, _ = shapes["uniform"]["sqnr"]
    assert rotated > plain
    nothing, rotated, random = shapes["normal, ±10 once in 16"]["kept"]
    assert nothing == 0
    assert (rotated, random) == pytest.approx((1, 1), abs=0.05)


def test_a_training_in_four_bits_ends_within_two_percent_of_bf16() -> None:
    rows = kept("ablation")["rows"]
    cases = [(recipe, options) for recipe, several in ablation.CASES.items() for options in several]
    assert [(row["recipe"], row["options"]) for row in rows] == cases
    plain = rows[0]["losses"]
    for recipe in ("nvfp4", "mx"):
        losses = next(row["losses"] for row in rows if row["recipe"] == recipe)
        assert losses == pytest.approx(plain, rel=0.02)
