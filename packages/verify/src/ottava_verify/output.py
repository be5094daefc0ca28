"""The report of ``ottava verify`` in a terminal, and as a page that requests nothing else."""

import re
from collections.abc import Iterator, Sequence

from rich.table import Table

from ottava.cli.files import FileKind
from ottava.cli.output import grouped, table
from ottava_verify.finding import Example, Finding, Report
from ottava_verify.search import Agreement

# More names and causes than these are in the other outputs.
_MOST_NAMES, _MOST_CAUSES = 3, 4


def summary(report: Report) -> Table:
    """One row for each group of tensors that the same is said of."""
    rows = [
        (names_of(group), first.status, *_counts(group))
        for group in report.groups().values()
        for first in group[:1]
    ]
    heads = ("of", "status", "elements that depart", "scales that depart")
    return table(f"{report.subject} against {report.against}", heads, rows, right=heads[2:])


def names_of(group: Sequence[Finding]) -> str:
    """The first names of a group, where those that differ in numbers are one."""
    names = grouped([finding.name for finding in group])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _counts(group: Sequence[Finding]) -> tuple[str, str]:
    """How many elements and scales of a group depart from the contract."""
    counts = [finding.agreement for finding in group if finding.agreement is not None]
    return departing(sum(counts, Agreement())) if len(counts) == len(group) else ("", "")


def departing(agreement: Agreement) -> tuple[str, str]:
    """How many elements depart, and how many scales, as texts."""
    elements = _share(agreement.elements, agreement.equal_elements)
    return elements, _share(*agreement.all_scales)


def _share(count: int, equal: int) -> str:
    """How many of a number are not equal, as text."""
    if count == equal:
        return "none"
    return f"{count - equal} of {count} ({100 * (count - equal) / count:.3g} %)"


def sentences(report: Report) -> Iterator[str]:
    """What is to be said of each group of tensors."""
    for group in report.groups().values():
        yield f"{names_of(group)}:"
        for sentence in of_finding(group[0]):
            yield f"  {sentence}"


def of_finding(finding: Finding) -> Iterator[str]:
    """What a finding says, without its examples."""
    errors = "; ".join(f"{case}: {text}" for case, text in [*finding.errors.items()][:2])
    if finding.status == "not compared":
        yield f"cannot be compared. {finding.note or errors}"
        return
    cited = f" ({finding.citation})" if finding.citation else ""
    if finding.status == "equal":
        yield f"all bytes are those of {finding.contract}{cited}." if finding.contract else "equal."
    elif finding.contract:
        yield f"bytes depart from {finding.contract}{cited}."
    if finding.note:
        yield f"{finding.note}."
    yield from _causes(finding)
    if finding.errors:
        yield f"it fails on {len(finding.errors)} inputs. {errors}"
    if finding.kinds:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in finding.kinds.items())
        yield f"inputs of what departs: {kinds}."
    if finding.error is not None:
        yield f"decoded, the difference is {finding.error:.3g} of the values (root mean square)."


def _causes(finding: Finding) -> Iterator[str]:
    """What explains the bytes, and what nearly does."""
    clauses = ["; and ".join(each) for each in finding.causes]
    what = f"all bytes of {finding.scope}" if finding.scope else "all bytes"
    if clauses == [""]:
        yield f"{what} are those of the contract."
    elif len(clauses) == 1:
        yield f"{what} are explained: {clauses[0]}."
    elif clauses:
        yield (
            f"{what} are explained by each of {len(clauses)} causes, which cannot be told apart on "
            f"these data: {'; or '.join(clauses[:_MOST_CAUSES])}."
        )
    elif finding.status == "departs" and finding.nearest and finding.nearest_agreement:
        elements, scales = departing(finding.nearest_agreement)
        yield (
            f"nothing known explains all bytes. The nearest: {'; and '.join(finding.nearest)}; "
            f"then elements depart: {elements}, scales: {scales}."
        )
    elif finding.status == "departs" and finding.citation:
        yield "nothing known explains the bytes."


def examples(rows: Sequence[Example]) -> Table:
    """The first elements and scales that depart."""
    heads = ("kind", "input", "row", "column", "value or amax", "contract", "found")
    cells = [
        (e.kind, e.case, str(e.row), str(e.column), f"{e.value:.9g}", e.expected, e.found)
        for e in rows
    ]
    return table("The first that depart", heads, cells, right=heads[2:])


def example_line(example: Example) -> str:
    """An example as a line of text."""
    return (
        f"  {example.kind} at [{example.row}, {example.column}] of {example.case}, "
        f"{example.value:.9g}: contract {example.expected}, found {example.found}"
    )


# Files.

_HEAD = rb"(?is)<!doctype html>.*?<title>ottava verify [^<]*</title>"
PAGE = FileKind("page of `ottava verify`", re.compile(_HEAD))
JSON = FileKind("JSON report of `ottava verify`", re.compile(rb'\{\s*"subject":\s*"'))


def page(report: Report) -> str:
    """The page; every text in it is escaped."""
    # The terminal needs no templates.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    template = environment.get_template("page.html")
    return template.render(report=report, of_finding=of_finding, departing=departing)
