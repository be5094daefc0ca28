"""What a package says of its recipes. Reading a spec imports neither torch nor the recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ottava.errors import OptionError

#: The version of the extension points; a spec for another version is reported and not used.
API_VERSION = 1

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_SUFFIX = re.compile(r"\.[a-z0-9]+")
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


# The fields are checked as values of any type: a plugin's author need not run a type checker, and what a spec holds is
# printed and compared by code that no plugin's failure may reach.
def _word(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _positive(value: object) -> bool:
    return type(value) is int and value > 0


def _require(right: bool, what: str, value: object, owner: str, expected: str) -> None:
    if not right:
        raise OptionError(f"{what} {value!r} of {owner}", expected=expected)


def _shared_by(block: tuple[int | None, int | None] | None) -> str:
    if block is None:
        return "per tensor"
    named = {(1, None): "per row", (None, 1): "per column"}
    return named.get(block, "block {}x{}".format(*("all" if size is None else size for size in block)))


def is_name(name: object) -> bool:
    """Whether a recipe or a factory may have this name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _check(kind: str, name: object, summary: object, factory: object, api_version: object) -> str:
    if not is_name(name):
        raise OptionError(f"{kind} name {name!r}", expected="lower-case letters, digits, - and _, a letter first")
    owner = f"{kind} {name!r}"
    _require(_word(summary), "summary", summary, owner, "one line of printable text")
    reference = isinstance(factory, str) and _REFERENCE.fullmatch(factory) is not None
    _require(reference, "factory", factory, owner, 'a reference "package.module:Object"')
    _require(_positive(api_version), "api_version", api_version, owner, "a positive integer")
    return owner


@dataclass(frozen=True, kw_only=True)
class RecipeSpec:
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

    name: str
    summary: str
    factory: str
    stateful: bool = False
    block_size: tuple[int | None, int | None] | None = None
    formats: tuple[str, ...] = ()
    needs_reduction: bool = False
    api_version: int = API_VERSION
    fake_quant_formats: tuple[str, ...] = ()
    relative_error: float = 0.1
    quantized_weights: bool = True
    deterministic: bool = True
    compiles: bool = True
    file_suffixes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        owner = _check("recipe", self.name, self.summary, self.factory, self.api_version)
        block: object = self.block_size
        pair = isinstance(block, tuple) and len(block) == 2 and all(size is None or _positive(size) for size in block)
        right = block is None or (pair and block != (None, None))
        _require(right, "block_size", block, owner, "None or a tuple of two, positive integers or one None")
        for field in ("stateful", "needs_reduction", "quantized_weights", "deterministic", "compiles"):
            value: object = getattr(self, field)
            _require(isinstance(value, bool), field, value, owner, "True or False")
        for field in ("formats", "fake_quant_formats"):
            value = getattr(self, field)
            words = isinstance(value, tuple) and all(word and _word(word) for word in value)
            _require(words, field, value, owner, 'a tuple of names, for example ("E4M3",)')
        error: object = self.relative_error
        positive = type(error) in (int, float) and 0 < error < float("inf")  # type: ignore[operator]
        _require(positive, "relative_error", error, owner, "a positive number")
        suffixes: object = self.file_suffixes
        known = isinstance(suffixes, tuple) and all(isinstance(s, str) and _SUFFIX.fullmatch(s) for s in suffixes)
        _require(known, "file_suffixes", suffixes, owner, 'a tuple of suffixes, for example (".yaml",)')

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The flags as words, for listings."""
        words = [*self.formats]
        words.append(_shared_by(self.block_size))
        words.append("stateful" if self.stateful else "stateless")
        if self.needs_reduction:
            words.append("reduces amax")
        return tuple(words)


@dataclass(frozen=True, kw_only=True)
class FactorySpec:
    """A named quantizer factory as its package announces it.

    Attributes:
        name: how users ask for it.
        summary: one line for listings.
        factory: lazy reference ``"package.module:Object"`` to a ``qfactory(role)``.
        api_version: version of the extension points it was written for.

    Raises:
        OptionError: a field has a value that is not allowed.
    """

    name: str
    summary: str
    factory: str
    api_version: int = API_VERSION

    def __post_init__(self) -> None:
        _check("quantizer factory", self.name, self.summary, self.factory, self.api_version)
