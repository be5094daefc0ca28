"""Losses, and what callables return, that an option names by ``module:callable``."""

from typing import Any

from ottava.cli.references import ANYTHING, resolve
from ottava.errors import UsageError, named, translated


def resolve_loss(reference: str | None) -> Any:
    """The loss of the option ``--loss``: a known name, None, or a callable that it names."""
    # This import is local, because torch takes seconds.
    from ottava_debug.losses import LOSSES

    is_known = reference is None or reference in LOSSES
    return reference if is_known else resolve("--loss", str(reference))


def call(option: str, reference: str) -> Any:
    """The result of the callable that ``reference`` names, called without arguments.

    Raises:
        OptionError: see :func:`resolve`.
        UsageError: the callable fails.
    """
    title = f"{option} {reference!r}"
    function = resolve(option, reference)
    with (
        named(title),
        translated(f"{title} fails", "a callable without arguments", to=UsageError, of=ANYTHING),
    ):
        return function()
