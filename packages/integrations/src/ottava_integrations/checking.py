"""``check_export``: what another library reads of an export, compared with the model."""

import importlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ottava.errors import UsageError, listed
from ottava.filesystem import AnyPath, as_path
from ottava.kernels import HIGH_PRECISION
from ottava.nn.conversion import Filter
from ottava.recipes import Recipe
from ottava.tensors import QuantizedTensorStorage
from ottava_integrations.exporting import weights_of
from ottava_integrations.formats import Library, Scheme
from ottava_integrations.formats.recognized import Source, open_published
from ottava_integrations.names import of_transformers
from ottava_integrations.planning import plan_export

Tensor = torch.Tensor
#: Decodes the tensors of a layer, by what follows its name and a dot.
_Decode = Callable[[Mapping[str, Tensor], Scheme], Tensor]
# Tokens or pixels of the batch whose logits are compared.
_TOKENS = 16


@dataclass(frozen=True)
class ExportCheck:
    """What another library reads of an export.

    Attributes:
        reader: the library and its version; or ``"formula"`` where none can be run, as of ModelOpt.
        weights: the number of quantized weights that were compared.
        different: the layers whose decoded values differ from those in memory, and the number of
            values that do.
        others: the names of tensors in high precision that differ.
        logits: the relative difference (of Euclidean norms) between the logits of the model, as it
            computes now, and of the one that Transformers loads of the files; None where
            Transformers cannot load it, or the model is not its own.
        reason: why the logits were not compared.
    """

    reader: str
    weights: int
    different: Mapping[str, int]
    others: tuple[str, ...]
    logits: float | None = None
    reason: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether all weights have the values that the other library reads."""
        return not self.different and not self.others


def check_export(
    model: torch.nn.Module,
    folder: AnyPath,
    *,
    recipe: Recipe | str | None = None,
    include: Filter | None = None,
    exclude: Filter | None = None,
) -> ExportCheck:
    """Read an export with the library of its format, and compare it with the model.

    Each quantized weight is decoded by the released library, and compared with what its bytes
    decode to here, in the dtype that the library gives. Where Transformers can load the folder,
    the logits of one small batch are compared, too; they differ by what quantized inputs do.

    Args:
        model, recipe, include, exclude: as they were exported.
        folder: the export.

    Raises:
        UsageError: the library is not installed; or the model would have other quantized layers.
        CheckpointError: the folder is damaged.
    """
    source = open_published(folder)
    format = next(iter(source.published.layers.values())).scheme.format
    reader, decode = _reader(source.published.library, as_path(folder))
    plan = plan_export(
        model, format, recipe=recipe, include=include, exclude=exclude, check_inputs=False
    )
    _check_layers(source.published.layers.keys(), plan.schemes().keys())
    different: dict[str, int] = {}
    others: list[str] = []
    count = 0
    for name, value in weights_of(plan):
        if isinstance(value, QuantizedTensorStorage):
            layer = name.removesuffix(".weight")
            scheme = source.published.layers[layer].scheme
            theirs = decode(source.parts(layer), scheme)
            # Some readers decode to a dtype of their own.
            dtype = theirs.dtype if theirs.dtype in HIGH_PRECISION else value.dtype
            ours = value.dequantize(dtype=dtype)
            count += 1
            unequal = _count_different(theirs.to(ours.dtype), ours)
            if unequal:
                different[layer] = unequal
        elif _count_different(source.tensors[name], value.cpu()):
            others.append(name)
    logits, reason = _logits(model, as_path(folder), source)
    return ExportCheck(reader, count, different, tuple(others), logits, reason)


def _check_layers(exported: Set[str], planned: Set[str]) -> None:
    """Refuse to compare an export with a model of which other layers would be quantized."""
    if others := sorted(exported ^ planned):
        raise UsageError(
            f"the export and the model would not have the same quantized layers: {listed(others)}",
            expected="the model, include and exclude of the export",
            remedy="check with the arguments that export_model was given",
        )


def _count_different(found: Tensor, expected: Tensor) -> int:
    """The number of values that differ; NaN is equal to NaN."""
    both_nan = found.isnan() & expected.isnan()
    return int(((found != expected) & ~both_nan).sum())


# -- the readers --


def _reader(library: Library, folder: Path) -> tuple[str, _Decode]:
    """The name of a reader of a format, and its function."""
    if library is Library.COMPRESSED_TENSORS:
        return _compressed_tensors(folder)
    if library is Library.TRANSFORMERS:
        return _hugging_face()
    return "formula", _by_formula


def _module(name: str, distribution: str) -> tuple[Any, str]:
    """A module of another library, and the library with its version.

    Raises:
        UsageError: it is not installed.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{distribution} is not installed, which reads this format",
            expected=f"{distribution} in this environment",
            remedy=f"pip install {distribution}",
        ) from error
    return module, f"{distribution} {importlib.metadata.version(distribution)}"


def _compressed_tensors(folder: Path) -> tuple[str, _Decode]:
    compressors, version = _module("compressed_tensors.compressors", "compressed-tensors")
    quantization, _ = _module("compressed_tensors.quantization", "compressed-tensors")
    options = json.loads((folder / "config.json").read_bytes())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(options)
    groups = list(config.config_groups.values())

    def decode(parts: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
        group = next(each for each in groups if _is_of(each, scheme))
        compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
        result: Tensor = compressor.decompress(dict(parts), group)["weight"]
        return result

    return version, decode


def _is_of(group: Any, scheme: Scheme) -> bool:
    """Whether a group of compressed-tensors describes the weights of a scheme."""
    strategy = getattr(group.weights.strategy, "value", group.weights.strategy)
    return strategy == scheme.grain or scheme.grain == "group"


def _hugging_face() -> tuple[str, _Decode]:
    integration, version = _module("transformers.integrations.finegrained_fp8", "transformers")
    quantizers, _ = _module("transformers.quantizers.auto", "transformers")
    configs, _ = _module("transformers", "transformers")

    def decode(parts: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
        block = list(scheme.block) if scheme.grain == "block" else None
        config = configs.FineGrainedFP8Config(weight_block_size=block, dequantize=True)
        quantizer = quantizers.AutoHfQuantizer.from_config(config, pre_quantized=True)
        operation = integration.Fp8Dequantize(quantizer)
        weight: Tensor = operation.convert(dict(parts))["weight"]
        return weight

    return version, decode


def _by_formula(parts: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """Elements times scales times the scale of the tensor, in float64."""
    names = scheme.names
    data, scales = parts[names.data], parts[names.scales].double()
    values = data.double()
    if scheme.is_packed:
        codes = torch.stack([data & 15, data >> 4], -1).flatten(-2).long()
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        values = torch.cat([numbers, -numbers])[codes]
    if scales.numel() > 1:
        values = values.unflatten(-1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)
        values = values.flatten(-2)
    else:
        values = values * scales.reshape(())
    if names.level:
        values = values * parts[names.level].double()
    return values


# -- logits --


def _logits(model: torch.nn.Module, folder: Path, source: Source) -> tuple[float | None, str]:
    """The relative difference of logits, or why there is none."""
    if not of_transformers(model):
        return None, "the model is not one of Transformers"
    if source.published.library is Library.MODELOPT:
        return None, "Transformers does not read ModelOpt's files"
    transformers, _ = _module("transformers", "transformers")
    options: Any = transformers.CompressedTensorsConfig(dequantize=True)
    if source.published.library is Library.TRANSFORMERS:
        options = transformers.FineGrainedFP8Config(dequantize=True)
    try:
        loaded = type(model).from_pretrained(  # type: ignore[attr-defined]
            folder, quantization_config=options, dtype=next(model.parameters()).dtype
        )
        ours, theirs = (_outputs(each) for each in (model, loaded))
    # Errors are of many classes: its reader has cases that it does not serve, and models have
    # inputs of all kinds.
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return None, f"Transformers cannot load the folder, or run the model: {first[:200]}"
    return float((ours - theirs).norm() / ours.norm()), ""


def _outputs(model: Any) -> Tensor:
    """The logits of a model for a small batch; its mode stays as it was."""
    is_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits: Tensor = model(**_batch(model)).logits
    finally:
        model.train(is_training)
    return logits.double()


def _batch(model: Any) -> dict[str, Tensor]:
    """A small batch that fits a model."""
    generator = torch.Generator().manual_seed(0)
    config = model.config
    if model.main_input_name == "pixel_values":
        shape = (1, config.num_channels, config.image_size, config.image_size)
        pixels = torch.randn(shape, generator=generator)
        return {"pixel_values": pixels.to(model.device, model.dtype)}
    ids = torch.randint(config.vocab_size, (1, _TOKENS), generator=generator)
    return {"input_ids": ids.to(model.device)}
