"""``ottava check-recipe``: the conformance kit on the command line."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from ottava.cli.export import parse_options
from ottava.errors import OptionError, UsageError


def _kit() -> Any:
    try:
        import ottava_testing
    except ImportError as error:
        raise UsageError(
            "the conformance kit is not installed", expected="ottava-testing", remedy="pip install ottava-testing"
        ) from error
    return ottava_testing


def show_checks(as_json: bool) -> None:
    """Print every check with what it promises.

    Raises:
        UsageError: the kit is not installed.
    """
    checks = _kit().list_checks()
    if as_json:
        rows = [
            {
                "name": check.name,
                "group": check.group,
                "promise": check.promise,
                "needs": [needs.field for needs in check.needs],
                "slow": check.slow,
            }
            for check in checks
        ]
        print(json.dumps({"checks": rows}, indent=2))
        return
    table = Table(title="Checks")
    for column in ("check", "group", "what a recipe that passes keeps", "slow"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.name, check.group, check.promise, "slow" if check.slow else "")
    Console(markup=False, emoji=False).print(table)


def parse_expected(given: list[str]) -> dict[str, str]:
    """Expected failures from texts ``CHECK=REASON``.

    Raises:
        OptionError: one is something else, or a check stands there twice.
    """
    expected: dict[str, str] = {}
    for text in given:
        name, equals, reason = text.partition("=")
        if not equals or not name or name in expected:
            raise OptionError(f"--expect-failure {text!r}", expected="CHECK=REASON, each check once")
        expected[name] = reason
    return expected


def run_checks(
    *,
    recipe: str,
    options: list[str],
    checks: list[str],
    fast: bool,
    expected_failures: list[str],
    layers: list[str],
    as_json: bool,
) -> int:
    """Run the checks on a recipe and print what became of them.

    Returns:
        0 where none failed, else 1.

    Raises:
        UsageError: the kit is not installed.
        OptionError, RecipeNotFoundError, PluginError: the recipe, an option or a check is wrong.
    """
    kit = _kit()
    report = kit.check_recipe(
        recipe,
        options=parse_options(recipe, options),
        only=checks or None,
        skip_slow=fast,
        expected_failures=parse_expected(expected_failures),
        **({"layers": layers} if layers else {}),
    )
    if as_json:
        results = [
            {"name": r.name, "outcome": r.outcome, "message": r.message, "seconds": round(r.seconds, 3)}
            for r in report.results
        ]
        body = {"recipe": report.recipe, "ok": report.ok, "results": results, "left_out": list(report.left_out)}
        print(json.dumps(body, indent=2))
    else:
        _print(report)
    return 0 if report.ok else 1


def _print(report: Any) -> None:
    table = Table(title=f"Conformance of {report.recipe}")
    for column in ("check", "outcome", "seconds"):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    for result in report.results:
        table.add_row(result.name, result.outcome, f"{result.seconds:.2f}")
    console = Console(markup=False, emoji=False)
    console.print(table)
    # Whole, below the table: a message is a sentence or more.
    console.print(str(report), soft_wrap=True)
