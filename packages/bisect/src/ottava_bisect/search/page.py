"""The report as one self-contained page."""

import re

from ottava.cli.files import FileKind
from ottava_bisect.search.report import COLUMNS, Report, number
from ottava_debug.output import rendered

_HEAD = rb"(?is)<!doctype html>.*?<title>ottava bisect [^<]*</title>"
PAGE = FileKind("page of `ottava bisect`", re.compile(_HEAD))


def page(report: Report, name: str) -> str:
    """The report as HTML that requests nothing else; every text in it is escaped."""
    return rendered(__package__, report=report, name=name, columns=COLUMNS, number=number)
