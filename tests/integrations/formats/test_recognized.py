"""What configurations of other libraries say of each layer."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ottava.errors import CheckpointError
from ottava_integrations import load_quantized, quantized_from
from ottava_integrations.formats import scheme_of
from tests.comparing import assert_same
from tests.integrations.files import inner, published_parts

Json = dict[str, Any]


def written(folder: Path, config: Json, layers: tuple[str, ...], texts: Json | None = None) -> Path:
    """A folder with a configuration, and empty weights for layers; no weight is read."""
    suffixes = ("weight", "weight_scale") if texts is None else ("_weight_qdata", "_weight_scale")
    if '"num_bits": 4' in json.dumps(config):
        suffixes = ("weight_packed", "weight_scale")
    if config.get("quant_method") == "fp8":
        suffixes = ("weight", "weight_scale_inv")
    tensors = {"norm.weight": torch.zeros(2)}
    for layer in layers:
        tensors |= {f"{layer}.{suffix}": torch.zeros(0, dtype=torch.uint8) for suffix in suffixes}
    save_file(tensors, folder / "model.safetensors", {"format": "pt", **(texts or {})})
    if "modelopt" in config:
        (folder / "hf_quant_config.json").write_text(json.dumps(config["modelopt"]))
    elif config:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def weights(**fields: Any) -> Json:
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False} | fields


CHANNEL = weights(strategy="channel")
TENSOR = weights(strategy="tensor")
BLOCK = weights(strategy="block", block_structure=[128, 128])
MXFP8 = weights(strategy="group", group_size=32)
NVFP4 = weights(strategy="tensor_group", group_size=16, num_bits=4)
TOKEN = weights(strategy="token", dynamic=True)


def compressed(*groups: Json, **options: Any) -> Json:
    named = {f"group_{place}": group for place, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named} | options


def group(
    weights: Json, inputs: Json | None = None, targets: tuple[str, ...] = ("Linear",)
) -> Json:
    return {"weights": weights, "input_activations": inputs, "targets": list(targets)}


#: A configuration, and what is said of layers by their names.
SAID: tuple[tuple[Json, dict[str, str]], ...] = (
    (
        compressed(group(CHANNEL, TOKEN)),
        {"a": "float-quantized, channel; inputs with a scale for each token"},
    ),
    (
        compressed(group(TENSOR, weights(strategy="tensor"))),
        {"a": "float-quantized, tensor; inputs with a scale for each tensor, constant"},
    ),
    (
        compressed(group(BLOCK, weights(strategy="group", group_size=128, dynamic=True))),
        {"a": "float-quantized, block; inputs with a scale for each block"},
    ),
    (
        compressed(group(CHANNEL), format="naive-quantized"),
        {"a": "naive-quantized, channel; inputs in high precision"},
    ),
    (
        compressed(group(MXFP8, MXFP8 | {"dynamic": True})),
        {"a": "mxfp8-quantized, group; inputs with a scale for each group"},
    ),
    (compressed(group(MXFP8)), {"a": "mxfp8-quantized, group; inputs in high precision"}),
    (
        compressed(group(NVFP4, NVFP4 | {"dynamic": "local"})),
        {"a": "nvfp4-pack-quantized, group; inputs with a scale for each group, constant"},
    ),
    # A name comes before a class, whatever the order of the groups.
    (
        compressed(group(MXFP8), group(CHANNEL, None, ("re:b[.].*", "c")), ignore=["lm_head"]),
        {
            "a": "mxfp8-quantized, group; inputs in high precision",
            "b.q": "float-quantized, channel; inputs in high precision",
            "c": "float-quantized, channel; inputs in high precision",
        },
    ),
    # A name comes before a pattern, too.
    (
        compressed(group(MXFP8, None, ("re:.*",)), group(CHANNEL, None, ("b",))),
        {
            "a": "mxfp8-quantized, group; inputs in high precision",
            "b": "float-quantized, channel; inputs in high precision",
        },
    ),
    ({"quant_method": "fp8"}, {"a": "fp8, block; inputs with a scale for each block"}),
    (
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        {"a": "fp8, tensor; inputs with a scale for each tensor, constant"},
    ),
    (
        {"quant_method": "fp8", "scale_fmt": "ue8m0"},
        {"a": "fp8-ue8m0, block; inputs with a scale for each block"},
    ),
    (
        {"modelopt": {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}},
        {"a": "modelopt-fp8, tensor; inputs with a scale for each tensor, constant"},
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        {"a": "modelopt-nvfp4, group; inputs with a scale for each group, constant"},
    ),
    (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "W4A16_NVFP4"}},
        {"a": "modelopt-nvfp4, group; inputs in high precision"},
    ),
)


@pytest.mark.parametrize(("config", "said"), SAID)
def test_what_a_configuration_says(config: Json, said: dict[str, str], tmp_path: Path) -> None:
    published = quantized_from(written(tmp_path, config, tuple(said)))
    assert {name: str(layer) for name, layer in published.layers.items()} == said
    assert published.high_precision == ("norm.weight",)


def header(kind: str, **fields: Any) -> Json:
    entry = json.dumps({"_type": kind, "_data": fields})
    return {"a.weight": entry, "tensor_names": '["a.weight"]'}


E4M3 = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
E2M1 = {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}
HEADERS: tuple[tuple[Json, str], ...] = (
    (
        header("Float8Tensor", block_size=[1, 64]),
        "torchao-float8, channel; inputs in high precision",
    ),
    (
        header("Float8Tensor", block_size=[64, 64], act_quant_kwargs={}),
        "torchao-float8, tensor; inputs with a scale for each tensor",
    ),
    (
        header("MXTensor", elem_dtype=E4M3, block_size=32, act_quant_kwargs={"a": 1}),
        "torchao-mxfp8, group; inputs with a scale for each group",
    ),
    (
        header("MXTensor", elem_dtype=E2M1, block_size=32),
        "torchao-mxfp4, group; inputs in high precision",
    ),
    (header("NVFP4Tensor", block_size=16), "torchao-nvfp4, group; inputs in high precision"),
)


@pytest.mark.parametrize(("texts", "said"), HEADERS)
def test_what_a_header_of_torchao_says(texts: Json, said: str, tmp_path: Path) -> None:
    published = quantized_from(written(tmp_path, {}, ("a",), texts))
    assert {str(layer) for layer in published.layers.values()} == {said}


#: A configuration, and words of the error.
REFUSED: tuple[tuple[Json, str], ...] = (
    ({}, "says nothing of quantized weights"),
    ({"quant_method": "gptq"}, "is 'gptq'"),
    (compressed(), "config_groups {}"),
    (compressed(group(weights(strategy="group", group_size=64))), "float/8/group/64"),
    (compressed(group(weights(strategy="channel", type="int"))), "int/8/channel/None"),
    (compressed(group(CHANNEL | {"symmetric": False})), "weights of"),
    (compressed(group(CHANNEL, weights(strategy="token", type="int"))), "inputs of 'int/8/token"),
    (compressed(group(MXFP8, MXFP8 | {"num_bits": 4})), "inputs of 'float/4/group/32'"),
    (compressed(group(CHANNEL), format="pack-quantized"), "format 'pack-quantized'"),
    (compressed(group(CHANNEL, None, ("b",))), "'a', and the configuration says nothing of it"),
    (compressed(group(CHANNEL), ignore=["a"]), "says that it is in high precision"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
    ({"modelopt": {"quantization": {"quant_algo": "MIXED_PRECISION"}}}, "'MIXED_PRECISION'"),
    ({"modelopt": {"quantization": {"quant_algo": "NVFP4", "group_size": 8}}}, "group_size 8"),
    (
        {"modelopt": {"quantization": {"quant_algo": "FP8", "exclude_modules": ["a*"]}}},
        "says that it is in high precision",
    ),
)


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_what_is_not_read_is_refused_by_name(config: Json, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        quantized_from(written(tmp_path, config, ("a",)))
    assert words in str(error.value)


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="INT4Tensor"):
        quantized_from(written(tmp_path, {}, ("a",), header("INT4Tensor", block_size=32)))
    with pytest.raises(CheckpointError, match=r"Int8Tensor/None/\[1, 64\]"):
        quantized_from(written(tmp_path, {}, ("a",), header("Int8Tensor", block_size=[1, 64])))
    with pytest.raises(CheckpointError, match="NVFP4Tensor without per_tensor_scale"):
        one_level = header("NVFP4Tensor", block_size=16, act_quant_kwargs={"a": 1})
        one_level["a.weight"] = one_level["a.weight"][:-1] + ', "_tensor_data_names": ["qdata"]}'
        quantized_from(written(tmp_path, {}, ("a",), one_level))
    with pytest.raises(CheckpointError, match="has no quantized weights"):
        quantized_from(written(tmp_path, {"quant_method": "fp8"}, ()))


def test_scales_of_torchao_in_tiles_are_those_of_rows(tmp_path: Path) -> None:
    """Padded to tiles of 128 x 4; row 32 a + b, column c of a tile is at place 16 b + 4 a + c."""
    parts = published_parts(torch.randn(130, 96).bfloat16(), scheme_of("torchao-nvfp4"))
    scales = parts["_weight_scale"].view(torch.uint8)
    padded = torch.nn.functional.pad(scales, (0, 2, 0, 126))
    tiles = torch.empty(2, 2, 512, dtype=torch.uint8)
    for row, column in itertools.product(range(256), range(8)):
        place = 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
        tiles[row // 128, column // 4, place] = padded[row, column]
    weights = []
    for name, own in (("rows", scales), ("tiles", tiles.view(-1))):
        tensors = {f"a.{suffix}": part for suffix, part in parts.items()}
        tensors["a._weight_scale"] = own.view(torch.float8_e4m3fn)
        texts = header("NVFP4Tensor", block_size=16, is_swizzled_scales=name == "tiles")
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt", **texts})
        net: Any = torch.nn.ModuleDict({"a": torch.nn.Linear(96, 130, bias=False)}).bfloat16()
        load_quantized(net, tmp_path / name)
        weights.append(net["a"].weight.detach())
    for one, other in zip(inner(weights[0]), inner(weights[1]), strict=True):
        assert_same(one, other)
