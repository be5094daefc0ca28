"""The page on conformance has every check of the table, and every field of a spec with the checks
it switches."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from ottava import RecipeSpec
from ottava_testing import list_checks

PAGE = (Path(__file__).parents[2] / "docs" / "conformance-checks.md").read_text()
CHECKS = PAGE[PAGE.index("## The checks") :]
FLAGS = dict(re.findall(r"^\| `(\w+)` \| (.*)$", PAGE, re.M))
ROWS = {
    name: (promise, applies)
    for name, promise, applies in re.findall(r"^\| `([\w-]+)` \| (.*) \| (.*) \|$", CHECKS, re.M)
}


def test_a_check_is_on_the_page_as_it_is_in_the_table() -> None:
    said = {
        name: (promise, applies.endswith("slow"), set(re.findall(r"`(\w+)`", applies)))
        for name, (promise, applies) in ROWS.items()
    }
    kept = {c.name: (c.promise, c.slow, {needs.field for needs in c.needs}) for c in list_checks()}
    assert said == kept
    unnamed = [
        (c.name, n.field)
        for c in list_checks()
        for n in c.needs
        if f"`{c.name}`" not in FLAGS[n.field]
    ]
    assert unnamed == []


def test_every_field_of_a_spec_is_on_the_page_and_no_other_check() -> None:
    fields = {field.name for field in dataclasses.fields(RecipeSpec)}
    section = PAGE[PAGE.index("## What the flags promise") : PAGE.index("## The checks")]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == fields
    assert re.findall(r"^\| `([\w-]+)` \|", CHECKS, re.M) == [check.name for check in list_checks()]
    named = set(re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", section))
    assert named <= {check.name for check in list_checks()} | {"check-recipe"}
