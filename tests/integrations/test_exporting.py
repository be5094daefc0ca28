"""Models in published formats: names, bytes, files and refusals, read with nothing but
safetensors and the definition of each format."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import ottava
import ottava_integrations.writing as writing
from ottava.cli.main import app
from ottava.errors import DTypeError, OptionError, UsageError
from ottava_integrations import (
    ExportCheck,
    ServedRecipe,
    check_export,
    export_model,
    iter_exported,
    load_quantized,
)
from ottava_integrations.formats import FORMATS, companions_of, scheme_of
from ottava_integrations.sources import model_of_state
from tests.comparing import assert_same
from tests.integrations.files import Net, published_parts

#: The largest magnitudes of inputs, for formats with constant scales of them.
AMAXES = {"up": 3.0, "down": 5.0}


def model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    made = Net().to(dtype)
    with torch.no_grad():
        # Rows of different magnitudes.
        made.up.weight.mul_(torch.linspace(0.1, 3, 256)[:, None])
    return made


def amaxes_for(format: str) -> dict[str, float] | None:
    return AMAXES if format == "modelopt-fp8" else None


@pytest.mark.parametrize("format", FORMATS)
def test_the_tensors_of_a_format(format: str) -> None:
    net = model()
    tensors = dict(iter_exported(net, format, input_amaxes=amaxes_for(format)))
    scheme = scheme_of(format)
    for name in ("up", "down"):
        for suffix, expected in published_parts(net.get_submodule(name).weight, scheme).items():
            assert_same(tensors.pop(f"{name}.{suffix}"), expected, note=(name, suffix))
    if format == "modelopt-fp8":
        # amax / 448, in float32
        assert float(tensors.pop("up.input_scale")) == pytest.approx(3 / 448, rel=1e-7)
        assert float(tensors.pop("down.input_scale")) == pytest.approx(5 / 448, rel=1e-7)
    # The tied weight comes once, and what is not linear as it is.
    assert sorted(tensors) == ["embed.weight", "norm.bias", "norm.weight", "shift", "up.bias"]
    assert_same(tensors["embed.weight"], net.embed.weight)


#: Recipes whose kept weights formats hold, and the grain of the scheme.
HELD: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("current", {}, "fp8", "tensor"),
    ("current", {}, "modelopt-fp8", "tensor"),
    ("current", {"force_pow_2_scales": True}, "float-quantized", "tensor"),
    ("delayed", {}, "fp8", "tensor"),
    ("rowwise", {"force_pow_2_scales": True}, "float-quantized", "channel"),
    ("blockwise", {}, "fp8", "block"),
    ("blockwise", {}, "fp8-ue8m0", "block"),
    ("blockwise", {}, "float-quantized", "block"),
    ("mxfp8", {"with_2d_quantization": True}, "mxfp8-quantized", "group"),
    ("mx", {"with_2d_quantization": True}, "mxfp4-pack-quantized", "group"),
    ("nvfp4", {}, "nvfp4-pack-quantized", "group"),
    ("nvfp4", {"four_over_six": "weights"}, "modelopt-nvfp4", "group"),
    ("nvfp4", {"four_over_six": "weights"}, "nvfp4-pack-quantized", "group"),
)


@pytest.mark.parametrize(("name", "options", "format", "grain"), HELD)
def test_every_recipe_leaves_in_the_formats_that_hold_it(
    name: str, options: dict[str, Any], format: str, grain: str, tmp_path: Path
) -> None:
    recipe = ottava.get_recipe(name, **options)
    net = ottava.convert(model(), recipe, exclude="lm_head", primary=True)
    data = {layer: net.get_submodule(layer).weight for layer in AMAXES}
    values = {layer: weight.dequantize(dtype=torch.float32) for layer, weight in data.items()}
    report = export_model(net, tmp_path / "out", format, input_amaxes=amaxes_for(format))
    assert {(layer.scheme.grain, layer.recipe) for layer in report.layers.values()} == {(grain, "")}
    loaded = model()
    load_quantized(loaded, tmp_path / "out")
    for layer, expected in values.items():
        found = loaded.get_submodule(layer).weight.dequantize(dtype=torch.float32)
        # 4-over-6 has another bound than the recipe that loads it: its scale of the tensor may
        # differ in the last bit.
        other_bound = "four_over_six" in options
        torch.testing.assert_close(found, expected, rtol=2e-7 if other_bound else 0, atol=0)
    # Nothing of the trainer's state is in the files.
    assert not any("recipe_state" in key for key in load_file(tmp_path / "out/model.safetensors"))


def test_which_weights_are_quantized() -> None:
    def quantized(net: torch.nn.Module, **options: Any) -> set[str]:
        tensors = iter_exported(net, "fp8", **options)
        return {name.rpartition(".")[0] for name, _ in tensors if name.endswith("scale_inv")}

    assert quantized(model()) == {"up", "down"}
    assert quantized(model(), include="up") == {"up"}
    assert quantized(model(), exclude="up") == {"down"}
    assert quantized(model(), include=["up", "down"], exclude="up") == {"down"}
    converted = ottava.convert(model(), "blockwise", include="down")
    assert quantized(converted) == {"down"}
    # The weight of the head is the embedding's.
    with pytest.raises(OptionError, match="no layer of the model would be quantized") as error:
        quantized(model(), include="lm_head")
    assert "up: it is not selected" in str(error.value)


def test_the_recipe_of_a_layer_or_of_the_call_quantizes() -> None:
    def scales(net: torch.nn.Module, format: str, **options: Any) -> torch.Tensor:
        return dict(iter_exported(net, format, **options))["up.weight_scale"]

    served = ottava.convert(model(), ServedRecipe("mxfp8-quantized"), include="up")
    floor = ottava.get_recipe("mxfp8", scale_rounding="floor")
    bound = ottava.convert(model(), floor, include="up")
    plain = scales(model(), "mxfp8-quantized")
    assert_same(scales(served, "mxfp8-quantized"), plain)
    by_layer, by_call = (
        scales(bound, "mxfp8-quantized"),
        scales(model(), "mxfp8-quantized", recipe=floor),
    )
    assert_same(by_layer, by_call)
    assert not torch.equal(by_layer, plain)
    # A recipe with state begins with the scale of the weight.
    whole = ottava.get_recipe("current", fp8_format="E4M3")
    for recipe in (whole, "delayed"):
        tensors = dict(iter_exported(model(), "fp8", recipe=recipe))
        largest = model().up.weight.abs().max().float()
        assert_same(tensors["up.weight_scale_inv"], (largest / 448).view(1, 1))


#: A recipe that layers have, a format, and what of the error.
REFUSED = (
    ("mxfp8", "fp8", "block is 1 x 32"),
    ("current", "float-quantized", "a scale is"),
    ("mx", "nvfp4-pack-quantized", "second_level is none"),
)


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize(("recipe", "format", "words"), REFUSED)
def test_all_weights_that_a_format_cannot_hold_are_named(
    recipe: str, format: str, words: str, primary: bool, tmp_path: Path
) -> None:
    net = ottava.convert(model(), recipe, exclude="lm_head", primary=primary)
    with pytest.raises(OptionError, match="1 other weights are refused") as error:
        export_model(net, tmp_path / "out", format)
    assert words in str(error.value)
    assert "quantize the weight by ottava.get_recipe(" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_has_the_layers_and_files_that_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for option, quantized in (("include", "up"), ("exclude", "down")):
        out = tmp_path / option
        export_model(model(), out, "fp8", files=[tmp_path / "tokenizer.json"], **{option: "up"})
        names = load_file(out / "model.safetensors")
        assert [name for name in names if "scale" in name] == [f"{quantized}.weight_scale_inv"]
        assert (out / "tokenizer.json").read_text() == "{}"


def test_a_format_may_hold_the_scales_of_one_dtype_alone() -> None:
    net = ottava.convert(model(), "rowwise", exclude="lm_head")
    net.up.float()
    with pytest.raises(OptionError, match=r"'down': .* a scale is"):
        iter_exported(net, "float-quantized")


def test_only_one_scale_for_the_tensor_is_constant() -> None:
    for format, activations, expected in (
        ("float-quantized", "token", False),
        ("float-quantized", "tensor", True),
        ("fp8", "block", False),
        ("fp8", "tensor", True),
        ("mxfp8-quantized", "group", False),
        ("nvfp4-pack-quantized", "none", False),
    ):
        tensors = dict(iter_exported(model(), format, activations=activations, input_amaxes=AMAXES))
        scheme = scheme_of(format)
        scale = tensors.get(f"up.{scheme.names.input_scale}")
        assert (scale is not None) == expected, format
        if scale is not None and scheme.scale_dtype is None:
            assert (scale.dtype, scale.shape) == (torch.bfloat16, (1,))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "gguf"}, "format 'gguf'"),
        ({"format": "modelopt-fp8"}, "input of 'up' is not known"),
        ({"format": "nvfp4-pack-quantized", "activations": "group"}, "input of 'up' is not known"),
        ({"format": "fp8", "activations": "group"}, "activations 'group' of fp8"),
        ({"format": "fp8", "max_shard_size": 0}, "max_shard_size is 0"),
        ({"format": "fp8", "max_shard_size": 5e9}, "max_shard_size is 5000000000.0"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=words):
        export_model(model(), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_models_and_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no linear layer inside"):
        iter_exported(torch.nn.Linear(128, 128), "fp8")
    with pytest.raises(DTypeError, match="model is a str"):
        iter_exported("model", "fp8")  # type: ignore[arg-type]
    adapted = model()
    adapted.up.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(128, 4, bias=False)})
    with pytest.raises(UsageError, match=r"'up.lora_A.default.weight'(?s:.*)merge_and_unload"):
        iter_exported(adapted, "fp8")
    (tmp_path / "file").write_text("of a user")
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(UsageError, match="exists"):
            export_model(model(), place, "fp8")


#: A format, options, and parts of the configuration.
CONFIGURATIONS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("fp8", {}, {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "float"}),
    ("fp8-ue8m0", {}, {"scale_fmt": "ue8m0"}),
    ("float-quantized", {}, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    ("nvfp4-pack-quantized", {}, {"format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}),
    ("modelopt-nvfp4", {}, {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}),
    (
        "modelopt-nvfp4",
        {"activations": "group", "input_amaxes": AMAXES},
        {"quant_algo": "NVFP4", "group_size": 16},
    ),
)


@pytest.mark.parametrize(("format", "options", "parts"), CONFIGURATIONS)
def test_the_configuration(
    format: str, options: dict[str, Any], parts: dict[str, Any], tmp_path: Path
) -> None:
    net = model()
    net.lm_head = torch.nn.Linear(128, 16, bias=False).bfloat16()
    (tmp_path / "config.json").write_text("of the source")
    options = options | {"files": [tmp_path / "config.json"], "config": {"model_type": "own"}}
    export_model(net, tmp_path / "out", format, **options)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "own"
    found = config["quantization_config"]
    assert {name: found[name] for name in parts} == parts
    if format.startswith("modelopt"):
        other = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
        assert other["quantization"]["exclude_modules"] == ["lm_head"]


#: A format of compressed-tensors, options, and what its configuration says of inputs.
INPUTS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("float-quantized", {}, {"num_bits": 8, "strategy": "token", "dynamic": True}),
    (
        "float-quantized",
        {"activations": "tensor", "input_amaxes": AMAXES},
        {"strategy": "tensor", "dynamic": False},
    ),
    ("float-quantized", {"activations": "block"}, {"strategy": "group", "group_size": 128}),
    (
        "mxfp8-quantized",
        {"activations": "group"},
        {"num_bits": 8, "strategy": "group", "group_size": 32, "dynamic": True},
    ),
    (
        "nvfp4-pack-quantized",
        {"activations": "group", "input_amaxes": AMAXES},
        {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
    ),
)


@pytest.mark.parametrize(("format", "options", "parts"), INPUTS)
def test_the_configuration_of_inputs(
    format: str, options: dict[str, Any], parts: dict[str, Any], tmp_path: Path
) -> None:
    export_model(model(), tmp_path / "out", format, **options)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    found = group["input_activations"]
    assert {name: found[name] for name in parts} == parts


@pytest.mark.filterwarnings("ignore:only")
def test_layers_with_other_scales_are_a_group(tmp_path: Path) -> None:
    rows = ottava.get_recipe("rowwise", force_pow_2_scales=True)
    net = ottava.convert(ottava.convert(model(), rows, include="up"), "blockwise", include="down")
    export_model(net, tmp_path / "out", "float-quantized")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert [
        (group["targets"], group["weights"]["strategy"], group["weights"].get("block_structure"))
        for group in config["config_groups"].values()
    ] == [(["up"], "channel", None), (["down"], "block", [128, 128])]


def test_shards_their_index_and_contracts(tmp_path: Path) -> None:
    net = model()
    # Parameters may share memory.
    net.norm.bias.data = net.up.bias.data
    report = export_model(net, tmp_path / "out", "fp8", max_shard_size=33_000)
    whole = export_model(net, tmp_path / "whole", "fp8")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    assert index["metadata"]["total_size"] == report.nbytes == whole.nbytes
    one = load_file(tmp_path / "whole" / "model.safetensors")
    contracts: set[str] = set()
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert {index["weight_map"][name] for name in tensors} == {file}
        for name, tensor in tensors.items():
            assert_same(tensor, one.pop(name))
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            own = set(json.loads(opened.metadata().get("ottava.contracts", "{}")))
        # A file has the contracts of its own layers.
        assert own == {report.layers[n[:-7]].citation for n in tensors if n[:-7] in report.layers}
        contracts |= own
    assert not one
    assert contracts == {layer.citation for layer in report.layers.values()}
    assert all(citation.startswith("ottava:blockwise/") for citation in contracts)


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_export_that_is_interrupted_leaves_nothing(
    fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def save_two(tensors: Any, path: Path, texts: Any) -> None:
        if len(written) == 2:
            raise fault
        written.append(path)
        path.write_bytes(b"part")

    export_model(model(), tmp_path / "former", "fp8")
    former = (tmp_path / "former" / "model.safetensors").read_bytes()
    monkeypatch.setattr(writing, "save_file", save_two)
    expected: type[BaseException] = type(fault)
    if isinstance(fault, OSError):
        expected = UsageError
    for place in ("out", "former"):
        written.clear()
        with pytest.raises(expected):
            export_model(model(), tmp_path / place, "fp8", max_shard_size=9, force=True)
        assert len(written) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["former"]
    assert (tmp_path / "former" / "model.safetensors").read_bytes() == former


def test_a_file_is_full_at_its_limit(tmp_path: Path) -> None:
    nbytes = export_model(model(), tmp_path / "whole", "fp8").nbytes
    for limit, count in ((nbytes, 1), (nbytes - 1, 2)):
        report = export_model(model(), tmp_path / str(limit), "fp8", max_shard_size=limit)
        files = [name for name in report.files if name.endswith(".safetensors")]
        assert len(files) == count


def test_a_state_dict_is_a_model_of_parameters_and_buffers() -> None:
    made = model_of_state({"a.weight": torch.ones(2, 2), "a.steps": torch.tensor(3)})
    assert [name for name, _ in made.named_parameters()] == ["a.weight"]
    assert [name for name, _ in made.named_buffers()] == ["a.steps"]


def test_a_folder_that_cannot_be_put_in_place_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, replace = tmp_path / "out", os.replace
    export_model(model(), target, "fp8")
    former = (target / "model.safetensors").read_bytes()

    def fails_once(source: Any, place: Any) -> None:
        if Path(place) == target and not Path(source).name.endswith(".former"):
            raise PermissionError("not now")
        replace(source, place)

    monkeypatch.setattr(os, "replace", fails_once)
    with pytest.raises(UsageError):
        export_model(model(), target, "fp8", activations="none", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (target / "model.safetensors").read_bytes() == former
    monkeypatch.undo()
    export_model(model(), target, "naive-quantized", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (target / "model.safetensors").read_bytes() != former


def test_companions_are_written_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"activations": "group", "input_amaxes": AMAXES}
    export_model(model(), tmp_path / "out", "nvfp4-pack-quantized", **options)
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    # A global scale that is the quotient of no amax.
    level = tensors["up.weight_global_scale"]
    tensors["up.weight_global_scale"] = torch.nextafter(level * 1.1, level)
    writing.save_file(tensors, path, {"format": "pt"})
    net = model()
    load_quantized(net, tmp_path / "out")
    assert companions_of(net.up) is not None
    again = dict(iter_exported(net, "nvfp4-pack-quantized"))
    # Parameters of the files, in any order.
    assert sorted(again) == sorted(tensors)
    for name, tensor in tensors.items():
        assert_same(again[name], tensor, note=name)
    # Another format has another scale of inputs.
    with pytest.raises(OptionError, match="input of 'up' is not known"):
        iter_exported(net, "modelopt-nvfp4", activations="group")
    # A weight that is written to has another scale of the tensor.
    with torch.no_grad():
        net.up.weight.mul_(2)
    written = dict(iter_exported(net, "nvfp4-pack-quantized"))
    assert written["up.weight_global_scale"] < 0.6 * tensors["up.weight_global_scale"]


@pytest.mark.parametrize("grain", ["channel", "tensor", "block"])
def test_scales_of_others_become_those_that_the_file_holds(grain: str, tmp_path: Path) -> None:
    """A weight with any BF16 scales keeps them until it is written to."""
    scheme = scheme_of("float-quantized", grain)
    net = ottava.convert(model(), scheme.exports_as.make(), exclude="lm_head", primary=True)
    export_model(net, tmp_path / "out", "float-quantized")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors["up.weight_scale"] = tensors["up.weight_scale"] * 1.3
    writing.save_file(tensors, path, {"format": "pt"})
    loaded = model()
    load_quantized(loaded, tmp_path / "out")
    again = export_model(loaded, tmp_path / "again", "float-quantized")
    assert_same(
        load_file(tmp_path / "again" / "model.safetensors")["up.weight_scale"],
        tensors["up.weight_scale"],
    )
    # Nobody says by which contract another tool made its bytes.
    assert again.layers["up"].citation == ""
    with torch.no_grad():
        loaded.up.weight.mul_(1.1)
    written = export_model(loaded, tmp_path / "written", "float-quantized")
    scale = load_file(tmp_path / "written" / "model.safetensors")["up.weight_scale"]
    assert bool((torch.frexp(scale.float()).mantissa == 0.5).all())
    assert written.layers["up"].citation.startswith("ottava:")


def test_readers_find_the_values_of_modelopt(tmp_path: Path) -> None:
    for format in ("modelopt-fp8", "modelopt-nvfp4"):
        net = model()
        # NaN is read as NaN.
        net.norm.bias.data[1] = math.nan
        export_model(net, tmp_path / format, format, input_amaxes=amaxes_for(format))
        check = check_export(net, tmp_path / format)
        assert (check.reader, check.weights) == ("formula", 2)
        assert check.is_equal
        with torch.no_grad():
            net.up.weight[3, 5] = 9.0
            net.norm.bias[0] = 1.0
        check = check_export(net, tmp_path / format)
        assert set(check.different) == {"up"}
        assert check.others == ("norm.bias",)


def test_the_layers_of_a_check_are_those_of_the_export(tmp_path: Path) -> None:
    for option, layer in (("include", "up"), ("exclude", "down")):
        net, out = model(), tmp_path / option
        export_model(net, out, "modelopt-nvfp4", **{option: "up"})
        with torch.no_grad():
            net.get_submodule(layer).weight[3, 5:7] = 0
        check = check_export(net, out, **{option: "up"})
        assert (check.weights, check.different) == (1, {layer: 2})
        with pytest.raises(UsageError, match="Expected: the model, include and exclude"):
            check_export(net, out)


MODULE = f"""
import torch
from {__name__} import model

def make():
    float(torch.ones(1))
    return model()
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "model.safetensors", tmp_path / "out"
    net = model()
    net.lm_head = torch.nn.Linear(128, 16, bias=False).bfloat16()
    ottava.checkpoint.save_model(net, source)

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["export", *map(str, arguments)])

    options = ("--activations", "none", "--max-shard-size", 1)
    done = run(source, out, "--to", "mxfp4-pack-quantized", *options)
    assert done.exit_code == 0, done.output
    assert "Inputs when served: none" in done.output
    # Without a model, names say what is linear, and what is an embedding or a head.
    tensors = [[*load_file(file)] for file in out.glob("*.safetensors")]
    assert all(len(names) == 1 for names in tensors)
    packed = {name for (name,) in tensors if "packed" in name}
    assert packed == {"down.weight_packed", "up.weight_packed"}
    # A module of the current directory, whose model cannot be made on the meta device.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_an_export.py").write_text(MODULE)
    by_model = run(source, tmp_path / "b", "--to", "fp8", "--model", "of_an_export:make")
    assert by_model.exit_code == 0, by_model.output
    amaxes = tmp_path / "amaxes.json"
    amaxes.write_text(json.dumps(AMAXES))
    checked = run(
        source, tmp_path / "c", "--to", "modelopt-fp8", "--input-amaxes", amaxes, "--verify"
    )
    assert checked.exit_code == 0, checked.output
    assert "formula decodes 2 of 2 weights to the same values" in checked.output
    # What is read is compared with what the recipe of the export makes.
    recipe = ("--recipe", "nvfp4", "--option", "four_over_six=weights", "--verify")
    for number, layers in enumerate(((), ("--include", "up"), ("--exclude", "up"))):
        checked = run(source, tmp_path / f"e{number}", "--to", "modelopt-nvfp4", *recipe, *layers)
        assert checked.exit_code == 0, checked.output
    for arguments, words in (
        ((source, out, "--to", "fp8"), "--force replaces it"),
        ((source, tmp_path / "d"), "neither --to nor --recipe"),
        ((source, tmp_path / "d", "--to", "gguf"), "format 'gguf'"),
        ((source, tmp_path / "d", "--recipe", "bf16", "--verify"), "--verify without --to"),
        ((source, tmp_path / "d", "--to", "modelopt-fp8"), "input_amaxes"),
        ((source, tmp_path / "d", "--to", "fp8", "--option", "a=1"), "--option without --recipe"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2, refused.output
        assert words in refused.output
    assert not (tmp_path / "d").exists()
    for different, others in (({"up": 1}, ()), ({}, ("norm.bias",))):
        check = ExportCheck("x", 2, different, others)
        name = "ottava_integrations.checking.check_export"
        monkeypatch.setattr(name, lambda *_, check=check, **__: check)
        assert run(source, out, "--to", "fp8", "--verify", "--force").exit_code == 1
