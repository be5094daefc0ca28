"""Each check finds a recipe that is broken in its way, by a message that names the defect; a sound
one passes all.
"""

from __future__ import annotations

import re

import pytest

from ottava_testing import check_recipe, list_checks
from tests.testing.defects import DEFECTS, Defect
from tests.testing.row_recipe import SPEC, Rows


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: f"{d.check}: {d.message}")
def test_a_broken_recipe_fails_with_the_name_of_its_defect(defect: Defect) -> None:
    (result,) = check_recipe(defect.recipe(), spec=defect.spec, only=[defect.check]).results
    assert result.outcome == "failed"
    assert re.search(defect.message, result.message), result.message


def test_every_check_has_a_recipe_that_it_finds() -> None:
    found = {defect.check for defect in DEFECTS}
    assert [check.name for check in list_checks() if check.name not in found] == []


@pytest.mark.slow
def test_a_sound_recipe_passes_all() -> None:
    report = check_recipe(Rows(), spec=SPEC)
    assert report.ok, str(report)
    # The others need state, reductions or random rounding, which the recipe does not have.
    assert report.count("not applicable") == 5
