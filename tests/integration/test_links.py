"""Links of the README and of the docs lead to files that are there, and to headings of pages; every
page is in a table of contents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import DOCS, ROOT, name_of

PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
READERS = [*PAGES, ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
FENCE = re.compile(r"(`{3,})(.*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,3} (.+)$", re.M)
INCLUDE = re.compile(r"^```\{include\} (\S+)$", re.M)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.M | re.S)


def prose(page: Path) -> str:
    """The text of a page without its code, whose comments are no headings."""
    lines: list[str] = []
    end = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = FENCE.match(line)
        if end:
            end = "" if line.rstrip() == end else end
        elif fence and not fence[2].startswith("{container}"):
            end = fence[1] if fence[2].strip() else ""
        elif not fence:
            lines.append(line)
    return "\n".join(lines)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST name them; those of a page that it
    includes are among them."""
    texts = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose(page)))
    names = {text.replace(" ", "-") for text in texts}
    for path in INCLUDE.findall(page.read_text(encoding="utf-8")):
        names |= anchors((page.parent / path).resolve())
    return names


def missing(reader: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(prose(reader)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (reader.parent / path).resolve() if path else reader
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("reader", READERS, ids=name_of)
def test_links_lead_somewhere(reader: Path) -> None:
    assert missing(reader) == []


def test_every_page_is_in_one_table_of_contents() -> None:
    entries = [
        (page.parent / f"{line.strip()}.md").resolve()
        for page in PAGES
        for toctree in TOCTREE.findall(page.read_text(encoding="utf-8"))
        for line in toctree.splitlines()
        if line.strip() and not line.startswith(":")
    ]
    assert sorted(entries) == [page for page in PAGES if page != DOCS / "index.md"]


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Other\n\n## `main_grad`, and more\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#main_grad-and-more) [c](none.md) [d](other.md#none)\n"
        "```text\n[e](none.md)\n```\n"
    )
    assert missing(page) == ["none.md", "other.md#none"]
