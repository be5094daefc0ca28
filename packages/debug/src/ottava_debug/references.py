"""What an option names by ``module:callable``."""

import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from ottava.errors import OptionError, UsageError, named, translated

#: What anybody's code may raise: a script may end the process.
ANYTHING = (Exception, SystemExit)


def resolve(option: str, reference: str) -> Callable[..., Any]:
    """The callable that ``module:callable`` names; modules of the working directory are found, as
    of ``python -m``.

    Raises:
        OptionError: it names none, or the module cannot be imported.
    """
    what = f"{option} {reference!r}"
    sys.path.insert(0, os.getcwd())
    try:
        with translated(f"{what} cannot be had", "module:callable", to=OptionError, of=ANYTHING):
            found: Any = pkgutil.resolve_name(reference) if ":" in reference else None
            if not callable(found):
                raise ValueError("it names no callable")
    finally:
        sys.path.remove(os.getcwd())
    return found  # type: ignore[no-any-return]


def made(option: str, reference: str) -> Any:
    """What the callable gives when it is called without arguments.

    Raises:
        OptionError: as of :func:`resolve`.
        UsageError: it fails.
    """
    what, make = f"{option} {reference!r}", resolve(option, reference)
    with (
        named(what),
        translated(f"{what} fails", "a callable without arguments", to=UsageError, of=ANYTHING),
    ):
        return make()
