"""The tables that help to choose a recipe are what the benchmark measures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import choosing

NUMBER = re.compile(r"(\d+\.\d+)")


@pytest.mark.parametrize("path", choosing.PAGES, ids=lambda path: path.stem)
def test_the_page_has_what_the_benchmark_measures(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    measured = choosing.with_results(page, choosing.PAGES[path]())
    on_page, now = (NUMBER.split(text) for text in (page, measured))
    assert on_page[::2] == now[::2]
    # Random numbers may differ in a last bit between processors.
    assert [float(number) for number in on_page[1::2]] == pytest.approx(
        [float(number) for number in now[1::2]], abs=0.11
    )


def test_the_table_has_every_recipe_that_needs_no_options() -> None:
    specs = choosing.ottava.list_recipes()
    # `custom` exists for factories and files.
    assert set(choosing.RECIPES) == {spec.name for spec in specs} - {"custom"}
