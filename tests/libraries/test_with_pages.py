"""The snippets of the pages about released libraries run as printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import OF_LIBRARIES, name_of, run_snippets, snippets


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", OF_LIBRARIES, ids=name_of)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert snippets(page)
    run_snippets(page)
