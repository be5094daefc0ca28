"""What an export writes: which weights are quantized, how, and what a format cannot hold.

Nothing is computed of the weights but what shows whether the format holds them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ottava.errors import DTypeError, OptionError, OttavaError, ShapeError, UsageError
from ottava.nn import HEADS, Linear
from ottava.nn.conversion import Filter, predicate_of
from ottava.nn.converters import is_convertible
from ottava.recipes import Recipe
from ottava.recipes.base import as_recipe
from ottava.recipes.role import QuantizerRole
from ottava.recipes.state import RecipeState
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage, Quantizer
from ottava_integrations.formats import (
    FORMATS,
    Scheme,
    companions_of,
    published_tensors,
    schemes_of,
)
from ottava_integrations.names import file_tensors, named_tensors
from ottava_integrations.served import ServedRecipe

Tensor = torch.Tensor
#: How the names of weights end in files.
WEIGHT = ".weight"
# Names that adapters of PEFT have.
_ADAPTER = re.compile(r"(^|\.)(lora_\w+|base_layer)\.")
# The sides of a weight whose export shows whether a format holds what a quantizer makes.
_SAMPLE = 256
_Predicate = Callable[[str, torch.nn.Module], bool]


class Source(NamedTuple):
    """The weight, or part of a parameter, that becomes one quantized layer.

    Attributes:
        layer: its name in the files.
        scheme: of the weight.
        quantizer: quantizes the weight; None for one that is quantized already.
        recipe: the name of the quantizer's recipe.
        input_scale: the constant scale of the input that the files hold; None without one.
    """

    layer: str
    scheme: Scheme
    quantizer: Quantizer | None
    recipe: str
    input_scale: Tensor | None


class Item(NamedTuple):
    """A parameter or buffer of the model, and what of it is quantized.

    Attributes:
        name: in the model.
        tensor: of the model.
        module: that has it.
        sources: by the name in the files of the weight.
    """

    name: str
    tensor: Tensor
    module: torch.nn.Module
    sources: dict[str, Source]


@dataclass
class Plan:
    """What an export writes.

    Attributes:
        model: of the parameters.
        format: its name.
        items: the parameters and buffers, in the order of the model.
        high_precision: the weights that stay in high precision, by their layers in the files, and
            why.
        tables: those of them that are embeddings.
        activations: what has one scale in inputs when the files are served, or ``"none"``.
        is_static: whether files hold constant scales of inputs.
    """

    model: torch.nn.Module
    format: str
    items: list[Item] = field(default_factory=list)
    high_precision: dict[str, str] = field(default_factory=dict)
    tables: set[str] = field(default_factory=set)
    activations: str = "none"
    is_static: bool = False

    def ignored(self) -> list[str]:
        """The layers that a configuration lists as not quantized."""
        return [layer for layer in self.high_precision if layer not in self.tables]

    def schemes(self) -> dict[str, Scheme]:
        """The scheme of each quantized layer."""
        return {each.layer: each.scheme for item in self.items for each in item.sources.values()}


def plan_export(
    model: torch.nn.Module,
    format: str,
    *,
    recipe: Recipe | str | None = None,
    activations: str | None = None,
    include: Filter | None = None,
    exclude: Filter | None = None,
    input_amaxes: Mapping[str, float] | None = None,
    check_inputs: bool = True,
) -> Plan:
    """What an export of a model writes; arguments and errors are those of :func:`iter_exported`.

    Args:
        check_inputs: whether constant scales of inputs are needed where the format has any.
    """
    _check_model(model)
    if format not in FORMATS:
        raise OptionError(f"format {format!r}", expected=f"one of {', '.join(FORMATS)}")
    chosen = None if recipe is None else as_recipe(recipe)
    is_selected = _selection(model, include, exclude)
    plan = Plan(model, format)
    plan.activations = _activations(model, format, activations)
    faults: list[OttavaError] = []
    samples: dict[tuple[str, torch.dtype], Scheme] = {}
    names = {id(module): name for name, module in model.named_modules()}
    tied = _tied(model)
    for name, tensor, module in named_tensors(model):
        if isinstance(module, RecipeState):
            continue
        sources: dict[str, Source] = {}
        module_name = names[id(module)]
        files = _files(model, name, tensor)
        try:
            reason = _reason(name, tensor, module, files, is_selected, id(tensor) in tied)
            if reason is None:
                sources = _sources(plan, module_name, tensor, module, files, chosen, samples)
        except (OptionError, ShapeError) as error:
            faults.append(error)
            continue
        plan.items.append(Item(name, tensor, module, sources))
        for file, shape in files.items():
            if len(shape) == 2 and file.endswith(WEIGHT) and file not in sources:
                layer = file.removesuffix(WEIGHT)
                plan.high_precision[layer] = reason or "blocks do not divide it"
                if isinstance(module, torch.nn.Embedding):
                    plan.tables.add(layer)
    _refuse(faults, format)
    if not plan.schemes():
        raise _nothing(plan)
    if check_inputs:
        _add_input_scales(plan, names, input_amaxes or {})
    return plan


def _check_model(model: object) -> None:
    """Raises DTypeError unless it is a module, and UsageError if adapters are not merged."""
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
    adapted = [name for name, _ in model.named_parameters() if _ADAPTER.search(name)]
    if adapted:
        raise UsageError(
            f"the model has adapters that are not merged: {adapted[0]!r}",
            expected="weights alone, because readers of the format know no adapters",
            remedy="model = model.merge_and_unload()",
        )


def _nothing(plan: Plan) -> OptionError:
    """The error for a model of which nothing is quantized."""
    reasons = [f"{name}: {reason}" for name, reason in plan.high_precision.items()]
    why = "; ".join(reasons[:5]) or "it has no linear layer inside, whose name the files would have"
    return OptionError(
        f"no layer of the model would be quantized to {plan.format!r}; {why}",
        expected="a model with linear layers that the format can hold",
    )


def _refuse(faults: list[OttavaError], format: str) -> None:
    """Raise one error for all weights that a format cannot hold."""
    if not faults:
        return
    others = ""
    if len(faults) > 1:
        others = f" ({len(faults) - 1} other weights are refused, too: "
        others += "; ".join(fault.what for fault in faults[1:6]) + ")"
    first = faults[0]
    raise OptionError(f"{first.what}{others}", first.expected, first.remedy) from first


def _selection(
    model: torch.nn.Module, include: Filter | None, exclude: Filter | None
) -> _Predicate:
    """The function of (name, module) that says whether weights of a module are quantized."""
    is_included = predicate_of(model, include, "include")
    is_excluded = predicate_of(model, exclude, "exclude")
    is_head = predicate_of(model, HEADS, "exclude")
    has_recipes = any(isinstance(m, Linear) and m.recipe is not None for m in model.modules())

    def is_selected(name: str, module: torch.nn.Module) -> bool:
        if is_excluded is not None and is_excluded(name, module):
            return False
        if is_included is not None:
            return is_included(name, module)
        if has_recipes and is_convertible(module):
            return isinstance(module, Linear) and module.recipe is not None
        return is_head is None or not is_head(name, module)

    return is_selected


def _activations(model: torch.nn.Module, format: str, activations: str | None) -> str:
    """What has one scale in inputs."""
    if activations is not None:
        if activations != "none":
            schemes_of(format)[0].input_choice(activations)
        return activations
    for module in model.modules():
        recipe = module.recipe if isinstance(module, Linear) else None
        if isinstance(recipe, ServedRecipe) and recipe.activations is not None:
            return recipe.activations
    return schemes_of(format)[0].activations


def _tied(model: torch.nn.Module) -> set[int]:
    """The ids of parameters that several modules have."""
    seen: set[int] = set()
    tied: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def _files(model: torch.nn.Module, name: str, tensor: Tensor) -> dict[str, tuple[int, ...]]:
    """The names and shapes in files of a tensor of the model."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return {file: tuple(value.shape) for file, value in file_tensors(model, name, plain).items()}


def _reason(
    name: str,
    tensor: Tensor,
    module: torch.nn.Module,
    files: Mapping[str, tuple[int, ...]],
    is_selected: _Predicate,
    is_tied: bool,
) -> str | None:
    """Why nothing of a parameter is quantized; None where something is."""
    if isinstance(tensor, QuantizedTensor):
        return None
    if not tensor.is_floating_point():
        return "its values are whole numbers"
    is_expert = len(files) > 1 and tensor.dim() > 2
    is_linear = is_convertible(module) and name.rpartition(".")[2] == "weight"
    if not is_expert and not is_linear:
        return f"it belongs to a module of class {type(module).__name__}"
    if is_linear and (getattr(module, "weight_is_transposed", False) or _is_conv1d(module)):
        return "its weight is stored transposed, which readers of the format do not expect"
    if not is_selected(name.rpartition(".")[0], module):
        return "it is not selected"
    if is_tied:
        return "it is tied to another parameter"
    return None


def _is_conv1d(module: torch.nn.Module) -> bool:
    """Whether a module is Transformers' linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D"


def _sources(
    plan: Plan,
    module_name: str,
    tensor: Tensor,
    module: torch.nn.Module,
    files: Mapping[str, tuple[int, ...]],
    recipe: Recipe | None,
    samples: dict[tuple[str, torch.dtype], Scheme],
) -> dict[str, Source]:
    """The quantized layers that a parameter becomes.

    Raises:
        OptionError: the format cannot hold them.
    """
    schemes = schemes_of(plan.format)
    if isinstance(tensor, QuantizedTensor):
        (file,) = files
        scheme = _first_that_holds(tensor, schemes, tensor.dtype)
        return {file: Source(file.removesuffix(WEIGHT), scheme, None, "", None)}
    if recipe is None:
        bound = module.recipe if isinstance(module, Linear) else None
        recipe = bound or schemes[0].exports_as.make()
    role = QuantizerRole("linear", "weight", module_name)
    quantizer = recipe.quantizer(role).copy()
    quantizer.set_usage(rowwise=True, columnwise=False)
    quantizer.internal = True
    key = repr(quantizer.contract), tensor.dtype
    if key not in samples:
        samples[key] = _scheme_of_quantizer(quantizer, schemes, tensor.dtype, module_name)
    scheme = samples[key]
    if isinstance(recipe, ServedRecipe):
        _check_served(module_name, files, scheme)
    label = recipe.scheme.exports_as.name if isinstance(recipe, ServedRecipe) else recipe._label
    return {
        file: Source(file.removesuffix(WEIGHT), scheme, quantizer, label, None)
        for file, shape in files.items()
        if file.endswith(WEIGHT) and len(shape) == 2 and scheme.divides((shape[0], shape[1]))
    }


def _check_served(name: str, files: Mapping[str, tuple[int, ...]], scheme: Scheme) -> None:
    """Raises ShapeError for a layer that trains with bytes which no file can hold."""
    for shape in files.values():
        if len(shape) == 2 and not scheme.divides((shape[0], shape[1])):
            raise ShapeError(
                f"{name!r} trains with the bytes of {scheme}, whose blocks do not divide its "
                f"weight {shape}",
                expected="layers in high precision where the format cannot hold them",
                remedy="ottava.convert(model, recipe, include=recipe.holds)",
            )


def _scheme_of_quantizer(
    quantizer: Quantizer, schemes: tuple[Scheme, ...], dtype: torch.dtype, name: str
) -> Scheme:
    """The scheme that holds what a quantizer makes."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(_SAMPLE, _SAMPLE, generator=generator).to(dtype)
    weight = quantizer.quantize(sample)
    assert isinstance(weight, QuantizedTensorStorage)
    try:
        return _first_that_holds(weight, schemes, dtype)
    except OptionError as error:
        raise OptionError(f"{name!r}: {error.what}", error.expected, error.remedy) from error


def _first_that_holds(
    weight: QuantizedTensorStorage, schemes: tuple[Scheme, ...], dtype: torch.dtype
) -> Scheme:
    """The first scheme that holds a weight, beginning with those that have its blocks.

    Raises:
        OptionError, ShapeError: none does.
    """
    layout = getattr(weight, "grid_layout", None)
    block = None if layout is None else layout.block_of(columnwise=False)
    faults: list[OttavaError] = []
    for scheme in sorted(schemes, key=lambda scheme: scheme.block != block):
        try:
            published_tensors(weight, scheme, dtype)
        except (OptionError, ShapeError) as fault:
            faults.append(fault)
        else:
            return scheme
    raise faults[0]


def _add_input_scales(
    plan: Plan, names: Mapping[int, str], input_amaxes: Mapping[str, float]
) -> None:
    """Give layers the constant scales of their inputs, if the files hold any.

    Raises:
        OptionError: the format needs such scales, and that of a layer is not known.
    """
    for place, item in enumerate(plan.items):
        module_name = names[id(item.module)]
        for file, source in item.sources.items():
            scale = None
            if _holds_input_scale(source.scheme, plan.activations):
                scale = _input_scale(source.scheme, item.module, input_amaxes.get(module_name))
            if scale is None:
                if _needs_input_scale(source.scheme, plan.activations):
                    raise OptionError(
                        f"the scale of the input of {module_name!r} is not known, and "
                        f"{plan.format!r} has constant scales of inputs",
                        expected="input_amaxes with the largest magnitude of each layer's input",
                        remedy="pass input_amaxes, or activations='none' for NVFP4, or export to "
                        "'float-quantized', whose inputs have the scales of each batch",
                    )
                continue
            plan.is_static = True
            plan.items[place].sources[file] = source._replace(input_scale=scale)


def _holds_input_scale(scheme: Scheme, activations: str) -> bool:
    """Whether files can hold a constant scale of inputs: one for the tensor."""
    is_whole = activations == "tensor" or (bool(scheme.names.level) and activations == "group")
    return bool(scheme.names.input_scale) and is_whole


def _needs_input_scale(scheme: Scheme, activations: str) -> bool:
    is_modelopt = scheme.format == "modelopt-fp8"
    return is_modelopt or (bool(scheme.names.level) and activations != "none")


def _input_scale(scheme: Scheme, module: torch.nn.Module, amax: float | None) -> Tensor | None:
    """The constant scale of an input: from its amax, or as the file had it that the layer was
    loaded of."""
    if amax is None:
        companions = companions_of(module)
        if companions is None or companions.scheme.format != scheme.format:
            return None
        return companions.input_scale
    largest = torch.tensor(amax, dtype=torch.float32)
    if not scheme.names.level:
        return largest / 448
    if scheme.level_multiplies:
        return largest / 2688
    return (torch.tensor(2688.0) / largest).reshape(1)
