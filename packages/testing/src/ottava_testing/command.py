"""``ottava check-recipe`` runs the checks from the command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ottava.cli.output import Json, console, parse_options, say, show_json, table
from ottava.errors import OptionError, UsageError


def _show_checks(as_json: bool) -> None:
    """Print every check with the promise that it tests."""
    from ottava_testing.checks import list_checks

    names = ("name", "group", "promise", "needs", "slow")
    rows = [
        (check.name, check.group, check.promise, [n.field for n in check.needs], check.slow)
        for check in list_checks()
    ]
    if as_json:
        return show_json({"checks": [dict(zip(names, row, strict=True)) for row in rows]})
    columns = ("check", "group", "what a recipe that passes keeps", "slow")
    cells = [(*row[:3], "slow" if row[4] else "") for row in rows]
    return console().print(table("Checks", columns, cells))


def _reasons(texts: list[str]) -> dict[str, str]:
    """Reasons by the names of checks, from texts ``CHECK=REASON``.

    Raises:
        OptionError: a text has another form, or names a check for the second time.
    """
    reasons: dict[str, str] = {}
    for text in texts:
        name, equals, reason = text.partition("=")
        if not equals or not name or name in reasons:
            expected = "CHECK=REASON, each check once"
            raise OptionError(f"--expect-failure {text!r}", expected=expected)
        reasons[name] = reason
    return reasons


def _show_report(report: Any, as_json: bool) -> None:
    if as_json:
        results = [vars(r) | {"seconds": round(r.seconds, 3)} for r in report.results]
        return show_json(vars(report) | {"ok": report.ok, "results": results})
    rows = [(result.name, result.outcome, f"{result.seconds:.2f}") for result in report.results]
    columns = ("check", "outcome", "seconds")
    console().print(table(f"Conformance of {report.recipe}", columns, rows, right=("seconds",)))
    # Messages are sentences, too long for a cell, so the whole report follows below the table.
    return say(str(report), lines=True)


def check_recipe(
    NAME: Annotated[
        str | None, typer.Argument(help="An installed recipe, or the path of a recipe file.")
    ] = None,
    check: Annotated[
        list[str] | None, typer.Option(help="A check to run; may be given again. By default all.")
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Leave out what compiles or starts processes.")
    ] = False,
    expect_failure: Annotated[
        list[str] | None,
        typer.Option(help="A check that has to fail, CHECK=REASON; may be given again."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the recipe, key=value; may be given again."),
    ] = None,
    promise: Annotated[
        list[str] | None,
        typer.Option(
            help="A field of the spec, key=value, in its place; sizes as block_size=[1,32]."
        ),
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(help="The name of a layer, for recipes that go by names; may be given again."),
    ] = None,
    list_checks: Annotated[
        bool, typer.Option("--list", help="List the checks, and run none.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the conformance kit (ottava-testing) on a recipe; exit code 1 when a check fails."""
    if list_checks:
        return _show_checks(as_json)
    if NAME is None:
        expected = "the name of an installed recipe, or --list"
        raise UsageError("no recipe is named", expected=expected)
    from ottava_testing import runner
    from ottava_testing.subject import LAYER

    report = runner.check_recipe(
        NAME,
        options=parse_options(option or []),
        only=check or None,
        skip_slow=fast,
        expected_failures=_reasons(expect_failure or []),
        layers=layer or (LAYER,),
        promises=parse_options(promise or [], "--promise"),
    )
    _show_report(report, as_json)
    raise typer.Exit(0 if report.ok else 1)
