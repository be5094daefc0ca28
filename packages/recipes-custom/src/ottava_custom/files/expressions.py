"""What may stand for a quantizer in a recipe file, and what each gives for a role. Errors name the
place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from ottava.errors import OptionError
from ottava.recipes.base import QuantizerRequest, Recipe
from ottava.recipes.role import QuantizerRole, words
from ottava.tensors import Quantizer
from ottava_custom.files.source import Place, Source
from ottava_custom.hybrid import HybridQuantizer, side_of
from ottava_custom.identity import IdentityQuantizer

#: What keeps high precision.
IDENTITY = "identity"

Served = Quantizer | QuantizerRequest


@dataclass(frozen=True)
class Expression(ABC):
    """What stands for a quantizer, at a place of a file."""

    #: Whether it gives something for every role.
    total: ClassVar[bool] = True

    source: Source
    place: Place

    @abstractmethod
    def serve(self, role: QuantizerRole) -> Served | None:
        """What serves ``role``; None to leave it to the next rule."""

    @abstractmethod
    def words(self, role: QuantizerRole) -> tuple[str, str]:
        """What serves ``role`` along rows and along columns, for a role that is served."""

    def quantizer(self, role: QuantizerRole, side: str) -> Quantizer:
        """A quantizer by itself, for one side of a hybrid; none, or one that keeps state, is
        refused."""
        served = self.serve(role)
        if isinstance(served, QuantizerRequest):
            with self.source.at(self.place):
                served = side_of(served.recipe, role, side)
        if served is None:
            what = f"nothing is given for {role.tensor_type!r} of layer {role.name!r}"
            raise self.source.error(self.place, what, expected="a quantizer, for either direction")
        if served.stateful:
            raise self.keeps_state()
        return served

    def check_layers(self, names: Sequence[str]) -> None:
        """Refuse patterns that fit none of the names of a model's layers; a recipe may have
        some."""

    def keeps_state(self) -> OptionError:
        """The error about one direction of a hybrid that keeps state."""
        return self.source.error(
            self.place,
            "a recipe that keeps state cannot serve one direction",
            expected="recipes without state for rowwise and columnwise",
            remedy="let it serve the whole role",
        )


@dataclass(frozen=True)
class Identity(Expression):
    """High precision."""

    def serve(self, role: QuantizerRole) -> Quantizer:
        return IdentityQuantizer()

    def words(self, role: QuantizerRole) -> tuple[str, str]:
        return IDENTITY, IDENTITY


@dataclass(frozen=True)
class OfRecipe(Expression):
    """What a recipe uses for the role. The layer's state makes the quantizer, so that the recipe
    may be stateful."""

    recipe: Recipe
    options: tuple[tuple[str, Any], ...]

    def check_layers(self, names: Sequence[str]) -> None:
        with self.source.at(self.place):
            self.recipe.check_layers(names)

    def serve(self, role: QuantizerRole) -> QuantizerRequest:
        return QuantizerRequest(self.recipe)

    def words(self, role: QuantizerRole) -> tuple[str, str]:
        """The recipe's own words, and the options of this place; a format shows in the former."""
        explained = self.recipe.explain(role)
        shown = [
            (key, value)
            for key, value in self.options
            if not isinstance(getattr(self.recipe, key, None), Enum)
        ]
        options = [f"{key}={value}" for key, value in shown]
        return ", ".join([explained.rowwise, *options]), ", ".join([explained.columnwise, *options])


@dataclass(frozen=True)
class OfFactory(Expression):
    """What a published quantizer factory gives."""

    total: ClassVar[bool] = False

    name: str
    factory: Callable[[QuantizerRole], Any]

    def serve(self, role: QuantizerRole) -> Served | None:
        with self.source.at(self.place):
            given = self.factory(role)
        if given is None or isinstance(given, Served):
            return given
        raise self.source.error(
            self.place,
            f"factory {self.name!r} gives a {type(given).__name__} for {role}",
            expected="an ottava.Quantizer, an ottava.QuantizerRequest or None",
            remedy="report it to the package's authors",
        )

    def words(self, role: QuantizerRole) -> tuple[str, str]:
        """Those of the quantizer, with the name of the factory."""
        served = self.serve(role)
        if isinstance(served, QuantizerRequest):
            explained = served.recipe.explain(role)
            return f"{self.name}: {explained.rowwise}", f"{self.name}: {explained.columnwise}"
        text = self.name if served is None else f"{self.name}: {words(served)}"
        return text, text


@dataclass(frozen=True)
class Hybrid(Expression):
    """One quantizer along rows, another along columns; a hybrid, and a recipe that keeps state, can
    be neither."""

    rowwise: Expression
    columnwise: Expression

    def check_layers(self, names: Sequence[str]) -> None:
        self.rowwise.check_layers(names)
        self.columnwise.check_layers(names)

    def __post_init__(self) -> None:
        for side in (self.rowwise, self.columnwise):
            if isinstance(side, Hybrid):
                what = "a hybrid inside a hybrid"
                raise side.source.error(
                    side.place, what, expected="one quantizer for one direction"
                )
            if isinstance(side, OfRecipe) and side.recipe.stateful:
                raise side.keeps_state()

    def serve(self, role: QuantizerRole) -> Quantizer:
        rowwise, columnwise = (
            self.rowwise.quantizer(role, "rowwise"),
            self.columnwise.quantizer(role, "columnwise"),
        )
        with self.source.at(self.place):
            return HybridQuantizer(rowwise, columnwise)

    def words(self, role: QuantizerRole) -> tuple[str, str]:
        return self.rowwise.words(role)[0], self.columnwise.words(role)[1]
