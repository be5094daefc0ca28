"""What a package says of its recipes. Reading a spec imports neither torch nor the recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

from ottava.errors import OptionError

#: The version of the extension points; a spec for another version is reported and not used.
API_VERSION = 1


def _is_text(value: Any, pattern: str = ".*") -> bool:
    return isinstance(value, str) and value.isprintable() and re.fullmatch(pattern, value) is not None


def _are_texts(value: Any, pattern: str = ".+") -> bool:
    return isinstance(value, tuple) and all(_is_text(each, pattern) for each in value)


def _are_positive(values: Any) -> bool:
    return all(type(value) is int and value > 0 for value in values)


def _is_block(value: Any) -> bool:
    sizes = [size for size in value if size is not None] if isinstance(value, tuple) and len(value) == 2 else []
    return value is None or (sizes != [] and _are_positive(sizes))


def is_name(name: object) -> bool:
    """Whether a recipe or a factory may have this name."""
    return _is_text(name, r"[a-z][a-z0-9_-]*")


_FLAG = (lambda value: isinstance(value, bool), "True or False")
_FORMATS = (_are_texts, 'a tuple of names, for example ("E4M3",)')
_REFERENCE = partial(_is_text, pattern=r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
# Field -> what it has to be. Values of any type are checked: a plugin's author need not run a type checker, and what a
# spec holds is printed and compared by code that no plugin's failure may reach.
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (is_name, "lower-case letters, digits, - and _, a letter first"),
    "summary": (_is_text, "one line of printable text"),
    "factory": (_REFERENCE, 'a reference "package.module:Object"'),
    "api_version": (lambda value: _are_positive([value]), "a positive integer"),
    "block_size": (_is_block, "None or a tuple of two, positive integers or one None"),
    "relative_error": (lambda value: type(value) in (int, float) and 0 < value < float("inf"), "a positive number"),
    "file_suffixes": (partial(_are_texts, pattern=r"\.[a-z0-9]+"), 'a tuple of suffixes, for example (".yaml",)'),
    **dict.fromkeys(("formats", "fake_quant_formats"), _FORMATS),
    **dict.fromkeys(("stateful", "needs_reduction", "quantized_weights", "deterministic", "compiles"), _FLAG),
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is common to the specs of all kinds."""

    kind: ClassVar[str]  # what it is of, in words
    name: str
    summary: str
    factory: str
    api_version: int = API_VERSION

    def __post_init__(self) -> None:
        for field in fields(self):
            value: object = getattr(self, field.name)
            is_right, expected = _CHECKS[field.name]
            if not is_right(value):
                owner = "" if field.name == "name" else f" of {self.kind} {self.name!r}"
                raise OptionError(f"{field.name} {value!r}{owner}", expected=expected)


@dataclass(frozen=True, kw_only=True)
class RecipeSpec(Spec):
    """One recipe as its package announces it.

    Attributes:
        name: how users ask for it.
        summary: one line for listings.
        factory: lazy reference ``"package.module:Object"`` to what builds the recipe.
        stateful: whether layers keep state for it.
        block_size: rows and columns that share a scale, None for all of them: ``(1, 32)``, ``(1, None)`` for a scale
            for each row. None for one scale a tensor.
        formats: names of the element formats that it uses.
        needs_reduction: whether it reduces amaxes over a process group by itself.
        api_version: version of the extension points it was written for.
        fake_quant_formats: names of the fake-quantization formats that it serves.
        relative_error: what a linear layer is off at most: ``‖y - reference‖ / ‖reference‖`` (Frobenius norms) of its
            output and of its gradients, for normally distributed operands.
        quantized_weights: whether weights can be kept quantized: its quantizers give a ``QuantizedTensor``, unless they
            are told to be internal.
        deterministic: whether equal tensors give equal bytes.
        compiles: whether ``torch.compile(fullgraph=True)`` takes a layer that runs under it.
        file_suffixes: suffixes of the recipe files that it reads, ``(".yaml",)``; its factory takes ``file=path``.

    Raises:
        OptionError: a field has a value that is not allowed.
    """

    kind: ClassVar[str] = "recipe"
    stateful: bool = False
    block_size: tuple[int | None, int | None] | None = None
    formats: tuple[str, ...] = ()
    needs_reduction: bool = False
    fake_quant_formats: tuple[str, ...] = ()
    relative_error: float = 0.1
    quantized_weights: bool = True
    deterministic: bool = True
    compiles: bool = True
    file_suffixes: tuple[str, ...] = ()

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The flags as words, for listings."""
        named: dict[Any, str] = {None: "per tensor", (1, None): "per row", (None, 1): "per column"}
        sizes = ["all" if size is None else str(size) for size in self.block_size or ()]
        shared = named.get(self.block_size, f"block {'x'.join(sizes)}")
        kept = "stateful" if self.stateful else "stateless"
        return (*self.formats, shared, kept, *(["reduces amax"] if self.needs_reduction else []))


@dataclass(frozen=True, kw_only=True)
class FactorySpec(Spec):
    """A named quantizer factory as its package announces it: its fields are as those of :class:`RecipeSpec`, and
    ``factory`` is a lazy reference to a ``qfactory(role)``."""

    kind: ClassVar[str] = "quantizer factory"
