"""The table of converters: functions that make an Ottava layer of a module, by the module's
class."""

from collections.abc import Callable
from typing import Any

import torch

from ottava.errors import DTypeError, ShapeError, check_takes
from ottava.kernels import HIGH_PRECISION
from ottava.nn.linear import Linear
from ottava.tensors import QuantizedTensor

Converter = Callable[[torch.nn.Module, str], Linear | str]
# By class, or by its qualified name, so that the class need not be imported.
_CONVERTERS: dict[type | str, Converter] = {}
#: Types of callables that take other arguments than a function of modules does.
NO_FUNCTIONS = (type, torch.nn.Module)
# The modules of the tensor subclasses that layers work with: tensors that are traced, DTensors, and
# Ottava's.
_KNOWN_SUBCLASSES = ("torch._subclasses.", "torch.distributed.", "ottava.")


def register_converter(cls: type[torch.nn.Module] | str, function: Converter) -> None:
    """Have :func:`convert` make layers of the modules of a class. A later registration replaces an
    earlier one.

    Args:
        cls: the class, or its qualified name, ``"package.module.Class"``, which imports nothing. It
            stands for itself alone: subclasses, whose behaviour may differ, are left alone unless
            they are registered too.
        function: ``function(module, name)``, called with a module and its qualified name. It
            returns an :class:`ottava.nn.Linear` with the module's own parameter objects, as
            ``ottava.nn.Linear.from_linear`` and ``ottava.nn.TransposedLinear.from_linear`` make it,
            or a string: why the module is left alone. It changes nothing. :func:`convert` lets its
            exceptions through, before anything is changed.

    Raises:
        DTypeError: ``cls`` is neither a class of modules nor a qualified name, or ``function`` no
            such function.
    """
    qualified = isinstance(cls, str) and "." in cls.strip(".")
    if not qualified and not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        expected = "a subclass of torch.nn.Module, or the name of one as 'package.module.Class'"
        raise DTypeError(f"a converter was registered for {cls!r}", expected=expected)
    subject = f"the converter for {cls!r}"
    expected = "a function of a module and its name"
    check_takes(function, subject, expected, None, "", refused=NO_FUNCTIONS)
    _CONVERTERS[cls] = function


def _converter_of(cls: type) -> Converter | None:
    """The converter that is registered for a class itself, or for its name."""
    return _CONVERTERS.get(cls) or _CONVERTERS.get(f"{cls.__module__}.{cls.__qualname__}")


def is_convertible(module: torch.nn.Module) -> bool:
    """Whether a converter is registered for the class of a module, or for a base of it; Ottava's
    layers are."""
    return any(map(_converter_of, type(module).__mro__))


def refusal(module: torch.nn.Module) -> str | None:
    """Why a convertible module is left alone whatever its converter says, or None."""
    if not isinstance(module, Linear) and _converter_of(type(module)) is None:
        return f"is a subclass, {type(module).__name__}, whose behaviour would be lost"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, which would go on running the old module"
    if getattr(module, "weight", module) is None:
        return "it has no weight"
    for parameter in module._parameters.values():
        if parameter is not None and parameter.dim() > 1:
            reason = _refusal_of_weight(parameter)
            if reason is not None:
                return reason
    return None


def _refusal_of_weight(weight: torch.Tensor) -> str | None:
    """Why a layer cannot compute with a weight, or None."""
    cls = type(weight)
    is_known = issubclass(cls, QuantizedTensor) or cls.__module__.startswith(_KNOWN_SUBCLASSES)
    if not is_known and cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"its weight is a {cls.__module__}.{cls.__name__}, a tensor subclass with "
            f"operators of its own"
        )
    if weight.dtype not in HIGH_PRECISION or weight.layout != torch.strided:
        return f"its weight has dtype {weight.dtype} and layout {weight.layout}"
    return None


def layer_or_reason(module: torch.nn.Module, name: str) -> Linear | str:
    """The layer that its converter makes of a module, or the converter's reason to leave the module
    alone.

    Args:
        module: one that :func:`refusal` has nothing against.
        name: the qualified name of the module.

    Raises:
        DTypeError: the converter returned no layer of the module's own parameters.
    """
    if isinstance(module, Linear):
        return module
    converter = _converter_of(type(module))
    assert converter is not None
    result: object = converter(module, name)
    if isinstance(result, str) and result.strip():
        return result
    if isinstance(result, Linear) and _is_layer_of(result, module):
        return result
    cls = type(result)
    raise DTypeError(
        f"the converter for {type(module).__name__} returned for {name!r} a "
        f"{cls.__module__}.{cls.__qualname__}",
        expected="an ottava.nn.Linear of the module's own parameters, with what a torch.nn.Linear "
        "has, or a string that says why not",
    )


def _is_layer_of(layer: Linear, module: torch.nn.Module) -> bool:
    """Whether a layer has the parameters of a module, and the attributes of a
    ``torch.nn.Linear``."""
    parameters = {id(parameter) for parameter in module.parameters()}
    if {id(parameter) for parameter in layer.parameters()} != parameters:
        return False
    attributes = ("in_features", "out_features", "weight", "bias")
    return all(hasattr(layer, attribute) for attribute in attributes)


class TransposedLinear(Linear):
    """A layer whose weight is stored ``[in_features, out_features]``, as in the ``Conv1D`` of
    Transformers. Its results are bit for bit those of :class:`ottava.nn.Linear` with the transposed
    weight. The parameter, its gradient and its ``main_grad`` have that shape. The parameter stays
    in high precision."""

    weight_is_transposed = True

    def __init__(self, in_features: int, out_features: int, *args: Any, **options: Any) -> None:
        super().__init__(in_features, out_features, *args, **options)
        self.weight = torch.nn.Parameter(self.weight.detach().t().contiguous())
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: torch.nn.Module, name: str = "") -> Linear:
        """This class around a module with a ``bias`` or none: same parameters, hooks, mode.

        Raises:
            ShapeError: the module has no parameter ``weight`` that is a matrix.
        """
        weight = getattr(linear, "_parameters", {}).get("weight")
        if weight is None or weight.dim() != 2:
            raise ShapeError(
                f"{type(linear).__name__} {name!r} has no parameter 'weight' of two dimensions",
                expected="a matrix [in_features, out_features]",
            )
        layer = super().from_linear(linear, name)
        layer._parameters = {**linear._parameters, "bias": linear._parameters.get("bias")}
        layer.in_features, layer.out_features = weight.shape
        return layer

    def reset_parameters(self) -> None:
        """:meth:`ottava.nn.Linear.reset_parameters` of the transposed weight, whose shape it reads
        the layer's features from."""
        weight = self._parameters["weight"]
        matrix = self.weight.detach().t()
        self._parameters["weight"] = torch.nn.Parameter(matrix, requires_grad=False)
        try:
            super().reset_parameters()
        finally:
            self._parameters["weight"] = weight


register_converter(torch.nn.Linear, Linear.from_linear)
register_converter("transformers.pytorch_utils.Conv1D", TransposedLinear.from_linear)
