"""The text of a layout, for operators and files."""

from collections.abc import Callable, Mapping

import torch

from ottava.formats import ELEMENT_NAMES
from ottava.layout.grids import Block, Size
from ottava.layout.rotation import Rotation
from ottava.layout.scales import SCALES

#: The value of a field, as the constructor takes it.
Value = torch.dtype | Block | str | float | tuple[float, ...] | Rotation | None
#: The fields that every text has, by their place. It has the others by name.
PLACES = ("element", "block", "scale", "rounding", "epsilon", "columnwise", "shared", "finite_as")


def text_of(value: Value) -> str:
    """The value of a field in a text."""
    if isinstance(value, Rotation):
        return f"{value.size}:{value.signs:#x}:{value.directions}"
    if isinstance(value, tuple):
        return "x".join("all" if size is None else str(size) for size in value)
    return str(value).removeprefix("torch.")


def text_of_fields(layout: object, named: Mapping[str, object]) -> str:
    """The text of a layout.

    Args:
        named: the fields that a text has by name, with their defaults, which it leaves out.
    """
    words = [text_of(getattr(layout, name)) for name in PLACES]
    for name, default in named.items():
        value = getattr(layout, name)
        if value != default:
            words.append(f"{name}={text_of(value)}")
    return "/".join(words)


def _dtype_of(text: str) -> torch.dtype | str:
    if text in ELEMENT_NAMES or text in SCALES:
        return text
    dtype = vars(torch).get(text)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {text!r}")
    return dtype


def _block_of(text: str) -> Block:
    rows, columns = (None if size == "all" else int(size) for size in text.split("x"))
    return rows, columns


def _shared_of(text: str) -> Size | None:
    if text == "None":
        return None
    rows, columns = map(int, text.split("x"))
    return rows, columns


def _factors_of(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split("x")))


def _flag_of(text: str) -> bool:
    return {"True": True, "False": False}[text]


def _rotation_of(text: str) -> Rotation:
    size, signs, directions = text.split(":")
    return Rotation(int(size), int(signs, 0), directions)


_READERS: dict[str, Callable[[str], Value]] = {
    "element": _dtype_of,
    "block": _block_of,
    "scale": _dtype_of,
    "rounding": str,
    "epsilon": float,
    "columnwise": str,
    "shared": _shared_of,
    "finite_as": str,
    "second_level": str,
    "bound": float,
    "candidates": _factors_of,
    "error": str,
    "stochastic": _flag_of,
    "rotation": _rotation_of,
}


def fields_of(text: str, named: Mapping[str, object]) -> dict[str, Value]:
    """The fields in the text of a layout.

    Args:
        named: the fields that a text has by name, with their defaults.

    Raises:
        ValueError, KeyError: the text has another form.
    """
    words = text.split("/")
    values = dict(zip(PLACES, words[: len(PLACES)], strict=True))
    for word in words[len(PLACES) :]:
        name, _, value = word.partition("=")
        if name not in named or name in values:
            raise ValueError(f"{name!r} is no field, or is there twice")
        values[name] = value
    return {name: _READERS[name](value) for name, value in values.items()}
