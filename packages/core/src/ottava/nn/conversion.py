"""``convert``: swap the linear modules of a model for Ottava's and bind a recipe to them."""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, TypeVar

import torch

from ottava.errors import DTypeError, OptionError, UsageError, check_takes, listed
from ottava.nn.converted import ConvertedModel, begins_steps
from ottava.nn.converters import NO_FUNCTIONS, converted, is_convertible, refusal
from ottava.nn.linear import Linear
from ottava.nn.loading import OF_STATE, fill_in_states
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
from ottava.tensors import QuantizedTensor
from ottava.tensors.declaration import check_flag
from ottava.torch_private import is_distributed

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
Predicate = Callable[[str, torch.nn.Module], bool]
Filter = str | Iterable[str] | Predicate

#: A pattern for the output heads of a model, which may have none: what ``get_output_embeddings()``
#: gives, modules that share a weight with an embedding, and those with usual names: ``lm_head`` and
#: the like outside of stacks, which have numbers for names, and ``head``, ``output``, ``fc`` and
#: the like directly in the model, or in what wraps it.
HEADS = "ottava.HEADS"
_HEAD_NAME = re.compile(
    r"((?!\d+\.)[^.]*\.)*((lm|mlm|cls|classification|value|v|policy|reward)_head|classifier|embed_out|unembed|qa_outputs|"
    r"vocab_proj)|((_orig_mod|base_model|model|module|net)\.)*(heads?|score|cls|fc|proj_out|(to_)?logits|"
    "output(_layer|_proj|_projection)?)"
)

# Why a linear module was left alone that the user excluded.
_EXCLUDED, _NOT_INCLUDED = "in exclude", "not in include"


def _heads(model: torch.nn.Module) -> set[str]:
    """Qualified names of what ``HEADS`` stands for."""
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    found: list[Any] = [
        m for m in model.modules() if is_convertible(m) and getattr(m, "weight", None) in tables
    ]
    for module in model.modules():
        # Models without a head may have the method, and raise anything.
        with contextlib.suppress(Exception):
            given = module.get_output_embeddings()  # type: ignore[operator]
            found.extend(given if isinstance(given, (list, tuple)) else [given])
    modules = model.named_modules(remove_duplicate=False)
    return {name for name, module in modules if module in found or _HEAD_NAME.fullmatch(name)}


def _matcher(model: torch.nn.Module, given: Filter | None, what: str) -> Predicate | None:
    """A predicate for a filter that was given. Patterns that match no module are mistakes."""
    if given is None:
        return None
    if callable(given):
        expected = "name patterns or predicate(name, module)"
        check_takes(given, f"the predicate {what}", expected, "", model, refused=NO_FUNCTIONS)
        return given
    # The name of a whole model, "", would match nothing in it.
    names = [
        n
        for n, module in model.named_modules(remove_duplicate=False)
        if n or is_convertible(module)
    ]
    matched: set[str] = set()
    for pattern in given if isinstance(given, Iterable) and not isinstance(given, str) else [given]:
        if pattern == HEADS:
            matched |= _heads(model)
            continue
        if not isinstance(pattern, str):
            raise DTypeError(
                f"{what} has a {type(pattern).__name__}", expected="name patterns or a predicate"
            )
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            expected = suggestion(pattern, names, "the qualified name of a module")
            remedy = "names are those of model.named_modules(); * matches any characters"
            raise OptionError(
                f"{what} pattern {pattern!r} matches no module", expected=expected, remedy=remedy
            )
        matched.update(found)
    # A pattern that matches a container matches all modules in it.
    return lambda name, module: any(
        path in matched for path in accumulate(name.split("."), "{}.{}".format)
    )


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

    Linear are ``nn.Linear``, the ``Conv1D`` of Transformers, and what :func:`register_converter`
    was called for. Parameters stay the same objects: tied weights stay tied and optimizers stay
    valid. One new module takes all places of a module. A bare linear module gives the new module
    itself. Where less than 90 % of the weights of products run quantized then, those in ``exclude``
    not counted, a ``UserWarning`` names the largest others. :func:`conversion_report` says all of
    it, and :func:`revert` undoes it.

    Args:
        model: swapped in place.
        recipe: a recipe, or the name of an installed one.
        include: only these: patterns (``fnmatch``) of the qualified names of modules, or of modules
            that they are in; ``ottava.HEADS``; or ``predicate(name, module)``.
        exclude: not these, in the same forms; it wins over ``include``.
        primary: keep the weights quantized only, as :func:`quantized_model_init` does. They become
            new parameters, in all modules that share them: make optimizers afterwards. The step of
            one that was made before gives a ``UserWarning``, once. A weight that is stored
            transposed, or shared with a linear module that is left alone, stays in high precision,
            with a ``UserWarning``.
        keep_initial_values: with ``primary``, have ``weight.get_high_precision_init_val()`` give
            the values of before.

    Raises:
        DTypeError: ``model`` is no module, ``recipe`` no recipe, a filter neither patterns nor a
            predicate, or what a converter returned no layer around the module's parameters.
        RecipeNotFoundError, OptionError: there is no such recipe; a pattern of a filter matches no
            module, or one of a recipe file no layer; a flag is no bool.
        UsageError: weights that are to be primary are sharded already. Nothing is changed by any of
            these.
    """
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
    check_flag("primary", primary)
    check_flag("keep_initial_values", keep_initial_values)
    if keep_initial_values and not primary:
        raise OptionError("keep_initial_values without primary", remedy="pass primary=True, too")
    chosen = as_recipe(recipe)
    chosen.check_layers(
        [n for n, m in model.named_modules(remove_duplicate=False) if is_convertible(m)]
    )
    left_alone, replacements = _replacements(model, include, exclude)
    unwanted = _unwanted(model, exclude)
    # All states and weights are made before the first change, because a quantizer factory may
    # raise.
    with asked_once():
        states = {
            module: layer._binding.prepare(layer, chosen) for module, layer in replacements.items()
        }
        weights = (
            _primary_weights(model, replacements, chosen, keep_initial_values) if primary else {}
        )

    for module, layer in replacements.items():
        note_original(layer, module)
        layer._binding.bind(layer, chosen, states[module])
    # What an earlier conversion excluded stays excluded where this one does not name it.
    for module, reason in left_alone.items():
        if reason == _NOT_INCLUDED and module.__dict__.get(LEFT_ALONE) == _EXCLUDED:
            left_alone[module] = _EXCLUDED
    for parent in [*model.modules(), *replacements.values()]:
        parent.__dict__.pop(LEFT_ALONE, None)
        swap(parent._modules, replacements)
    result: Any = replacements.get(model, model)
    before = {layer: layer._parameters.get("weight") for layer in replacements.values()}
    for owner in result.modules():
        swap(owner._parameters, weights)
    for layer, weight in before.items():
        if weight in weights:
            watch(weight, layer, layer.name)
    if any(state.stateful for state in states.values()):
        if not isinstance(result, ConvertedModel):
            result.register_load_state_dict_pre_hook(fill_in_states)
        step = begins_steps(result)
        for layer in replacements.values():
            layer._binding.step = step
        _keep_from_broadcast(result)
    for module, reason in {result: "", **left_alone}.items():
        module.__dict__[LEFT_ALONE] = reason
    _warn(conversion_report(result), unwanted)
    return result  # type: ignore[no-any-return]


def _replacements(
    model: torch.nn.Module, include: Filter | None, exclude: Filter | None
) -> tuple[dict[Any, str], dict[Any, Linear]]:
    """Why modules are left alone that could be converted, and module -> layer for the others."""
    aliases: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_convertible(module):
            aliases.setdefault(module, []).append(name)
    included, excluded = _matcher(model, include, "include"), _matcher(model, exclude, "exclude")
    left_alone: dict[Any, str] = {}
    replacements: dict[Any, Linear] = {}
    for module, known_as in aliases.items():
        if excluded and any(excluded(alias, module) for alias in known_as):
            left_alone[module] = _EXCLUDED
        elif refusal(module):
            continue
        elif included and not any(included(alias, module) for alias in known_as):
            left_alone[module] = _NOT_INCLUDED
        elif isinstance(made := converted(module, known_as[0]), str):
            left_alone[module] = made
        else:
            replacements[module] = made
    return left_alone, replacements


def _unwanted(model: torch.nn.Module, exclude: Filter | None) -> set[str]:
    """Qualified names of the modules, of any class, that patterns of ``exclude`` name.

    A predicate is asked about linear modules only, so that it says nothing of the others.
    """
    excluded = None if callable(exclude) else _matcher(model, exclude, "exclude")
    if excluded is None:
        return set()
    modules = model.named_modules(remove_duplicate=False)
    return {name for name, module in modules if excluded(name, module)}


def _primary_weights(
    model: torch.nn.Module,
    replacements: dict[Any, Linear],
    recipe: Recipe,
    keep_initial_values: bool,
) -> dict[Any, torch.nn.Parameter]:
    """The weights that are to be quantized -> the parameters that take their places."""
    made: dict[Any, torch.nn.Parameter] = {}
    others = [m for m in model.modules() if is_convertible(m) and m not in replacements]
    others += [layer for layer in replacements.values() if layer.weight_is_transposed]
    kept: set[Any] = {
        None,
        *(parameter for module in others for parameter in module._parameters.values()),
    }
    layers = {
        name: replacements[module]
        for name, module in model.named_modules()
        if module in replacements
    }
    for name, layer in layers.items():
        weight = layer._parameters.get("weight")
        if weight in kept or weight in made or isinstance(weight, QuantizedTensor):
            continue
        if is_distributed(weight) or hasattr(weight, "high_precision"):
            what = (
                f"the weight of {name!r} is a {type(weight).__name__}, of which FSDP2 gathers "
                f"shards"
            )
            remedy = "convert with primary=True before gather_quantized and fully_shard"
            raise UsageError(what, expected="a plain parameter", remedy=remedy)
        made[weight] = quantized_parameter(weight, recipe, layer.name, keep_initial_values)
    if staying := [
        name for name, layer in layers.items() if layer._parameters.get("weight") in kept
    ]:
        why = (
            "they are stored transposed, parametrized, or shared with a linear module that is "
            "left alone"
        )
        warnings.warn(
            f"the weights of {listed(staying)} stay in high precision: {why}",
            UserWarning,
            stacklevel=3,
        )
    return made


def _warn(report: ConversionReport, unwanted: set[str]) -> None:
    """Warn if more than 10 % of the weights of products run in high precision, those not counted
    that the user left there: in ``exclude``, or by a recipe that keeps its operands.

    Where nothing is quantized at all, the user may have mistaken the filters, and all weights
    count.
    """
    weights = [weight for weight in report.weights if not _is_unwanted(weight, unwanted)]
    if not report.swapped or all(
        weight.reason.endswith(KEEPS_OPERANDS) for weight in report.weights
    ):
        weights = [*report.weights]
    total = sum(weight.share for weight in weights)
    quantized = sum(weight.share for weight in weights if weight.recipe is not None)
    # A share is a sum of fractions, whose last bits are rounded.
    if (weights or report.swapped) and quantized >= 0.9 * total - 1e-9:
        return
    shares: dict[str, float] = {}
    for weight in weights:
        if weight.recipe is None:
            # The layers of a stack count together.
            name = re.sub(r"\b\d+\b", "*", weight.name) + f" ({weight.reason})"
            shares[name] = shares.get(name, 0.0) + weight.share / total
    largest = sorted(shares, key=lambda name: -shares[name])[:3]
    amount = f"only {quantized / total:.0%}" if quantized else "nothing"
    rest = "none was found"
    if largest:
        rest = "the largest others: " + "; ".join(f"{shares[name]:.0%} {name}" for name in largest)
    what = (
        f"{amount} of the weights of products runs quantized; {rest}. See "
        f"print(ottava.conversion_report(model))"
    )
    warnings.warn(what, UserWarning, stacklevel=3)


def _is_unwanted(weight: ProductWeight, unwanted: set[str]) -> bool:
    """Whether ``exclude`` names the module of a weight, or its recipe keeps it in high
    precision."""
    by_reason = weight.reason == _EXCLUDED or weight.reason.endswith(KEEPS_OPERANDS)
    return by_reason or weight.name.rpartition(".")[0] in unwanted


def _keep_from_broadcast(model: Any) -> None:
    """Have DistributedDataParallel leave the states alone, because it copies the first rank's
    buffers over those of the others at every forward pass, which would lose what these recorded
    before it is reduced."""
    states = (
        name for name, _ in model.named_buffers(remove_duplicate=False) if OF_STATE.search(name)
    )
    known = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    model._ddp_params_and_buffers_to_ignore = sorted({*known, *states})
