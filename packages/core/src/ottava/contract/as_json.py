"""Frozen dataclasses of plain words and numbers as JSON: written, read, compared and described.

Each field is annotated with what it says, and may have limits in the words of JSON Schema, which
hold for each number or word in its value: ``Annotated[type, "text", {"minimum": 1}]``.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ottava.errors import OptionError

Limits = Mapping[str, Any]
_HOLDS: dict[str, Callable[[Any, Any], object]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "enum": lambda value, words: value in words,
    "pattern": lambda value, pattern: re.search(pattern, value),
}


def written(value: Any) -> Any:
    """A value as JSON has it."""
    if hasattr(value, "__dataclass_fields__"):
        return {each.name: written(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return [written(entry) for entry in value]
    return value


def read(kind: Any, value: Any, path: str, limits: Limits | None = None) -> Any:
    """A value of a type from its JSON.

    Args:
        path: the name of the value in errors.
        limits: of the numbers and words in the value.

    Raises:
        OptionError: it is no such value.
    """
    origin, options = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value in options and type(value) in {type(option) for option in options}:
            return value
        raise _refused(path, value, f"one of {', '.join(map(repr, options))}")
    if origin is tuple:
        return _read_tuple(kind, value, path, limits)
    if origin is Union or origin is type(int | None):
        return _read_one_of(options, value, path, limits)
    if hasattr(kind, "__dataclass_fields__"):
        return _read_fields(kind, value, path)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise _refused(path, value, kind.__name__)
    for keyword, limit in (limits or {}).items():
        if not _HOLDS[keyword](value, limit):
            raise _refused(path, value, f"{keyword} {limit}")
    return value


def _read_fields(kind: Any, value: Any, path: str) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    if not isinstance(value, Mapping) or set(value) != set(hints):
        names = sorted(value) if isinstance(value, Mapping) else value
        raise _refused(path, names, f"the fields {', '.join(hints)}")
    values = {}
    for name, hint in hints.items():
        annotated, _, *limits = get_args(hint)
        values[name] = read(annotated, value[name], f"{path}.{name}", *limits)
    return kind(**values)


def _read_tuple(kind: Any, value: Any, path: str, limits: Limits | None) -> tuple[Any, ...]:
    options = get_args(kind)
    if not isinstance(value, list | tuple):
        raise _refused(path, value, "a list")
    if len(options) == 2 and options[1] is ...:
        options = (options[0],) * len(value)
    if len(options) != len(value):
        raise _refused(path, value, f"a list of {len(options)}")
    pairs = zip(options, value, strict=True)
    return tuple(read(each, entry, path, limits) for each, entry in pairs)


def _read_one_of(options: tuple[Any, ...], value: Any, path: str, limits: Limits | None) -> Any:
    """A value of one of several types, of which at most one has fields."""
    if value is None and type(None) in options:
        return None
    others = [option for option in options if option is not type(None)]
    objects = [option for option in others if hasattr(option, "__dataclass_fields__")]
    if objects and isinstance(value, Mapping):
        return read(objects[0], value, path)
    plain = [option for option in others if option not in objects]
    if not plain:
        raise _refused(path, value, "an object, or null")
    return read(plain[0], value, path, limits)


def _refused(path: str, value: object, expected: str) -> OptionError:
    return OptionError(f"{path} is {value!r:.200}", expected=expected)


def differences(path: str, one: Any, other: Any) -> Iterator[tuple[str, tuple[object, object]]]:
    """The places where two JSON values differ, with both values."""
    if isinstance(one, dict) and isinstance(other, dict) and set(one) == set(other):
        for name in one:
            yield from differences(f"{path}.{name}".lstrip("."), one[name], other[name])
    elif one != other:
        yield path, (one, other)


def leaves(value: Any) -> list[object]:
    """The words and numbers of a dataclass, or of what it consists of."""
    if hasattr(value, "__dataclass_fields__"):
        return [leaf for each in fields(value) for leaf in leaves(getattr(value, each.name))]
    if isinstance(value, tuple):
        return [leaf for entry in value for leaf in leaves(entry)]
    return [value]


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a dataclass, with what each field says."""
    definitions: dict[str, Any] = {}
    root = _schema_of(kind, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **root,
        "$defs": definitions,
    }


def _schema_of(
    kind: Any, definitions: dict[str, Any], limits: Limits | None = None
) -> dict[str, Any]:
    origin, options = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(options)}
    if origin is tuple:
        if options[1] is ...:
            return {"type": "array", "items": _schema_of(options[0], definitions, limits)}
        entries = [_schema_of(option, definitions, limits) for option in options]
        return {"type": "array", "prefixItems": entries, "items": False, "minItems": len(entries)}
    if origin is Union or origin is type(int | None):
        return {"anyOf": [_schema_of(option, definitions, limits) for option in options]}
    if hasattr(kind, "__dataclass_fields__"):
        return _schema_of_fields(kind, definitions)
    word = {int: "integer", float: "number", str: "string", type(None): "null"}[kind]
    if word == "null":
        return {"type": word}
    return {"type": word, **(limits or {})}


def _schema_of_fields(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    properties = {}
    for name, hint in hints.items():
        annotated, text, *limits = get_args(hint)
        properties[name] = {"description": text, **_schema_of(annotated, definitions, *limits)}
    definitions[kind.__name__] = {
        "type": "object",
        "description": " ".join((kind.__doc__ or "").split()),
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"$ref": f"#/$defs/{kind.__name__}"}
