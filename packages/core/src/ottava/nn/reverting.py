"""``revert``: put the layers of torch, or of other packages, in the places of Ottava's, with their
values."""

import sys
from typing import TypeVar

import torch

from ottava.errors import DTypeError, UsageError
from ottava.nn.converted import ConvertedModel, remove_step
from ottava.nn.converters import TransposedLinear
from ottava.nn.linear import Linear
from ottava.nn.replaced import swap, watch
from ottava.nn.report import LEFT_ALONE
from ottava.tensors import QuantizedTensor
from ottava.torch_private import is_distributed, share_hooks

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
#: The attribute of a layer that ``convert`` made of another class than ``torch.nn.Linear``. It has
#: the qualified name of that class.
ORIGINAL = "_ottava_original"
# The attributes that Ottava's layers have besides those of torch's.
_OWN = ("name", "_binding", "fuse_wgrad_accumulation", "recomputes", ORIGINAL)


def note_original(layer: Linear, module: torch.nn.Module) -> None:
    """Note on a new layer the class of the module that it was made of, for :func:`revert`.

    A layer that lacks attributes of the module cannot become a module of that class again.
    """
    if type(module) is torch.nn.Linear or isinstance(module, Linear):
        return
    if not vars(module).keys() <= vars(layer).keys():
        return
    # By name, because some classes cannot be pickled.
    layer.__dict__[ORIGINAL] = f"{type(module).__module__}:{type(module).__qualname__}"


def revert(model: ModelT) -> ModelT:
    """Undo :func:`ottava.convert`: put plain layers in the places of Ottava's, and return the
    model.

    Each :class:`ottava.nn.Linear` becomes a ``torch.nn.Linear``; a layer that ``convert`` made of
    another class becomes one of that class again. Parameters in high precision, hooks and modes
    stay the same objects, so that optimizers stay valid. A weight that is kept quantized becomes a
    new parameter with its dequantized values, in all modules that share it: make optimizers
    afterwards. The first step of an optimizer that was made before gives a ``UserWarning``. The
    states of recipes (scales, histories) are dropped, and the model has the class again that it had
    before the conversion. If the model itself is a layer, the new module is returned.

    Args:
        model: reverted in place; one without Ottava's layers stays as it is.

    Raises:
        DTypeError: ``model`` is no module.
        UsageError: weights are sharded; or a layer that ``convert`` did not make is of a subclass
            of Ottava's layers, or of a class that torch has no equal of.

    The model is as it was before when one of these is raised.
    """
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
    layers = {module: name for name, module in model.named_modules() if isinstance(module, Linear)}
    plain_layers: dict[torch.nn.Module, torch.nn.Module] = {
        layer: _plain_layer(layer, name) for layer, name in layers.items()
    }
    plain_weights: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for layer in layers:
        weight = layer._parameters.get("weight")
        if isinstance(weight, QuantizedTensor) and weight not in plain_weights:
            plain_weights[weight] = _plain_weight(weight)

    for layer, name in layers.items():
        weight = layer._parameters.get("weight")
        if weight is not None and weight in plain_weights:
            watch(weight, plain_layers[layer], name, call="ottava.revert(model)")
    for parent in [*model.modules(), *plain_layers.values()]:
        parent.__dict__.pop(LEFT_ALONE, None)
        swap(parent._modules, plain_layers)
        swap(parent._parameters, plain_weights)
    for module in model.modules():
        if isinstance(module, ConvertedModel):
            remove_step(module)
    return plain_layers.get(model, model)  # type: ignore[return-value]


def _plain_layer(layer: Linear, name: str) -> torch.nn.Module:
    """The module that takes the place of a layer, with the layer's parameters as they are.

    Raises:
        UsageError: the weight is sharded, or no class is known for the module.
    """
    label = f"{type(layer).__name__} {name!r}" if name else type(layer).__name__
    weight = layer._parameters.get("weight")
    if is_distributed(weight) or hasattr(weight, "high_precision"):
        raise UsageError(
            f"the weight of {label} is a {type(weight).__name__}, of which FSDP2 gathers shards",
            "a parameter that is whole",
            "save it by ottava.checkpoint, and load it into a plain model",
        )
    cls = _plain_class(layer, label)
    plain = cls.__new__(cls)
    attributes = {key: value for key, value in vars(layer).items() if key not in _OWN}
    children = {key: child for key, child in layer._modules.items() if key != "recipe_state"}
    plain.__dict__ = attributes | {"_modules": children}
    return plain


def _plain_class(layer: Linear, label: str) -> type[torch.nn.Module]:
    """The class that ``convert`` made a layer of, or ``torch.nn.Linear``.

    Raises:
        UsageError: the layer is of a subclass, or the class is not known, or not imported.
    """
    if type(layer) not in (Linear, TransposedLinear):
        raise UsageError(
            f"{label} is of a subclass, whose behaviour would be lost",
            "ottava.nn.Linear itself",
            "put a layer of torch in its place",
        )
    original: str | None = vars(layer).get(ORIGINAL)
    if original is None and type(layer) is Linear:
        return torch.nn.Linear
    cls = None if original is None else _imported_class(original)
    if cls is not None:
        return cls
    fault = f"{label} was made of {original or 'no other layer'}, and stores its weight transposed"
    if type(layer) is Linear:
        fault = f"{label} was made of {original}, which is no class of a module that is imported"
    raise UsageError(
        fault,
        "a layer of torch.nn.Linear, or of a class that its module has",
        "import that module",
    )


def _imported_class(name: str) -> type[torch.nn.Module] | None:
    """The class of modules with the name ``"package.module:Class"``; None if it is not imported."""
    module, _, qualified = name.partition(":")
    value: object = sys.modules.get(module)
    for attribute in qualified.split("."):
        value = getattr(value, attribute, None)
    if isinstance(value, type) and issubclass(value, torch.nn.Module):
        return value
    return None


def _plain_weight(weight: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with the values of a quantized one, its gradient, hooks and public attributes."""
    with torch.no_grad():
        parameter = torch.nn.Parameter(weight.dequantize(), requires_grad=weight.requires_grad)
    for name, value in vars(weight).items():
        # Private attributes belong to the quantized tensor.
        if not name.startswith("_"):
            parameter.__dict__[name] = value
    parameter.grad = weight.grad
    share_hooks(weight, parameter)
    return parameter
