"""The report of ``ottava verify`` as one HTML page that requests nothing else."""

import re

import jinja2

from ottava.cli.files import FileKind
from ottava_verify.report import Report
from ottava_verify.terminal import departing, of_finding

_HEAD = rb"(?is)<!doctype html>.*?<title>ottava verify [^<]*</title>"
PAGE = FileKind("page of `ottava verify`", re.compile(_HEAD))
JSON = FileKind("JSON report of `ottava verify`", re.compile(rb'\{\s*"subject":\s*"'))


def page(report: Report) -> str:
    """The page; every text in it is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    template = environment.get_template("page.html")
    return template.render(report=report, of_finding=of_finding, departing=departing)
