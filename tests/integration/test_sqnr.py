"""The tables of quantization noise in the docs are what the benchmark finds."""

from __future__ import annotations

import re

from benchmarks import sqnr


def test_the_page_has_what_the_benchmark_finds() -> None:
    page = sqnr.PAGE.read_text(encoding="utf-8")
    mine, theirs = (re.split(r"(-?\d+\.\d)", text) for text in (page, sqnr.with_results(page)))
    assert mine[::2] == theirs[::2]
    # Random numbers may differ in a last bit between processors.
    assert all(
        abs(float(a) - float(b)) < 0.3 for a, b in zip(mine[1::2], theirs[1::2], strict=True)
    )
