"""Writes a report to files."""

import json
import os
import re

from ottava.cli.files import FileKind, write_text
from ottava.filesystem import AnyPath
from ottava_custom import CustomRecipe
from ottava_debug.analysis.page import page
from ottava_debug.analysis.report import Analysis, most_underflow
from ottava_debug.recipe_file import recipe_text, write_recipe_file

# Both begin with the name of what was analyzed.
_JSON_HEAD = rb'\{\s*"source":\s*"(?:[^"\\]|\\.)*",\s*"recipes":\s*\['
_PAGE_HEAD = rb"(?is)<!doctype html>.*?<title>[^<]* ottava analyze</title>"
JSON = FileKind("JSON report of `ottava analyze`", re.compile(_JSON_HEAD))
PAGE = FileKind("page of `ottava analyze`", re.compile(_PAGE_HEAD))


def write_json(report: Analysis, path: AnyPath) -> None:
    """Write :meth:`Analysis.to_json` to a file; an existing file is replaced atomically.

    Raises:
        OptionError: the file cannot be written. Then an existing file is unchanged.
    """
    write_text(path, json.dumps(report.to_json(), indent=1))


def write_html(report: Analysis, path: AnyPath) -> None:
    """Write the report as one page that requests nothing else; an existing file is replaced
    atomically.

    Raises:
        OptionError: the file cannot be written. Then an existing file is unchanged.
    """
    write_text(path, page(report, suggestion(report)))


def suggestion(report: Analysis, recipe: str | None = None) -> str:
    """The text of a recipe file that applies a recipe of the report, by default the best one, to
    all layers except those that need high precision.

    Errors are those of :meth:`Analysis.complaints` and
    :func:`ottava_debug.recipe_file.recipe_text`.
    """
    base = recipe or report.best_recipe()
    return recipe_text(report.keeps(base), base, about=_about(report))


def write_suggestion(report: Analysis, path: AnyPath, recipe: str | None = None) -> CustomRecipe:
    """Write :func:`suggestion` to a file, and return the recipe that it describes.

    Raises:
        OptionError: the recipe is not in the report, or the file has another suffix or cannot be
            written.
    """
    base = recipe or report.best_recipe()
    return write_recipe_file(path, report.keeps(base), base, about=_about(report))


def _about(report: Analysis) -> str:
    limit = most_underflow(report.threshold)
    return (
        f"Suggested by `ottava analyze` for {os.path.basename(report.source) or report.source}.\n"
        f"Kept in high precision: layers with an SQNR below {report.threshold:g} dB or underflow "
        f"above {limit:.1f} %."
    )
