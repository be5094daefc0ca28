"""The weights of a checkpoint; files are mapped, and a tensor is read when it is used."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint import read_state
from ottava.checkpoint.files import INDEX_NAME
from ottava.checkpoint.flatten import place_of
from ottava.checkpoint.published import find_published
from ottava.errors import CheckpointError, DTypeError, UsageError
from ottava.filesystem import as_path
from ottava.kernels import HIGH_PRECISION
from ottava.nn.loading import OF_STATE
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.analysis.report import Skipped

#: Names of weights that are looked up, such as embeddings: a part of the name, or its last word.
_LOOKED_UP = re.compile(
    r"embed|(^|\.)(emb|wte|wpe|tok|tokens?|pos|positions?)\.weight$", re.IGNORECASE
)
_WEIGHT = "weight"
_WHOLE = ("model.safetensors", "model.safetensors.index.json", INDEX_NAME)
# The weights in folders of older Transformers versions, before safetensors. Other files with this
# suffix hold no weights.
_BY_TORCH = "pytorch_model*.bin"
# A tensor that every captured step has: an operand of its first call.
_OPERAND = "operands/0.activation"
_MANY = 5


def read(source: Any) -> Mapping[str, Any]:
    """The tensors of a source by name, mapped where files allow that.

    Args:
        source: a safetensors file; a folder of safetensors files, with or without an index, or of
            ``pytorch_model*.bin`` files; a file of ``torch.save`` with a state dict, which is read
            without running code; a sharded checkpoint of Ottava; or a state dict.

    Raises:
        CheckpointError: the source is damaged, or none of these.
        DTypeError: the source is neither a path nor a state dict.
    """
    if isinstance(source, Mapping):
        for name, value in source.items():
            if not isinstance(name, str) or not isinstance(
                value, (torch.Tensor, QuantizedTensorStorage)
            ):
                raise DTypeError(
                    f"{name!r} is a {type(value).__name__}",
                    expected="a state dict of tensors by name",
                )
        return source
    path = as_path(source)
    is_one = not path.is_dir() or any((path / name).exists() for name in _WHOLE)
    state = read_state(path)[0] if is_one else _read_folder(path)
    if _OPERAND in state:
        raise CheckpointError(
            f"{path} is a captured step",
            expected="a checkpoint",
            remedy="`ottava bisect`, of the package ottava-bisect, reads it",
        )
    return state


def check_values(source: Any, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a source that has data which another tool has quantized."""
    path = None if isinstance(source, Mapping) else as_path(source)
    codes = find_published(state, path)
    codes.refuse(path or "the state dict", codes.scales)


def _read_folder(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob(_BY_TORCH))
    if not files:
        raise CheckpointError(
            f"{folder} has no safetensors file",
            expected=f"such files, or {_BY_TORCH}",
            remedy="name the folder that holds them, or a file",
        )
    tensors: dict[str, Any] = {}
    for file in files:
        state = read_state(file)[0]
        if both := tensors.keys() & state.keys():
            raise CheckpointError(
                f"{folder} has {min(both)!r} in several files",
                expected="each tensor once",
                remedy="name the file that is meant",
            )
        tensors |= state
    return tensors


def weights(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], list[Skipped]]:
    """The weights of products by the names of their layers, and the other tensors with the reasons.

    A weight is a matrix in high precision that is named ``weight`` or ``*.weight``, and neither
    named as an embedding nor tied to one.

    Raises:
        UsageError: there is no weight.
    """
    looked_up = {
        place_of(v): n for n, v in state.items() if n.endswith(_WEIGHT) and _LOOKED_UP.search(n)
    }
    weights: dict[str, torch.Tensor] = {}
    skipped: list[Skipped] = []
    for name, value in state.items():
        reason = _reason(name, value, looked_up)
        if reason:
            skipped.append(Skipped(name, reason))
        else:
            weights[name.removesuffix(_WEIGHT).removesuffix(".")] = value
    if not weights:
        raise UsageError(
            "nothing that was read is a weight of a product"
            + "".join(f"; {s.name}: {s.reason}" for s in skipped[:_MANY]),
            expected=f"matrices in float32, bfloat16 or float16 that are named *.{_WEIGHT}",
            remedy="--model names the layers of a model whose names differ",
        )
    return weights, skipped


def _reason(name: str, value: Any, looked_up: Mapping[Any, str]) -> str:
    """The reason why a tensor is not the weight of a product; empty for one that is."""
    if OF_STATE.search(name):
        return "state of a recipe"
    if isinstance(value, QuantizedTensorStorage):
        return f"quantized already, as {type(value).__name__}"
    if value.dim() != 2:
        return f"{value.dim()} dimension{'s' * (value.dim() != 1)}"
    if value.dtype == torch.float64:
        return "float64, which no recipe quantizes: float32, bfloat16 and float16 are"
    if value.dtype not in HIGH_PRECISION:
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} is no high precision: indices, or quantized by another tool"
    if not f".{name}".endswith(f".{_WEIGHT}"):
        return f"not named {_WEIGHT}"
    if not value.numel():
        return "empty"
    first = looked_up.get(place_of(value), name if _LOOKED_UP.search(name) else "")
    if first == name:
        return "named as an embedding, which is looked up"
    return f"tied to {first}, which is looked up" if first else ""
