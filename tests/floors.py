"""Draw the floors of core from the table in CONTRIBUTING.md: ``python tests/floors.py``.

``tests/core/test_imports.py`` compares the table with the code, and the drawing with the table.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
DRAWING = ROOT / "docs" / "_static" / "floors.svg"
WIDTH, MARGIN, LINE, ROW = 426, 44, 17, 36


def floors() -> dict[int, dict[str, str]]:
    """The number of each floor -> its rooms with what they hold, from the top."""
    found: dict[int, dict[str, str]] = {}
    for number, room, content in re.findall(
        r"^\| (\d) \| `(\w+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M
    ):
        found.setdefault(int(number), {})[room] = content
    return found


def drawing() -> str:
    """The floors as SVG, with a recipe package beside them."""
    boxes, names, contents = [], [], []
    y = 20
    for floor in floors().values():
        # A floor of several rooms has their names alone, three a line.
        rooms = list(floor)
        lines = [" · ".join(rooms[i : i + 3]) for i in range(0, len(rooms), 3)]
        height = ROW + LINE * (len(lines) - 1)
        boxes.append(f'<rect x="{MARGIN}" y="{y}" width="{WIDTH}" height="{height}"/>')
        for number, line in enumerate(lines):
            names.append(f'<text x="58" y="{y + 23 + LINE * number}">{line}</text>')
        if len(rooms) == 1:
            content = floor[rooms[0]].replace("`", "")
            contents.append(f'<text x="164" y="{y + 23}">{content}</text>')
        y += height + 6
    bottom = y - 6
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {bottom + 38}" \
font-family="sans-serif" font-size="14">
<title>The floors of core, and a recipe package beside them</title>
<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M0 0L10 5L0 10z" fill="#555"/></marker></defs>
<rect width="760" height="{bottom + 38}" fill="#ffffff"/>
<g fill="#eef3fb" stroke="#3566a8">{"".join(boxes)}</g>
<g font-weight="bold">{"".join(names)}</g>
<g fill="#444">{"".join(contents)}</g>
<rect x="560" y="146" width="180" height="162" rx="6" fill="#fdf0e2" stroke="#c06a15"/>
<g text-anchor="middle"><text x="650" y="182" font-weight="bold">a recipe package</text>\
<text x="650" y="218">a quantizer</text><text x="650" y="244">a recipe</text>\
<text x="650" y="270">an entry point</text></g>
<g stroke="#555" fill="none" stroke-width="1.5" marker-end="url(#a)"><path d="M560 292H474"/>\
<path d="M24 20V{bottom}"/></g>
<path d="M470 240H558" stroke="#c06a15" fill="none" stroke-width="1.5" stroke-dasharray="5 4"/>
<g font-size="12" text-anchor="middle"><text x="517" y="284" fill="#555">imports</text>\
<text x="517" y="232" fill="#8a4a0c">finds</text></g>
<g font-size="12" fill="#555"><text x="20" y="{bottom + 24}">imports only go down</text></g>
<g font-size="12" fill="#444"><text x="560" y="334">Core finds it by its entry point</text>\
<text x="560" y="351">and knows no recipe by name</text><text x="560" y="368">or type.</text></g>
</svg>
"""


if __name__ == "__main__":
    DRAWING.write_text(drawing(), encoding="utf-8")
