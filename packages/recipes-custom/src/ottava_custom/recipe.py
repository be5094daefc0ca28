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
from ottava.recipes.backward import in_words, reads_of_word
from ottava.tensors import Quantizer


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """The quantizers that a factory gives, for each role of each layer.

    Attributes:
        qfactory: ``qfactory(role)`` returns an :class:`ottava.Quantizer`, or an
            :class:`ottava.QuantizerRequest` for the quantizer of another recipe, which may keep
            state. The name of a published factory stands for the factory.
        backward: what the backward pass reads, as :attr:`ottava.recipes.Recipe.backward` says.

    Raises:
        DTypeError: ``qfactory`` is neither a function of a role nor a name.
        OptionError: ``qfactory`` is the path of a file, or ``backward`` is no such word.
        RecipeNotFoundError, PluginError: :func:`ottava.get_quantizer_factory` raised it.

    A factory may be called more than once for a role, and must return equal quantizers each time.
    """

    name: ClassVar[str] = "custom"

    qfactory: Callable[[QuantizerRole], Any]
    backward: str = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
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
    def from_file(
        cls, path: str | os.PathLike[str], *, backward: str = "quantized"
    ) -> CustomRecipe:
        """The recipe of a YAML or TOML file; ``backward`` is a field of the class.

        Raises:
            OptionError, RecipeNotFoundError, PluginError: something in the file is wrong; the error
                names the place.
        """
        from ottava_custom.files import load_factory

        return cls(load_factory(path), backward)

    def factory_answer(
        self, role: QuantizerRole, of: Callable[[QuantizerRole], Any] | None = None
    ) -> Quantizer | QuantizerRequest:
        """What the factory returns; a factory that was set over this recipe comes first.

        Raises:
            DTypeError: a factory returned something else.
        """
        answer = super().factory_answer(role, of)
        if answer is None:
            answer = super().factory_answer(role, self.qfactory)
        if answer is None:
            raise DTypeError(
                f"the quantizer factory returned None for {role}",
                expected="an ottava.Quantizer or an ottava.QuantizerRequest",
                remedy="return ottava_custom.IdentityQuantizer() for high precision, or set a "
                "factory for some roles over a recipe: set_quantizer_factory()",
            )
        return answer

    def make_quantizer(self, role: QuantizerRole, *, amax_reduction_group: Any = None) -> Quantizer:
        """The factory's quantizer."""
        return self.quantizer(role, amax_reduction_group=amax_reduction_group)

    def explain(self, role: QuantizerRole | str) -> Explanation:
        explain = getattr(self.qfactory, "explain", None)
        role = QuantizerRole.of(role)
        if not callable(explain) or super().factory_answer(role) is not None:
            return super().explain(role)
        return in_words(reads_of_word(self.backward, role.tensor_type), explain(role))

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
    backward: str = "quantized",
) -> CustomRecipe:
    """The recipe ``custom`` of a factory or of a file; without either, the reference of current
    scaling.

    Raises:
        OptionError: both a factory and a file are given.
    """
    if file is not None:
        if qfactory is not None:
            raise OptionError("both qfactory and file are given", expected="one of them")
        return CustomRecipe.from_file(file, backward=backward)
    if qfactory is None:
        from ottava_custom.factories import current_scaling_ref_quantizer_factory

        qfactory = current_scaling_ref_quantizer_factory
    return CustomRecipe(qfactory, backward)  # type: ignore[arg-type]
