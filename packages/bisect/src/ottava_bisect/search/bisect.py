"""``bisect``: finds the operands that break a captured step, and the recipe file that fixes it."""

import copy
import time
from collections.abc import Callable, Mapping
from math import inf, nan
from typing import Any

import torch

from ottava.errors import DTypeError, OptionError, OttavaError, UsageError, listed, text_of
from ottava.filesystem import AnyPath
from ottava.recipes import Recipe, get_recipe
from ottava.recipes.base import as_recipe
from ottava_bisect.bundle import Bundle
from ottava_bisect.recipe_data import build, describe
from ottava_bisect.search.culprits import Progress, Search
from ottava_bisect.search.measure import MEASURES
from ottava_bisect.search.operands import Comparison, Operand
from ottava_bisect.search.products import Products
from ottava_bisect.search.replay import Replay
from ottava_bisect.search.report import Finding, Report, reason
from ottava_custom import CustomRecipe
from ottava_custom.files import FileFactory
from ottava_debug.losses import Loss, check_loss
from ottava_debug.recipe_file import Keep, recipe_text

#: The relative distance by which an operand may move the result of its product, without the model.
PRODUCT_TOLERANCE = 0.3
FEWEST_REPLAYS = 10
_PRODUCT_WORDS = (
    "‖z - z₀‖ / ‖z₀‖ of a product's result z, the operand alone quantized; z₀ in high precision"
)
# Sums in another order move an operand by a relative distance far below this.
_ROUNDING = 0.1


def bisect(
    bundle: Bundle | AnyPath,
    model: torch.nn.Module | Callable[[], torch.nn.Module] | None = None,
    *,
    measure: str = "grad-distance",
    loss: Loss | str | None = None,
    recipe: Recipe | str | None = None,
    tolerance: float | None = None,
    max_replays: int = 200,
    progress: Progress | None = None,
) -> Report:
    """Find the operands whose quantization makes a captured step go wrong.

    Args:
        bundle: the file that :class:`ottava_bisect.capture` wrote, or its :class:`Bundle`.
        model: the captured model, or a function that returns it. It is converted if it is not yet,
            and loaded with the captured state. With None each product is measured separately, which
            finds suspects but not their effect on the step.
        measure: ``"loss"``, ``"grad-norm"`` or ``"grad-distance"``, each compared with the step in
            high precision.
        loss: the loss function ``loss(output, targets)``, or the name of a known one. None uses the
            function that was named when the step was captured, or the loss that the model itself
            returns. Without any of these, the backward pass starts from the captured gradients of
            the model's output, and the loss is not measured.
        recipe: another recipe for the replays; required where the captured recipe holds functions
            and the model is not converted.
        tolerance: the largest distance that counts as right; None uses one that healthy FP8 recipes
            stay below.
        max_replays: the largest number of replays, at least 10.
        progress: called after each replay with the number of replays so far, and the number that is
            expected in total.

    Raises:
        OptionError: the measure or the name of the loss is not known, the tolerance is not above 0,
            or ``max_replays`` is below 10.
        DTypeError: the model is not a module.
        CheckpointError: the bundle cannot be read, or the model is not the captured one.
        UsageError: the recipe or a loss function has to be passed.
    """
    _check_options(measure, tolerance, max_replays)
    function = check_loss(loss)
    step = bundle if isinstance(bundle, Bundle) else Bundle.read(bundle)
    own_recipe = None if recipe is None else as_recipe(recipe)
    start = time.perf_counter()
    if model is None:
        report = _without_model(step, own_recipe, tolerance or PRODUCT_TOLERANCE, progress)
    else:
        is_captured = _is_captured(own_recipe, step)
        replay = Replay(step, _model(model), loss=function, recipe=own_recipe, fed=is_captured)
        if measure == "loss" and not replay.knows_loss:
            raise UsageError(
                "the loss of the step is not known",
                expected="a loss function, or a model that gives the loss",
                remedy="give loss=, or --loss for the command",
            )
        search = Search(
            replay, measure, tolerance or MEASURES[measure].tolerance, max_replays, progress
        )
        report = _with_model(step, replay, own_recipe, measure, search, function)
    report.seconds = time.perf_counter() - start
    return report


def _check_options(measure: str, tolerance: float | None, max_replays: int) -> None:
    if measure not in MEASURES:
        raise OptionError(f"measure is {measure!r}", expected=f"one of {', '.join(MEASURES)}")
    if tolerance is not None and not tolerance > 0:
        raise OptionError(f"tolerance is {tolerance!r}", expected="a number above 0")
    if max_replays < FEWEST_REPLAYS:
        raise OptionError(f"max_replays is {max_replays}", expected=f"at least {FEWEST_REPLAYS}")


def _is_captured(recipe: Recipe | None, step: Bundle) -> bool:
    """Whether a recipe is the captured one; a captured recipe that data cannot describe counts as
    the same."""
    if recipe is None:
        return True
    descriptions = [description for description in step.recipes if "words" not in description]
    return all(build(description).same_as(recipe) for description in descriptions)


def _model(model: torch.nn.Module | Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """The model, or the model that a function returns."""
    result: Any = model
    if not isinstance(model, torch.nn.Module) and callable(model):
        result = model()
    if not isinstance(result, torch.nn.Module):
        raise DTypeError(
            f"the model is a {type(result).__name__}",
            expected="a torch.nn.Module, or what makes one",
        )
    return result


def _with_model(
    step: Bundle,
    replay: Replay,
    recipe: Recipe | None,
    measure: str,
    search: Search,
    loss: Loss | None,
) -> Report:
    report = search.run()
    if replay.broken:
        report.findings[:0] = [
            _broken_finding(operand, error, report.before)
            for operand, error in replay.broken.items()
        ]
        report.before, report.value = inf, nan
    report.captured = {"loss": step.loss, "grad-norm": step.grad_norm}.get(measure)
    report.operands = _operand_counts(replay.comparison)
    report.notes += _notes(replay.comparison, report.noisy)
    _put_recipe(report, recipe or _bound(replay), replay.layers)
    if report.recipe_file:
        _verify(report, replay, step, loss, search)
    report.replays = replay.replays
    return report


def _broken_finding(operand: Operand, error: Exception, distance: float) -> Finding:
    """The finding for an operand whose quantizer raises."""
    text = f"its quantizer raises {type(error).__name__}: {text_of(error)}"
    return Finding((operand.layer,), operand.gemm, operand.tensor, text, inf, distance)


def _notes(comparison: Comparison, noisy: tuple[str, ...]) -> list[str]:
    """Notes on how the replay differs from the captured step."""
    notes: list[str] = []
    if comparison.equal < comparison.operands:
        notes.append(
            f"{comparison.operands - comparison.equal} of {comparison.operands} operands arrived "
            f"otherwise than captured, by up to {comparison.difference:.1e} of their size; the "
            f"captured ones took their place"
        )
    if comparison.difference > _ROUNDING:
        notes.append(
            "that is more than the order of sums does: dropout on another device, for example, "
            "differs"
        )
    if comparison.other_bytes:
        operands = listed([str(operand) for operand in comparison.other_bytes])
        notes.append(f"quantized bytes are not the captured ones: {operands}")
    if noisy:
        notes.append(f"gradients that are noise in high precision do not count: {listed(noisy)}")
    return notes


def _without_model(
    step: Bundle, recipe: Recipe | None, tolerance: float, progress: Progress | None
) -> Report:
    products = Products(step, recipe, progress)
    comparison = products.comparison
    report = Report("products", _PRODUCT_WORDS, tolerance, operands=_operand_counts(comparison))
    report.before = max(products.errors.values(), default=0.0)
    for operand, error in sorted(products.errors.items(), key=lambda entry: -entry[1]):
        if error > tolerance:
            report.findings.append(
                Finding(
                    (operand.layer,),
                    operand.gemm,
                    operand.tensor,
                    reason([operand], comparison),
                    error,
                    statistics=comparison.statistics[operand],
                )
            )
        else:
            report.after = max(report.after, error)
    report.notes = [
        "products by themselves: how much a finding matters to the step, the model would tell"
    ]
    if comparison.other_bytes:
        report.notes.append(
            f"{len(comparison.other_bytes)} operands have other quantized bytes than captured"
        )
    if recipe is not None and comparison.stateful:
        report.notes.append(
            "scales of earlier steps, which the step has of its own recipe only, start afresh"
        )
    recipes = [recipe] if recipe is not None else [build(data) for data in step.recipes]
    _put_recipe(report, recipes[0] if len(recipes) == 1 else None, {})
    return report


def _operand_counts(comparison: Comparison) -> dict[str, Any]:
    return {
        "operands": comparison.operands,
        "arrived_equal": comparison.equal,
        "largest_difference": comparison.difference,
        "quantized": comparison.products,
        "other_bytes": [str(operand) for operand in comparison.other_bytes],
    }


# -- the recipe file --


def _bound(replay: Replay) -> Recipe | None:
    """The recipe of the layers; None if they have several."""
    recipes: list[Any] = [layer.recipe for layer in replay.layers.values()]
    first: Recipe = recipes[0]
    return first if all(recipe.same_as(first) for recipe in recipes) else None


def _put_recipe(report: Report, recipe: Recipe | None, layers: Mapping[str, Any]) -> None:
    """Add the recipe file that keeps the findings in high precision to the report, or a note why
    there is none."""
    if not report.findings:
        return
    blamed = [name for finding in report.findings for name in finding.layers]
    # Recipe files match the layers' own names, which convert sets.
    names = {name: getattr(layers.get(name), "name", "") or name for name in blamed}
    if unnamed := [name for name in names if name in layers and not layers[name].name]:
        report.notes.append(
            f"no recipe file finds {listed(unnamed)}, made without a name: ottava.nn.Linear(..., "
            f"name=...)"
        )
    if recipe is None:
        report.notes.append("no recipe file: layers run under several recipes")
        return
    keeps = [
        Keep.of_operand(names[name], finding.reason, finding.gemm, finding.tensor)
        for finding in report.findings
        for name in finding.layers
    ]
    try:
        name, options = _name_and_options(recipe)
        about = (
            f"Keeps in high precision what `ottava bisect` found to break a step, by "
            f"{report.measure}."
        )
        report.recipe_file = recipe_text(keeps, name, options, about=about)
    except OttavaError as error:
        report.notes.append(f"no recipe file: {error.what}")


def _name_and_options(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """The name of a recipe, or the path of its file, and the options that differ from the
    defaults."""
    data = describe(recipe)
    if "file" in data:
        return data["file"], {}
    if "name" not in data:
        raise UsageError("the recipe holds functions, which a file cannot say")
    defaults = describe(get_recipe(data["name"])).get("options", {})
    options = {key: value for key, value in data["options"].items() if value != defaults.get(key)}
    return data["name"], options


def _verify(
    report: Report, replay: Replay, step: Bundle, loss: Loss | None, search: Search
) -> None:
    """Replay the step under the recipe file itself."""
    recipe = CustomRecipe(FileFactory("fixed.yaml", report.recipe_file))
    model = copy.deepcopy(replay.model)
    for name in replay.layers:
        layer = model.get_submodule(name)
        layer.name = layer.name or name
    try:
        again = Replay(step, model, loss=loss, recipe=recipe, fed=False, scales=replay.scales)
    except OttavaError as error:
        report.notes.append(f"the recipe file was not tried: {error.what}")
        return
    replay.replays += again.replays
    distance = MEASURES[report.measure].distance
    report.verified = distance(again.first, search.reference, search.noisy)
    if report.verified > report.tolerance >= report.after:
        report.notes.append("under the recipe file the step is still wrong")
