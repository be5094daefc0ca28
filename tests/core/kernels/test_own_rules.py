"""Rules for scales that users register."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ottava import GridQuantizer, Layout, kernels, layout
from ottava.errors import DTypeError, OptionError, ShapeError
from ottava.layout import register_scale_rule
from tests.samples import wide

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
PLAIN = {
    scale: Layout("E2M1", (1, 16), scale, rule, columnwise="transposed")
    for scale, rule in ((torch.float32, "nearest"), (E8M0, "floor"), (E4M3, "nearest"))
}


@pytest.fixture(autouse=True)
def _no_rules_are_left() -> Iterator[None]:
    before = dict(layout.OWN_RULES)
    yield
    layout.OWN_RULES.clear()
    layout.OWN_RULES.update(before)


@pytest.mark.parametrize("scale", PLAIN, ids=str)
@pytest.mark.parametrize("candidates", [(), (1.0, 1.5)])
def test_a_rule_decides_the_scales(scale: Any, candidates: tuple[float, ...]) -> None:
    """The scales are those of a quarter of the amax, so that elements are clamped."""
    plain = PLAIN[scale]

    def quarter(amax: torch.Tensor, own: Layout) -> torch.Tensor:
        assert own.rounding == "quarter"
        return kernels.grid_scales(amax / 4, plain)[1]

    register_scale_rule("quarter", quarter)
    own = replace(plain, rounding="quarter", candidates=candidates)
    x = torch.full((3, 32), 6.0)
    q = GridQuantizer(own)(x)
    # With candidates the larger scale is nearer. It is one and a half times the other, or the next
    # power of two.
    factor = 1.0
    if candidates:
        factor = 2.0 if scale is E8M0 else 1.5
    assert torch.equal(q.dequantize(), torch.full((3, 32), 1.5 * factor))
    assert Layout.of(own.text) == own


RESULTS: list[tuple[type[Exception], Any, str]] = [
    (DTypeError, lambda amax, own: amax.double(), "result of the rule 'own'.*float64"),
    (ShapeError, lambda amax, own: amax[:1], "result of the rule 'own'.*shape"),
]


@pytest.mark.parametrize(("error", "rule", "match"), RESULTS, ids=lambda value: str(value)[:24])
def test_results_that_are_refused(error: type[Exception], rule: Any, match: str) -> None:
    register_scale_rule("own", rule)
    with pytest.raises(error, match=match):
        GridQuantizer(replace(PLAIN[torch.float32], rounding="own"))(wide(4, 32))


def test_names_and_rules_that_are_refused() -> None:
    register_scale_rule("own", len)  # type: ignore[arg-type]
    for error, name, rule, match in (
        (OptionError, "floor", len, "name 'floor' of a rule is taken"),
        (OptionError, "own", max, "name 'own' of a rule is taken"),
        (OptionError, "a/b", len, "a rule for scales named 'a/b'"),
        (DTypeError, "other", 3, "the rule 'other' is a int"),
    ):
        with pytest.raises(error, match=match):
            register_scale_rule(name, rule)  # type: ignore[arg-type]
    # A text of a rule that this process has not registered.
    text = PLAIN[E8M0].text.replace("floor", "theirs")
    with pytest.raises(OptionError, match=r"is no layout.*register rules of your own"):
        Layout.of(text)
