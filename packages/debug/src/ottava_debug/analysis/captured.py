"""Captures the inputs and gradients of a model's layers in a few steps in high precision."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

import ottava
from ottava.cli.references import ANYTHING
from ottava.errors import CheckpointError, DTypeError, UsageError, listed, text_of, translated
from ottava.kernels import HIGH_PRECISION
from ottava.nn import Linear, conversion_report
from ottava.recipes import Recipe
from ottava.tensors import QuantizedTensorStorage
from ottava_custom import CustomRecipe, identity_factory
from ottava_debug.analysis.measuring import Series
from ottava_debug.analysis.report import Skipped, TensorReport
from ottava_debug.losses import Loss, loss_in
from ottava_debug.operands import ROLES
from ottava_debug.products import Inspection, Watch


def in_high_precision(model: torch.nn.Module, state: Mapping[str, Any] | None) -> torch.nn.Module:
    """A copy of a model, whose linear layers can be watched and compute in high precision.

    The values of ``state`` are loaded into the copy, if it is not None.
    """
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"the model is a {type(model).__name__}", expected="a torch.nn.Module")
    own_model = copy.deepcopy(model)
    if state is not None:
        load_values(own_model, state)
    with warnings.catch_warnings(action="ignore"):
        return ottava.convert(own_model, CustomRecipe(identity_factory))


def load_values(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state dict, of which quantized tensors are dequantized.

    Raises:
        CheckpointError: it does not fit the model.
    """
    plain: dict[str, Any] = {}
    for name, value in state.items():
        is_quantized = isinstance(value, QuantizedTensorStorage)
        plain[name] = value.dequantize() if is_quantized else value
    try:
        absent = model.load_state_dict(plain, strict=False).missing_keys
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint does not fit the model: {text_of(error)}",
            expected="a checkpoint of the model",
        ) from error
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if absent_parameters := [name for name in absent if name in parameters]:
        raise CheckpointError(
            f"the checkpoint has nothing for {listed(absent_parameters)}",
            expected="every parameter of the model",
            remedy="--model makes another model",
        )


def weights_of(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], list[Skipped]]:
    """The weights ``[out, in]`` of the layers of :func:`in_high_precision`, and the weights that
    are left out."""
    weights: dict[str, torch.Tensor] = {}
    skipped: list[Skipped] = []
    for name, module in model.named_modules():
        if not isinstance(module, Linear):
            continue
        weight = module.weight.detach()
        if isinstance(weight, QuantizedTensorStorage):
            skipped.append(Skipped(name, f"quantized already, as {type(weight).__name__}"))
        elif weight.dtype not in HIGH_PRECISION or not weight.numel():
            skipped.append(
                Skipped(name, f"its weight is of {weight.dtype} and has {weight.numel()} elements")
            )
        else:
            weights[name] = weight.t() if module.weight_is_transposed else weight
    for weight_report in conversion_report(model).left_out:
        if weight_report.name.rpartition(".")[0] not in weights:
            skipped.append(Skipped(weight_report.name, weight_report.reason))
    if not weights:
        raise UsageError(
            "the model has no linear layer with a weight in high precision",
            expected="nn.Linear, say",
        )
    return weights, skipped


class _Look(Inspection):
    """Passes on the input and the gradient of one pass of a layer, each once."""

    def __init__(self, take: Callable[[str, torch.Tensor], None]) -> None:
        self._take = take
        self._roles = {"weight"}

    def observe(
        self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None
    ) -> None:
        role = ROLES.get(tensor)
        if role is not None and role not in self._roles:
            self._roles.add(role)
            self._take(role, values)


class _Gatherer:
    """Gathers the inputs and gradients of a model's layers, a series for each."""

    def __init__(self, names: Mapping[Any, str], recipes: Mapping[str, Recipe]) -> None:
        self.series: dict[tuple[str, str], Series] = {}
        self._names = names
        self._recipes = recipes
        self._gradients: list[tuple[str, torch.Tensor]] = []

    def inspection(self, layer: Any) -> Inspection | None:
        """The inspection of a layer; None for one that is not the model's."""
        name = self._names.get(layer)
        return None if name is None else _Look(partial(self._take, name))

    def _take(self, name: str, role: str, values: torch.Tensor) -> None:
        if role == "grad_output":
            # The values are added after the backward pass, because a recipe with state cannot begin
            # a step inside it.
            self._gradients.append((name, values))
        else:
            self._add(name, role, values)

    def end_step(self) -> None:
        """Add the gradients of a step, after its backward pass."""
        while self._gradients:
            name, values = self._gradients.pop(0)
            self._add(name, "grad_output", values)

    def _add(self, name: str, role: str, values: torch.Tensor) -> None:
        if not values.numel():
            return
        if (name, role) not in self.series:
            self.series[name, role] = Series(name, role, self._recipes)
        self.series[name, role].add(values)


def capture(
    model: torch.nn.Module,
    batches: Iterable[Any],
    loss: Loss | None,
    steps: int,
    recipes: Mapping[str, Recipe],
    progress: Callable[[int], None],
) -> tuple[list[TensorReport], int, list[Skipped]]:
    """Run up to ``steps`` steps of the model; the inputs and gradients, the number of steps, and
    what was not captured."""
    names = {module: name for name, module in model.named_modules() if isinstance(module, Linear)}
    gatherer = _Gatherer(names, recipes)
    step_count, has_backward = 0, False
    with torch.enable_grad():
        for batch in first_of(batches, steps):
            with Watch(gatherer.inspection):
                has_backward |= _step(model, batch, loss)
            gatherer.end_step()
            step_count += 1
            progress(step_count)
    if not step_count:
        raise UsageError("the data have no batch", expected="an iterable of at least one")
    series = gatherer.series
    skipped = [
        Skipped(name, "not called in the steps")
        for name in names.values()
        if (name, "input") not in series
    ]
    if not has_backward:
        skipped.append(
            Skipped("gradients", "the model gives no loss, and no loss function was named")
        )
    return [each.report() for each in series.values()], step_count, skipped


def first_of(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """The first batches, at most ``steps``.

    Raises:
        UsageError: they are not iterable, or fail.
    """
    with translated("the data fail", "an iterable of batches", to=UsageError, of=ANYTHING):
        yield from itertools.islice(batches, steps)


def _step(model: torch.nn.Module, batch: Any, loss: Loss | None) -> bool:
    """Run a forward pass, and a backward pass if there is a loss; returns whether there was one."""
    is_pair = loss is not None and isinstance(batch, (tuple, list)) and len(batch) == 2
    inputs, targets = batch if is_pair else (batch, batch)
    try:
        output = call_model(model, inputs)
        value = loss_in(output) if loss is None else loss(output, targets)
        if value is not None:
            value.backward()
    except ANYTHING as error:
        raise UsageError(
            f"a step fails: {type(error).__name__}: {text_of(error)}",
            expected="batches that the model and the loss take",
        ) from error
    finally:
        model.zero_grad(set_to_none=True)
    return value is not None


def call_model(model: torch.nn.Module, inputs: Any) -> Any:
    """The output of the model for inputs: one argument, a tuple of them, or a mapping."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)
