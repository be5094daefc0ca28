"""Parameters that ``convert(primary=True)`` or ``revert`` replaced, looked for in the optimizers
that step afterwards.

An optimizer that was made before the conversion holds the parameters of before: it steps them,
nothing reads them, and the weights of the layers stay as they are. A hook of torch's, which all
optimizers run before a step, says so once. It is taken off as soon as nobody holds such a
parameter, which is at once where optimizers are made afterwards.
"""

import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ottava.errors import listed

#: id of a replaced parameter -> the parameter, the layer and the name of the weight that took its
#: place, and the call.
_replaced: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], str, str]] = {}
#: What takes the hook off, while it is on.
_hook: list[Any] = []


def watch(parameter: Any, layer: Any, name: str, by: str = "ottava.convert(primary=True)") -> None:
    """Warn at the step of an optimizer that holds ``parameter``, which the weight of ``layer``
    replaced in the call ``by``, and took over the gradient of."""
    # One that is left would say that somebody still trains the parameter.
    parameter.grad = None
    key = id(parameter)
    gone = weakref.ref(parameter, lambda _: _replaced.pop(key, None))
    _replaced[key] = gone, weakref.ref(layer), f"{name}.weight" if name else "weight", by
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    dead = {key: found for key, parameter in held.items() if (found := _trained(parameter, held))}
    if dead:
        trained = list(dead.values())
        for key in dead:
            del _replaced[key]
        names, calls = [name for name, _ in trained], dict.fromkeys(by for _, by in trained)
        what = f"{type(optimizer).__name__} holds parameters from before {' and '.join(calls)}"
        effect = f"it does not train the weights that replaced them: {listed(names)}"
        remedy = "make the optimizer after the conversion"
        warnings.warn(f"{what}, so that {effect}; {remedy}", UserWarning, stacklevel=3)
    if not _replaced and _hook:
        _hook.pop().remove()


def _trained(parameter: Any, held: dict[int, Any]) -> tuple[str, str] | None:
    """The name of the weight that replaced a parameter, has a gradient and is not held besides, and
    the call that replaced it; None without one.

    A parameter that has a gradient itself is one that somebody uses: a master, say, of which the
    weight is a copy.
    """
    found = _replaced.get(id(parameter))
    layer = None if found is None else found[1]()
    if found is None or layer is None or found[0]() is not parameter or id(layer.weight) in held:
        return None
    if getattr(parameter, "grad", None) is not None:
        return None
    has_gradient = (
        layer.weight.grad is not None or getattr(layer.weight, "main_grad", None) is not None
    )
    return found[2:] if has_gradient else None


def swap(owned: Any, made: dict[Any, Any]) -> None:
    """Put what was made of modules or parameters in their places."""
    for name, old in list(owned.items()):  # of a dict, or of what a scripted module has for one
        if old in made:
            owned[name] = made[old]
