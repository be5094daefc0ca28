"""``analyze``: how well each recipe would represent the tensors of a checkpoint or a model."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ottava.errors import OptionError, UsageError
from ottava_debug.analysis import sources
from ottava_debug.analysis.measuring import Series, candidates, repeated
from ottava_debug.analysis.report import THRESHOLD, Analysis
from ottava_debug.losses import LOSSES, Loss

#: ``progress(unit, done, total)``; the unit is ``"elements"`` of weights, or ``"steps"``.
Progress = Callable[[str, int, int], None]


def analyze(
    source: Any = None,
    *,
    recipes: Sequence[str] | None = None,
    model: torch.nn.Module | None = None,
    data: Iterable[Any] | None = None,
    loss: Loss | str | None = None,
    steps: int = 3,
    threshold: float = THRESHOLD,
    progress: Progress | None = None,
) -> Analysis:
    """Measure the loss of each weight under each recipe; with ``data`` also the losses of the
    inputs and gradients of a model's layers.

    Weights, inputs and gradients are those of high precision. A recipe with state is first given
    the values of the first step, as in a training that is under way; in later steps its scales come
    from the steps before.

    Args:
        source: a safetensors file, a folder of such files, a file of ``torch.save``, a sharded
            checkpoint, or a state dict; None for the weights of ``model``. Files are mapped, and
            their tensors are read one by one.
        recipes: names of recipes, or paths of recipe files. None tries every installed recipe that
            needs no options, except one that reads recipe files and without a file only repeats
            another recipe.
        model: the model that the weights belong to. Its layers are those that
            :func:`ottava.convert` converts, whatever their names. It is copied, and not changed.
        data: batches; each is a tensor, or a tuple or a mapping of arguments of the model. With
            ``loss`` a batch may be a pair of these and the targets.
        loss: ``"cross_entropy"``, ``"mse"`` or ``loss(output, targets)``; the targets are those of
            the batch, otherwise the batch itself. With None the output of the model is the loss, or
            has an entry ``loss``. Without a loss there are no gradients.
        steps: the largest number of batches that are used.
        threshold: dB; see :data:`ottava_debug.analysis.report.THRESHOLD`.
        progress: called repeatedly; see :data:`Progress`.

    Raises:
        CheckpointError: the source is damaged or cannot be read, does not fit the model, or has
            weights for it that another tool has quantized.
        OptionError: an option has a value that is not allowed, or two options exclude each other.
        UsageError: there is no weight, no recipe or no batch, or a step fails.
        DTypeError: an argument has another type.
        RecipeNotFoundError, PluginError: a named recipe cannot be loaded.
    """
    _check(source, model, data, loss, steps, threshold)
    tried, unavailable = candidates(recipes)
    if not tried:
        raise UsageError(
            "there is no recipe to try", expected="one", remedy="pip install ottava-recipes-current"
        )
    tell: Progress = progress or (lambda what, done, total: None)
    state = None if source is None else sources.read(source)
    if model is None:
        weights, skipped = sources.weights(state or {})
    else:
        # This import is local, because it takes seconds.
        from ottava_debug.analysis import captured

        if state is not None:
            sources.check_values(source, state)
        model = captured.in_high_precision(model, state)
        weights, skipped = captured.weights_of(model)
    total, done = sum(weight.numel() for weight in weights.values()), 0
    tensors = []
    tell("elements", 0, total)
    for layer, weight in weights.items():
        series = Series(layer, "weight", tried)
        series.add(weight)
        tensors.append(series.report())
        done += weight.numel()
        tell("elements", done, total)
    taken = 0
    if model is not None and data is not None:
        found, taken, missed = captured.captured(
            model, data, loss, steps, tried, lambda n: tell("steps", n, steps)
        )
        tensors += [series.report() for series in found]
        skipped += missed
        place = {layer: number for number, layer in enumerate(weights)}
        tensors.sort(key=lambda tensor: place.get(tensor.layer, len(place)))
    named = (
        type(model).__name__
        if source is None
        else "a state dict"
        if isinstance(source, Mapping)
        else str(source)
    )
    repeating = repeated(tried, tensors) if recipes is None else []
    left_out = {skip.name for skip in repeating}
    names = tuple(candidate.name for candidate in tried if candidate.name not in left_out)
    tensors = [tensor.under(names) for tensor in tensors]
    left = tuple(dict.fromkeys(skipped))
    return Analysis(
        named, names, tuple(tensors), left, (*unavailable, *repeating), taken, threshold
    )


def _check(source: Any, model: Any, data: Any, loss: Any, steps: int, threshold: float) -> None:
    if source is None and model is None:
        raise OptionError(
            "neither a source nor a model", expected="a checkpoint, a state dict or a model"
        )
    if data is not None and model is None:
        raise OptionError("data without a model", expected="the model that takes them")
    if isinstance(loss, str) and loss not in LOSSES:
        raise OptionError(
            f"loss is {loss!r}", expected=f"one of {', '.join(LOSSES)}, or a function"
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise OptionError(f"steps is {steps!r}", expected="a positive integer")
    if (
        isinstance(threshold, bool)
        or not isinstance(threshold, (int, float))
        or not math.isfinite(threshold)
    ):
        raise OptionError(f"threshold is {threshold!r}", expected="a number of dB")
