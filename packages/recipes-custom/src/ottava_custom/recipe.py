"""``CustomRecipe``: the quantizers of a factory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ottava.errors import DTypeError, OptionError, check_takes
from ottava.recipes import (
    Explanation,
    QuantizerRequest,
    QuantizerRole,
    Recipe,
    RecipeRule,
    registry,
)
from ottava.tensors import Quantizer


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """The quantizers that a factory gives, for each role of each layer.

    Attributes:
        qfactory: ``qfactory(role)`` gives an :class:`ottava.Quantizer`, or an
            :class:`ottava.QuantizerRequest` for what another recipe would use, one that keeps state
            included. The name of a published factory will do.

    Raises:
        DTypeError: ``qfactory`` is neither a function of a role nor a name.
        OptionError: it is the path of a file.
        RecipeNotFoundError, PluginError: as of :func:`ottava.get_quantizer_factory`.

    When a layer is bound, the factory is called once for each of its roles or more; it must give
    equal quantizers then.
    """

    name: ClassVar[str] = "custom"

    qfactory: Callable[[QuantizerRole], Any]

    def __post_init__(self) -> None:
        expected = "a callable qfactory(role), or the name of a published one"
        if isinstance(self.qfactory, str) and registry.is_path(self.qfactory):
            remedy = f"use CustomRecipe.from_file({self.qfactory!r})"
            raise OptionError(
                f"qfactory is the path {self.qfactory!r}", expected=expected, remedy=remedy
            )
        if isinstance(self.qfactory, str):
            object.__setattr__(self, "qfactory", registry.get_quantizer_factory(self.qfactory))
        if not callable(self.qfactory):
            remedy = "for a recipe file, use CustomRecipe.from_file(path)"
            raise DTypeError(
                f"qfactory is a {type(self.qfactory).__name__}", expected=expected, remedy=remedy
            )
        check_takes(self.qfactory, "qfactory", expected, None)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> CustomRecipe:
        """The recipe of a YAML or TOML file.

        Raises:
            OptionError, RecipeNotFoundError: the file says something wrong; the error has the line.
        """
        from ottava_custom.files import load_factory

        return cls(load_factory(path))

    def given(
        self, role: QuantizerRole, of: Callable[[QuantizerRole], Any] | None = None
    ) -> Quantizer | QuantizerRequest:
        """What the factory gives; a factory put over this recipe comes first.

        Raises:
            DTypeError: a factory gave something else.
        """
        over = super().given(role, of)
        made = super().given(role, self.qfactory) if over is None else over
        if made is None:
            raise DTypeError(
                f"the quantizer factory returned None for {role}",
                expected="an ottava.Quantizer or an ottava.QuantizerRequest",
                remedy="return ottava_custom.IdentityQuantizer() where nothing is to be "
                "quantized; a factory for some "
                "roles only goes over a recipe: set_quantizer_factory()",
            )
        return made

    def make_quantizer(self, role: QuantizerRole, *, amax_reduction_group: Any = None) -> Quantizer:
        """The factory's quantizer."""
        return self.quantizer(role, amax_reduction_group=amax_reduction_group)

    def explain(self, role: QuantizerRole | str) -> Explanation:
        explain = getattr(self.qfactory, "explain", None)
        asked = QuantizerRole.of(role)
        if not callable(explain) or super().given(asked) is not None:
            return super().explain(asked)
        found: Explanation = explain(asked)
        return found

    def check_layers(self, names: Sequence[str]) -> None:
        check = getattr(self.qfactory, "check_layers", None)
        if callable(check):
            check(names)

    def rules(self) -> tuple[RecipeRule, ...]:
        rules = getattr(self.qfactory, "rules", None)
        return tuple(rules()) if callable(rules) else ()


def build(
    qfactory: Callable[[QuantizerRole], Any] | str | None = None,
    file: str | os.PathLike[str] | None = None,
) -> CustomRecipe:
    """The recipe by name: of a factory, of a file, or by itself that of the reference of current
    scaling.

    Raises:
        OptionError: a factory and a file at once.
    """
    if file is not None:
        if qfactory is not None:
            raise OptionError("qfactory and file at once", expected="one of them")
        return CustomRecipe.from_file(file)
    if qfactory is None:
        from ottava_custom.factories import current_scaling_ref_quantizer_factory

        qfactory = current_scaling_ref_quantizer_factory
    return CustomRecipe(qfactory)  # type: ignore[arg-type]
