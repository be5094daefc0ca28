"""What ``ottava export`` reads: safetensors files and folders of them, files of ``torch.save``, sharded checkpoints."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint.files import BY_TORCH, METADATA_KEY, as_path, looks_like, named, read_tensors, translated
from ottava.checkpoint.flatten import held_tensors, unflatten_state_dict
from ottava.checkpoint.folder import INDEX_NAME
from ottava.errors import CheckpointError

_FOLDER_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_state(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The state dict at ``path``, checked, and mapped where the files allow that, and other texts of the file.

    It is a safetensors file, a folder of such with an index, a file of ``torch.save``, or a sharded checkpoint. Of what
    each rank of that had of its own it is rank 0's; of what the next step would have reduced, the largest of all.

    Raises:
        CheckpointError: it is none of these, or damaged.
    """
    place = as_path(path)
    if (place / INDEX_NAME).is_file():
        return _sharded(place), {}
    if place.is_dir() and not (place / _SINGLE).is_file():
        return _folder(place), {}
    file = place / _SINGLE if place.is_dir() else place
    if file.is_file() and looks_like(file)[1] == BY_TORCH:
        return _unpickled(file), {}
    tensors, metadata = read_tensors(file)
    with named(file):
        state = unflatten_state_dict(tensors, metadata)
    return state, {key: text for key, text in metadata.items() if not key.startswith(METADATA_KEY)}


def _folder(folder: Path) -> dict[str, Any]:
    """safetensors files with an index of which tensor is in which, as large models are published."""
    index = folder / _FOLDER_INDEX
    if not index.is_file():
        what = f"{folder} has neither {_FOLDER_INDEX}, {_SINGLE} nor {INDEX_NAME}"
        raise CheckpointError(what, expected="a folder of tensors")
    with translated(f"{index} is damaged", "names of files by tensor"):
        missing: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        files = sorted({Path(file) for file in missing.values()})
    state: dict[str, Any] = {}
    for file in files:
        if file.name != str(file):
            raise CheckpointError(f"{index} names {str(file)!r}", expected="files in the same folder")
        tensors, metadata = read_tensors(folder / file)
        with named(folder / file):
            state |= unflatten_state_dict(tensors, metadata)
        missing = {name: there for name, there in missing.items() if there != file.name or name not in tensors}
    for name, there in missing.items():
        raise CheckpointError(f"{folder / there} has no tensor {name!r}", expected=f"what {index} says")
    return state


def _sharded(path: Path) -> dict[str, Any]:
    from ottava.checkpoint.storage import FolderReader

    reader = FolderReader(path)
    for name in reader.index.files:
        reader.file(name, verify=True)
    others = {name for names in reader.index.description["per_rank"].values() for name in names[1:]}
    tensors = {name: reader.whole(name) for name in sorted(reader.index.tensors) if name not in others}
    text = json.dumps({"version": 1, "quantized": reader.index.description["quantized"]})
    with named(path):
        return unflatten_state_dict(tensors, {METADATA_KEY: text})


def _unpickled(path: Path) -> dict[str, Any]:
    """The state dict in a file of ``torch.save``, of which no code is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # files of old versions of torch cannot be mapped
                state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Damaged bytes make the unpickler raise anything; and torch's own words advise to run the code.
        needs = re.search(r"GLOBAL ([\w.]+)", str(error))
        code = f"it needs code to be run{f' ({needs[1]})' if needs else ''}"
        why = code if needs or "Weights only" in str(error) else (str(error).splitlines() or [repr(error)])[0][:200]
        what, remedy = f"{path} cannot be read as a file of torch.save: {why}", "torch.save(model.state_dict(), path)"
        raise CheckpointError(what, expected="a state dict of tensors alone", remedy=remedy) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}", expected="a state dict of tensors")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            what, remedy = f"{path}: {name!r} is a {type(value).__name__}", "save the state dict of the model by itself"
            raise CheckpointError(what, expected="a state dict of tensors alone", remedy=remedy)
        for tensor in held_tensors(value):
            if tensor.is_nested or tensor.is_meta or tensor.layout != torch.strided:
                raise CheckpointError(f"{path}: {name!r} is on meta, sparse or nested", expected="dense tensors")
            # Strides are the file's word: a small file could ask for any amount of memory.
            if tensor.nbytes > tensor.untyped_storage().nbytes():
                what = f"{path}: {name!r} of shape {tuple(tensor.shape)} has more elements than it has memory"
                raise CheckpointError(what, expected="no expanded views", remedy="save .contiguous() copies")
    return state
