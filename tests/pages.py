"""Pages of documentation and their snippets, which run as printed: each page in a namespace of its
own."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# What is about released libraries runs where these are installed, in tests/libraries.
OF_LIBRARIES = [
    DOCS / f"{name}.md" for name in ("accelerate", "lightning", "peft", "transformers", "trl")
]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def snippets(page: Path) -> list[str]:
    """The blocks of a page that are marked as Python."""
    return _BLOCK.findall(page.read_text())


def run_snippets(page: Path) -> None:
    """Run them in the working directory, one after another."""
    namespace: dict[str, object] = {"__name__": "snippet"}
    for snippet in snippets(page):
        exec(compile(snippet, str(page), "exec"), namespace)
