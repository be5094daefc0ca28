"""The typer application.

Commands import the rest of Ottava when they run, so listing recipes imports no torch. Other
packages add commands through entry points of the group ``ottava.commands``: the name of a command,
and a function for :mod:`typer`. These are imported when they run or are listed.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

import ottava
from ottava.cli.contract import contract
from ottava.cli.doctor import doctor
from ottava.cli.output import escaped, say
from ottava.cli.recipes import recipes
from ottava.errors import OttavaError, PluginError, UsageError, text_of, translated
from ottava.recipes.registry import PluginStatus, discover

#: The group of entry points by which packages add commands.
COMMANDS = "ottava.commands"
# Commands of Ottava's own packages -> the package to install for each.
_ELSEWHERE = {
    "analyze": "ottava-debug",
    "bisect": "ottava-bisect",
    "check-recipe": "ottava-testing",
    "demo": "ottava-demo",
    "export": "ottava-integrations",
    "new-recipe": "ottava-testing",
    "vectors": "ottava-verify",
    "verify": "ottava-verify",
}
#: A context or a command of click, whose module has another name in each version of typer.
_Click = Any


def _load(name: str, offers: list[PluginStatus]) -> Callable[..., object]:
    """The function of another package's command; an error if no package, or several, have it."""
    if not offers:
        package = _ELSEWHERE[name]
        raise UsageError(
            f"the command {name!r} is not installed",
            expected=package,
            remedy=f"pip install {package}",
        )
    owners = " and by ".join(f"{offer.distribution} {offer.version}" for offer in offers)
    if len(offers) > 1:
        raise PluginError(f"the command {name!r} is offered by {owners}", remedy="uninstall one")
    with translated(
        f"the command {name!r} of {owners} cannot be imported",
        "a function",
        "reinstall the package, or tell its authors",
        to=PluginError,
        of=(Exception, SystemExit),
    ):
        function: Callable[..., object] = offers[0].entry.load()
        return function


def _command(
    name: str,
    function: Callable[..., object],
    text: str,
    context_settings: dict[str, bool] | None = None,
) -> _Click:
    app_of_one = typer.Typer(add_completion=False)
    # Brackets in the text of a plugin are not markup.
    command = app_of_one.command(
        name, help=escape(escaped(text, lines=True)), context_settings=context_settings
    )
    command(function)
    return typer.main.get_command(app_of_one)


@contextlib.contextmanager
def _escaped_errors() -> Iterator[None]:
    """Escape control characters in errors about arguments, which typer prints with the
    arguments."""
    try:
        yield
    except Exception as error:
        # The class of such errors differs between versions of typer.
        message = getattr(error, "message", None)
        if hasattr(error, "format_message") and isinstance(message, str):
            vars(error)["message"] = escaped(message, lines=True)
        raise


class _Commands(TyperGroup):
    """Core's commands and those of other packages.

    Errors of Ottava are printed, with exit code 2.
    """

    def list_commands(self, ctx: _Click) -> list[str]:
        others = {escaped(status.entry_point) for status in discover(COMMANDS)}
        return list(dict.fromkeys([*super().list_commands(ctx), *sorted(others)]))

    def get_command(self, ctx: _Click, cmd_name: str) -> _Click:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        offers = [offer for offer in discover(COMMANDS) if escaped(offer.entry_point) == cmd_name]
        if not offers and cmd_name not in _ELSEWHERE:
            return None
        try:
            with translated(
                f"the command {cmd_name!r} cannot be run",
                "a function as typer takes it",
                to=PluginError,
            ):
                function = _load(cmd_name, offers)
                return _command(cmd_name, function, inspect.getdoc(function) or "")
        except OttavaError as error:
            # The error is shown in the list of commands, and raised when the command runs.
            failure = error

        def broken() -> None:
            raise failure

        anything = {"ignore_unknown_options": True, "allow_extra_args": True}
        return _command(cmd_name, broken, text_of(failure), context_settings=anything)

    def make_context(self, *arguments: Any, **options: Any) -> _Click:
        with _escaped_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: _Click) -> object:
        try:
            with _escaped_errors():
                return super().invoke(ctx)
        except OttavaError as error:
            say(f"error: {text_of(error)}", stderr=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False, help="FP8 training for PyTorch."
)
for _function in (recipes, contract, doctor):
    app.command()(_function)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"ottava {ottava.__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
]


@app.callback()
def main(version: _Version = False) -> None:
    """FP8 training for PyTorch."""
