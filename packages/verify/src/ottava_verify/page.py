"""The report of ``ottava verify`` as one HTML page that requests nothing else."""

import re

from ottava_debug.output import FileKind, rendered
from ottava_verify.report import Report
from ottava_verify.terminal import of_finding, share

_HEAD = rb"(?is)<!doctype html>.*?<title>ottava verify [^<]*</title>"
PAGE = FileKind("page of `ottava verify`", re.compile(_HEAD))
JSON = FileKind("JSON report of `ottava verify`", re.compile(rb'\{\s*"subject":\s*"'))


def page(report: Report) -> str:
    """The page; every text in it is escaped."""
    return rendered(__package__, report=report, of_finding=of_finding, share=share)
