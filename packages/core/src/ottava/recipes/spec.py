"""Specs: how a package announces its recipes. Reading one imports neither torch nor the recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import ClassVar

from ottava.errors import OptionError

#: The version of the extension points. A spec for another version is refused.
API_VERSION = 1
_NAME = "[a-z][a-z0-9_-]*"
# Field, or type of fields -> the pattern that the `repr` of a value has to match, and the pattern
# in words. Types are checked as well, because the values are printed and compared outside of any
# handling of a plugin's errors.
_PATTERNS = {
    "name": (f"'{_NAME}'", "lower-case letters, digits, - and _, a letter first"),
    "factory": (
        r"'[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*'",
        'a reference "package.module:Object"',
    ),
    "api_version": (
        str(API_VERSION),
        f"{API_VERSION}: install a release of the package that fits this ottava",
    ),
    "block_size": (
        r"None|(?!\(None, N)\((None|[1-9]\d*), (None|[1-9]\d*)\)",
        "None or two sizes, one may be None",
    ),
    "file_suffixes": (r"\(('\.[a-z0-9]+',? ?)*\)", 'a tuple of suffixes, for example (".yaml",)'),
    "str": (r"""(['"])([^\\]|\\[\\'])*\1""", "one line of printable text"),
    "tuple[str, ...]": (r"\(('[^'\\]+',? ?)*\)", 'a tuple of names, for example ("E4M3",)'),
    "float": (r"(?!0(\.0)?$)\d+(\.\d+)?(e[+-]\d+)?", "a positive number"),
    "bool": ("True|False", "True or False"),
}


def is_name(name: object) -> bool:
    """Whether a recipe or a factory may have this name."""
    return isinstance(name, str) and re.fullmatch(_NAME, name) is not None


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The fields that all kinds of specs have."""

    kind: ClassVar[str]  # recipe or quantizer factory, in words
    name: str
    summary: str
    factory: str
    api_version: int = API_VERSION

    def __post_init__(self) -> None:
        for field in fields(self):
            value: object = getattr(self, field.name)
            pattern, expected = _PATTERNS.get(field.name) or _PATTERNS[str(field.type)]
            if not re.fullmatch(pattern, repr(value)):
                raise OptionError(
                    f"{field.name} {value!r} of {self.kind} {self.name!r}", expected=expected
                )


@dataclass(frozen=True, kw_only=True)
class RecipeSpec(Spec):
    """One recipe as its package announces it.

    Attributes:
        name: how users ask for it.
        summary: one line for listings.
        factory: lazy reference ``"package.module:Object"`` to what builds the recipe.
        stateful: whether layers keep state for it.
        block_size: rows and columns that share a scale, None for all of them: ``(1, 32)``;
            ``(1, None)`` is a scale for each row. None is one scale for the tensor.
        formats: names of the element formats that it uses.
        needs_reduction: whether it reduces amaxes over a process group by itself.
        api_version: version of the extension points that it was written for.
        fake_quant_formats: names of the formats that it provides for fake quantization.
        relative_error: the largest ``‖y - reference‖ / ‖reference‖`` (Frobenius norms) of the
            output and of the gradients of a linear layer with normally distributed operands.
        quantized_weights: whether weights can be FP8-primary: its quantizers return a
            ``QuantizedTensor`` unless they are internal.
        deterministic: whether equal tensors give equal bytes; those of a ``stochastic`` recipe for
            equal states of torch's generator.
        stochastic: whether elements are rounded at random, by seeds that
            :func:`ottava.kernels.draw_seed` draws.
        second_level: whether blocks have another scale in common, so that a value can change how
            values of other blocks are rounded.
        shows_nan: whether a NaN dequantizes to NaN or an infinity. False for formats in which
            every code is a number.
        compiles: whether ``torch.compile(fullgraph=True)`` compiles a layer that runs under it.
        file_suffixes: suffixes of the recipe files that it reads, such as ``(".yaml",)``; its
            factory takes ``file=path``.

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
    stochastic: bool = False
    second_level: bool = False
    shows_nan: bool = True
    compiles: bool = True
    file_suffixes: tuple[str, ...] = ()

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The fields as words for listings."""
        words = [*self.formats, self._block_in_words()]
        words.append("stateful" if self.stateful else "stateless")
        if self.second_level:
            words.append("two levels of scales")
        if self.stochastic:
            words.append("stochastic")
        if self.needs_reduction:
            words.append("reduces amax")
        return tuple(words)

    def _block_in_words(self) -> str:
        if self.block_size is None:
            return "per tensor"
        if self.block_size == (1, None):
            return "per row"
        if self.block_size == (None, 1):
            return "per column"
        return "block " + "x".join(str(size or "all") for size in self.block_size)


@dataclass(frozen=True, kw_only=True)
class FactorySpec(Spec):
    """One named quantizer factory as its package announces it.

    Its fields are those of :class:`RecipeSpec`; ``factory`` is a lazy reference to a
    ``qfactory(role)``.
    """

    kind: ClassVar[str] = "quantizer factory"
