"""``analyze``: how well each recipe would represent the tensors of a checkpoint or a model."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ottava.errors import OptionError, UsageError
from ottava.recipes import Recipe
from ottava_debug.analysis import sources
from ottava_debug.analysis.measuring import Series, candidates, repetitions
from ottava_debug.analysis.report import THRESHOLD, Analysis, Skipped, TensorReport
from ottava_debug.losses import Loss, check_loss

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
    _check(source, model, data, steps, threshold)
    function = check_loss(loss)
    trials, unavailable = candidates(recipes)
    if not trials:
        raise UsageError(
            "there is no recipe to try", expected="one", remedy="pip install ottava-recipes-current"
        )
    report: Progress = progress or (lambda unit, done, total: None)
    subject = _subject(source, model)
    tensors = _weight_reports(subject.weights, trials, report)
    skipped = subject.skipped
    step_count = 0
    if subject.model is not None and data is not None:
        # This import is local, because it takes seconds.
        from ottava_debug.analysis.captured import capture

        captured, step_count, missed = capture(
            subject.model, data, function, steps, trials, lambda done: report("steps", done, steps)
        )
        place = {name: number for number, (name, _) in enumerate(subject.model.named_modules())}
        # The weight of a layer comes first, then its input and its gradient.
        tensors = sorted(tensors + captured, key=lambda tensor: place[tensor.layer])
        skipped = skipped + missed
    repeats = repetitions(trials, tensors) if recipes is None else []
    repeat_names = {skip.name for skip in repeats}
    names = tuple(name for name in trials if name not in repeat_names)
    return Analysis(
        subject.name,
        names,
        tuple(tensor.under(names) for tensor in tensors),
        tuple(dict.fromkeys(skipped)),
        (*unavailable, *repeats),
        step_count,
        threshold,
    )


class _Subject(NamedTuple):
    """What is analyzed: weights ``[out, in]`` by layers, what is left out, and a copy of the model
    if there is one."""

    name: str
    weights: Mapping[str, torch.Tensor]
    skipped: list[Skipped]
    model: torch.nn.Module | None = None


def _subject(source: Any, model: torch.nn.Module | None) -> _Subject:
    name = "a state dict" if isinstance(source, Mapping) else str(source)
    state = None if source is None else sources.read(source)
    if model is None:
        return _Subject(name, *sources.weights(state or {}))
    # This import is local, because it takes seconds.
    from ottava_debug.analysis import captured

    if state is None:
        name = type(model).__name__
    else:
        sources.check_values(source, state)
    copy = captured.in_high_precision(model, state)
    return _Subject(name, *captured.weights_of(copy), copy)


def _weight_reports(
    weights: Mapping[str, torch.Tensor], trials: Mapping[str, Recipe], report: Progress
) -> list[TensorReport]:
    total = sum(weight.numel() for weight in weights.values())
    count = 0
    tensors: list[TensorReport] = []
    report("elements", 0, total)
    for layer, weight in weights.items():
        series = Series(layer, "weight", trials)
        series.add(weight)
        tensors.append(series.report())
        count += weight.numel()
        report("elements", count, total)
    return tensors


def _check(source: Any, model: Any, data: Any, steps: int, threshold: float) -> None:
    if source is None and model is None:
        raise OptionError(
            "neither a source nor a model", expected="a checkpoint, a state dict or a model"
        )
    if data is not None and model is None:
        raise OptionError("data without a model", expected="the model that takes them")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise OptionError(f"steps is {steps!r}", expected="a positive integer")
    is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not is_number or not math.isfinite(threshold):
        raise OptionError(f"threshold is {threshold!r}", expected="a number of dB")
