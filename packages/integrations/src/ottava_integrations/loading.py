"""``load_quantized``: a model whose layers compute with the bytes of a published checkpoint."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

import ottava
from ottava.errors import CheckpointError, DTypeError, UsageError, listed
from ottava.filesystem import AnyPath
from ottava.kernels import HIGH_PRECISION
from ottava.nn.converters import is_convertible, refusal
from ottava.recipes import Recipe
from ottava.tensors import QuantizedTensor
from ottava.tensors.declaration import check_flag
from ottava_integrations.formats import Companions, PublishedLevel, attach, quantized_weight
from ottava_integrations.formats.recognized import (
    PublishedCheckpoint,
    PublishedLayer,
    Source,
    open_published,
)
from ottava_integrations.names import copy_from_files, file_tensors, named_tensors
from ottava_integrations.served import ServedRecipe

Tensor = torch.Tensor
_WEIGHT = ".weight"
# Scales of a cache of keys and values, and tables that models compute themselves.
_IGNORED = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_output_scale", "inv_freq")


@dataclass(frozen=True)
class LoadReport:
    """What :func:`load_quantized` did, by names in the model.

    Attributes:
        published: how the checkpoint is quantized.
        layers: the layers that have the published bytes, and their recipes.
        values: parameters that got the values of quantized weights, because no layer of Ottava
            computes with them: experts in one parameter, say, or a weight that modules share.
        static_inputs: the layers of which the file has, or its servers use, a constant scale of the
            input; they compute the scale of each batch in its place.
        high_precision: the other parameters and buffers that were loaded.
        kept: buffers of which the file has nothing, which keep their values.
        ignored: tensors of the file that no model needs, such as scales of a cache.
    """

    published: PublishedCheckpoint
    layers: dict[str, ServedRecipe]
    values: tuple[str, ...]
    static_inputs: tuple[str, ...]
    high_precision: tuple[str, ...]
    kept: tuple[str, ...]
    ignored: tuple[str, ...]

    def __str__(self) -> str:
        lines = [str(self.published), f"  {len(self.layers)} layers with the published bytes"]
        for what, names in (
            ("values of quantized weights, in high precision", self.values),
            ("constant scales of inputs, replaced by those of each batch", self.static_inputs),
            ("buffers that the file lacks, unchanged", self.kept),
            ("ignored", self.ignored),
        ):
            if names:
                lines.append(f"  {what}: {listed(list(names))}")
        return "\n".join(lines)


class _Weight(NamedTuple):
    """A weight that keeps the published bytes.

    Attributes:
        name: of the module in the model.
        module: linear.
        kind: how the file stores it.
        weight: mapped into memory.
        companions: what else the file has of the layer.
    """

    name: str
    module: torch.nn.Module
    kind: PublishedLayer
    weight: QuantizedTensor
    companions: Companions


class _Values(NamedTuple):
    """A parameter or buffer that gets values in high precision.

    Attributes:
        name: in the model.
        module: that has it.
        tensor: the present one.
        files: the names in the file of what it is made of.
    """

    name: str
    module: torch.nn.Module
    tensor: Tensor
    files: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    """What will be loaded, all of which was checked."""

    weights: list[_Weight]
    values: list[_Values]
    recipes: dict[str, ServedRecipe]
    from_quantized: tuple[str, ...]
    kept: tuple[str, ...]
    ignored: tuple[str, ...]


def load_quantized(
    model: torch.nn.Module,
    path: AnyPath,
    *,
    training: Recipe | str | None = None,
    trainable: bool = False,
) -> LoadReport:
    """Load a published quantized checkpoint: linear layers keep its bytes.

    Each ``nn.Linear`` whose weight the file has quantized becomes an :class:`ottava.nn.Linear` with
    a quantized parameter of the same data and scales; nothing is quantized again. It runs under a
    :class:`~ottava_integrations.ServedRecipe`: the forward pass quantizes inputs as servers of the
    format do, and gradients pass through the values of the weight. Everything else is loaded in the
    dtypes of the model. Other weights, such as experts in one parameter, or one that modules
    share, get values.

    All checks come before the first change. Beside the model, memory holds one tensor at a time:
    files are mapped.

    Args:
        model: with the names of the file, or a model of Transformers, whose mapping of names is
            used; in high precision. Parameters, and buffers that the file has, may be on the meta
            device.
        path: as of :func:`quantized_from`.
        training: the recipe of the backward pass, as of :class:`ServedRecipe`. The weight has
            rows alone, so its ``backward`` must not be ``"quantized"``. None: gradients are those
            of the values that the forward pass multiplied.
        trainable: whether quantized weights require gradients; an optimizer's step quantizes them
            again.

    Returns:
        What was loaded. ``print`` shows it.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not fit the model: tensors are
            missing, unexpected, or of other shapes and dtypes. All faults are named.
        OptionError: ``training`` reads columns of weights.
        RecipeNotFoundError: the package of a recipe is not installed.
        UsageError: the model is quantized already, or has a buffer on the meta device that the
            file lacks.
    """
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
    check_flag("trainable", trainable)
    source = open_published(path)
    plan = _plan(model, source, training)
    _load_weights(model, plan, trainable)
    _load_values(model, source, plan.values)
    static = tuple(each.name for each in plan.weights if each.kind.is_static)
    quantized = set(plan.from_quantized)
    return LoadReport(
        source.published,
        plan.recipes,
        plan.from_quantized,
        static,
        tuple(each.name for each in plan.values if each.name not in quantized),
        plan.kept,
        plan.ignored,
    )


# -- the plan --


def _plan(model: torch.nn.Module, source: Source, training: Recipe | str | None) -> _Plan:
    """What is loaded where. Nothing is changed.

    Raises:
        CheckpointError: the file does not fit the model.
        UsageError: the model is quantized, or has buffers without values.
    """
    _check_buffers(model, source)
    weights: list[_Weight] = []
    values: list[_Values] = []
    from_quantized: list[str] = []
    kept: list[str] = []
    used: set[str] = set()
    faults: list[str] = []
    names = {id(module): name for name, module in model.named_modules()}
    aliases = _aliases(model)
    shared = _shared(model)
    for name, tensor, module in named_tensors(model):
        if isinstance(tensor, QuantizedTensor):
            raise UsageError(
                f"the model is quantized already: {name!r} is a {type(tensor).__name__}",
                expected="a model in high precision",
                remedy="make the model anew",
            )
        own_names = aliases.get(id(tensor), [name])
        files = _files_of(model, own_names, tensor, source)
        used.update(_copies(own_names, files, source))
        layer = None if id(tensor) in shared else _layer_of(name, files, source)
        if layer is not None and is_convertible(module) and refusal(module) is None:
            weight = _weight_of(layer, names[id(module)], module, tensor, source)
            weights.append(weight)
            used.add(f"{layer}{_WEIGHT}")
            _check_shape(name, tuple(weight.weight.shape), tuple(tensor.shape), faults)
            continue
        found, quantized = _check_values(name, tensor, files, source, faults)
        used.update(found)
        if quantized:
            from_quantized.append(name)
        if found:
            values.append(_Values(name, module, tensor, tuple(files)))
        elif _is_buffer(module, name):
            kept.append(name)
        else:
            faults.append(f"{name!r} of the model is missing ({listed(list(files))} in the file)")
    ignored = _unused(source, used, faults)
    if faults:
        raise CheckpointError(
            f"{source.published.path} does not fit the model: {'; '.join(faults[:10])}",
            expected="the tensors of the model",
            remedy="make the model of the configuration beside the checkpoint",
        )
    recipes = {each.name: _recipe(each.kind, training) for each in weights}
    return _Plan(weights, values, recipes, tuple(from_quantized), tuple(kept), tuple(ignored))


def _check_buffers(model: torch.nn.Module, source: Source) -> None:
    """Refuse buffers that would stay without values.

    Raises:
        UsageError: a buffer is on the meta device, and the file lacks it.
    """
    empty = [
        name
        for name, buffer in model.named_buffers()
        if buffer.is_meta and name not in source.tensors
    ]
    if empty:
        raise UsageError(
            f"buffers on the meta device of which the file has nothing: {listed(empty)}",
            expected="buffers with the values that the model computes for them",
            remedy="make the model with accelerate.init_empty_weights(), which fills buffers",
        )


def _aliases(model: torch.nn.Module) -> dict[int, list[str]]:
    """The names of each parameter, several of one that is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _shared(model: torch.nn.Module) -> set[int]:
    """The ids of parameters that several modules have. A layer that got bytes of its own would
    leave the others with the former parameter."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _copies(names: list[str], files: dict[str, tuple[int, ...]], source: Source) -> list[str]:
    """The other names of a tied parameter under which the file has the same values again."""
    if len(files) != 1 or len(names) == 1:
        return []
    (file,) = files
    first = source.tensors.get(file)
    if first is None or first.dtype not in HIGH_PRECISION:
        return []
    others = {name: source.tensors[name] for name in names if name in source.tensors}
    return [
        name
        for name, other in others.items()
        if other.dtype == first.dtype and torch.equal(other, first)
    ]


def _files_of(
    model: torch.nn.Module, names: list[str], tensor: Tensor, source: Source
) -> dict[str, tuple[int, ...]]:
    """The names and shapes in the file of a tensor of the model, by that of its names which the
    file has."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    first: dict[str, tuple[int, ...]] = {}
    for name in names:
        files = {key: tuple(value.shape) for key, value in file_tensors(model, name, plain).items()}
        first = first or files
        if all(_is_there(file, source) for file in files):
            return files
    return first


def _is_there(file: str, source: Source) -> bool:
    return file in source.tensors or file.removesuffix(_WEIGHT) in source.published.layers


def _layer_of(name: str, files: dict[str, tuple[int, ...]], source: Source) -> str | None:
    """The layer of the file whose weight a parameter is; None where it is not one quantized
    weight."""
    if len(files) != 1:
        return None
    (file,) = files
    layer = file.removesuffix(_WEIGHT)
    is_weight = name.endswith("weight") and file.endswith(_WEIGHT)
    return layer if is_weight and layer in source.published.layers else None


def _weight_of(
    layer: str, name: str, module: torch.nn.Module, tensor: Tensor, source: Source
) -> _Weight:
    kind = source.published.layers[layer]
    parts = source.parts(layer)
    names = kind.scheme.names
    weight = quantized_weight(parts, kind.scheme, tensor.dtype, name=layer)
    level = None
    if names.level:
        level = PublishedLevel(parts[names.level].clone(), kind.scheme.level_multiplies)
    input_scale = parts.get(names.input_scale) if names.input_scale else None
    if input_scale is not None:
        _check_input_scale(f"{layer}.{names.input_scale}", input_scale)
        input_scale = input_scale.clone()
    return _Weight(name, module, kind, weight, Companions(kind.scheme, level, input_scale))


def _check_input_scale(name: str, scale: Tensor) -> None:
    """Raises CheckpointError for a constant scale of an input that is not one number. Its value is
    not read: layers that no calibration reached have any."""
    if scale.numel() != 1 or scale.dtype not in HIGH_PRECISION:
        raise CheckpointError(
            f"tensor {name!r} has shape {tuple(scale.shape)} and dtype {scale.dtype}",
            expected="one floating-point number, the scale of the layer's inputs",
        )


def _check_shape(
    name: str, found: tuple[int, ...], expected: tuple[int, ...], faults: list[str]
) -> None:
    if found != expected:
        faults.append(f"{name!r} has shape {expected} in the model and {found} in the file")


def _check_values(
    name: str,
    tensor: Tensor,
    files: dict[str, tuple[int, ...]],
    source: Source,
    faults: list[str],
) -> tuple[list[str], bool]:
    """The tensors of the file that a parameter gets, none if the file lacks one; and whether any is
    quantized."""
    quantized = False
    for file, shape in files.items():
        layer = file.removesuffix(_WEIGHT)
        if file.endswith(_WEIGHT) and layer in source.published.layers:
            quantized = True
            kind = source.published.layers[layer]
            # Made for its checks.
            found = quantized_weight(source.parts(layer), kind.scheme, torch.float32, name=layer)
            _check_shape(file, tuple(found.shape), shape, faults)
        elif file in source.tensors:
            value = source.tensors[file]
            _check_shape(file, tuple(value.shape), shape, faults)
            fits = value.dtype in HIGH_PRECISION if tensor.is_floating_point() else True
            if not fits or value.is_floating_point() != tensor.is_floating_point():
                faults.append(f"{file!r} is {value.dtype}, and {name!r} is {tensor.dtype}")
        else:
            return [], False
    return list(files), quantized


def _is_buffer(module: torch.nn.Module, name: str) -> bool:
    return name.rpartition(".")[2] in module._buffers


def _unused(source: Source, used: set[str], faults: list[str]) -> list[str]:
    """Tensors of the file that nothing in the model takes and that may be ignored; others are
    faults."""
    ignored = []
    for layer in source.published.layers:
        if f"{layer}{_WEIGHT}" not in used:
            faults.append(f"layer {layer!r} of the file is not in the model")
    for name in source.published.high_precision:
        if name in used:
            continue
        if name.rpartition(".")[2] in _IGNORED:
            ignored.append(name)
        else:
            faults.append(f"{name!r} of the file is not in the model")
    return ignored


def _recipe(kind: PublishedLayer, training: Recipe | str | None) -> ServedRecipe:
    if training is None:
        return kind.recipe
    scheme = kind.scheme
    recipe = ServedRecipe(scheme.format, scheme.grain, kind.activations, training)
    recipe.check_rows_suffice()
    return recipe


# -- loading --


def _load_weights(model: torch.nn.Module, plan: _Plan, trainable: bool) -> None:
    """Swap the modules of quantized weights for layers, under their recipes."""
    by_recipe: dict[ServedRecipe, set[int]] = {}
    for each in plan.weights:
        by_recipe.setdefault(plan.recipes[each.name], set()).add(id(each.module))
    for recipe, modules in by_recipe.items():
        # Some modules have other recipes, and others stay in high precision as in the file.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            ottava.convert(model, recipe, include=_is_one_of(modules))
    for each in plan.weights:
        layer = model.get_submodule(each.name)
        former = layer._parameters["weight"]
        assert former is not None
        with torch.no_grad():
            weight = each.weight.detach().clone()
        if former.device.type != "meta":
            weight = weight.to(former.device)
        layer.weight = torch.nn.Parameter(weight, requires_grad=trainable)
        attach(layer, each.companions)


def _is_one_of(modules: set[int]) -> Callable[[str, torch.nn.Module], bool]:
    """A filter for modules with these ids."""
    return lambda name, module: id(module) in modules


def _load_values(model: torch.nn.Module, source: Source, values: list[_Values]) -> None:
    """Copy values into parameters and buffers; those on the meta device are replaced."""
    for name, module, tensor, files in values:
        leaf = name.rpartition(".")[2]
        target = tensor.detach()
        if tensor.is_meta:
            target = torch.empty(tensor.shape, dtype=tensor.dtype)
        copy_from_files(model, name, target, _decoded(source, files, target.dtype))
        if not tensor.is_meta:
            continue
        if leaf in module._buffers:
            module._buffers[leaf] = target
        else:
            _replace(model, tensor, torch.nn.Parameter(target, tensor.requires_grad))


def _decoded(
    source: Source, files: tuple[str, ...], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The values of tensors of the file, one at a time."""
    for file in files:
        layer = file.removesuffix(_WEIGHT)
        if file in source.tensors and layer not in source.published.layers:
            yield file, source.tensors[file]
            continue
        kind = source.published.layers[layer]
        nominal = dtype if dtype in HIGH_PRECISION else torch.float32
        weight = quantized_weight(source.parts(layer), kind.scheme, nominal, name=layer)
        yield file, weight.dequantize()


def _replace(model: torch.nn.Module, former: Tensor, parameter: torch.nn.Parameter) -> None:
    """Put a parameter in all places of another one."""
    for module in model.modules():
        for leaf, present in module._parameters.items():
            if present is former:
                module._parameters[leaf] = parameter
