"""The README's and the docs' Python snippets run as printed, page by page; CI runs the README's test command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "snippet"}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), namespace)


def test_ci_runs_the_readmes_test_command() -> None:
    commands = re.findall(r"^```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.M | re.S)
    tests = next(command for command in commands if command.endswith("nox -s tests"))
    assert tests in (ROOT / ".ci" / "run").read_text()
