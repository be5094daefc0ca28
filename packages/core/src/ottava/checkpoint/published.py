"""Weights that other tools have quantized: data, with scales under names that are not Ottava's.

Data are not values without their scales. So whoever would take them for values checks here first;
``ottava_integrations.load_quantized`` reads such files. The formats are recognized by the names and
dtypes of the tensors, and by the configuration beside the file.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ottava.checkpoint.files import dtype_name
from ottava.checkpoint.flatten import Value
from ottava.errors import CheckpointError
from ottava.tensors.storage import QuantizedTensorStorage

#: Dtypes of FP8 elements. Without scales such elements are values.
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_PACKED = (torch.uint8, torch.int8, torch.int32, torch.float4_e2m1fn_x2)
_SCALE = re.compile(r"scale|absmax|SCB$")
# Suffixes and prefixes that turn the name of a weight into that of its data.
_DATA = re.compile(r"[._]_?(?:packed|qdata|data|blocks)$")
_PREFIXED = re.compile(r"(^|\.)qweight$")
# Words that may stand between the weight's name and "scale": `weight_input_global_scale` has two.
_QUALIFIERS = 3
_CONFIG, _MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
_INDEX = "*.safetensors.index.json"
# Indices of the largest models have a few MiB.
_MOST_BYTES = 1 << 26
_LOADED = "ottava_integrations.load_quantized loads it with its bytes"
_REWRITTEN = "Ottava's own, without its metadata: another tool has rewritten the file"
_PACKED_MX = "mxfp4-pack-quantized or mxfp6-pack-quantized"
_FLOAT_QUANTIZED = "compressed-tensors float-quantized, or ModelOpt FP8"


@dataclass(frozen=True)
class Format:
    """A format of quantized weights.

    Attributes:
        title: the name of the format.
        reader: how to load such a checkpoint; empty if unknown.
    """

    title: str
    reader: str = ""


#: By ``quant_method`` of ``config.json``.
FORMATS = {
    "compressed-tensors": Format(
        "compressed-tensors",
        _LOADED,
    ),
    "fp8": Format("Hugging Face FP8", _LOADED),
    "modelopt": Format("ModelOpt", _LOADED),
    "mxfp4": Format(
        "Hugging Face MXFP4",
        "Transformers loads it in high precision with Mxfp4Config(dequantize=True): save that",
    ),
}


class _NamePattern(NamedTuple):
    """The names and dtypes by which a format is recognized.

    Attributes:
        data: a pattern of the name of the data.
        scales: a pattern of the name of one of their scales.
        scale_dtypes: the possible dtypes of these scales; empty for any.
        key: the key of the format in :data:`FORMATS`; empty for a format that is not there.
        addition: an addition to the title of the format.
    """

    data: str
    scales: str
    scale_dtypes: tuple[torch.dtype, ...]
    key: str
    addition: str


# The first row that fits counts.
_NAME_PATTERNS = (
    _NamePattern(r"[._]data$", r"scale_inv$", (), "", _REWRITTEN),
    _NamePattern(r"", r"weight_scale_2$", (), "modelopt", "NVFP4"),
    _NamePattern(r"", r"_scale_inv$", (), "fp8", ""),
    _NamePattern(r"_packed$", r"_global_scale$", (), "compressed-tensors", "nvfp4-pack-quantized"),
    _NamePattern(r"_packed$", r"_scale$", (torch.uint8,), "compressed-tensors", _PACKED_MX),
    _NamePattern(r"_packed$", r"_scale$", (), "compressed-tensors", "pack-quantized"),
    _NamePattern(r"_blocks$", r"_scales$", (), "mxfp4", ""),
    _NamePattern(
        r"weight$", r"weight_scale$", (torch.uint8,), "compressed-tensors", "mxfp8-quantized"
    ),
    _NamePattern(r"weight$", r"weight_scale$", (), "", _FLOAT_QUANTIZED),
    _NamePattern(r"", r"(^|\.)scale_weight$", (), "", "scaled FP8 of ComfyUI"),
    _NamePattern(r"", r"", (), "", "none that Ottava knows"),
)


@dataclass(frozen=True)
class PublishedWeights:
    """The quantized weights in a file.

    Attributes:
        scales: the names of the data -> the names of their scales; no names where the
            configuration alone tells of scales.
        dtypes: the dtypes of the data, by name.
        format: the format of the weights.
    """

    scales: Mapping[str, tuple[str, ...]]
    dtypes: Mapping[str, torch.dtype]
    format: Format

    def refuse(self, path: object, names: Iterable[str]) -> None:
        """Raise CheckpointError if there are any ``names``, which are names of data."""
        data_names = list(names)
        if not data_names:
            return
        first = data_names[0]
        scales = " and ".join(map(repr, self.scales[first])) or "other files"
        example = f"{first!r} of {dtype_name(self.dtypes[first])} has its scales in {scales}"
        if len(data_names) > 1:
            example += f"; {len(data_names) - 1} more tensors are such data"
        dequantized = "dequantize this one with the tool that wrote it, save that"
        reader = self.format.reader or dequantized
        raise CheckpointError(
            f"{path} holds data of quantized weights, in the format {self.format.title}, where "
            f"values are expected: {example}",
            expected="values in high precision, or weights that Ottava has quantized",
            remedy=f"take the checkpoint in high precision that it was made of; or {reader}",
        )


_NOTHING = PublishedWeights({}, {}, Format(""))


def find_published(state: Mapping[str, Value], path: Path | None = None) -> PublishedWeights:
    """The quantized weights among the tensors of a checkpoint that another tool has written.

    Elements of 8-bit float formats that come without scales are values, and are not among them.

    Args:
        state: tensors by name; quantized tensors of Ottava are left alone.
        path: the file or the folder that they are from. Nothing that is beside it is trusted.
    """
    dtypes = {n: v.dtype for n, v in state.items() if not isinstance(v, QuantizedTensorStorage)}
    candidates = [
        name
        for name, dtype in dtypes.items()
        if dtype in (*FLOAT8, *_PACKED) and not _is_scale(name)
    ]
    if not candidates:
        return _NOTHING
    format: Format | None = None
    names = [*dtypes]
    if path is not None:
        folder = path if path.is_dir() else path.parent
        format = _format_of_configuration(folder)
        names += _names_in_index(folder, path)
    scales_of_weight = _scales_by_weight(dict.fromkeys(names))
    scales: dict[str, tuple[str, ...]] = {}
    for name in candidates:
        scale_names = scales_of_weight.get(weight_of(name), [])
        # The configuration tells of scales that are in another file.
        if scale_names or (format is not None and dtypes[name] in FLOAT8):
            scales[name] = tuple(scale_names)
    if not scales:
        return _NOTHING
    if format is None:
        format = _format_of_names(scales, dtypes)
    return PublishedWeights(scales, {name: dtypes[name] for name in scales}, format)


def _scales_by_weight(names: Iterable[str]) -> dict[str, list[str]]:
    """Each possible name of a weight -> the names of its scales among ``names``."""
    scales: dict[str, list[str]] = {}
    for name in names:
        for weight in _weights_of_scale(name):
            scales.setdefault(weight, []).append(name)
    return scales


def weight_of(name: str) -> str:
    """The name of the weight that data are of: ``"a.weight"`` for ``"a.weight_packed"``."""
    return _PREFIXED.sub(r"\1weight", _DATA.sub("", name))


def _is_scale(name: str) -> bool:
    return bool(_SCALE.search(name.rpartition(".")[2]))


def _weights_of_scale(name: str) -> list[str]:
    """Possible names of the weights of a tensor of scales; none if its name has no such word."""
    module, dot, leaf = name.rpartition(".")
    word = _SCALE.search(leaf)
    if word is None:
        return []
    before = leaf[: word.start()].rstrip("_")
    if not before:
        # `scale`, `scales`, `scale_inv` and `scale_weight` lie beside a weight, or in a module that
        # has data.
        return [module, f"{module}{dot}weight"]
    parts = before.rsplit("_", _QUALIFIERS)
    return [module, *(module + dot + "_".join(parts[:count]) for count in range(1, len(parts) + 1))]


def _format_of_names(
    scales: Mapping[str, tuple[str, ...]], dtypes: Mapping[str, torch.dtype]
) -> Format:
    """The format, by the names and dtypes of the first data and their scales."""
    data_name, scale_names = next(iter(scales.items()))
    for row in _NAME_PATTERNS:
        names = [name for name in scale_names if re.search(row.scales, name)]
        dtype_fits = not row.scale_dtypes or any(dtypes.get(n) in row.scale_dtypes for n in names)
        if re.search(row.data, data_name) and names and dtype_fits:
            format = FORMATS.get(row.key, Format(""))
            return Format(f"{format.title} {row.addition}".strip(), format.reader)
    raise AssertionError("the last row fits everything")


def _format_of_configuration(folder: Path) -> Format | None:
    """The format that the configuration in a folder names; None without a configuration or a
    format."""
    config = _json_object(folder / _CONFIG)
    options = _object(config, "quantization_config") or _object(config, "compression_config")
    modelopt_options = _object(_json_object(folder / _MODELOPT_CONFIG), "quantization")
    method = options.get("quant_method")
    if not isinstance(method, str):
        if not modelopt_options:
            return None
        method = "modelopt"
    format = FORMATS.get(method, Format(f"{method!r:.80}"))
    kinds = (options.get("format"), options.get("quant_algo"), modelopt_options.get("quant_algo"))
    kind = next((kind for kind in kinds if isinstance(kind, str)), "")
    return Format(f"{format.title} {kind:.80}".strip(), format.reader)


def _names_in_index(folder: Path, path: Path) -> Sequence[str]:
    """The names of all tensors of a model, from an index of its files; empty without an index."""
    for index in sorted(folder.glob(_INDEX)):
        files = _object(_json_object(index), "weight_map")
        if path == folder or path.name in files.values():
            return list(files)
    return []


def _object(config: Mapping[str, object], key: str) -> dict[str, object]:
    """The object at a key; empty if there is none."""
    value = config.get(key)
    if isinstance(value, dict):
        return value
    return {}


def _json_object(path: Path) -> dict[str, object]:
    """The JSON beside a checkpoint; empty if it cannot be read, because it belongs to other
    tools."""
    with suppress(OSError, ValueError, RecursionError):
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            config = json.loads(path.read_bytes())
            if isinstance(config, dict):
                return config
    return {}
