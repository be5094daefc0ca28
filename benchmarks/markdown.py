"""Writes rows as a table in Markdown; imports only the standard library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def markdown(rows: Sequence[Mapping[str, object]], number: str = "{:.2f}") -> str:
    """A table with a column for every key of any row, and a dash where a row has no value."""
    headings = list(dict.fromkeys(key for row in rows for key in row))

    def line(values: Sequence[object]) -> str:
        cells = (
            "-" if v is None else number.format(v) if isinstance(v, float) else str(v)
            for v in values
        )
        return f"| {' | '.join(cells)} |"

    return "\n".join(
        [
            line(headings),
            "|" + "---|" * len(headings),
            *(line([row.get(h) for h in headings]) for row in rows),
        ]
    )
