"""``ottava verify`` compares a function, a checkpoint or two checkpoints with a contract."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ottava.cli.files import Force, Output, check_outputs, write_text
from ottava.cli.output import console, parse_options, plain, say
from ottava.errors import OptionError, UsageError

if TYPE_CHECKING:
    from ottava_verify.finding import Report

_Texts = list[str] | None


def verify(
    SUBJECT: Annotated[
        str,
        typer.Argument(help="module:callable, or a checkpoint: a file or folder of safetensors."),
    ],
    OTHER: Annotated[
        str | None, typer.Argument(help="Another checkpoint, to compare the two.")
    ] = None,
    contract: Annotated[
        str | None,
        typer.Option(help="A recipe, or a file (.json) with a contract. A function needs one."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(help="The checkpoint in high precision that SUBJECT was made of."),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help="For which tensor the recipe makes the contract: input, weight or grad_output. By "
            "default input for a function, weight for a checkpoint."
        ),
    ] = None,
    usage: Annotated[
        str, typer.Option(help="Which data a function makes: rowwise or columnwise.")
    ] = "rowwise",
    option: Annotated[
        _Texts, typer.Option(help="An option of the recipe, key=value; may be given again.")
    ] = None,
    numpy: Annotated[
        bool, typer.Option("--numpy", help="Call the function with arrays of numpy.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report as JSON.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report as a page: one file that asks for nothing else."),
    ] = None,
    force: Force = False,
) -> None:
    """Say whether bytes are those of a contract, and if not, which choice made them.

    The exit status is 0 if all bytes are equal, 1 if some depart, and 2 if they cannot be compared.
    """
    from ottava_verify import output

    outputs = (Output("--json", json_file, output.JSON), Output("--html", html, output.PAGE))
    check_outputs(outputs, (SUBJECT, OTHER, source), force)
    if usage not in ("rowwise", "columnwise"):
        raise OptionError(f"--usage {usage!r}", expected="rowwise or columnwise")
    options: dict[str, Any] = {"options": parse_options(option or [])}
    if role is not None:
        options["role"] = role
    if OTHER is not None:
        report = _pair(SUBJECT, OTHER, contract, source)
    elif Path(SUBJECT).exists():
        report = _checkpoint(SUBJECT, source, contract=contract, **options)
    else:
        report = _function(SUBJECT, contract, usage=usage, as_numpy=numpy, **options)
    _show(report)
    if json_file is not None:
        write_text(json_file, json.dumps(plain(report.value()), indent=1))
    if html is not None:
        write_text(html, output.page(report))
    for path in filter(None, (json_file, html)):
        say(f"Written: {path}")
    raise typer.Exit(report.exit_status)


def _pair(one: str, other: str, contract: str | None, source: Path | None) -> "Report":
    from ottava_verify.verifying import verify_checkpoints

    if contract is not None or source is not None:
        raise OptionError(
            "two checkpoints, with --contract or --source",
            expected="two checkpoints alone",
            remedy="compare each of them with its source in a command of its own",
        )
    return verify_checkpoints(one, other)


def _checkpoint(checkpoint: str, source: Path | None, **options: Any) -> "Report":
    from ottava_verify.verifying import verify_checkpoint

    if source is None:
        raise UsageError(
            f"{checkpoint} without --source",
            expected="the checkpoint in high precision that it was made of",
            remedy="or another checkpoint to compare it with",
        )
    return verify_checkpoint(checkpoint, source, **options)


def _function(reference: str, contract: str | None, **options: Any) -> "Report":
    from ottava.cli.references import resolve
    from ottava_verify.verifying import verify_function

    if contract is None:
        raise UsageError(
            f"{reference!r} without --contract",
            expected="a recipe, for a function; or the path of a checkpoint that exists",
            remedy="`ottava recipes` lists recipes",
        )
    function = resolve("SUBJECT", reference)
    return verify_function(function, contract, name=reference, **options)


def _show(report: "Report") -> None:
    from ottava_verify.output import examples, sentences, summary

    console().print(summary(report))
    for sentence in sentences(report):
        say(sentence)
    first = next((found.examples for found in report.findings if found.examples), ())
    if first:
        console().print(examples(first))
