"""Callables that an option names by ``module:callable``."""

import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from ottava.errors import OptionError, UsageError, named, translated

#: The errors that user code may raise; a script may also end the process.
ANYTHING = (Exception, SystemExit)


def resolve(option: str, reference: str) -> Callable[..., Any]:
    """The callable that ``module:callable`` names.

    Modules of the working directory are found, as with ``python -m``.

    Raises:
        OptionError: ``reference`` names no callable, or the module cannot be imported.
    """
    title = f"{option} {reference!r}"
    sys.path.insert(0, os.getcwd())
    try:
        with translated(f"{title} cannot be had", "module:callable", to=OptionError, of=ANYTHING):
            function: Any = pkgutil.resolve_name(reference) if ":" in reference else None
            if not callable(function):
                raise ValueError("it names no callable")
    finally:
        sys.path.remove(os.getcwd())
    return function  # type: ignore[no-any-return]


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
