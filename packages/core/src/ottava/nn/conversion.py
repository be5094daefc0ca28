"""``convert``: swap the ``nn.Linear`` modules of a model and bind a recipe to them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, TypeVar

import torch

from ottava.errors import DTypeError, OptionError, UsageError
from ottava.kernels import HIGH_PRECISION
from ottava.nn.linear import Linear
from ottava.nn.loading import fill_in_states
from ottava.recipes.base import Recipe, as_recipe
from ottava.recipes.region import enter_module, leave_module
from ottava.recipes.state import RecipeState
from ottava.tensors import QuantizedTensor

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
Predicate = Callable[[str, torch.nn.Module], bool]
Filter = str | Iterable[str] | Predicate

_REPORT_ATTRIBUTE = "_ottava_conversion_report"
# Where tensor subclasses are defined that layers are known to work with: tensors that are traced, DTensors, Ottava's.
_KNOWN_SUBCLASSES = ("torch._subclasses.", "torch.distributed.", "ottava.")


@dataclass(frozen=True)
class Decision:
    """What became of one linear module: its qualified name, whether it was swapped, and why."""

    name: str
    swapped: bool
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did, module by module."""

    recipe: str
    decisions: tuple[Decision, ...]

    @property
    def swapped(self) -> tuple[str, ...]:
        """Qualified names of the modules that run under the recipe now."""
        return tuple(d.name for d in self.decisions if d.swapped)

    @property
    def skipped(self) -> dict[str, str]:
        """Qualified name -> reason, for linear modules that were left alone."""
        return {d.name: d.reason for d in self.decisions if not d.swapped}

    def __str__(self) -> str:
        lines = [f"{len(self.swapped)} of {len(self.decisions)} linear modules run under {self.recipe!r}"]
        lines += [f"  {'+' if d.swapped else '-'} {d.name or '(root)'}: {d.reason}" for d in self.decisions]
        return "\n".join(lines)


def _matcher(names: list[str], given: Filter | None, what: str) -> Predicate | None:
    """A predicate for a filter that was given. Patterns that match no module are mistakes."""
    if given is None or callable(given):
        return given
    if not isinstance(given, (str, Iterable)):
        raise DTypeError(f"{what} is a {type(given).__name__}", expected="name patterns or a predicate")
    matched: set[str] = set()
    for pattern in [given] if isinstance(given, str) else given:
        if not isinstance(pattern, str):
            raise DTypeError(f"{what} holds a {type(pattern).__name__}", expected="name patterns or a predicate")
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            expected = f"a name such as {', '.join(near)}" if near else "the qualified name of a module"
            remedy = "names are those of model.named_modules(); * matches any characters"
            raise OptionError(f"{what} pattern {pattern!r} matches no module", expected=expected, remedy=remedy)
        matched.update(found)
    # A pattern that matches a container matches all modules in it.
    return lambda name, module: any(path in matched for path in accumulate(name.split("."), "{}.{}".format))


def _refusal(module: torch.nn.Module) -> str | None:
    """Why a linear module cannot be swapped, or None."""
    if type(module) is not torch.nn.Linear and not isinstance(module, Linear):
        return f"is a subclass, {type(module).__name__}, whose behaviour would be lost"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, which would go on running the old module"
    cls = type(module.weight)
    own = issubclass(cls, QuantizedTensor) or cls.__module__.startswith(_KNOWN_SUBCLASSES)
    if not own and cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"its weight is a {cls.__module__}.{cls.__name__}, a tensor subclass with operators of its own"
    dtype = module.weight.dtype
    return None if dtype in HIGH_PRECISION else f"its weight has dtype {dtype}"


def convert(
    model: ModelT,
    recipe: Recipe | str | os.PathLike[str],
    *,
    include: Filter | None = None,
    exclude: Filter | None = None,
) -> ModelT:
    """Swap every ``nn.Linear`` of ``model`` for :class:`ottava.nn.Linear`, bind ``recipe`` to them, return the model.

    Parameters stay the same objects: tied weights stay tied and optimizers stay valid. A module that stands in several
    places is swapped in all of them by one new module. A bare ``nn.Linear`` gives the new module itself.

    Args:
        model: swapped in place.
        recipe: a recipe, or the name of an installed one.
        include: only these: name patterns (``fnmatch`` on qualified names, of the module or of a module that it is in)
            or ``predicate(name, module)``.
        exclude: not these, in the same forms; it wins over ``include``.

    Raises:
        DTypeError: ``model`` is no module, ``recipe`` no recipe, or a filter neither patterns nor a predicate.
        RecipeNotFoundError: no installed package provides the name.
        OptionError: a pattern matches no module. Nothing is changed by any of these.

    See :func:`conversion_report` for what was swapped and what was not, and why.
    """
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
    chosen = as_recipe(recipe)
    aliases: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(id(module), []).append(name)
    names = [name for group in aliases.values() for name in group]
    included, excluded = _matcher(names, include, "include"), _matcher(names, exclude, "exclude")

    fast_paths = {name for name, m in model.named_modules() if isinstance(m, torch.nn.TransformerEncoderLayer)}
    decisions: list[Decision] = []
    replacements: dict[int, Linear] = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        reason = _refusal(module)
        if reason is None and included and not any(included(alias, module) for alias in aliases[id(module)]):
            reason = "not in include"
        if excluded and any(excluded(alias, module) for alias in aliases[id(module)]):
            reason = "in exclude"
        if reason is None:
            made = module if isinstance(module, Linear) else Linear.from_linear(module, name=name)
            reason = "nn.Linear swapped" if made is not module else "already an ottava.nn.Linear: recipe bound"
            if name.rpartition(".")[0] in fast_paths:
                reason += "; evaluated without gradients its nn.TransformerEncoderLayer bypasses it, in high precision"
            replacements[id(module)] = made
        decisions.append(Decision(name, id(module) in replacements, reason))

    # All states are made before the first change, because a quantizer factory may raise.
    states = {key: replacement._make_state(chosen, None) for key, replacement in replacements.items()}
    for key, replacement in replacements.items():
        replacement._bind_prepared(chosen, states[key])
    for parent in list(model.modules()):
        for child_name, child in parent._modules.items():
            if child is not None and id(child) in replacements:
                parent._modules[child_name] = replacements[id(child)]
    result: Any = replacements.get(id(model), model)
    if any(state.stateful for state in states.values()) and enter_module not in result._forward_pre_hooks.values():
        # The model's forward pass becomes a region, so that all its layers begin a step together.
        result.register_forward_pre_hook(enter_module, prepend=True)
        result.register_forward_hook(leave_module, always_call=True)
        result.register_load_state_dict_pre_hook(fill_in_states)
        _keep_from_broadcast(result)
    report = ConversionReport(chosen.name or type(chosen).__name__, tuple(decisions))
    setattr(result, _REPORT_ATTRIBUTE, report)
    return result  # type: ignore[no-any-return]


def _keep_from_broadcast(model: torch.nn.Module) -> None:
    """Have DistributedDataParallel leave the states alone.

    It copies the first rank's buffers over those of the others at every forward pass, which would lose what these
    recorded before it is reduced.
    """
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, RecipeState) and isinstance(module, torch.nn.Module):
            ignored |= {f"{name}.{buffer}" for buffer, _ in module.named_buffers()}
    model._ddp_params_and_buffers_to_ignore = sorted(ignored)  # type: ignore[assignment]


def conversion_report(model: torch.nn.Module) -> ConversionReport:
    """The report of the last :func:`convert` of ``model``.

    Raises:
        UsageError: the model was not converted.
    """
    report = getattr(model, _REPORT_ATTRIBUTE, None)
    if not isinstance(report, ConversionReport):
        raise UsageError("this model was not converted", remedy="call ottava.convert(model, recipe) first")
    return report
