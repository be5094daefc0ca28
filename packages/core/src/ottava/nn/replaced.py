"""Warns of optimizers that step parameters which ``convert(primary=True)`` or ``revert`` replaced.

An optimizer that was made before the conversion has the replaced parameters: it steps them, no
layer reads them, and the weights of the layers stay as they are. A hook that all optimizers of
torch run before a step warns of that once. The hook is taken off as soon as no replaced parameter
is alive, which is at once where optimizers are made afterwards.
"""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ottava.errors import listed

_T = TypeVar("_T")


class _Replacement(NamedTuple):
    """A parameter that was replaced, and the weight that took its place.

    Attributes:
        parameter: the replaced parameter.
        layer: the layer of the new weight.
        weight_name: the qualified name of the new weight.
        call: the call that replaced the parameter, as a warning shows it.
    """

    parameter: weakref.ref[torch.Tensor]
    layer: weakref.ref[torch.nn.Module]
    weight_name: str
    call: str


# By the id of the replaced parameter.
_replacements: dict[int, _Replacement] = {}
# The handle that removes the hook, while there is one.
_hook: list[RemovableHandle] = []


def watch(
    parameter: torch.Tensor,
    layer: torch.nn.Module,
    name: str,
    call: str = "ottava.convert(primary=True)",
) -> None:
    """Warn at the step of an optimizer that has a replaced parameter.

    Args:
        parameter: replaced by the weight of ``layer``, which has its gradient now.
        layer: the layer of the new weight.
        name: the qualified name of the layer.
        call: the call that replaced the parameter, as the warning shows it.
    """
    # A gradient would say that somebody still trains the parameter.
    parameter.grad = None
    key = id(parameter)
    weight_name = f"{name}.weight" if name else "weight"
    _replacements[key] = _Replacement(
        weakref.ref(parameter, lambda _: _replacements.pop(key, None)),
        weakref.ref(layer),
        weight_name,
        call,
    )
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Warn of the replaced parameters of an optimizer, and forget them."""
    if torch.compiler.is_compiling():
        return
    parameters: list[torch.Tensor] = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    stale = _stale_replacements(parameters)
    for key in stale:
        del _replacements[key]
    if stale:
        _warn(optimizer, list(stale.values()))
    if not _replacements and _hook:
        _hook.pop().remove()


def _stale_replacements(parameters: Sequence[torch.Tensor]) -> dict[int, _Replacement]:
    """The replacements, by id, whose new weights an optimizer of these parameters lacks."""
    stepped = {id(parameter) for parameter in parameters}
    stale: dict[int, _Replacement] = {}
    for parameter in parameters:
        replacement = _replacements.get(id(parameter))
        # Another object may have the id by now.
        if replacement is None or replacement.parameter() is not parameter:
            continue
        layer = replacement.layer()
        if layer is None or id(layer.weight) in stepped:
            continue
        # A parameter that has a gradient itself is in use: a master, say, that is copied to the
        # weight.
        if parameter.grad is None and _has_gradient(layer):
            stale[id(parameter)] = replacement
    return stale


def _has_gradient(layer: torch.nn.Module) -> bool:
    """Whether the weight of a layer has a gradient, or memory for one that its owner clears."""
    weight = layer.weight
    return weight.grad is not None or getattr(weight, "main_grad", None) is not None


def _warn(optimizer: torch.optim.Optimizer, stale: Sequence[_Replacement]) -> None:
    """Warn of an optimizer that was made before the calls that replaced its parameters."""
    names = listed([replacement.weight_name for replacement in stale])
    calls = " and ".join(dict.fromkeys(replacement.call for replacement in stale))
    warnings.warn(
        f"{type(optimizer).__name__} holds parameters from before {calls}, so that it does not "
        f"train the weights that replaced them: {names}; make the optimizer after the conversion",
        UserWarning,
        stacklevel=4,
    )


def swap(places: dict[str, _T | None], substitutes: Mapping[_T, _T]) -> None:
    """Put substitutes in the places of modules or parameters.

    A scripted module has a class of torch's in place of ``places``.
    """
    for name, value in list(places.items()):
        if value is not None and value in substitutes:
            places[name] = substitutes[value]
