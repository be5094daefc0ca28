"""Measures the loss of a layer's tensor under each recipe, over one or several steps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import ottava
from ottava.errors import OttavaError, text_of
from ottava.recipes import QuantizerRole, Recipe
from ottava.recipes.backward import HIGH_PRECISION, QUANTIZED
from ottava.recipes.of_layer import layer_state
from ottava.recipes.registry import list_recipes
from ottava.recipes.step import update_states
from ottava_debug.analysis.report import Noise, Skipped, TensorReport
from ottava_debug.measures import exponents, loss_sums, measures_of
from ottava_debug.sums import Sums, add

# Tensor type -> the product that reads its columns.
_READER_OF_COLUMNS = {"input": "wgrad", "weight": "dgrad", "grad_output": "wgrad"}


def candidates(names: Sequence[str] | None) -> tuple[dict[str, Recipe], list[Skipped]]:
    """The recipes of these names or files, or all installed ones that need no options; and those
    that are left out."""
    if names is not None:
        return {name: ottava.get_recipe(name) for name in names}, []
    recipes: dict[str, Recipe] = {}
    unavailable: list[Skipped] = []
    for spec in list_recipes():
        try:
            recipes[spec.name] = ottava.get_recipe(spec.name)
        except OttavaError as error:
            unavailable.append(Skipped(spec.name, text_of(error)))
    return recipes, unavailable


def repetitions(recipes: Mapping[str, Recipe], tensors: Sequence[TensorReport]) -> list[Skipped]:
    """The recipes that read recipe files, and without one quantize every tensor as another recipe
    without state does."""
    readers = {spec.name for spec in list_recipes() if spec.file_suffixes}
    stateless = [name for name, recipe in recipes.items() if not recipe.stateful]
    others = [name for name in stateless if name not in readers]
    repeats: list[Skipped] = []
    for name in (name for name in stateless if name in readers):
        same = [other for other in others if all(t.noise[name] == t.noise[other] for t in tensors)]
        if same:
            reason = f"without a file it makes of all tensors what {same[0]} makes"
            repeats.append(Skipped(name, reason))
    return repeats


class Series:
    """One tensor of a layer under all recipes, through all steps."""

    def __init__(self, layer: str, role: str, recipes: Mapping[str, Recipe]) -> None:
        self.layer = layer
        self._role = QuantizerRole("linear", role, layer)
        self._trials = {name: _Trial(self._role, recipe) for name, recipe in recipes.items()}
        # The tensor compared with itself, which counts its elements.
        self._own: Sums = {}
        self._exponents: Counter[int] = Counter()
        self._values: Any = None

    @torch.no_grad()
    def add(self, values: torch.Tensor) -> None:
        """Add the values of a step, a matrix in high precision."""
        self._values = values.to("meta")
        add(self._own, loss_sums(values, values))
        self._exponents.update(exponents(values))
        for trial in self._trials.values():
            trial.add(values)

    def report(self) -> TensorReport:
        """The report over all steps."""
        own = measures_of(self._own)
        return TensorReport(
            layer=self.layer,
            role=self._role.tensor_type,
            shape=tuple(self._values.shape),
            dtype=str(self._values.dtype).removeprefix("torch."),
            count=own.count,
            not_finite=own.not_finite,
            amax=own.amax,
            exponents=dict(sorted(self._exponents.items())),
            noise={name: trial.noise() for name, trial in self._trials.items()},
        )


class _Trial:
    """One recipe, tried on one tensor of one layer."""

    def __init__(self, role: QuantizerRole, recipe: Recipe) -> None:
        self._role = role
        self._recipe = recipe
        self._state: Any = None
        self._rows: Sums = {}
        self._columns: Sums = {}
        self._error = ""

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
            self._state = layer_state(self._recipe, [self._role])
            if isinstance(self._state, torch.nn.Module):
                self._state.to(values.device)
                # A first step only records, because the initial scales of a training are of no
                # interest.
                self._quantize(values)
        if self._state.stateful:
            update_states([self._state], None)
        reads = self._state.backward_reads
        if self._role.is_gradient and reads["dgrad", self._role.tensor_type] == HIGH_PRECISION:
            add(self._rows, loss_sums(values, values))
            return
        quantized = self._quantize(values)
        add(self._rows, loss_sums(values, quantized, columnwise=False))
        if quantized.get_usages()["columnwise"] and not quantized.rowwise_serves_columnwise:
            add(self._columns, loss_sums(values, quantized, columnwise=True))

    def _quantize(self, values: torch.Tensor) -> Any:
        role = self._role.tensor_type
        columnwise = self._state.backward_reads[_READER_OF_COLUMNS[role], role] == QUANTIZED
        return self._state.quantizer(role, rowwise=True, columnwise=columnwise).quantize(values)

    def noise(self) -> Noise:
        if self._error:
            return Noise(error=self._error)
        columns = measures_of(self._columns) if self._columns else None
        return Noise(measures_of(self._rows), columns)
