"""What ``ottava export`` reads: safetensors files and folders of them, files of ``torch.save``, sharded checkpoints."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint.description import Described, Description
from ottava.checkpoint.files import METADATA_KEY, named, read_tensors
from ottava.checkpoint.flatten import described_state
from ottava.checkpoint.index import INDEX_NAME
from ottava.checkpoint.paths import as_path
from ottava.errors import CheckpointError, OptionError
from ottava.tensors.storage import QuantizedTensorStorage

_FOLDER_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError)


@dataclass(frozen=True)
class Source:
    """Plain tensors by name: the bytes of each, what reads one, what they make, and other texts of the file."""

    sizes: Mapping[str, int]
    read: Callable[[str], torch.Tensor]
    description: Description
    metadata: Mapping[str, str]

    def under(self, prefix: str) -> Source:
        """The tensors whose names begin with a prefix, without it; raises OptionError where there are none."""

        def own(names: Any) -> dict[str, Any]:
            return {n.removeprefix(prefix): e for n, e in names.items() if n.startswith(prefix) and n != prefix}

        stored, aliases = own({name: name for name in self.sizes}), own(self.description.aliases)
        taken = {there: name for name, there in stored.items()}
        # An alias of a tensor that stays behind becomes that tensor.
        stored |= {alias: there for alias, there in aliases.items() if there not in taken}
        if not stored:
            starts = sorted({f"{name.partition('.')[0]}." for name in self.sizes if "." in name})[:8]
            what, expected = (
                f"no tensor has a name that begins with {prefix!r}",
                f"one of {', '.join(map(repr, starts))}",
            )
            raise OptionError(what, expected=expected if starts else "no prefix")
        kept = {alias: taken[there] for alias, there in aliases.items() if there in taken}
        return replace(
            self,
            sizes={name: self.sizes[there] for name, there in stored.items()},
            read=lambda name: self.read(stored[name]),
            description=Description(own(self.description.quantized), kept),
        )


def open_source(path: str | os.PathLike[str]) -> Source:
    """What reads the tensors at ``path``: a safetensors file, a folder of such with an index, a file of ``torch.save``
    with a state dict, or a sharded checkpoint. Bytes are checked here, and mapped where the file allows that.

    Raises:
        CheckpointError: it is none of these, or damaged.
    """
    place = as_path(path)
    if (place / INDEX_NAME).is_file():
        return _sharded(place)
    if place.is_dir() and not (place / _SINGLE).is_file():
        return _folder(place)
    file, start = place / _SINGLE if place.is_dir() else place, b""
    if file.is_file():
        with file.open("rb") as opened:
            start = opened.read(9)
    if start.startswith((b"PK\x03\x04", b"\x80")) and start[8:9] != b"{":
        return _of(*described_state(_unpickled(file), once=True), {})
    tensors, metadata = read_tensors(file)
    with named(file):
        return _of(tensors, Description.decode(metadata.get(METADATA_KEY)), metadata)


def _of(tensors: Mapping[str, torch.Tensor], description: Description, metadata: Mapping[str, str]) -> Source:
    others = {key: text for key, text in metadata.items() if not key.startswith(METADATA_KEY)}
    return Source({name: t.nbytes for name, t in tensors.items()}, tensors.__getitem__, description, others)


def _folder(folder: Path) -> Source:
    """safetensors files with an index of which tensor is in which, as large models are published."""
    index = folder / _FOLDER_INDEX
    if not index.is_file():
        what = f"{folder} has neither {_FOLDER_INDEX}, {_SINGLE} nor {INDEX_NAME}"
        raise CheckpointError(what, expected="a folder of tensors")
    try:
        found: dict[str, str] = json.loads(index.read_bytes().decode())["weight_map"]
        outside = [name for name, file in found.items() if Path(file).name != file]
    except _DAMAGE as error:
        what = f"{index} is damaged: {type(error).__name__}: {error}"
        raise CheckpointError(what, expected="names of files by tensor") from error
    if outside:
        what = f"{index} has {outside[0]!r} in {found[outside[0]]!r}"
        raise CheckpointError(what, expected="files in the same folder")
    files = {file: read_tensors(folder / file) for file in dict.fromkeys(found.values())}
    for name, file in found.items():
        if name not in files[file][0]:
            raise CheckpointError(f"{folder / file} has no tensor {name!r}", expected=f"what {index} says")
    described = [Description.decode(metadata.get(METADATA_KEY)) for _, metadata in files.values()]
    quantized = {name: entry for description in described for name, entry in description.quantized.items()}
    aliases = {alias: stored for description in described for alias, stored in description.aliases.items()}
    tensors = {name: tensor for held, _ in files.values() for name, tensor in held.items() if name in found}
    return _of(tensors, Description(quantized, aliases), {})


def _sharded(path: Path) -> Source:
    """Of what each rank had of its own, rank 0's; of what the next step would have reduced, the largest of all."""
    from ottava.checkpoint.storage import FolderReader

    reader = FolderReader(path)
    for name in reader.index.files:
        reader.file(name, verify=True)
    try:
        entries = reader.index.description["quantized"].items()
        description = Description({name: Described.decode(entry) for name, entry in entries})
    except _DAMAGE as error:
        what = f"{path} describes its quantized tensors wrongly: {error}"
        raise CheckpointError(what, expected="what save_sharded wrote") from error
    others = {name for names in reader.index.description["per_rank"].values() for name in names[1:]}
    tensors = {name: reader.index.tensors[name] for name in sorted(reader.index.tensors) if name not in others}
    return Source({name: tensor.nbytes for name, tensor in tensors.items()}, reader.whole, description, {})


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
        why = f"it needs code to be run{f' ({needs[1]})' if needs else ''}"
        why = why if needs or "Weights only" in str(error) else (str(error).splitlines() or [repr(error)])[0][:200]
        what, remedy = (
            f"{path} cannot be read as a file of torch.save: {why}",
            "save model.state_dict() with torch.save",
        )
        raise CheckpointError(what, expected="a state dict of tensors alone", remedy=remedy) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}", expected="a state dict of tensors")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            what, remedy = f"{path}: {name!r} is a {type(value).__name__}", "save the state dict of the model by itself"
            raise CheckpointError(what, expected="a state dict of tensors alone", remedy=remedy)
        for plain in value.inner_list() if isinstance(value, QuantizedTensorStorage) else [value]:
            if plain is not None and (plain.is_nested or plain.is_meta or plain.layout != torch.strided):
                raise CheckpointError(f"{path}: {name!r} is on meta, sparse or nested", expected="dense tensors")
            # Strides are the file's word: a small file could ask for any amount of memory.
            if plain is not None and plain.nbytes > plain.untyped_storage().nbytes():
                what = f"{path}: {name!r} of shape {tuple(plain.shape)} has more elements than it has memory"
                raise CheckpointError(what, expected="no expanded views", remedy="save .contiguous() copies")
    return state
