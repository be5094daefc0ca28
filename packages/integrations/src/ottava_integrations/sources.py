"""The model that a checkpoint is exported as: of Transformers, the user, or the names."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ottava.checkpoint import read_state
from ottava.errors import CheckpointError, UsageError, translated
from ottava.filesystem import AnyPath, as_path, read_bytes
from ottava.tensors import QuantizedTensor
from ottava_integrations.converting import is_named_as_embedding

Tensor = torch.Tensor
_CONFIG = "config.json"
#: Files beside weights that an export keeps: of tokenizers, generation and so on.
_KEPT = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
_WEIGHTS = (".index.json", "adapter_config.json")


class ExportSource(NamedTuple):
    """What is exported.

    Attributes:
        model: with the values of the checkpoint.
        config: the content of ``config.json``; None where there is none.
        files: other files to copy.
    """

    model: torch.nn.Module
    config: dict[str, Any] | None
    files: tuple[Path, ...] = ()


def open_source(path: AnyPath, model: torch.nn.Module | None = None) -> ExportSource:
    """The model of a checkpoint.

    - A folder with ``config.json`` of Transformers: the model that this names, which says what is
      linear, and how experts are named.
    - With ``model``: this model, with the tensors of the checkpoint.
    - Any other checkpoint: a module for each name. Matrices named ``weight`` are taken for those of
      linear layers, but for those that are named as embeddings.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not fit the model.
        UsageError: Transformers is needed and not installed.
    """
    location = as_path(path)
    if model is not None:
        state, _ = read_state(location)
        expected = "the tensors of the model"
        with translated(f"{location} does not fit the model", expected, to=CheckpointError):
            model.load_state_dict(state, assign=True)
        return ExportSource(model, None)
    config = _config(location)
    if config.get("architectures"):
        return _of_transformers(location, config)
    state, _ = read_state(location)
    return ExportSource(model_of_state(state), None)


def _config(path: Path) -> dict[str, Any]:
    """The configuration of Transformers in a folder; empty if there is none."""
    file = path / _CONFIG
    if not file.is_file():
        return {}
    with translated(f"{file} cannot be read", "a JSON object"):
        config = json.loads(read_bytes(file))
        if not isinstance(config, dict):
            raise TypeError(f"it is a {type(config).__name__}")
    return config


def _of_transformers(path: Path, config: dict[str, Any]) -> ExportSource:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            f"{path} is a checkpoint of Transformers, which is not installed",
            expected="Transformers, which says what is linear in its models",
            remedy="pip install transformers accelerate, or pass --model module:callable",
        ) from error
    name = config["architectures"][0]
    cls = getattr(transformers, str(name), None)
    if cls is None:
        raise CheckpointError(
            f"{path / _CONFIG} names the model {name!r}",
            expected=f"one of Transformers {transformers.__version__}",
            remedy="pass --model module:callable",
        )
    with translated(f"{path} cannot be loaded by Transformers", "a model", to=CheckpointError):
        model = cls.from_pretrained(path, dtype="auto")
    files = [
        file
        for file in sorted(path.iterdir())
        if file.is_file()
        and file.name != _CONFIG
        and file.name.endswith(_KEPT)
        and not file.name.endswith(_WEIGHTS)
    ]
    return ExportSource(model, config, tuple(files))


def model_of_state(state: Mapping[str, Tensor]) -> torch.nn.Module:
    """A module for each name of a state dict, with its tensors as parameters."""
    model = torch.nn.Module()
    for name, tensor in state.items():
        *parts, leaf = name.split(".")
        module = model
        for place, part in enumerate(parts):
            if part not in module._modules:
                weight = ".".join([*parts[: place + 1], "weight"])
                module._modules[part] = _module_for(weight, state)
            child = module._modules[part]
            assert child is not None
            module = child
        if tensor.is_floating_point():
            module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor
    return model


def _module_for(name: str, state: Mapping[str, Tensor]) -> torch.nn.Module:
    """An empty module for the tensors beside a weight: linear where that is a matrix."""
    weight = state.get(name)
    is_matrix = weight is not None and weight.dim() == 2 and weight.is_floating_point()
    if isinstance(weight, QuantizedTensor) or (is_matrix and not is_named_as_embedding(name)):
        linear = torch.nn.Linear(1, 1, device="meta")
        linear._parameters.clear()
        linear._parameters.update(weight=None, bias=None)
        return linear
    return torch.nn.Module()
