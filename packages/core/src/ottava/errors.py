"""Typed errors. Each message names the fault, the expected value and the remedy."""

import contextlib
import inspect
import re
from collections import abc

#: The classes of exceptions of an ``except`` clause.
Exceptions = type[BaseException] | tuple[type[BaseException], ...]


class OttavaError(Exception):
    """Base class of every error that Ottava raises on purpose.

    Args:
        what: the fault.
        expected: the correct value.
        remedy: the action that corrects it.
    """

    def __init__(self, what: str, expected: str = "", remedy: str = "") -> None:
        self.what, self.expected, self.remedy = what, expected, remedy
        sentences = [what]
        if expected:
            sentences.append(f"Expected: {expected}")
        if remedy:
            sentences.append(f"Remedy: {remedy}")
        super().__init__(". ".join(text.rstrip(".") for text in sentences) + ".")


def text_of(error: BaseException) -> str:
    """The text of any exception; a placeholder if its ``__str__`` raises."""
    try:
        return str(error)
    # The text is somebody else's code.
    except (Exception, SystemExit):
        return "an error whose text cannot be shown"


def stable_repr(value: object) -> str:
    """``repr(value)`` without addresses and with sets in order; all processes get the same text."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return re.sub(r"\{([^{}:]*)\}", _sorted_set, text)


def _sorted_set(match: re.Match[str]) -> str:
    members = sorted(match[1].split(", "))
    return "{" + ", ".join(members) + "}"


class ShapeError(OttavaError, ValueError):
    """A tensor or a list has the wrong shape or length."""


class DTypeError(OttavaError, TypeError, ValueError):
    """A tensor, a dtype or an object has the wrong type."""


class DeviceError(OttavaError, ValueError):
    """Tensors that belong together are on different devices."""


class OptionError(OttavaError, ValueError):
    """An option has a value that is not allowed."""


class UsageError(OttavaError, RuntimeError):
    """An object is used in a way that its state does not allow."""


class CheckpointError(UsageError):
    """A checkpoint is damaged, incomplete or of another kind. Reading it has changed nothing."""


class RecipeNotFoundError(OttavaError, LookupError):
    """No installed package provides the recipe."""


class PluginError(OttavaError, RuntimeError):
    """A recipe package cannot be used."""


class DuplicateRecipeError(PluginError):
    """Two packages offer a recipe of the same name."""


class BackendError(OttavaError, RuntimeError):
    """A kernel backend is unknown or cannot be used."""


@contextlib.contextmanager
def translated(
    fault: str,
    expected: str,
    remedy: str = "",
    *,
    to: type[OttavaError] = CheckpointError,
    of: Exceptions = Exception,
) -> abc.Iterator[None]:
    """Turn exceptions of class ``of`` in the block into errors of class ``to``.

    Errors of Ottava pass unchanged.
    """
    try:
        yield
    except OttavaError:
        raise
    except of as error:
        text = text_of(error)
        # The texts of other classes are often a bare key or value, which says little by itself.
        if not isinstance(error, (OSError, RuntimeError)):
            text = f"{type(error).__name__}: {text}"
        raise to(f"{fault}: {text}", expected=expected, remedy=remedy) from error


@contextlib.contextmanager
def named(subject: object) -> abc.Iterator[None]:
    """Put ``subject``, a file or a tensor, in front of errors of Ottava that do not name it."""
    try:
        yield
    except OttavaError as error:
        if str(subject) in error.what:
            raise
        raise type(error)(
            f"{subject}: {error.what}", expected=error.expected, remedy=error.remedy
        ) from error


def check_takes(
    function: object,
    name: str,
    expected: str,
    *arguments: object,
    refused: type | tuple[type, ...] = (),
) -> None:
    """Check that ``function`` can be called with ``arguments`` and is not of a ``refused`` type.

    Raises:
        DTypeError: it cannot, or is of a refused type. The message calls it ``name``.
    """
    if not callable(function) or isinstance(function, refused):
        raise DTypeError(f"{name} is a {type(function).__name__}", expected=expected)
    # Some functions written in C have no signature.
    with (
        translated(f"{name} cannot be called", expected, to=DTypeError, of=TypeError),
        contextlib.suppress(ValueError),
    ):
        inspect.signature(function).bind(*arguments)


def of_any_class(name: str) -> contextlib.AbstractContextManager[None]:
    """Turn any exception of the class of a quantized tensor into a CheckpointError.

    The class may belong to another package, and a file may pass anything to it.
    """
    return translated(f"{name!r} has no values", "a tensor that can be loaded or dequantized")


def listed(names: abc.Sequence[str]) -> str:
    """The first five names for an error message, and the number of the others."""
    text = ", ".join(map(repr, names[:5]))
    if len(names) > 5:
        text += f" and {len(names) - 5} more"
    return text
