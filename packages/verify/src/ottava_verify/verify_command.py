"""``ottava verify`` compares a function, a checkpoint or two checkpoints with a contract."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ottava.cli.contract import Options
from ottava.cli.files import Force, Output, check_outputs, write_text
from ottava.cli.output import console, parse_options, plain, say
from ottava.cli.references import resolve


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
        typer.Option(help="A recipe, a citation, or a file (.json). A function needs one."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(help="The checkpoint in high precision that SUBJECT was made of."),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(help="input (for a function), weight (for a checkpoint), or grad_output."),
    ] = None,
    usage: Annotated[
        str | None,
        typer.Option(help="Which data a function makes: rowwise (default) or columnwise."),
    ] = None,
    option: Options = None,
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
    from ottava_verify.verifying import verify as verify_subject

    outputs = (Output("--json", json_file, output.JSON), Output("--html", html, output.PAGE))
    check_outputs(outputs, (SUBJECT, OTHER, source), force)
    is_path = OTHER is not None or Path(SUBJECT).exists()
    report = verify_subject(
        SUBJECT if is_path else resolve("SUBJECT, which is no path,", SUBJECT),
        OTHER,
        contract=contract,
        source=source,
        role=role,
        usage=usage,
        options=parse_options(option or []),
        as_numpy=numpy,
        name="" if is_path else SUBJECT,
    )
    console().print(output.summary(report))
    for sentence in output.sentences(report):
        say(sentence)
    first = next((found.examples for found in report.findings if found.examples), ())
    if first:
        console().print(output.examples(first))
    if json_file is not None:
        write_text(json_file, json.dumps(plain(report.value()), indent=1))
    if html is not None:
        write_text(html, output.page(report))
    for path in filter(None, (json_file, html)):
        say(f"Written: {path}")
    raise typer.Exit(report.exit_status)
