"""``iter_exported``: the tensors of a model in a published format, one at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from ottava.checkpoint import contracts
from ottava.contract import Contract
from ottava.nn.conversion import Filter
from ottava.recipes import Recipe
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage
from ottava_integrations.formats import (
    Scheme,
    companions_of,
    is_as_published,
    published_tensors,
)
from ottava_integrations.names import file_tensors
from ottava_integrations.planning import Item, Plan, Source, plan_export

Tensor = torch.Tensor


@dataclass(frozen=True)
class ExportedLayer:
    """A layer of an export whose weight is quantized.

    Attributes:
        scheme: of the weight.
        recipe: the name of the recipe that quantized the weight now; empty for a weight that was
            quantized already, whose bytes are kept.
        citation: of the contract of the bytes; empty where nothing states it.
    """

    scheme: Scheme
    recipe: str
    citation: str


@dataclass(frozen=True)
class ExportReport:
    """What an export has.

    Attributes:
        format: its name.
        layers: the quantized layers, by their names in the files.
        high_precision: the layers that stay in high precision, and why.
        activations: what has one scale in inputs when the files are served, or ``"none"``.
        files: the names of the written files; empty for :func:`plan_export`.
        nbytes: of all tensors.
    """

    format: str
    layers: Mapping[str, ExportedLayer]
    high_precision: Mapping[str, str]
    activations: str
    files: tuple[str, ...] = ()
    nbytes: int = 0


def iter_exported(
    model: torch.nn.Module,
    format: str,
    *,
    recipe: Recipe | str | None = None,
    activations: str | None = None,
    include: Filter | None = None,
    exclude: Filter | None = None,
    input_amaxes: Mapping[str, float] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model in a published format, one at a time, as its readers name them.

    Nothing is written, and no second copy of the model is held: an engine that serves the format
    can take new weights after each step of reinforcement learning.

    Weights that are kept quantized leave with their bytes. Others are quantized: by ``recipe``, or
    the recipe that their layer is bound to, or else as the format's first scheme says. In a model
    that has layers with recipes, these are quantized, and experts that Transformers keeps in one
    parameter; in others all linear layers but the output heads. Tied weights come once, in high
    precision. Tensors are on the device of the model, and may share its memory.

    Args:
        model: of Transformers, or any whose names are those of the files.
        format: one of :data:`ottava_integrations.formats.FORMATS`.
        recipe: quantizes the weights that are in high precision.
        activations: how the files say that inputs are quantized: what has one scale (the
            ``"tensor"``, a ``"token"``, a ``"block"`` or a ``"group"``), or ``"none"``. None: as
            the layers' :class:`ServedRecipe` says, or else as servers of the format do by default.
        include: quantize only these modules, as in :func:`ottava.convert`.
        exclude: do not quantize these; it wins over ``include``.
        input_amaxes: the largest magnitude of the input of each layer, by its name in the model,
            where a format has constant scales of inputs: ``modelopt-fp8``, and NVFP4 with quantized
            inputs. Layers that were loaded of such files keep theirs.

    Raises:
        OptionError: the format, or a weight that it cannot hold exactly; all layers are named.
        RecipeNotFoundError: the package of a recipe is not installed.
        DTypeError: ``model`` is no module, or a filter is none of :func:`ottava.convert`.
        UsageError: adapters are not merged.
    """
    plan = plan_export(
        model,
        format,
        recipe=recipe,
        activations=activations,
        include=include,
        exclude=exclude,
        input_amaxes=input_amaxes,
    )
    return _tensors(plan)


def export_report(plan: Plan, files: tuple[str, ...] = (), nbytes: int = 0) -> ExportReport:
    """The report of a plan."""
    layers = {}
    for item in plan.items:
        for source in item.sources.values():
            citation = citation_of(item, source)
            layers[source.layer] = ExportedLayer(source.scheme, source.recipe, citation)
    return ExportReport(plan.format, layers, plan.high_precision, plan.activations, files, nbytes)


# -- tensors --


def _tensors(plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a plan, one at a time."""
    for item in plan.items:
        for name, tensor, _ in tensors_of(plan, item):
            yield name, tensor


def tensors_of(plan: Plan, item: Item) -> Iterator[tuple[str, Tensor, Source | None]]:
    """What files hold of a parameter; and the layer, for the tensors of a quantized one."""
    for file, value in _values(plan, item):
        if not isinstance(value, QuantizedTensorStorage):
            yield file, value, None
            continue
        yield from _quantized(item, item.sources[file], value)


def weights_of(plan: Plan) -> Iterator[tuple[str, Tensor | QuantizedTensorStorage]]:
    """The parameters and buffers of a plan by their names in files: quantized, or plain."""
    for item in plan.items:
        yield from _values(plan, item)


def _values(plan: Plan, item: Item) -> Iterator[tuple[str, Tensor | QuantizedTensorStorage]]:
    """What files hold of a parameter, each as one quantized weight or one plain tensor."""
    weight = item.tensor.detach()
    if isinstance(weight, QuantizedTensor):
        for file in item.sources:
            yield file, weight
        return
    for file, value in file_tensors(plan.model, item.name, weight).items():
        if file not in item.sources:
            yield file, value.detach()
            continue
        quantizer = item.sources[file].quantizer
        assert quantizer is not None
        with torch.no_grad():
            quantizer.initialize(value)
            storage = quantizer.quantize(value.contiguous())
        assert isinstance(storage, QuantizedTensorStorage)
        yield file, storage


def _quantized(
    item: Item, source: Source, weight: QuantizedTensorStorage
) -> Iterator[tuple[str, Tensor, Source]]:
    """The tensors of one quantized layer."""
    dtype = item.tensor.dtype
    companions = companions_of(item.module)
    level = None if companions is None else companions.level
    for suffix, tensor in published_tensors(weight, source.scheme, dtype, level).items():
        yield f"{source.layer}.{suffix}", tensor.detach(), source
    if source.input_scale is not None:
        name = f"{source.layer}.{source.scheme.names.input_scale}"
        scale = source.input_scale
        if source.scheme.scale_dtype is None:
            scale = scale.to(dtype).reshape(1)
        yield name, scale, source


def contract_of(item: Item, source: Source) -> Contract | None:
    """The contract of the bytes of a layer; None where nothing states it, as of bytes that another
    tool has published."""
    if source.quantizer is not None:
        return source.quantizer.contract
    weight = item.tensor
    assert isinstance(weight, QuantizedTensorStorage)
    return None if is_as_published(item.module) else contracts.contract_of(weight)


def citation_of(item: Item, source: Source) -> str:
    """The citation of the contract of a layer; empty where nothing states it."""
    contract = contract_of(item, source)
    if contract is None:
        return ""
    return contract.citation(source.recipe or source.scheme.loads_as.name)
