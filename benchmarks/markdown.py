"""Rows as tables in Markdown, and the parts of pages that are written by programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def markdown(rows: Sequence[Mapping[str, object]], number: str = "{:.2f}") -> str:
    """A table with a column for every key of any row, and a dash where a row has no value."""
    headings = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: object) -> str:
        if value is None:
            return "-"
        return number.format(value) if isinstance(value, float) else str(value)

    lines = [headings, *([cell(row.get(key)) for key in headings] for row in rows)]
    header, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([header, "|" + "---|" * len(headings), *body])


def with_part(page: str, name: str, text: str) -> str:
    """The page with another text between the two marks of this name."""
    begin, end = f"<!-- benchmarks: {name} -->", f"<!-- end of {name} -->"
    before, after = page.split(begin)[0], page.split(end)[1]
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
