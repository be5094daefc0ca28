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
from ottava_custom import CustomRecipe
from ottava_custom.files import FileFactory
from ottava_debug.bundle import Bundle
from ottava_debug.losses import LOSSES, Loss
from ottava_debug.recipe_data import build, describe
from ottava_debug.recipe_file import Keep, recipe_text
from ottava_debug.search.culprits import Progress, Search
from ottava_debug.search.measure import MEASURES
from ottava_debug.search.operands import Comparison
from ottava_debug.search.products import Products
from ottava_debug.search.replay import Replay
from ottava_debug.search.report import Finding, Report, reason

#: The relative distance by which an operand may move the result of its product, without the model.
PRODUCT_TOLERANCE = 0.3
FEWEST_REPLAYS = 10
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
        bundle: the file that :func:`ottava_debug.capture` wrote, or its :class:`Bundle`.
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
    if measure not in MEASURES:
        raise OptionError(f"measure is {measure!r}", expected=f"one of {', '.join(MEASURES)}")
    if tolerance is not None and not tolerance > 0:
        raise OptionError(f"tolerance is {tolerance!r}", expected="a number above 0")
    if max_replays < FEWEST_REPLAYS:
        raise OptionError(f"max_replays is {max_replays}", expected=f"at least {FEWEST_REPLAYS}")
    if isinstance(loss, str) and loss not in LOSSES:
        raise OptionError(
            f"loss is {loss!r}", expected=f"one of {', '.join(LOSSES)}, or a function"
        )
    step = bundle if isinstance(bundle, Bundle) else Bundle.read(bundle)
    given = None if recipe is None else as_recipe(recipe)
    start = time.perf_counter()
    if model is None:
        report = _without_model(step, given, tolerance or PRODUCT_TOLERANCE, progress)
    else:
        function = LOSSES[loss] if isinstance(loss, str) else loss
        replay = Replay(
            step, _made(model), loss=function, recipe=given, fed=_is_captured(given, step)
        )
        if measure == "loss" and not replay.knows_loss:
            what, remedy = (
                "the loss of the step is not known",
                "give loss=, or --loss for the command",
            )
            raise UsageError(
                what, expected="a loss function, or a model that gives the loss", remedy=remedy
            )
        search = Search(
            replay, measure, tolerance or MEASURES[measure].tolerance, max_replays, progress
        )
        report = _with_model(step, replay, given, measure, search, function)
    report.seconds = time.perf_counter() - start
    return report


def _is_captured(given: Recipe | None, step: Bundle) -> bool:
    """Whether a recipe is the captured one; a captured recipe that data cannot describe counts as
    the same."""
    return given is None or all(
        "words" in said or build(said).same_as(given) for said in step.recipes
    )


def _made(model: Any) -> torch.nn.Module:
    made = model if isinstance(model, torch.nn.Module) else model() if callable(model) else model
    if not isinstance(made, torch.nn.Module):
        raise DTypeError(
            f"the model is a {type(made).__name__}", expected="a torch.nn.Module, or what makes one"
        )
    return made


def _with_model(
    step: Bundle,
    replay: Replay,
    recipe: Recipe | None,
    measure: str,
    search: Search,
    loss: Loss | None,
) -> Report:
    seen, report = replay.comparison, search.run()
    if replay.broken:
        report.findings[:0] = [
            Finding(
                (o.layer,),
                o.gemm,
                o.tensor,
                f"its quantizer raises {type(e).__name__}: {text_of(e)}",
                inf,
                report.before,
            )
            for o, e in replay.broken.items()
        ]
        report.before, report.value = inf, nan
    report.captured = {"loss": step.loss, "grad-norm": step.grad_norm}.get(measure)
    report.operands = _told(seen)
    if seen.equal < seen.operands:
        what = (
            f"{seen.operands - seen.equal} of {seen.operands} operands arrived otherwise than "
            f"captured, by up to"
        )
        report.notes.append(
            f"{what} {seen.difference:.1e} of their size; the captured ones took their place"
        )
    if seen.difference > _ROUNDING:
        report.notes.append(
            "that is more than the order of sums does: dropout on another device, for example, "
            "differs"
        )
    if seen.other_bytes:
        report.notes.append(
            f"quantized bytes are not the captured ones: {listed([*map(str, seen.other_bytes)])}"
        )
    if report.noisy:
        report.notes.append(
            f"gradients that are noise in high precision do not count: {listed(report.noisy)}"
        )
    _put_recipe(report, recipe or _bound(replay), replay.layers)
    if report.recipe_file:
        _verify(report, replay, step, loss, search)
    report.replays = replay.replays
    return report


def _without_model(
    step: Bundle, given: Recipe | None, tolerance: float, progress: Progress | None
) -> Report:
    made = Products(step, given, progress)
    words = (
        "‖z - z₀‖ / ‖z₀‖ of a product's result z, the operand alone quantized; z₀ in high precision"
    )
    report = Report("products", words, tolerance, operands=_told(made.comparison))
    report.before = max(made.errors.values(), default=0.0)
    for operand, error in sorted(made.errors.items(), key=lambda entry: -entry[1]):
        if error > tolerance:
            why = reason([operand], made.comparison)
            statistics = made.comparison.statistics[operand]
            report.findings.append(
                Finding((operand.layer,), *operand[1:], why, error, statistics=statistics)
            )
        else:
            report.after = max(report.after, error)
    report.notes = [
        "products by themselves: how much a finding matters to the step, the model would tell"
    ]
    if made.comparison.other_bytes:
        report.notes.append(
            f"{len(made.comparison.other_bytes)} operands have other quantized bytes than captured"
        )
    if given is not None and made.comparison.stateful:
        report.notes.append(
            "scales of earlier steps, which the step has of its own recipe only, start afresh"
        )
    recipes = [given] if given is not None else [build(said) for said in step.recipes]
    _put_recipe(report, recipes[0] if len(recipes) == 1 else None, {})
    return report


def _told(seen: Comparison) -> dict[str, Any]:
    return {
        "operands": seen.operands,
        "arrived_equal": seen.equal,
        "largest_difference": seen.difference,
        "quantized": seen.products,
        "other_bytes": [str(operand) for operand in seen.other_bytes],
    }


# -- the recipe file --


def _bound(replay: Replay) -> Recipe | None:
    """The recipe of the layers; None if they have several."""
    recipes: list[Any] = [layer.recipe for layer in replay.layers.values()]
    return recipes[0] if all(recipe.same_as(recipes[0]) for recipe in recipes) else None


def _put_recipe(report: Report, recipe: Recipe | None, layers: Mapping[str, Any]) -> None:
    """Add the recipe file that keeps the findings in high precision to the report, or a note why
    there is none."""
    if not report.findings:
        return
    # Recipe files match the layers' own names, which convert sets.
    names = {
        name: getattr(layers.get(name), "name", "") or name
        for f in report.findings
        for name in f.layers
    }
    if unnamed := [name for name in names if name in layers and not layers[name].name]:
        report.notes.append(
            f"no recipe file finds {listed(unnamed)}, made without a name: ottava.nn.Linear(..., "
            f"name=...)"
        )
    if recipe is None:
        report.notes.append("no recipe file: layers run under several recipes")
        return
    keeps = [
        Keep.of_operand(names[name], f.reason, f.gemm, f.tensor)
        for f in report.findings
        for name in f.layers
    ]
    try:
        name, options = _named(recipe)
        about = (
            f"Keeps in high precision what `ottava bisect` found to break a step, by "
            f"{report.measure}."
        )
        report.recipe_file = recipe_text(keeps, name, options, about=about)
    except OttavaError as error:
        report.notes.append(f"no recipe file: {error.what}")


def _named(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """The name of a recipe, or the path of its file, and the options that differ from the
    defaults."""
    said = describe(recipe)
    if "file" in said:
        return said["file"], {}
    if "name" not in said:
        raise UsageError("the recipe holds functions, which a file cannot say")
    default = describe(get_recipe(said["name"])).get("options", {})
    return said["name"], {
        key: value for key, value in said["options"].items() if value != default.get(key)
    }


def _verify(
    report: Report, replay: Replay, step: Bundle, loss: Loss | None, search: Search
) -> None:
    """Replay the step under the recipe file itself."""
    fixed, measure = (
        CustomRecipe(FileFactory("fixed.yaml", report.recipe_file)),
        MEASURES[report.measure],
    )
    model = copy.deepcopy(replay.model)
    for name in replay.layers:
        layer = model.get_submodule(name)
        layer.name = layer.name or name
    try:
        again = Replay(step, model, loss=loss, recipe=fixed, fed=False, scales=replay.scales)
    except OttavaError as error:
        report.notes.append(f"the recipe file was not tried: {error.what}")
        return
    replay.replays += again.replays
    report.verified = measure.distance(again.first, search.reference, search.noisy)
    if report.verified > report.tolerance >= report.after:
        report.notes.append("under the recipe file the step is still wrong")
