"""Measures the loss of a layer's tensor under each recipe, over one or several steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ottava
from ottava.errors import OttavaError, text_of
from ottava.recipes import QuantizerRole, Recipe
from ottava.recipes.mixed import layer_state
from ottava.recipes.registry import list_recipes
from ottava.recipes.step import update_states
from ottava_debug.analysis.report import Noise, Skipped, TensorReport
from ottava_debug.measures import Comparison, exponents


@dataclass(frozen=True)
class Candidate:
    """A recipe to try, and its name."""

    name: str
    recipe: Recipe


def candidates(names: Sequence[str] | None) -> tuple[list[Candidate], list[Skipped]]:
    """The recipes of these names or files, or all installed ones that need no options; and those
    that are left out."""
    if names is not None:
        return [Candidate(name, ottava.get_recipe(name)) for name in dict.fromkeys(names)], []
    recipes: list[Candidate] = []
    unavailable: list[Skipped] = []
    for spec in list_recipes():
        try:
            recipes.append(Candidate(spec.name, ottava.get_recipe(spec.name)))
        except OttavaError as error:
            unavailable.append(Skipped(spec.name, text_of(error)))
    return recipes, unavailable


def repetitions(recipes: Sequence[Candidate], tensors: Sequence[TensorReport]) -> list[Skipped]:
    """The recipes that read recipe files, and without one quantize every tensor as another recipe
    without state does."""
    readers = {spec.name for spec in list_recipes() if spec.file_suffixes}
    stateless = [candidate.name for candidate in recipes if not candidate.recipe.stateful]
    repeats: list[Skipped] = []
    for name in stateless:
        if name not in readers:
            continue
        others = [other for other in stateless if other not in readers]
        same = [other for other in others if all(t.noise[name] == t.noise[other] for t in tensors)]
        if same:
            reason = f"without a file it makes of all tensors what {same[0]} makes"
            repeats.append(Skipped(name, reason))
    return repeats


class Series:
    """One tensor of a layer under all recipes, through all steps."""

    def __init__(self, layer: str, role: str, recipes: Sequence[Candidate]) -> None:
        self._layer, self._role = layer, role
        self._trials = {
            candidate.name: _Trial(layer, role, candidate.recipe) for candidate in recipes
        }
        # The tensor compared with itself, which counts its elements.
        self._own = Comparison()
        self._exponents: Counter[int] = Counter()
        self._values: Any = None

    @torch.no_grad()
    def add(self, values: torch.Tensor) -> None:
        """Add the values of a step, a matrix in high precision."""
        self._values = values.to("meta")
        self._own.add(values, values)
        self._exponents.update(exponents(values))
        for trial in self._trials.values():
            trial.add(values)

    def report(self) -> TensorReport:
        """The report over all steps."""
        return TensorReport(
            layer=self._layer,
            role=self._role,
            shape=tuple(self._values.shape),
            dtype=str(self._values.dtype).removeprefix("torch."),
            count=self._own.count,
            not_finite=self._own.not_finite,
            amax=self._own.amax,
            exponents=dict(sorted(self._exponents.items())),
            noise={name: trial.noise() for name, trial in self._trials.items()},
        )


class _Trial:
    """One recipe, tried on one tensor of one layer."""

    def __init__(self, layer: str, role: str, recipe: Recipe) -> None:
        self._role, self._error = role, ""
        self._rows, self._columns = Comparison(), Comparison()
        self._state: Any = None
        self._recipe, self._roles = recipe, [QuantizerRole("linear", role, layer)]

    def add(self, values: torch.Tensor) -> None:
        """Add the values of a step; an error of the recipe goes into the report."""
        if self._error:
            return
        try:
            self._add(values)
        except Exception as error:
            kind = "" if isinstance(error, OttavaError) else f"{type(error).__name__}: "
            self._error = kind + text_of(error)

    def _add(self, values: torch.Tensor) -> None:
        if self._state is None:
            self._state = layer_state(self._recipe, self._roles)
            if isinstance(self._state, torch.nn.Module):
                self._state.to(values.device)
                # A first step only records, because the initial scales of a training are of no
                # interest.
                self._quantize(values)
        if self._state.stateful:
            update_states([self._state], None)
        quantized = self._quantize(values)
        self._rows.add(values, quantized, columnwise=False)
        if quantized.get_usages()["columnwise"] and not quantized.rowwise_serves_columnwise:
            self._columns.add(values, quantized, columnwise=True)

    def _quantize(self, values: torch.Tensor) -> Any:
        columnwise = self._role not in self._state.wgrad_unquantized
        quantizer = self._state.quantizer(self._role, rowwise=True, columnwise=columnwise)
        return quantizer.quantize(values)

    def noise(self) -> Noise:
        if self._error:
            return Noise(error=self._error)
        columns = self._columns.measures() if self._columns.count else None
        return Noise(self._rows.measures(), columns)
