"""The report as one self-contained page."""

from ottava_debug.output import rendered
from ottava_debug.search.report import COLUMNS, Report, number


def page(report: Report, name: str) -> str:
    """HTML with no outside request; every text in it is escaped."""
    return rendered(__package__, report=report, name=name, columns=COLUMNS, number=number)
