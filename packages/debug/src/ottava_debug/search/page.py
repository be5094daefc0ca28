"""The report as one self-contained page."""

from importlib.resources import files

import jinja2

from ottava_debug.search.report import COLUMNS, Report, number


def page(report: Report, name: str) -> str:
    """HTML with no outside request; every text in it is escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(report=report, name=name, columns=COLUMNS, number=number)
