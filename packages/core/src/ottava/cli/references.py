"""Callables that a command names by ``module:callable``."""

import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from ottava.errors import OptionError, translated

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
