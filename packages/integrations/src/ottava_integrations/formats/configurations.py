"""The JSON beside exported weights, as the readers of each library expect it.

Sources: the files that compressed-tensors 0.20 and Transformers 5.24 write, and published
``hf_quant_config.json`` of ModelOpt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ottava_integrations.formats.schemes import Library, Scheme

Json = dict[str, Any]
#: The version of compressed-tensors whose files these are like.
_COMPRESSED_TENSORS = "0.20.0"
#: The name of the file of ModelOpt's configuration.
MODELOPT_CONFIG = "hf_quant_config.json"


def quantization_config(
    layers: Mapping[str, Scheme], ignored: Sequence[str], activations: str, is_static: bool
) -> Json:
    """The value of ``quantization_config`` in ``config.json``.

    Args:
        layers: the scheme of each quantized layer, by its name in the file; all of one library.
        ignored: the names in the file of layers in high precision.
        activations: what has one scale in inputs, or ``"none"``.
        is_static: whether files hold constant scales of inputs.
    """
    schemes = list(dict.fromkeys(layers.values()))
    library = schemes[0].library
    if library is Library.COMPRESSED_TENSORS:
        return _compressed_tensors(layers, schemes, ignored, activations, is_static)
    if library is Library.TRANSFORMERS:
        return _hugging_face(schemes[0], ignored, is_static)
    return {"quant_method": "modelopt"} | _modelopt(schemes[0], ignored, activations)


def other_files(
    layers: Mapping[str, Scheme], ignored: Sequence[str], activations: str
) -> dict[str, Json]:
    """Other files of JSON that a format has, by name."""
    scheme = next(iter(layers.values()))
    if scheme.library is not Library.MODELOPT:
        return {}
    options = _modelopt(scheme, ignored, activations)
    options["exclude_modules"] = options.pop("ignore")
    return {
        MODELOPT_CONFIG: {"producer": {"name": "ottava"}, "quantization": options},
    }


# -- compressed-tensors --


def _compressed_tensors(
    layers: Mapping[str, Scheme],
    schemes: Sequence[Scheme],
    ignored: Sequence[str],
    activations: str,
    is_static: bool,
) -> Json:
    groups = {}
    for place, scheme in enumerate(schemes):
        targets = ["Linear"]
        if len(schemes) > 1:
            targets = [name for name, other in layers.items() if other == scheme]
        groups[f"group_{place}"] = {
            "format": scheme.format,
            "targets": targets,
            "weights": _weights(scheme),
            "input_activations": _inputs(scheme, activations, is_static),
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": schemes[0].format,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "version": _COMPRESSED_TENSORS,
    }


def _weights(scheme: Scheme) -> Json:
    strategy, size = scheme.grain, None
    if scheme.grain == "group":
        size = scheme.block[1]
        strategy = "tensor_group" if scheme.names.level else "group"
    arguments: Json = {
        "num_bits": 4 if scheme.is_packed else 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": size,
        "dynamic": False,
    }
    if scheme.grain == "block":
        arguments["block_structure"] = list(scheme.block)
    if scheme.scale_dtype is not None:
        arguments["scale_dtype"] = str(scheme.scale_dtype)
    return arguments


def _inputs(scheme: Scheme, activations: str, is_static: bool) -> Json | None:
    if activations == "none":
        return None
    strategy, size = activations, None
    if activations == "block":
        strategy, size = "group", 128
    elif activations == "group":
        size = scheme.block[1]
        strategy = "tensor_group" if scheme.names.level else "group"
    arguments: Json = {
        "num_bits": 4 if activations == "group" and scheme.is_packed else 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": size,
        "dynamic": not is_static,
    }
    if activations == "group":
        # Scales of blocks follow each batch, and the one of the tensor is a constant.
        arguments["dynamic"] = "local" if scheme.names.level else True
        arguments["scale_dtype"] = str(scheme.scale_dtype)
    return arguments


# -- others --


def _hugging_face(scheme: Scheme, ignored: Sequence[str], is_static: bool) -> Json:
    is_codes = scheme.scale_dtype is torch.float8_e8m0fnu
    return {
        "quant_method": "fp8",
        "activation_scheme": "static" if is_static else "dynamic",
        "weight_block_size": list(scheme.block) if scheme.grain == "block" else None,
        "scale_fmt": "ue8m0" if is_codes else "float",
        "modules_to_not_convert": list(ignored),
    }


def _modelopt(scheme: Scheme, ignored: Sequence[str], activations: str) -> Json:
    if scheme.grain == "tensor":
        return {"quant_algo": "FP8", "kv_cache_quant_algo": None, "ignore": list(ignored)}
    return {
        "quant_algo": "W4A16_NVFP4" if activations == "none" else "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": scheme.block[1],
        "ignore": list(ignored),
    }
