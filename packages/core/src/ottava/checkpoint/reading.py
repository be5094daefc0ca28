"""Reads the tensors of any checkpoint: files and folders of any tool, and sharded ones."""

import json
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint.files import BY_TORCH, INDEX_NAME, METADATA_KEY, looks_like, read_tensors
from ottava.checkpoint.flatten import described, held_tensors, unflatten_state_dict
from ottava.checkpoint.storage import FolderReader
from ottava.errors import CheckpointError, named, translated
from ottava.filesystem import AnyPath, as_path, read_bytes

_FOLDER_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_state(path: AnyPath) -> tuple[dict[str, Any], dict[str, str]]:
    """The state dict in a file or a folder, memory-mapped where the files allow that.

    Weights that another tool has quantized appear as data and scales, as in the files. Where
    the ranks of a sharded checkpoint had different tensors, those of rank 0 are read. Of amaxes,
    which the next step would have reduced, the largest of all ranks are read.

    Args:
        path: a safetensors file of any tool, a folder with ``model.safetensors.index.json`` or with
            ``model.safetensors``, a file of ``torch.save`` with a state dict (no code in it is
            run), or a sharded checkpoint.

    Returns:
        The tensors by name, some of them quantized, and the texts of a file's header without those
        of Ottava.

    Raises:
        CheckpointError: the file or folder is damaged, or cannot be read.
    """
    location = as_path(path)
    if (location / INDEX_NAME).is_file():
        return _read_sharded(location), {}
    single = location / _SINGLE if (location / _SINGLE).is_file() else location
    if single.is_file() and looks_like(single)[1] == BY_TORCH:
        return _read_pickled(single), {}
    state: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    files: Any = _files(location) if single.is_dir() else {single: ()}
    for file, names in files.items():
        tensors, metadata = read_tensors(file)
        if absent := [name for name in names if name not in tensors]:
            raise CheckpointError(
                f"{file} has no tensor {absent[0]!r}",
                expected=f"the tensors that {_FOLDER_INDEX} lists",
            )
        with named(file):
            state |= unflatten_state_dict(tensors, metadata)
    texts = {} if single.is_dir() else metadata
    return state, {key: text for key, text in texts.items() if not key.startswith(METADATA_KEY)}


def _files(folder: Path) -> dict[Path, list[str]]:
    """The safetensors files in a folder, with the names of the tensors in each.

    An index in the folder lists them; large models are published so.
    """
    index = folder / _FOLDER_INDEX
    with translated(
        f"{index} cannot be read", f"{_SINGLE}, files by tensor in {_FOLDER_INDEX}, or {INDEX_NAME}"
    ):
        file_of: dict[str, str] = json.loads(read_bytes(index))["weight_map"]
        outside = [file for file in file_of.values() if Path(file).name != file]
    if outside:
        raise CheckpointError(f"{index} names {outside[0]!r}", expected="files in the same folder")
    names: dict[str, list[str]] = {}
    for name, file in file_of.items():
        names.setdefault(file, []).append(name)
    return {folder / file: names[file] for file in sorted(names)}


def _read_sharded(path: Path) -> dict[str, Any]:
    reader = FolderReader(path)
    for name in reader.index.files:
        reader.file(name, verify=True)
    others = {name for names in reader.index.description["per_rank"].values() for name in names[1:]}
    tensors = {
        name: reader.whole(name) for name in sorted(reader.index.tensors) if name not in others
    }
    with named(path):
        description = reader.index.description
        texts = described(description["quantized"], description.get("contracts", {}))
        return unflatten_state_dict(tensors, texts)


def _read_pickled(path: Path) -> dict[str, Any]:
    """The state dict in a file of ``torch.save``; no code in the file is run."""
    try:
        with warnings.catch_warnings(action="ignore"):
            # Files of old versions of torch are no zip archives and cannot be memory-mapped.
            state: Any = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
        if not isinstance(state, dict):
            raise TypeError(f"it holds a {type(state).__name__}")
        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise TypeError(f"{name!r} is a {type(value).__name__}")
            for tensor in held_tensors(value):
                dense = (
                    not tensor.is_nested and not tensor.is_meta and tensor.layout == torch.strided
                )
                # The file chooses the strides, so a small file could ask for any amount of memory.
                if not dense or tensor.nbytes > tensor.untyped_storage().nbytes():
                    raise TypeError(f"{name!r} is on meta, sparse, nested or expanded")
    except Exception as error:
        # Damaged bytes make the unpickler raise exceptions of any type. torch's own message, which
        # is not shown here, advises to run the code.
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        if code:
            reason = f"it needs code to be run ({code[1]})"
        else:
            reason = (str(error).splitlines() or [repr(error)])[0][:200]
        raise CheckpointError(
            f"{path} cannot be read as a file of torch.save: {reason}",
            expected="a state dict of tensors alone",
            remedy="torch.save(model.state_dict(), path)",
        ) from error
    return state
