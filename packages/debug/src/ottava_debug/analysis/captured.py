"""Captures the inputs and gradients of a model's layers in a few steps in high precision."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import ottava
from ottava.errors import CheckpointError, DTypeError, UsageError, listed, text_of, translated
from ottava.kernels import HIGH_PRECISION
from ottava.nn import Linear, conversion_report
from ottava.tensors import QuantizedTensorStorage
from ottava_custom import CustomRecipe, identity_factory
from ottava_debug.analysis.measuring import Candidate, Series
from ottava_debug.analysis.report import Skipped
from ottava_debug.losses import LOSSES, Loss, loss_in
from ottava_debug.products import ROLES, Inspection, Watch
from ottava_debug.references import ANYTHING


def in_high_precision(model: torch.nn.Module, state: Mapping[str, Any] | None) -> torch.nn.Module:
    """A copy of a model, whose linear layers can be watched and compute in high precision.

    The values of ``state`` are loaded into the copy, if it is not None.

    Raises:
        DTypeError: ``model`` is not a module.
        CheckpointError: a parameter is missing from ``state``, or has another shape.
    """
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"the model is a {type(model).__name__}", expected="a torch.nn.Module")
    copied = copy.deepcopy(model)
    if state is not None:
        _load(copied, state)
    with warnings.catch_warnings(action="ignore"):
        return ottava.convert(copied, CustomRecipe(identity_factory))


def _load(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    plain = {
        n: v.dequantize() if isinstance(v, QuantizedTensorStorage) else v for n, v in state.items()
    }
    try:
        missing = model.load_state_dict(plain, strict=False).missing_keys
    except RuntimeError as error:
        what = f"the checkpoint does not fit the model: {text_of(error)}"
        raise CheckpointError(what, expected="a checkpoint of the model") from error
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if lacking := [name for name in missing if name in parameters]:
        what = f"the checkpoint has nothing for {listed(lacking)}"
        raise CheckpointError(
            what, expected="every parameter of the model", remedy="--model makes another model"
        )


def weights_of(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], list[Skipped]]:
    """The weights ``[out, in]`` of the layers of :func:`in_high_precision`, and the weights that
    are left out.

    Raises:
        UsageError: there is no weight in high precision.
    """
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
    left = (
        weight
        for weight in conversion_report(model).left_out
        if weight.name.rpartition(".")[0] not in weights
    )
    skipped += [Skipped(weight.name, weight.reason) for weight in left]
    if not weights:
        raise UsageError(
            "the model has no linear layer with a weight in high precision",
            expected="nn.Linear, say",
        )
    return weights, skipped


class _Look(Inspection):
    """Passes on the input and the gradient of one pass of a layer, each once."""

    def __init__(self, take: Callable[[str, torch.Tensor], None]) -> None:
        self._take, self._taken = take, {"weight"}

    def observe(
        self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None
    ) -> None:
        role = ROLES.get(tensor)
        if role is not None and role not in self._taken:
            self._taken.add(role)
            self._take(role, values)


def captured(
    model: torch.nn.Module,
    batches: Iterable[Any],
    loss: Loss | str | None,
    steps: int,
    recipes: Sequence[Candidate],
    progress: Callable[[int], None],
) -> tuple[list[Series], int, list[Skipped]]:
    """Run up to ``steps`` steps of the model.

    Returns:
        The series of inputs and gradients of the layers, the number of steps, and the layers or
        gradients that were not captured.

    Raises:
        UsageError: there is no batch, or the model or the loss fails.
    """
    names = {module: name for name, module in model.named_modules() if isinstance(module, Linear)}
    series: dict[tuple[str, str], Series] = {}

    gradients: list[tuple[str, str, torch.Tensor]] = []

    def add(name: str, role: str, values: torch.Tensor) -> None:
        if values.numel():
            if (name, role) not in series:
                series[name, role] = Series(name, role, recipes)
            series[name, role].add(values)

    def take(name: str, role: str, values: torch.Tensor) -> None:
        if role == "grad_output":
            # The values are added after the backward pass, because a recipe with state cannot begin
            # a step inside it.
            gradients.append((name, role, values))
        else:
            add(name, role, values)

    def watcher(layer: Any) -> Inspection | None:
        name = names.get(layer)
        return None if name is None else _Look(partial(take, name))

    done, backward = 0, False
    with torch.enable_grad():
        for done, batch in enumerate(_taken(batches, steps), 1):
            with Watch(watcher):
                backward |= _step(model, batch, loss)
            while gradients:
                add(*gradients.pop(0))
            progress(done)
    if not done:
        raise UsageError("the data have no batch", expected="an iterable of at least one")
    order = {name: place for place, name in enumerate(names.values())}
    found = [
        series[key]
        for key in sorted(series, key=lambda key: (order[key[0]], key[1] == "grad_output"))
    ]
    skipped = [
        Skipped(name, "not called in the steps") for name in order if (name, "input") not in series
    ]
    if not backward:
        skipped.append(
            Skipped("gradients", "the model gives no loss, and no loss function was named")
        )
    return found, done, skipped


def _taken(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    with translated("the data fail", "an iterable of batches", to=UsageError, of=ANYTHING):
        yield from itertools.islice(batches, steps)


def _step(model: torch.nn.Module, batch: Any, loss: Loss | str | None) -> bool:
    """Run a forward pass, and a backward pass if there is a loss; returns whether there was one."""
    function = LOSSES[loss] if isinstance(loss, str) else loss
    inputs, targets = batch if function is not None and _is_pair(batch) else (batch, batch)
    try:
        output = _called(model, inputs)
        value = loss_in(output) if function is None else function(output, targets)
        if value is not None:
            value.backward()
    except ANYTHING as error:
        what = f"a step fails: {type(error).__name__}: {text_of(error)}"
        raise UsageError(what, expected="batches that the model and the loss take") from error
    finally:
        model.zero_grad(set_to_none=True)
    return value is not None


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _called(model: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
