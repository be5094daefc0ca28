"""What a package says of its recipes. Reading a spec imports neither torch nor the recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ottava.errors import OptionError

#: The version of the extension points; a spec for another version is reported and not used.
API_VERSION = 1

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _check(kind: str, name: str, factory: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(f"{kind} name {name!r}", expected="lower-case letters, digits, - and _, a letter first")
    if not isinstance(factory, str) or not _REFERENCE.fullmatch(factory):
        raise OptionError(f"factory {factory!r} of {kind} {name!r}", expected='a reference "package.module:Object"')


@dataclass(frozen=True, kw_only=True)
class RecipeSpec:
    """One recipe as its package announces it.

    Attributes:
        name: how users ask for it.
        summary: one line for listings.
        factory: lazy reference ``"package.module:Object"`` to what builds the recipe.
        stateful: whether layers keep state for it.
        block_size: rows and columns that share a scale; None for one scale a tensor.
        formats: names of the element formats that it uses.
        needs_reduction: whether it reduces amaxes over a process group by itself.
        api_version: version of the extension points it was written for.
        fake_quant_formats: names of the fake-quantization formats that it serves.

    Raises:
        OptionError: a field has a value that is not allowed.
    """

    name: str
    summary: str
    factory: str
    stateful: bool = False
    block_size: tuple[int, int] | None = None
    formats: tuple[str, ...] = ()
    needs_reduction: bool = False
    api_version: int = API_VERSION
    fake_quant_formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check("recipe", self.name, self.factory)
        block = self.block_size
        if block is not None and not (len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise OptionError(f"block_size {block!r} of recipe {self.name!r}", expected="two positive integers")

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The flags as words, for listings."""
        words = [*self.formats]
        words.append("per tensor" if self.block_size is None else "block {}x{}".format(*self.block_size))
        words.append("stateful" if self.stateful else "stateless")
        if self.needs_reduction:
            words.append("reduces amax")
        return tuple(words)


@dataclass(frozen=True, kw_only=True)
class FactorySpec:
    """A named quantizer factory: ``factory`` refers to a ``qfactory(role)``."""

    name: str
    summary: str
    factory: str
    api_version: int = API_VERSION

    def __post_init__(self) -> None:
        _check("quantizer factory", self.name, self.factory)
