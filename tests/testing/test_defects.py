"""Each check finds a recipe that is broken in its way, by a message that names the defect; a good
one passes all."""

from __future__ import annotations

import re

import broken_quantizers  # noqa: F401
import broken_tensors  # noqa: F401
import broken_training  # noqa: F401
import broken_updates  # noqa: F401
import pytest
import row_recipe as rows
from defects import DEFECTS, Defect

from ottava_testing import check_recipe, list_checks
from tests.combinations import slow

# Code compiled with these runs, which takes long; the same checks find BreaksGraph and ReadsGlobal.
COMPILED = {"KnowsCompiler", "KnowsCompilerHere"}


@pytest.mark.parametrize(
    "defect",
    [
        *(defect for defect in DEFECTS if defect.name not in COMPILED),
        *slow(*(defect for defect in DEFECTS if defect.name in COMPILED)),
    ],
    ids=lambda d: f"{d.check}-{d.name}",
)
def test_a_broken_recipe_fails_with_the_name_of_its_defect(defect: Defect) -> None:
    report = check_recipe(defect.make(), spec=defect.spec, only=[defect.check])
    (result,) = report.results
    assert result.outcome == "failed"
    assert re.search(defect.message, result.message), result.message


def test_a_good_recipe_passes_all() -> None:
    report = check_recipe(rows.Rows(), spec=rows.SPEC)
    assert report.ok, str(report)
    assert report.count("passed") > 70


def test_every_check_has_a_recipe_that_it_finds() -> None:
    found = {defect.check for defect in DEFECTS}
    assert [check.name for check in list_checks() if check.name not in found] == []
