"""What `ottava verify` finds in checkpoints that released libraries write from one small model.

`python -m benchmarks.published` writes them in a temporary folder, and writes the results and the
table of docs/verify.md. It needs compressed-tensors, torchao, transformers and accelerate.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.markdown import markdown, with_part
from ottava_verify import Report, verify_checkpoint

FOLDER = Path(__file__).parent
RESULTS, PAGE = FOLDER / "published.json", FOLDER.parent / "docs" / "verify.md"
NAME = "published"
LIBRARIES = ("compressed-tensors", "torchao", "transformers")
#: Presets of compressed-tensors.
PRESETS = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8A16", "MXFP4A16", "NVFP4A16")
Write = Callable[[Path, Path], None]


def _module(name: str) -> Any:
    """A module of a library, which type checkers need not know."""
    return importlib.import_module(name)


def model() -> Any:
    """A small Llama in BF16, whose rows have different magnitudes."""
    transformers = _module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
    )
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config).bfloat16()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() == 2:
                rows = torch.exp(torch.randn(weight.shape[0], 1) * 0.3)
                weight.copy_(torch.randn(weight.shape) * 0.02 * rows)
    return made


def compressed(preset: str, source: Path, target: Path) -> None:
    """compressed-tensors: scales by its own functions from the least and the largest weights."""
    quantization = _module("compressed_tensors.quantization")
    made = model()
    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    config = quantization.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(made, config)
    for layer in made.modules():
        if getattr(layer, "quantization_scheme", None) is not None:
            _set_scales(layer)
    compressor = _module("compressed_tensors").ModelCompressor.from_pretrained_model(made)
    compressor.compress_model(made)
    made.save_pretrained(target)
    compressor.update_config(str(target))


def _set_scales(layer: Any) -> None:
    """The scales of a layer, of the blocks that its arguments name."""
    utils = _module("compressed_tensors.quantization.utils")
    arguments, weight = layer.quantization_scheme.weights, layer.weight.data
    strategy = getattr(arguments.strategy, "value", arguments.strategy)
    rows, columns = weight.shape
    blocks = {
        "tensor": lambda: weight.view(1, -1),
        "channel": lambda: weight.view(rows, 1, columns),
        "block": lambda: _tiles(weight, arguments.block_structure),
    }.get(strategy, lambda: weight.view(rows, -1, arguments.group_size))()
    ends = blocks.amin(-1), blocks.amax(-1)
    level = None
    if strategy == "tensor_group":
        level = utils.generate_gparam(weight.amin().view(1), weight.amax().view(1))
        layer.weight_global_scale.data.copy_(level)
    scale, _ = utils.calculate_qparams(*ends, arguments, level)
    stored = layer.weight_scale
    stored.data = scale.to(stored.dtype).reshape(stored.shape)


def _tiles(weight: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor:
    down, across = (size // side for size, side in zip(weight.shape, sides, strict=True))
    tiles = weight.view(down, sides[0], across, sides[1]).transpose(1, 2)
    return tiles.reshape(down, across, -1)


def hugging_face(options: dict[str, Any], source: Path, target: Path) -> None:
    """Transformers' FP8, by the operation of its quantizer: loading with it needs a GPU."""
    config = _module("transformers").FineGrainedFP8Config(**options)
    quantizer = _module("transformers.quantizers.auto").AutoHfQuantizer.from_config(
        config, pre_quantized=False
    )
    operation = _module("transformers.integrations.finegrained_fp8").Fp8Quantize(quantizer)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        made = {name: tensor}
        if name.endswith("proj.weight"):
            made = operation.convert({name: tensor})
        tensors |= {key: value.contiguous() for key, value in made.items()}
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    text = json.dumps({"quantization_config": config.to_dict()}, default=str)
    (target / "config.json").write_text(text)


def torchao(config: Callable[[], Any], source: Path, target: Path) -> None:
    """torchao's weight-only configurations, flattened by its own function."""
    support = _module("torchao.prototype.safetensors.safetensors_support")
    made = model()
    _module("torchao.quantization").quantize_(made.model.layers, config())
    tensors, metadata = support.flatten_tensor_state_dict(made.state_dict())
    target.mkdir()
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, target / "model.safetensors", {"format": "pt", **metadata})


def _rows_of_torchao() -> Any:
    return _module("torchao.quantization").Float8WeightOnlyConfig()


def _tensors_of_torchao() -> Any:
    quantization = _module("torchao.quantization")
    return quantization.Float8WeightOnlyConfig(granularity=quantization.PerTensor())


def _nvfp4_of_torchao() -> Any:
    return _module("torchao.prototype.mx_formats").NVFP4WeightOnlyConfig()


#: Weight-only configurations of torchao.
TORCHAO: dict[str, Callable[[], Any]] = {
    "Float8WeightOnly, rows": _rows_of_torchao,
    "Float8WeightOnly, tensor": _tensors_of_torchao,
    "NVFP4WeightOnly": _nvfp4_of_torchao,
}


def writers() -> Iterator[tuple[str, str, Write]]:
    """Library, what it writes, and the function that does."""
    for preset in PRESETS:
        yield "compressed-tensors", preset, partial(compressed, preset)
    options = ({}, {"scale_fmt": "ue8m0"}, {"weight_block_size": None})
    titles = ("FP8, blocks", "FP8, blocks, ue8m0", "FP8, tensor")
    for title, option in zip(titles, options, strict=True):
        yield "transformers", title, partial(hugging_face, option)
    for title, config in TORCHAO.items():
        yield "torchao", title, partial(torchao, config)


def measure() -> list[dict[str, Any]]:
    """What is found in each checkpoint, with the version of its library."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model().save_pretrained(folder / "source")
        for place, (library, title, write) in enumerate(writers()):
            target = folder / str(place)
            write(folder / "source", target)
            report = verify_checkpoint(target, folder / "source")
            version = f"{library} {importlib.metadata.version(library)}"
            rows.append({"library": version, "format": title} | row(report))
    return rows


def row(report: Report) -> dict[str, Any]:
    """The contract of most tensors, and what explains those that depart from it."""
    statuses = [finding.status for finding in report.findings]
    departing = [finding for finding in report.findings if finding.status == "departs"]
    first = departing[0] if departing else report.findings[0]
    causes = [list(clauses) for clauses in first.causes]
    return {
        "tensors": len(statuses),
        "equal": statuses.count("equal"),
        "explained": sum(bool(finding.causes) for finding in departing),
        "contract": first.contract,
        "causes": causes,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a table of the documentation."""
    return markdown([_cells(each) for each in rows])


def _cells(each: dict[str, Any]) -> dict[str, object]:
    causes = each["causes"]
    said = "; and ".join(causes[0]) if causes else "-"
    if len(causes) > 1:
        said += f" (or {len(causes) - 1} other explanations of the same bytes)"
    return {
        "library": each["library"],
        "format": each["format"],
        "nearest contract": each["contract"].rpartition(",")[0],
        "equal": f"{each['equal']} of {each['tensors']}",
        "explained": each["explained"],
        "what explains the others": said,
    }


def main() -> None:
    """Write the results and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    rows = measure()
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(
        with_part(PAGE.read_text(encoding="utf-8"), NAME, table(rows)), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
