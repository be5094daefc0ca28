"""Pages that are made of contracts and of measurements are up to date."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from benchmarks.published import NAME, PAGE, RESULTS, table
from ottava.cli.main import app
from tests.pages import DOCS

PAGES = sorted(page for page in (DOCS / "bytes").glob("*.md") if page.stem != "index")


@pytest.mark.parametrize("recipe", [page.stem for page in PAGES])
def test_the_bytes_of_a_recipe_are_those_of_its_contract(recipe: str) -> None:
    """`ottava contract RECIPE --markdown > docs/bytes/RECIPE.md` writes the page."""
    done = CliRunner().invoke(app, ["contract", recipe, "--markdown"])
    assert done.output == (DOCS / "bytes" / f"{recipe}.md").read_text(encoding="utf-8")


def test_every_page_is_listed() -> None:
    listed = (DOCS / "bytes" / "index.md").read_text(encoding="utf-8")
    names = re.findall(r"^(\w+)$", listed.split("{toctree}")[1], re.M)
    assert sorted(names) == [page.stem for page in PAGES]


def test_the_table_of_published_formats_is_that_of_the_results() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert table(rows) in PAGE.read_text(encoding="utf-8")
    assert all(row["equal"] + row["explained"] == row["tensors"] for row in rows), NAME
