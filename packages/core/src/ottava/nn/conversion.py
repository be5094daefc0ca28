"""``convert``: swap the linear modules of a model for Ottava's and bind a recipe to them."""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TypeVar

import torch

from ottava.errors import DTypeError, OptionError, UsageError, check_takes, listed
from ottava.nn.converted import add_step
from ottava.nn.converters import NO_FUNCTIONS, is_convertible, layer_or_reason, refusal
from ottava.nn.linear import Linear
from ottava.nn.replaced import swap, watch
from ottava.nn.report import (
    KEEPS_OPERANDS,
    LEFT_ALONE,
    ConversionReport,
    ProductWeight,
    conversion_report,
)
from ottava.nn.reverting import note_original
from ottava.nn.weight import quantized_parameter
from ottava.recipes.base import Recipe, as_recipe, asked_once
from ottava.recipes.patterns import suggestion
from ottava.recipes.state import RecipeState
from ottava.tensors import QuantizedTensor
from ottava.tensors.declaration import check_flag
from ottava.torch_private import is_distributed

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
Predicate = Callable[[str, torch.nn.Module], bool]
Filter = str | Iterable[str] | Predicate

#: A pattern for the output heads of a model, which may have none: those that
#: ``get_output_embeddings()`` returns, modules that share a weight with an embedding, and modules
#: with usual names. These are ``lm_head`` and the like, outside of stacks, whose modules have
#: numbers for names; and ``head``, ``output``, ``fc`` and the like, directly in the model or its
#: wrapper.
HEADS = "ottava.HEADS"
_OUTSIDE_STACKS = r"((?!\d+\.)[^.]*\.)*"
_HEAD_ANYWHERE = (
    r"((lm|mlm|cls|classification|value|v|policy|reward)_head"
    r"|classifier|embed_out|unembed|qa_outputs|vocab_proj)"
)
_WRAPPERS = r"((_orig_mod|base_model|model|module|net)\.)*"
_HEAD_OF_MODEL = r"(heads?|score|cls|fc|proj_out|(to_)?logits|output(_layer|_proj|_projection)?)"
_HEAD_NAME = re.compile(f"{_OUTSIDE_STACKS}{_HEAD_ANYWHERE}|{_WRAPPERS}{_HEAD_OF_MODEL}")

# The reasons of linear modules that the user left alone.
_EXCLUDED, _NOT_INCLUDED = "in exclude", "not in include"


def convert(
    model: ModelT,
    recipe: Recipe | str | os.PathLike[str],
    *,
    include: Filter | None = None,
    exclude: Filter | None = None,
    primary: bool = False,
    keep_initial_values: bool = False,
) -> ModelT:
    """Swap the linear modules of ``model`` for :class:`ottava.nn.Linear`, bind ``recipe`` to them,
    return the model.

    Linear modules are those of ``nn.Linear``, of the ``Conv1D`` of Transformers, and of the classes
    that :func:`register_converter` was called for. Parameters stay the same objects: tied weights
    stay tied and optimizers stay valid. A module that is in several places is replaced by one new
    module in all of them. If the model itself is a linear module, the new module is returned.

    If less than 90 % of the weights of products run quantized afterwards, a ``UserWarning`` names
    the largest others; those in ``exclude`` do not count. :func:`conversion_report` lists all
    layers and weights, and :func:`revert` undoes the conversion.

    Args:
        model: swapped in place.
        recipe: a recipe, or the name of an installed one.
        include: only these: patterns (``fnmatch``) of the qualified names of modules, or of modules
            that they are in; ``ottava.HEADS``; or ``predicate(name, module)``.
        exclude: not these, in the same forms; it wins over ``include``.
        primary: keep the weights quantized only, as :func:`quantized_model_init` does. They become
            new parameters, in all modules that share them: make optimizers afterwards. The first
            step of an optimizer that was made before gives a ``UserWarning``. A weight that is
            stored transposed, or shared with a linear module that is left alone, stays in high
            precision, with a ``UserWarning``.
        keep_initial_values: with ``primary``, have ``weight.get_high_precision_init_val()`` give
            the values in high precision.

    Raises:
        DTypeError: ``model`` is no module, ``recipe`` is no recipe, a filter is neither patterns
            nor a predicate, or a converter returned no layer around the module's parameters.
        RecipeNotFoundError: no recipe of this name is installed.
        OptionError: a pattern of a filter matches no module, or a pattern of a recipe file matches
            no layer; or a flag is no bool.
        UsageError: with ``primary``, weights are sharded already.

    The model is as it was before when one of these is raised.
    """
    _check_arguments(model, primary, keep_initial_values)
    bound = as_recipe(recipe)
    bound.check_layers(_convertible_names(model))
    is_included = predicate_of(model, include, "include")
    is_excluded = predicate_of(model, exclude, "exclude")
    layers, left_alone = _layers(model, is_included, is_excluded)
    excluded_names: set[str] = set()
    # A predicate of the user is asked about linear modules only.
    if is_excluded is not None and not callable(exclude):
        excluded_names = _matched_names(model, is_excluded)
    # All states and weights are made before the first change, because a quantizer factory may
    # raise.
    with asked_once():
        states = {layer: layer._binding.prepare(layer, bound) for layer in layers.values()}
        weights: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        if primary:
            weights = _primary_weights(model, layers, bound, keep_initial_values)

    _bind(layers, bound, states)
    _note_reasons([*model.modules(), *layers.values()], left_alone)
    converted = _swap_layers(model, layers)
    _swap_weights(converted, layers.values(), weights)
    if any(state.stateful for state in states.values()):
        step = add_step(converted)
        for layer in layers.values():
            layer._binding.step = step
    # An empty reason says that this is a converted model.
    converted.__dict__.setdefault(LEFT_ALONE, "")
    _warn_of_high_precision(conversion_report(converted), excluded_names)
    return converted


def _check_arguments(model: object, primary: object, keep_initial_values: object) -> None:
    """Raise a DTypeError or an OptionError for arguments of ``convert`` of wrong kinds."""
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
    check_flag("primary", primary)
    check_flag("keep_initial_values", keep_initial_values)
    if keep_initial_values and not primary:
        raise OptionError("keep_initial_values without primary", remedy="pass primary=True, too")


# -- which modules --


def _convertible_names(model: torch.nn.Module) -> list[str]:
    """All qualified names of the linear modules, in order."""
    modules = model.named_modules(remove_duplicate=False)
    return [name for name, module in modules if is_convertible(module)]


def _layers(
    model: torch.nn.Module, is_included: Predicate | None, is_excluded: Predicate | None
) -> tuple[dict[torch.nn.Module, Linear], dict[torch.nn.Module, str]]:
    """Module -> the layer that takes its place, and module -> the reason to leave it alone.

    Modules that :func:`refusal` is against are in neither, because a report asks it again.
    """
    names: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_convertible(module):
            names.setdefault(module, []).append(name)
    layers: dict[torch.nn.Module, Linear] = {}
    left_alone: dict[torch.nn.Module, str] = {}
    for module, aliases in names.items():
        if is_excluded and any(is_excluded(alias, module) for alias in aliases):
            left_alone[module] = _EXCLUDED
            continue
        if refusal(module):
            continue
        if is_included and not any(is_included(alias, module) for alias in aliases):
            left_alone[module] = _NOT_INCLUDED
            continue
        layer = layer_or_reason(module, aliases[0])
        if isinstance(layer, Linear):
            layers[module] = layer
        else:
            left_alone[module] = layer
    return layers, left_alone


def _matched_names(model: torch.nn.Module, predicate: Predicate) -> set[str]:
    """Qualified names of the modules, of any class, for which a predicate says yes."""
    modules = model.named_modules(remove_duplicate=False)
    return {name for name, module in modules if predicate(name, module)}


def predicate_of(model: torch.nn.Module, choice: Filter | None, argument: str) -> Predicate | None:
    """The predicate that a filter stands for; None for no filter.

    Args:
        argument: the name of the argument of ``convert`` that has the filter.

    Raises:
        DTypeError: the filter is neither patterns nor a predicate.
        OptionError: a pattern matches no module, which is a mistake.
    """
    if choice is None:
        return None
    if callable(choice):
        expected = "name patterns or predicate(name, module)"
        check_takes(choice, f"the predicate {argument}", expected, "", model, refused=NO_FUNCTIONS)
        return choice
    patterns: Iterable[object] = [choice]
    if isinstance(choice, Iterable) and not isinstance(choice, str):
        patterns = choice
    matched: set[str] = set()
    for pattern in patterns:
        matched |= _names_of_pattern(model, pattern, argument)

    def is_matched(name: str, module: torch.nn.Module) -> bool:
        # A pattern that matches a container matches all modules in it.
        paths = accumulate(name.split("."), "{}.{}".format)
        return any(path in matched for path in paths)

    return is_matched


def _names_of_pattern(model: torch.nn.Module, pattern: object, argument: str) -> set[str]:
    """The qualified names that a pattern of a filter matches."""
    if pattern == HEADS:
        return _head_names(model)
    if not isinstance(pattern, str):
        raise DTypeError(
            f"{argument} has a {type(pattern).__name__}", expected="name patterns or a predicate"
        )
    # A model has the name "", which stands for a layer only where the model is one.
    names = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if name or is_convertible(module)
    ]
    matched = {name for name in names if fnmatchcase(name, pattern)}
    if not matched:
        raise OptionError(
            f"{argument} pattern {pattern!r} matches no module",
            expected=suggestion(pattern, names, "the qualified name of a module"),
            remedy="names are those of model.named_modules(); * matches any characters",
        )
    return matched


def _head_names(model: torch.nn.Module) -> set[str]:
    """Qualified names of the modules that ``HEADS`` stands for."""
    tables = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    heads: list[object] = [
        module
        for module in model.modules()
        if is_convertible(module) and getattr(module, "weight", None) in tables
    ]
    for module in model.modules():
        heads += _output_embeddings(module)
    modules = model.named_modules(remove_duplicate=False)
    return {name for name, module in modules if module in heads or _HEAD_NAME.fullmatch(name)}


def _output_embeddings(module: torch.nn.Module) -> Sequence[object]:
    """The output heads that a model of Transformers names."""
    # Models without a head may have the method, and raise anything.
    with contextlib.suppress(Exception):
        heads: object = module.get_output_embeddings()  # type: ignore[operator]
        return heads if isinstance(heads, (list, tuple)) else [heads]
    return []


# -- the weights of primary=True --


def _primary_weights(
    model: torch.nn.Module,
    layers: dict[torch.nn.Module, Linear],
    recipe: Recipe,
    keep_initial_values: bool,
) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Parameter -> the quantized parameter that takes its place.

    Raises:
        UsageError: a weight is sharded.
    """
    high_precision = _high_precision_parameters(model, layers)
    weights: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    staying: list[str] = []
    for name, module in model.named_modules():
        if module not in layers:
            continue
        layer = layers[module]
        weight = layer._parameters.get("weight")
        if weight is None or weight in high_precision:
            staying.append(name)
        elif weight not in weights and not isinstance(weight, QuantizedTensor):
            _check_is_whole(weight, name)
            weights[weight] = quantized_parameter(weight, recipe, layer.name, keep_initial_values)
    if staying:
        warnings.warn(
            f"the weights of {listed(staying)} stay in high precision: they are stored "
            f"transposed, parametrized, or shared with a linear module that is left alone",
            UserWarning,
            stacklevel=3,
        )
    return weights


def _high_precision_parameters(
    model: torch.nn.Module, layers: dict[torch.nn.Module, Linear]
) -> set[torch.nn.Parameter]:
    """The parameters that a linear module needs in high precision."""
    modules = [
        module for module in model.modules() if is_convertible(module) and module not in layers
    ]
    modules += [layer for layer in layers.values() if layer.weight_is_transposed]
    return {
        parameter
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None
    }


def _check_is_whole(weight: torch.Tensor, name: str) -> None:
    """Refuse a sharded weight of the layer ``name`` with a UsageError."""
    if is_distributed(weight) or hasattr(weight, "high_precision"):
        raise UsageError(
            f"the weight of {name!r} is a {type(weight).__name__}, of which FSDP2 gathers shards",
            expected="a plain parameter",
            remedy="convert with primary=True before gather_quantized and fully_shard",
        )


# -- changes of the model --


def _bind(
    layers: dict[torch.nn.Module, Linear], recipe: Recipe, states: dict[Linear, RecipeState]
) -> None:
    """Bind a recipe to new layers, with the states that were prepared for them."""
    for module, layer in layers.items():
        note_original(layer, module)
        layer._binding.bind(layer, recipe, states[layer])


def _note_reasons(
    modules: Iterable[torch.nn.Module], left_alone: dict[torch.nn.Module, str]
) -> None:
    """Note on modules why they are left alone, in place of the reasons of an earlier conversion."""
    for module in modules:
        earlier = module.__dict__.pop(LEFT_ALONE, None)
        # A module that was excluded stays excluded where this conversion does not name it.
        if earlier == _EXCLUDED and left_alone.get(module) == _NOT_INCLUDED:
            left_alone[module] = _EXCLUDED
    for module, reason in left_alone.items():
        module.__dict__[LEFT_ALONE] = reason


def _swap_layers(model: ModelT, layers: dict[torch.nn.Module, Linear]) -> ModelT:
    """Put layers in the places of modules; the model, or the layer that takes its place."""
    for parent in [*model.modules(), *layers.values()]:
        swap(parent._modules, layers)
    return layers.get(model, model)  # type: ignore[return-value]


def _swap_weights(
    model: torch.nn.Module,
    layers: Iterable[Linear],
    weights: dict[torch.nn.Parameter, torch.nn.Parameter],
) -> None:
    """Put quantized weights in the places of parameters, and watch for optimizers of these."""
    replaced = {layer: layer._parameters.get("weight") for layer in layers}
    for module in model.modules():
        swap(module._parameters, weights)
    for layer, weight in replaced.items():
        if weight is not None and weight in weights:
            watch(weight, layer, layer.name)


# -- the warning --


def _warn_of_high_precision(report: ConversionReport, excluded_names: set[str]) -> None:
    """Warn if more than 10 % of the weights of products run in high precision against the user's
    wish."""
    weights = _expected_weights(report, excluded_names)
    total = sum(weight.share for weight in weights)
    quantized = sum(weight.share for weight in weights if weight.recipe is not None)
    # A share is a sum of fractions, whose last bits are rounded.
    enough = quantized >= 0.9 * total - 1e-9
    if enough and (weights or report.swapped):
        return
    amount = f"only {quantized / total:.0%}" if quantized else "nothing"
    text = (
        f"{amount} of the weights of products runs quantized; {_largest_others(weights, total)}. "
        f"See print(ottava.conversion_report(model))"
    )
    warnings.warn(text, UserWarning, stacklevel=3)


def _expected_weights(
    report: ConversionReport, excluded_names: set[str]
) -> Sequence[ProductWeight]:
    """The weights that the user may expect to run quantized.

    Those that ``exclude`` names are not among them, nor are those whose recipe keeps its operands.
    Where nothing is quantized at all, the user may have mistaken the filters, and all weights
    count.
    """
    keeps_all = all(weight.reason.endswith(KEEPS_OPERANDS) for weight in report.weights)
    if keeps_all or not report.swapped:
        return report.weights
    return [
        weight
        for weight in report.weights
        if weight.reason != _EXCLUDED
        and not weight.reason.endswith(KEEPS_OPERANDS)
        and weight.name.rpartition(".")[0] not in excluded_names
    ]


def _largest_others(weights: Sequence[ProductWeight], total: float) -> str:
    """The weights in high precision with the largest shares of ``total``, in words."""
    shares: dict[str, float] = {}
    for weight in weights:
        if weight.recipe is None:
            # The layers of a stack count together.
            name = re.sub(r"\b\d+\b", "*", weight.name) + f" ({weight.reason})"
            shares[name] = shares.get(name, 0.0) + weight.share / total
    largest = sorted(shares, key=lambda name: -shares[name])[:3]
    if not largest:
        return "none was found"
    return "the largest others: " + "; ".join(f"{shares[name]:.0%} {name}" for name in largest)
