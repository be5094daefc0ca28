"""What may serve a role in a recipe file: high precision, a recipe, a factory, or one of these for
each direction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from ottava.recipes.base import QuantizerRequest, Recipe
from ottava.recipes.role import QuantizerRole, words
from ottava.tensors import Quantizer
from ottava_custom.files.source import Place
from ottava_custom.hybrid import HybridQuantizer, quantizer_for_side
from ottava_custom.identity import IdentityQuantizer

Served = Quantizer | QuantizerRequest


@dataclass(frozen=True)
class Expression(ABC):
    """What a recipe file writes for a quantizer, with its place, which errors name."""

    #: Whether it serves every role. A factory may leave a role to the next rule.
    total: ClassVar[bool] = True

    place: Place

    @abstractmethod
    def serve(self, role: QuantizerRole) -> Served | None:
        """What serves ``role``, or None to leave the role to the next rule."""

    @abstractmethod
    def words(self, role: QuantizerRole) -> tuple[str, str]:
        """What serves ``role`` along rows and along columns, in words."""

    def check_layers(self, names: Sequence[str]) -> None:
        """Raises OptionError where a recipe inside has a pattern that fits none of the layers."""

    def check_roles(self, roles: Sequence[QuantizerRole]) -> None:
        """Raises OptionError where it is known before any layer is that a role cannot be served."""


@dataclass(frozen=True)
class Identity(Expression):
    """High precision: ``identity``."""

    def serve(self, role: QuantizerRole) -> Quantizer:
        return IdentityQuantizer()

    def words(self, role: QuantizerRole) -> tuple[str, str]:
        return "identity", "identity"


@dataclass(frozen=True)
class OfRecipe(Expression):
    """What a recipe uses for the role: ``current`` or ``{recipe: current, fp8_format: E4M3}``.

    The layer's state makes the quantizer, so that the recipe may keep state.
    """

    recipe: Recipe
    options: Mapping[str, object]

    def serve(self, role: QuantizerRole) -> QuantizerRequest:
        return QuantizerRequest(self.recipe)

    def words(self, role: QuantizerRole) -> tuple[str, str]:
        explanation = self.recipe.explain(role)
        # Formats, and what the backward pass reads, are shown by the recipe's own words.
        options = [
            f"{name}={value}"
            for name, value in self.options.items()
            if name != "backward" and not isinstance(getattr(self.recipe, name, None), Enum)
        ]
        rowwise = ", ".join([explanation.rowwise, *options])
        columnwise = ", ".join([explanation.columnwise, *options])
        return rowwise, columnwise

    def check_layers(self, names: Sequence[str]) -> None:
        with self.place.named_in_errors():
            self.recipe.check_layers(names)


@dataclass(frozen=True)
class OfFactory(Expression):
    """What a published quantizer factory returns: ``{factory: NAME}``."""

    total: ClassVar[bool] = False

    name: str
    factory: Callable[[QuantizerRole], object]

    def serve(self, role: QuantizerRole) -> Served | None:
        with self.place.named_in_errors():
            served = self.factory(role)
        if served is None or isinstance(served, Served):
            return served
        raise self.place.error(
            f"factory {self.name!r} returned a {type(served).__name__} for {role}",
            expected="an ottava.Quantizer, an ottava.QuantizerRequest or None",
            remedy="report it to the package's authors",
        )

    def words(self, role: QuantizerRole) -> tuple[str, str]:
        served = self.serve(role)
        if isinstance(served, QuantizerRequest):
            explanation = served.recipe.explain(role)
            return f"{self.name}: {explanation.rowwise}", f"{self.name}: {explanation.columnwise}"
        text = self.name if served is None else f"{self.name}: {words(served)}"
        return text, text


@dataclass(frozen=True)
class Hybrid(Expression):
    """One quantizer along rows and another along columns: ``{rowwise: ..., columnwise: ...}``."""

    rowwise: Expression
    columnwise: Expression

    def serve(self, role: QuantizerRole) -> Quantizer:
        with self.rowwise.place.named_in_errors():
            rowwise = quantizer_for_side(self.rowwise.serve, role, "rowwise")
        with self.columnwise.place.named_in_errors():
            columnwise = quantizer_for_side(self.columnwise.serve, role, "columnwise")
        with self.place.named_in_errors():
            return HybridQuantizer(rowwise, columnwise)

    def words(self, role: QuantizerRole) -> tuple[str, str]:
        return self.rowwise.words(role)[0], self.columnwise.words(role)[1]

    def check_layers(self, names: Sequence[str]) -> None:
        self.rowwise.check_layers(names)
        self.columnwise.check_layers(names)

    def check_roles(self, roles: Sequence[QuantizerRole]) -> None:
        # A factory is not asked before there is a layer.
        if self.rowwise.total and self.columnwise.total:
            for role in roles:
                self.serve(role)
