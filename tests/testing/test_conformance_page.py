"""The page on conformance has every check of the table, and every field of a spec with the checks it switches."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from ottava import RecipeSpec
from ottava_testing import Check, list_checks

PAGE = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
FLAGS = dict(re.findall(r"^\| `(\w+)` \| (.*)$", PAGE, re.M))
ROWS = {
    name: (promise, applies) for name, promise, applies in re.findall(r"^\| `([\w-]+)` \| (.*) \| (.*) \|$", PAGE, re.M)
}


@pytest.mark.parametrize("check", list_checks(), ids=lambda check: check.name)
def test_a_check_is_on_the_page(check: Check) -> None:
    promise, applies = ROWS[check.name]
    assert promise == check.promise
    assert applies.endswith("slow") == check.slow
    assert set(re.findall(r"`(\w+)`", applies)) == {needs.field for needs in check.needs}
    for needs in check.needs:
        assert f"`{check.name}`" in FLAGS[needs.field], needs.field


def test_every_field_of_a_spec_is_on_the_page_and_no_other_check() -> None:
    fields = {field.name for field in dataclasses.fields(RecipeSpec)}
    section = PAGE[PAGE.index("## What the flags promise") : PAGE.index("## The checks")]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == fields
    table = PAGE[PAGE.index("## The checks") :]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.M) == [check.name for check in list_checks()]
    named = set(re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", section))
    assert named <= {check.name for check in list_checks()} | {"check-recipe"}
