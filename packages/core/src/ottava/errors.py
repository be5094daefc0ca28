"""Typed errors. Each message names what was wrong, what was expected and the remedy."""

import contextlib
import inspect
import re
from collections import abc
from typing import Any


class OttavaError(Exception):
    """Base class of every error that Ottava raises on purpose.

    Args:
        what: what was wrong.
        expected: what would have been right.
        remedy: what to do about it.
    """

    def __init__(self, what: str, expected: str = "", remedy: str = "") -> None:
        self.what, self.expected, self.remedy = what, expected, remedy
        told = {"": what, "Expected: ": expected, "Remedy: ": remedy}
        super().__init__(
            ". ".join(f"{word}{text}".rstrip(".") for word, text in told.items() if text) + "."
        )


def text_of(error: BaseException) -> str:
    """The text of an exception that anyone may have raised: where its ``__str__`` raises, words
    that say so."""
    try:
        return str(error)
    # The text is somebody else's code.
    except (Exception, SystemExit):
        return "an error whose text cannot be shown"


def stable_repr(value: object) -> str:
    """``repr(value)`` as every process has it: without addresses, and with the elements of sets in
    order."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return re.sub(
        r"\{([^{}:]*)\}", lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text
    )


class ShapeError(OttavaError, ValueError):
    """A tensor or a list has the wrong shape or length."""


class DTypeError(OttavaError, TypeError, ValueError):
    """A tensor, dtype or object is of the wrong kind."""


class DeviceError(OttavaError, ValueError):
    """Tensors that belong together are on different devices."""


class OptionError(OttavaError, ValueError):
    """An option has a value that is not allowed."""


class UsageError(OttavaError, RuntimeError):
    """Data is asked for that an object does not hold."""


class CheckpointError(UsageError):
    """A checkpoint is damaged, incomplete or of another kind; nothing was changed by reading it."""


class RecipeNotFoundError(OttavaError, LookupError):
    """No installed package provides the recipe."""


class PluginError(OttavaError, RuntimeError):
    """A recipe package cannot be used."""


class DuplicateRecipeError(PluginError):
    """Two packages provide a recipe of one name."""


class BackendError(OttavaError, RuntimeError):
    """A kernel backend is unknown or cannot be used."""


@contextlib.contextmanager
def translated(
    what: str,
    expected: str,
    remedy: str = "",
    *,
    to: type[OttavaError] = CheckpointError,
    of: Any = Exception,
) -> abc.Iterator[None]:
    """What anybody's code raises, or some kinds of it, as an error of Ottava; those pass."""
    try:
        yield
    except OttavaError:
        raise
    except of as error:
        kind = "" if isinstance(error, (OSError, RuntimeError)) else f"{type(error).__name__}: "
        raise to(f"{what}: {kind}{text_of(error)}", expected=expected, remedy=remedy) from error


@contextlib.contextmanager
def named(what: object) -> abc.Iterator[None]:
    """Errors of Ottava name the file, or the tensor."""
    try:
        yield
    except OttavaError as error:
        if str(what) in error.what:
            raise
        raise type(error)(
            f"{what}: {error.what}", expected=error.expected, remedy=error.remedy
        ) from error


def check_takes(
    function: Any, what: str, expected: str, *arguments: Any, refused: Any = ()
) -> None:
    """Refuse with a DTypeError what cannot be called with ``arguments``, or is one of the
    ``refused`` kinds."""
    if not callable(function) or isinstance(function, refused):
        raise DTypeError(f"{what} is a {type(function).__name__}", expected=expected)
    # Some functions of C have no signature.
    with (
        translated(f"{what} cannot be called", expected, to=DTypeError, of=TypeError),
        contextlib.suppress(ValueError),
    ):
        inspect.signature(function).bind(*arguments)


def of_any_class(name: str) -> contextlib.AbstractContextManager[None]:
    """The class of a quantized tensor may be anybody's, and what a file says to it anything:
    CheckpointError."""
    return translated(f"{name!r} has no values", "a tensor that can be loaded or dequantized")


def listed(names: abc.Sequence[str]) -> str:
    """Names for an error, the first few of many."""
    return ", ".join(map(repr, names[:5])) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )
