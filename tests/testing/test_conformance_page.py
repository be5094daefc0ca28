"""The page on the checks has each check of the table, and each field of a spec with the checks that
it switches.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from ottava import RecipeSpec
from ottava_testing import list_checks

PAGE = (Path(__file__).parents[2] / "docs" / "conformance-checks.md").read_text()
FLAGS, ROWS = PAGE.split("## The checks")


def test_a_check_is_on_the_page_as_it_is_in_the_table() -> None:
    rows = [
        (name, promise, applies.endswith("slow"), set(re.findall(r"`(\w+)`", applies)))
        for name, promise, applies in re.findall(r"^\| `([\w-]+)` \| (.*) \| (.*) \|$", ROWS, re.M)
    ]
    checks = list_checks()
    assert rows == [(c.name, c.promise, c.slow, {n.field for n in c.needs}) for c in checks]


def test_a_field_of_a_spec_is_on_the_page_with_its_checks() -> None:
    fields = dict(re.findall(r"^\| `(\w+)` \| (.*)$", FLAGS, re.M))
    assert set(fields) == {field.name for field in dataclasses.fields(RecipeSpec)}
    for check in list_checks():
        for needs in check.needs:
            assert f"`{check.name}`" in fields[needs.field]
    names = set(re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", FLAGS))
    assert names <= {check.name for check in list_checks()} | {"check-recipe"}
