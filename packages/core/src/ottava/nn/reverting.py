"""``revert``: the layers of torch, or of other packages, in the places of Ottava's, with the values
of these."""

import sys
from typing import Any, TypeVar

import torch

from ottava.errors import DTypeError, UsageError
from ottava.nn.converted import ConvertedModel, unconverted
from ottava.nn.converters import TransposedLinear
from ottava.nn.linear import Linear
from ottava.nn.loading import OF_STATE
from ottava.nn.replaced import swap, watch
from ottava.nn.report import LEFT_ALONE
from ottava.tensors import QuantizedTensor
from ottava.torch_private import is_distributed, share_hooks

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
#: On a layer that ``convert`` made of another class than ``torch.nn.Linear``: the qualified name of
#: that class.
ORIGINAL = "_ottava_original"
_OWN = ("name", "_binding", "fuse_wgrad_accumulation", "recomputes", ORIGINAL)


def note_original(layer: Linear, module: torch.nn.Module) -> None:
    """Note on a new layer what it was made of, if all attributes of the module went over to it."""
    if (
        type(module) is torch.nn.Linear
        or isinstance(module, Linear)
        or not vars(module).keys() <= vars(layer).keys()
    ):
        return
    # By name: a class may be one that no pickle can have.
    layer.__dict__[ORIGINAL] = f"{type(module).__module__}:{type(module).__qualname__}"


def revert(model: ModelT) -> ModelT:
    """Undo :func:`ottava.convert`: put plain layers in the places of Ottava's, and return the
    model.

    Each :class:`ottava.nn.Linear` becomes a ``torch.nn.Linear``; a layer that ``convert`` made of
    another class becomes one of that class again. Parameters in high precision, hooks and modes
    stay the same objects, so that optimizers stay valid. A weight that is kept quantized becomes a
    new parameter with its dequantized values, in all modules that share it: make optimizers
    afterwards; the step of one that was made before gives a ``UserWarning``, once. What recipes
    have learnt (scales, histories) is dropped, and the model's class is again the one that was
    converted. A bare layer gives the new module itself.

    Args:
        model: reverted in place; one without Ottava's layers stays as it is.

    Raises:
        DTypeError: ``model`` is no module.
        UsageError: weights are sharded; a layer is of a subclass of Ottava's, or of a class that
            torch has no equal of, and ``convert`` did not make it. Nothing is changed then.
    """
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
    layers = {module: name for name, module in model.named_modules() if isinstance(module, Linear)}
    plain: dict[Any, torch.nn.Module] = {
        layer: _plain_layer(layer, name) for layer, name in layers.items()
    }
    weights: dict[Any, torch.nn.Parameter] = {}
    for layer in layers:
        weight = layer._parameters.get("weight")
        if isinstance(weight, QuantizedTensor) and weight not in weights:
            weights[weight] = _plain_weight(weight)

    for layer, name in layers.items():
        if (weight := layer._parameters.get("weight")) in weights:
            watch(weight, plain[layer], name, by="ottava.revert(model)")
    for parent in [*model.modules(), *plain.values()]:
        parent.__dict__.pop(LEFT_ALONE, None)
        swap(parent._modules, plain)
        swap(parent._parameters, weights)
    for module in model.modules():
        if isinstance(module, ConvertedModel):
            unconverted(module)
            _let_broadcast(module)
    return plain.get(model, model)  # type: ignore[return-value]


def _plain_layer(layer: Linear, name: str) -> torch.nn.Module:
    """What takes the place of a layer, with its parameters as they are."""
    label = f"{type(layer).__name__} {name!r}" if name else type(layer).__name__
    weight: Any = layer._parameters.get("weight")
    if is_distributed(weight) or hasattr(weight, "high_precision"):
        what = f"the weight of {label} is a {type(weight).__name__}, of which FSDP2 gathers shards"
        remedy = "save it by ottava.checkpoint, and load it into a plain model"
        raise UsageError(what, "a parameter that is whole", remedy)
    cls = _class_for(layer, label)
    plain = cls.__new__(cls)
    own: dict[str, Any] = {key: value for key, value in vars(layer).items() if key not in _OWN}
    children = {key: module for key, module in layer._modules.items() if key != "recipe_state"}
    plain.__dict__ = own | {"_modules": children}
    return plain


def _class_for(layer: Linear, label: str) -> type[torch.nn.Module]:
    """The class that ``convert`` made a layer of, or ``torch.nn.Linear``."""
    original: str | None = vars(layer).get(ORIGINAL)
    if type(layer) not in (Linear, TransposedLinear):
        what, remedy = (
            f"{label} is of a subclass, whose behaviour would be lost",
            "put a layer of torch in its place",
        )
        raise UsageError(what, "ottava.nn.Linear itself", remedy)
    if original is None and type(layer) is Linear:
        return torch.nn.Linear
    found: Any = None
    if original is not None:
        module, _, qualified = original.partition(":")
        found = sys.modules.get(module)
        for part in qualified.split("."):
            found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, torch.nn.Module):
        what = (
            f"{label} was made of {original or 'no other layer'}, and stores its weight transposed"
        )
        if type(layer) is Linear:
            what = f"{label} was made of {original}, which is no class of a module that is imported"
        raise UsageError(
            what,
            "a layer of torch.nn.Linear, or of a class that its module has",
            "import that module",
        )
    return found


def _plain_weight(weight: Any) -> torch.nn.Parameter:
    """A parameter with the values of one that is kept quantized, its gradient, hooks and public
    attributes."""
    with torch.no_grad():
        parameter = torch.nn.Parameter(weight.dequantize(), requires_grad=weight.requires_grad)
    # The others are of the quantized tensor.
    parameter.__dict__.update(
        {key: value for key, value in vars(weight).items() if not key.startswith("_")}
    )
    parameter.grad = weight.grad
    share_hooks(weight, parameter)
    return parameter


def _let_broadcast(model: Any) -> None:
    """Take the states that are gone from what DistributedDataParallel leaves alone."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    model._ddp_params_and_buffers_to_ignore = [
        name for name in ignored if not OF_STATE.search(name)
    ]
