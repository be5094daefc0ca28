"""Weights that other tools have quantized: codes, with scales under names that are not Ottava's.

Ottava does not read these formats yet, and codes are not values without their scales. So code that
would take them for values checks here first. The formats are recognized by the names and dtypes of
the tensors, and by the configuration beside the file.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint.files import dtype_name
from ottava.errors import CheckpointError
from ottava.tensors.storage import QuantizedTensorStorage

#: Dtypes of FP8 elements. Without scales such elements are values.
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_PACKED = (torch.uint8, torch.int8, torch.int32, torch.float4_e2m1fn_x2)
_SCALE = re.compile(r"scale|absmax|SCB$")
# Suffixes and prefixes that turn the name of a weight into that of its codes.
_CODES = re.compile(r"[._]_?(?:packed|qdata|data|blocks)$")
_PREFIXED = re.compile(r"(^|\.)qweight$")
# Words that may stand between the weight's name and "scale": `weight_input_global_scale` has two.
_QUALIFIERS = 3
_CONFIG, _MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
_INDEX = "*.safetensors.index.json"
# Indices of the largest models have a few MiB.
_MOST_BYTES = 1 << 26
_LOADED = "Transformers loads it in high precision with"
_REWRITTEN = "Ottava's own, without its metadata: another tool has rewritten the file"
_PACKED_MX = "mxfp4-pack-quantized or mxfp6-pack-quantized"


@dataclass(frozen=True)
class Format:
    """A format of quantized weights.

    Attributes:
        title: its name.
        reader: how to load the values of such a checkpoint; empty if unknown.
    """

    title: str
    reader: str = ""


#: By ``quant_method`` of ``config.json``.
FORMATS = {
    "compressed-tensors": Format(
        "compressed-tensors",
        f"{_LOADED} CompressedTensorsConfig(run_compressed=False)",
    ),
    "fp8": Format("Hugging Face FP8", f"{_LOADED} FineGrainedFP8Config(dequantize=True)"),
    "modelopt": Format("ModelOpt"),
    "mxfp4": Format("Hugging Face MXFP4", f"{_LOADED} Mxfp4Config(dequantize=True)"),
}
#: Patterns of the codes' and the scales' names, the dtypes of the scales (empty: any), the key in
#: :data:`FORMATS` and what the title says besides. The first row that fits counts.
_BY_NAMES: tuple[tuple[str, str, tuple[torch.dtype, ...], str, str], ...] = (
    (r"[._]data$", r"scale_inv$", (), "", _REWRITTEN),
    (r"", r"weight_scale_2$", (), "modelopt", "NVFP4"),
    (r"", r"_scale_inv$", (), "fp8", ""),
    (r"_packed$", r"_global_scale$", (), "compressed-tensors", "nvfp4-pack-quantized"),
    (r"_packed$", r"_scale$", (torch.uint8,), "compressed-tensors", _PACKED_MX),
    (r"_packed$", r"_scale$", (), "compressed-tensors", "pack-quantized"),
    (r"_blocks$", r"_scales$", (), "mxfp4", ""),
    (r"weight$", r"weight_scale$", (torch.uint8,), "compressed-tensors", "mxfp8-quantized"),
    (r"weight$", r"weight_scale$", (), "", "compressed-tensors float-quantized, or ModelOpt FP8"),
    (r"", r"(^|\.)scale_weight$", (), "", "scaled FP8 of ComfyUI"),
    (r"", r"", (), "", "none that Ottava knows"),
)


@dataclass(frozen=True)
class Codes:
    """The codes in a file.

    Attributes:
        scales: the names of the codes -> those of their scales; none where the configuration alone
            tells of scales.
        dtypes: the dtypes of the codes, by name.
        format: what they are in.
    """

    scales: Mapping[str, tuple[str, ...]]
    dtypes: Mapping[str, torch.dtype]
    format: Format

    def refuse(self, path: object, names: Iterable[str]) -> None:
        """Raise CheckpointError if there are any ``names``, which are names of codes."""
        refused = list(names)
        if not refused:
            return
        first = refused[0]
        scales = " and ".join(map(repr, self.scales[first])) or "other files"
        more = f"; {len(refused) - 1} more tensors are such codes" if refused[1:] else ""
        what = f"{path} holds codes of quantized weights"
        unread = f"and Ottava does not read their format, {self.format.title}"
        example = f"{first!r} of {dtype_name(self.dtypes[first])} has its scales in {scales}"
        reader = self.format.reader or "dequantize this one with the tool that wrote it"
        raise CheckpointError(
            f"{what}, {unread}: {example}{more}",
            expected="values in high precision, or weights that Ottava has quantized",
            remedy=f"take the checkpoint in high precision that it was made of; or {reader}, save "
            f"that",
        )


def find_codes(state: Mapping[str, Any], path: Path | None = None) -> Codes:
    """The codes among the tensors of a checkpoint that another tool has quantized.

    Elements of 8-bit float formats that come without scales are values, and are not among them.

    Args:
        state: tensors by name; quantized tensors of Ottava are left alone.
        path: the file or the folder that they are from. Nothing that is beside it is trusted.
    """
    plain = {n: v.dtype for n, v in state.items() if not isinstance(v, QuantizedTensorStorage)}
    kinds = (*FLOAT8, *_PACKED)
    able = [name for name, dtype in plain.items() if dtype in kinds and not _is_scale(name)]
    if not able:
        return Codes({}, {}, Format(""))
    folder = None if path is None else path if path.is_dir() else path.parent
    by_weight: dict[str, list[str]] = {}
    for name in dict.fromkeys([*plain, *(_other_names(folder, path) if folder else ())]):
        for weight in _weights_of_scale(name):
            by_weight.setdefault(weight, []).append(name)
    found = {name: tuple(by_weight.get(weight_of(name), ())) for name in able}
    configured = None if folder is None else _configured(folder)
    # The configuration tells of scales that are in another file.
    told = FLOAT8 if configured else ()
    scales = {name: found[name] for name in able if found[name] or plain[name] in told}
    if not scales:
        return Codes({}, {}, Format(""))
    dtypes = {name: plain[name] for name in scales}
    return Codes(scales, dtypes, configured or _named(scales, plain))


def weight_of(name: str) -> str:
    """The name of the weight that codes are of: ``"a.weight"`` for ``"a.weight_packed"``."""
    return _PREFIXED.sub(r"\1weight", _CODES.sub("", name))


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
        # `scale`, `scales`, `scale_inv`, `scale_weight` lie beside a weight, or in what holds
        # codes.
        return [module, f"{module}{dot}weight"]
    parts = before.rsplit("_", _QUALIFIERS)
    return [module, *(module + dot + "_".join(parts[:count]) for count in range(1, len(parts) + 1))]


def _named(scales: Mapping[str, tuple[str, ...]], dtypes: Mapping[str, torch.dtype]) -> Format:
    """The format, by names and dtypes."""
    name, found = next(iter(scales.items()))
    for codes, pattern, kinds, key, about in _BY_NAMES:
        fitting = [scale for scale in found if re.search(pattern, scale)]
        kind_fits = not kinds or any(dtypes.get(scale) in kinds for scale in fitting)
        if re.search(codes, name) and fitting and kind_fits:
            known = FORMATS.get(key, Format(""))
            return Format(f"{known.title} {about}".strip(), known.reader)
    raise AssertionError("the last row fits everything")


def _configured(folder: Path) -> Format | None:
    """The format that the configuration in a folder names; None without a configuration or a
    format."""
    config = _read(folder / _CONFIG)
    keys = ("quantization_config", "compression_config")
    about: dict[str, Any] = next((config[key] for key in keys if _is_object(config, key)), {})
    method = about.get("quant_method")
    exported = _read(folder / _MODELOPT_CONFIG)
    exported = exported["quantization"] if _is_object(exported, "quantization") else {}
    if not isinstance(method, str) and not exported:
        return None
    method = method if isinstance(method, str) else "modelopt"
    known = FORMATS.get(method, Format(f"{method!r:.80}"))
    kinds = (about.get("format"), about.get("quant_algo"), exported.get("quant_algo"))
    kind = next((kind for kind in kinds if isinstance(kind, str)), "")
    return Format(f"{known.title} {kind:.80}".strip(), known.reader)


def _other_names(folder: Path, path: Path | None) -> list[str]:
    """The names of all tensors of a model, from an index of its files; empty without an index."""
    for index in sorted(folder.glob(_INDEX)):
        told = _read(index)
        files = told["weight_map"] if _is_object(told, "weight_map") else {}
        if path == folder or (path is not None and path.name in files.values()):
            return list(files)
    return []


def _is_object(told: Mapping[str, Any], key: str) -> bool:
    return isinstance(told.get(key), dict)


def _read(path: Path) -> dict[str, Any]:
    """The JSON beside a checkpoint; empty if it cannot be read, because it belongs to other
    tools."""
    told: Any = {}
    with suppress(OSError, ValueError, RecursionError):
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            told = json.loads(path.read_bytes())
    return told if isinstance(told, dict) else {}
