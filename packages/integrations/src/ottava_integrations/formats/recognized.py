"""How the weights of a checkpoint are quantized: what its configuration and its tensors say.

Each library's configuration becomes a list of rules; the first rule that names a layer says its
scheme. Dtypes and shapes of the tensors are compared with the scheme when they are loaded.
"""

import fnmatch
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ottava.checkpoint import read_state
from ottava.errors import CheckpointError, translated
from ottava.filesystem import AnyPath, as_path, read_bytes
from ottava.tensors import QuantizedTensorStorage
from ottava_integrations.formats.schemes import SCHEMES, Library, Scheme, scheme_of
from ottava_integrations.served import ServedRecipe

Tensor = torch.Tensor
Json = dict[str, Any]
_CONFIG, _MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
_E4M3 = torch.float8_e4m3fn
# The rows and columns of a tile of scales, as block-scaled products of GPUs read them.
_TILE = (128, 4)


@dataclass(frozen=True)
class PublishedLayer:
    """How the weight of one layer is stored, and how its input is quantized when it is served.

    Attributes:
        scheme: of the weight.
        activations: what has one scale in the input, as in
            :class:`~ottava_integrations.ServedRecipe`; ``"none"`` for one in high precision.
        is_static: whether the scale of the input is a constant, which the file may hold.
        is_swizzled: whether scales are padded and in the order in which products of GPUs read them.
        level_is_one: whether the file leaves out the scale of the tensor, which then is one.
    """

    scheme: Scheme
    activations: str
    is_static: bool = False
    is_swizzled: bool = False
    level_is_one: bool = False

    @property
    def recipe(self) -> ServedRecipe:
        """The recipe whose forward pass computes as the server does, up to a constant scale of the
        input, in whose place is one of each batch."""
        return ServedRecipe(self.scheme.format, self.scheme.grain, self.activations)

    def __str__(self) -> str:
        inputs = "inputs in high precision"
        if self.activations != "none":
            constant = ", constant" if self.is_static else ""
            inputs = f"inputs with a scale for each {self.activations}{constant}"
        return f"{self.scheme}; {inputs}"


@dataclass(frozen=True)
class PublishedCheckpoint:
    """How a checkpoint is quantized.

    Attributes:
        path: the file or folder.
        library: whose format it is.
        layers: each layer with a quantized weight, by its name in the file.
        high_precision: the names of the other tensors.
    """

    path: Path
    library: Library
    layers: Mapping[str, PublishedLayer]
    high_precision: tuple[str, ...]

    def __str__(self) -> str:
        kinds: dict[PublishedLayer, int] = {}
        for layer in self.layers.values():
            kinds[layer] = kinds.get(layer, 0) + 1
        lines = [f"{self.path}: {self.library.value}"]
        lines += [f"  {count} layers: {layer}" for layer, count in kinds.items()]
        lines.append(f"  {len(self.high_precision)} tensors in high precision")
        return "\n".join(lines)


class Source(NamedTuple):
    """A checkpoint that was opened.

    Attributes:
        published: how it is quantized.
        tensors: by their names in the file, mapped into memory.
    """

    published: PublishedCheckpoint
    tensors: Mapping[str, Tensor]

    def parts(self, layer: str) -> dict[str, Tensor]:
        """The tensors of a layer by what follows its name and a dot; scales in their order.

        Raises:
            CheckpointError: swizzled scales have another size than those of the data.
        """
        kind = self.published.layers[layer]
        names = kind.scheme.names
        parts = {
            suffix: self.tensors[f"{layer}.{suffix}"]
            for suffix in (names.data, names.scales, names.level, names.input_scale)
            if suffix and f"{layer}.{suffix}" in self.tensors
        }
        if kind.level_is_one:
            parts[names.level] = torch.ones(())
        if kind.is_swizzled and {names.data, names.scales} <= set(parts):
            shape = kind.scheme.scale_shape(_shape_of(parts[names.data], kind.scheme))
            where = f"{layer}.{names.scales}"
            parts[names.scales] = _unswizzled(parts[names.scales], shape, where)
        return parts


def quantized_from(path: AnyPath) -> PublishedCheckpoint:
    """How a published checkpoint is quantized; no weight of it is read.

    Args:
        path: a folder with ``config.json`` (and ``hf_quant_config.json``), or a file in one; or a
            file of torchao's ``flatten_tensor_state_dict``.

    Raises:
        CheckpointError: it cannot be read, is not quantized, or is quantized in a way that is not
            in the table of formats; the error names it.
    """
    return open_published(path).published


def open_published(path: AnyPath) -> Source:
    """The tensors of a published checkpoint, and how it is quantized.

    Raises:
        CheckpointError: as of :func:`quantized_from`.
    """
    location = as_path(path)
    state, texts = read_state(location)
    tensors = {}
    for name, value in state.items():
        if isinstance(value, QuantizedTensorStorage):
            raise CheckpointError(
                f"{location} has been written by Ottava: {name!r} is a {type(value).__name__}",
                expected="a checkpoint of another tool",
                remedy="ottava.checkpoint.load_model loads it",
            )
        tensors[name] = value
    library, rules = _rules(location, texts)
    layers = dict(_layers(tensors, rules, location))
    if not layers:
        raise CheckpointError(
            f"{location} has no quantized weights",
            expected=f"tensors of {library.value}",
            remedy="load it as any other checkpoint in high precision",
        )
    own = {
        f"{layer}.{suffix}"
        for layer, kind in layers.items()
        for suffix in vars(kind.scheme.names).values()
        if suffix
    }
    others = tuple(name for name in tensors if name not in own)
    return Source(PublishedCheckpoint(location, library, layers, others), tensors)


# -- rules --


class _Rule(NamedTuple):
    """A rule of a configuration.

    Attributes:
        fits: whether the rule is for the layer of a name.
        layer: how it is quantized; None for a layer in high precision.
    """

    fits: Callable[[str], bool]
    layer: PublishedLayer | None


def _everything(name: str) -> bool:
    return True


def _rules(path: Path, texts: Mapping[str, str]) -> tuple[Library, list[_Rule]]:
    """The library that wrote a checkpoint, and the rules of its configuration."""
    if any(key.endswith("tensor_names") for key in texts):
        return Library.TORCHAO, _rules_of_torchao(texts)
    folder = path if path.is_dir() else path.parent
    config = _json_object(folder / _CONFIG)
    options = config.get("quantization_config") or config.get("compression_config") or {}
    if (folder / _MODELOPT_CONFIG).is_file():
        options = {"quant_method": "modelopt"} | _json_object(folder / _MODELOPT_CONFIG)
    with translated(f"the configuration in {folder} has another form", "that of its library"):
        if not isinstance(options, dict):
            raise TypeError(f"quantization_config is a {type(options).__name__}")
        method = options.get("quant_method")
        if isinstance(method, str) and method in _READERS:
            library, read = _READERS[method]
            return library, list(read(options))
    what = f"{folder} says nothing of quantized weights"
    if method is not None:
        what = f"quant_method of {folder / _CONFIG} is {method!r:.80}"
    raise CheckpointError(
        what,
        expected=f"{', '.join(map(repr, _READERS))} in {_CONFIG}, {_MODELOPT_CONFIG}, or a file of "
        "torchao's flatten_tensor_state_dict",
        remedy="load the checkpoint with the library that wrote it",
    )


def _json_object(path: Path) -> Json:
    """The object in a JSON file; empty if there is no file."""
    if not path.is_file():
        return {}
    with translated(f"{path} cannot be read", "a JSON object"):
        value = json.loads(read_bytes(path))
        if not isinstance(value, dict):
            raise TypeError(f"it is a {type(value).__name__}")
    return value


def _refused(what: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is quantized with {what} {value!r:.80}, which Ottava does not read",
        expected=expected,
        remedy="load it with the library that wrote it, and save it in high precision",
    )


# -- compressed-tensors --


def _rules_of_compressed_tensors(options: Json) -> Iterator[_Rule]:
    ignored = options.get("ignore") or []
    groups = options.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refused("config_groups", groups, "one group or more")
    _list_of_texts("ignore", ignored)
    yield _Rule(_named_in(ignored), None)
    by_name: list[_Rule] = []
    by_pattern: list[_Rule] = []
    by_class: list[_Rule] = []
    for group in groups.values():
        layer = _layer_of_group(group, options.get("format"))
        targets = group.get("targets") or []
        _list_of_texts("targets", targets)
        classes = [target for target in targets if _is_class(target)]
        patterns = [target for target in targets if target.startswith("re:")]
        names = [target for target in targets if target not in (*classes, *patterns)]
        by_name.append(_Rule(_named_in(names), layer))
        by_pattern.append(_Rule(_named_in(patterns), layer))
        if classes:
            by_class.append(_Rule(_everything, layer))
    yield from (*by_name, *by_pattern, *by_class)


def _list_of_texts(key: str, value: object) -> None:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _refused(key, value, "a list of texts")


def _is_class(target: str) -> bool:
    return not target.startswith("re:") and target[:1].isupper() and "." not in target


def _named_in(targets: list[str]) -> Callable[[str], bool]:
    """Whether a layer is one of the targets.

    Raises:
        re.error: a target is a pattern that cannot be compiled.
    """
    for target in targets:
        if target.startswith("re:"):
            re.compile(target[3:])
    return lambda name: any(_is_named(name, target) for target in targets)


def _is_named(name: str, target: str) -> bool:
    """Whether a target, the name of a module or a pattern, is for a layer."""
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return name == target or name.startswith(f"{target}.")


#: (type, bits, strategy, size of groups or blocks) -> grain, and the format by default.
_STRATEGIES: dict[tuple[object, ...], tuple[str, str]] = {
    ("float", 8, "tensor", None): ("tensor", "float-quantized"),
    ("float", 8, "channel", None): ("channel", "float-quantized"),
    ("float", 8, "block", (128, 128)): ("block", "float-quantized"),
    ("float", 8, "group", 32): ("group", "mxfp8-quantized"),
    ("float", 4, "group", 32): ("group", "mxfp4-pack-quantized"),
    ("float", 4, "tensor_group", 16): ("group", "nvfp4-pack-quantized"),
}
#: (strategy, size of groups) of an input -> what has one scale.
_OF_INPUTS: dict[tuple[object, object], str] = {
    ("tensor", None): "tensor",
    ("token", None): "token",
    ("group", 128): "block",
    ("block", 128): "block",
    ("group", 32): "group",
    ("tensor_group", 16): "group",
}


def _layer_of_group(group: object, default_format: object) -> PublishedLayer:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise _refused("a group", group, "an object with 'weights'")
    weights = group["weights"]
    size = weights.get("group_size")
    if weights.get("strategy") == "block":
        size = tuple(weights.get("block_structure") or ())
    key = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"), size)
    known = _STRATEGIES.get(key) if weights.get("symmetric", True) is True else None
    if known is None:
        words = ["/".join(map(str, each)) for each in _STRATEGIES]
        raise _refused("weights of", "/".join(map(str, key)), f"one of {', '.join(words)}")
    grain, format = known
    named = group.get("format") or default_format
    if named == "naive-quantized" and format == "float-quantized":
        format = named
    if named not in (format, None, "mixed-precision"):
        raise _refused("format", named, f"{format!r} for weights of {'/'.join(map(str, key))}")
    scheme = scheme_of(format, grain)
    inputs = group.get("input_activations")
    if inputs is None:
        return PublishedLayer(scheme, "none")
    if not isinstance(inputs, dict):
        raise _refused("input_activations", inputs, "an object, or null")
    activations = _OF_INPUTS.get((inputs.get("strategy"), inputs.get("group_size")))
    same_bits = activations != "group" or inputs.get("num_bits") == weights.get("num_bits")
    if activations is None or not same_bits or inputs.get("type") != "float":
        found = [inputs.get(field) for field in ("type", "num_bits", "strategy", "group_size")]
        raise _refused(
            "inputs of", "/".join(map(str, found)), "floats for a tensor, token or group"
        )
    return PublishedLayer(scheme, activations, is_static=inputs.get("dynamic") is not True)


# -- Hugging Face FP8 --


def _rules_of_hugging_face(options: Json) -> Iterator[_Rule]:
    block = options.get("weight_block_size", [128, 128])
    scale_format = options.get("scale_fmt") or "float"
    activations = options.get("activation_scheme", "dynamic")
    if block not in (None, [128, 128]):
        raise _refused("weight_block_size", block, "[128, 128] or null")
    if scale_format not in ("float", "ue8m0") or (block is None and scale_format != "float"):
        raise _refused("scale_fmt", scale_format, "'float', or 'ue8m0' with blocks")
    if activations not in ("dynamic", "static"):
        raise _refused("activation_scheme", activations, "'dynamic' or 'static'")
    if options.get("expert_dtype", "fp8") != "fp8":
        raise _refused("expert_dtype", options["expert_dtype"], "'fp8'")
    kept = options.get("modules_to_not_convert") or options.get("ignored_layers") or []
    _list_of_texts("modules_to_not_convert", kept)
    grain = "tensor" if block is None else "block"
    scheme = scheme_of("fp8" if scale_format == "float" else "fp8-ue8m0", grain)
    # What is in high precision has no scales; names in the list may be those of another model.
    yield _Rule(_everything, PublishedLayer(scheme, grain, is_static=activations == "static"))


def _with_scales_of(layer: PublishedLayer, scales: Tensor | None) -> PublishedLayer:
    """A layer by the dtype of its scales: files of DeepSeek-V3.1 say ``ue8m0``, and hold these
    powers of two as numbers."""
    if layer.scheme.format != "fp8-ue8m0" or scales is None or scales.dtype in _E8M0_DTYPES:
        return layer
    return replace(layer, scheme=scheme_of("fp8", layer.scheme.grain))


# -- ModelOpt --

#: ``quant_algo`` -> the format, and what has one scale in the input.
_ALGORITHMS = {
    "FP8": ("modelopt-fp8", "tensor"),
    "NVFP4": ("modelopt-nvfp4", "group"),
    "W4A16_NVFP4": ("modelopt-nvfp4", "none"),
    "NVFP4_W4A16": ("modelopt-nvfp4", "none"),
}


def _rules_of_modelopt(options: Json) -> Iterator[_Rule]:
    options = options.get("quantization") or options
    algorithm = options.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise _refused("quant_algo", algorithm, f"one of {', '.join(_ALGORITHMS)}")
    format, activations = _ALGORITHMS[algorithm]
    if format == "modelopt-nvfp4" and options.get("group_size", 16) != 16:
        raise _refused("group_size", options["group_size"], "16")
    excluded = options.get("exclude_modules") or options.get("ignore") or []
    _list_of_texts("exclude_modules", excluded)
    yield _Rule(lambda name: any(_is_excluded(name, pattern) for pattern in excluded), None)
    layer = PublishedLayer(scheme_of(format), activations, is_static=activations != "none")
    yield _Rule(_everything, layer)


def _is_excluded(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


# -- torchao --


def _rules_of_torchao(texts: Mapping[str, str]) -> list[_Rule]:
    """One rule for each tensor whose class the header names."""
    rules = []
    for name, text in texts.items():
        if not name.endswith(".weight"):
            continue
        with translated(f"the header of {name!r} has another form", "JSON of torchao"):
            layer = _layer_of_entry(name, json.loads(text))
        if layer is None:
            continue
        rules.append(_Rule(name.removesuffix(".weight").__eq__, layer))
    return rules


def _layer_of_entry(name: str, entry: Json) -> PublishedLayer | None:
    """The layer of an entry of the header; None for a plain tensor.

    Raises:
        KeyError, TypeError, AttributeError: the entry has another form.
    """
    kind, fields = entry["_type"], entry.get("_data") or {}
    if kind == "Tensor":
        return None
    layer = _layer_of_torchao(name, kind, fields)
    stored = entry.get("_tensor_data_names") or ["per_tensor_scale"]
    if layer.scheme.names.level and "per_tensor_scale" not in stored:
        return _without_level(layer)
    return layer


def _without_level(layer: PublishedLayer) -> PublishedLayer:
    """A layer of NVFP4 whose blocks have the only scales.

    Raises:
        CheckpointError: inputs are quantized so, too, which no recipe does.
    """
    if layer.activations != "none":
        raise _refused("inputs of", "NVFP4Tensor without per_tensor_scale", "per_tensor_scale")
    return replace(layer, level_is_one=True)


def _layer_of_torchao(name: str, kind: object, fields: Json) -> PublishedLayer:
    inputs = fields.get("act_quant_kwargs")
    swizzled = fields.get("is_swizzled_scales") is True
    if kind == "Float8Tensor":
        block = fields.get("block_size")
        is_row = isinstance(block, list) and block[:1] == [1]
        scheme = scheme_of("torchao-float8", "channel" if is_row else "tensor")
        activations = "none" if inputs is None else scheme.activations
        return PublishedLayer(scheme, activations)
    formats = {
        ("MXTensor", "float8_e4m3fn", 32): "torchao-mxfp8",
        ("MXTensor", "float4_e2m1fn_x2", 32): "torchao-mxfp4",
        ("NVFP4Tensor", None, 16): "torchao-nvfp4",
    }
    element = fields.get("elem_dtype")
    if isinstance(element, dict):
        element = element.get("_data")
    key = (kind, element, fields.get("block_size"))
    if key[2] not in (16, 32) or key not in formats:
        raise _refused(
            f"{name!r} of",
            "/".join(map(str, key)),
            "Float8Tensor, MXTensor in E4M3 or E2M1, or NVFP4Tensor",
        )
    activations = "none" if inputs is None else "group"
    return PublishedLayer(scheme_of(formats[key]), activations, is_swizzled=swizzled)


_READERS: dict[str, tuple[Library, Callable[[Json], Iterator[_Rule]]]] = {
    "compressed-tensors": (Library.COMPRESSED_TENSORS, _rules_of_compressed_tensors),
    "fp8": (Library.TRANSFORMERS, _rules_of_hugging_face),
    "modelopt": (Library.MODELOPT, _rules_of_modelopt),
}

# -- tensors --

_DATA = sorted({scheme.names.data for scheme in SCHEMES})
_SCALES = sorted({scheme.names.scales for scheme in SCHEMES})
_DATA_DTYPES = (_E4M3, torch.uint8, torch.int8, torch.float8_e5m2)
_E8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


def _layers(
    tensors: Mapping[str, Tensor], rules: list[_Rule], path: Path
) -> Iterator[tuple[str, PublishedLayer]]:
    """The layers with data or scales, and how they are quantized.

    Raises:
        CheckpointError: the configuration says nothing of such a layer, or that it is in high
            precision.
    """
    for name in _names_of_layers(tensors):
        rule = next((rule for rule in rules if rule.fits(name)), None)
        if rule is None or rule.layer is None:
            says = "nothing of it" if rule is None else "that it is in high precision"
            raise CheckpointError(
                f"{path} has quantized tensors of {name!r}, and the configuration says {says}",
                expected="a configuration that fits the tensors",
            )
        scales = tensors.get(f"{name}.{rule.layer.scheme.names.scales}")
        yield name, _with_scales_of(rule.layer, scales)


def _names_of_layers(tensors: Mapping[str, Tensor]) -> list[str]:
    names: dict[str, None] = {}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        is_data = leaf in _DATA and tensor.dtype in _DATA_DTYPES
        if layer and (is_data or leaf in _SCALES):
            names[layer] = None
    return list(names)


def _shape_of(data: Tensor, scheme: Scheme) -> tuple[int, int]:
    if data.dim() != 2:
        # The error about data comes where the weight is made.
        return 1, 1
    return data.shape[0], data.shape[1] * (2 if scheme.is_packed else 1)


def _unswizzled(scales: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Padded scales in the order of products of GPUs, in that of rows.

    Row ``32 a + b`` and column ``c`` of a tile of 128 x 4 lie at place ``16 b + 4 a + c``.
    """
    down, across = (size + -size % side for size, side in zip(shape, _TILE, strict=True))
    if scales.numel() != down * across:
        raise CheckpointError(
            f"tensor {name!r} has {scales.numel()} scales",
            expected=f"{down * across}: those of {shape}, padded to tiles of 128 x 4",
        )
    codes = scales.contiguous().view(torch.uint8)
    tiles = codes.reshape(down // _TILE[0], across // _TILE[1], 32, 4, _TILE[1])
    rows = tiles.permute(0, 3, 2, 1, 4).reshape(down, across)
    return rows[: shape[0], : shape[1]].contiguous().view(scales.dtype)
