"""Where tensors are read from, one by one: safetensors files and folders of them, torch.save, sharded checkpoints."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ottava.checkpoint.description import Description
from ottava.checkpoint.files import shared_tensors
from ottava.checkpoint.flatten import described_state
from ottava.checkpoint.header import METADATA_KEY, TensorSpec
from ottava.checkpoint.index import INDEX_NAME
from ottava.checkpoint.reader import SafetensorsFile, as_path
from ottava.errors import CheckpointError, OptionError
from ottava.tensors.storage import QuantizedTensorStorage

_SHARDS = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class TensorSource(Protocol):
    """Tensors by name, of which one is read at a time; quantized ones as their inner tensors.

    ``metadata`` is what :func:`unflatten_state_dict` takes. A source that holds files open also has ``close()``.
    """

    @property
    def metadata(self) -> dict[str, str]:
        """The description of the quantized tensors."""
        ...

    def names(self) -> Sequence[str]:
        """The tensors, in an order that reads well."""
        ...

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a tensor, without reading it."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU; raises CheckpointError where it is damaged."""
        ...


class SavedByTorch:
    """A state dict in a file of ``torch.save``: mapped into memory, unpickled with ``weights_only=True``.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is damaged, would need code to be run, or holds anything but tensors by name.
    """

    def __init__(self, path: Path) -> None:
        state = _unpickled(path)
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} holds a {type(state).__name__}", expected="a state dict of tensors")
        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{path}: {name!r} is a {type(value).__name__}",
                    expected="a state dict of tensors alone",
                    remedy="save the state dict of the model by itself",
                )
            _check_dense(path, name, value)
        tensors, description = described_state(state)
        aliases = shared_tensors(tensors)
        self._tensors = {name: tensor for name, tensor in tensors.items() if name not in aliases}
        self.metadata = {METADATA_KEY: replace(description, aliases=aliases).encode()}

    def names(self) -> list[str]:
        """The tensors, as they were saved."""
        return list(self._tensors)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor."""
        return TensorSpec(self._tensors[name].dtype, tuple(self._tensors[name].shape))

    def read(self, name: str) -> torch.Tensor:
        """A tensor, still in the mapped file."""
        return self._tensors[name]


def _check_dense(path: Path, name: str, value: torch.Tensor) -> None:
    """Refuse a tensor that is no block of memory with values: on meta, sparse, nested, or larger than its memory."""
    parts = value.inner_list() if isinstance(value, QuantizedTensorStorage) else [value]
    for part in parts:
        if part is None:
            continue
        if part.is_meta or part.layout != torch.strided or part.is_nested:
            raise CheckpointError(
                f"{path}: {name!r} is on meta, sparse or nested", expected="dense tensors with values"
            )
        # Strides are the file's word: a small file could ask for any amount of memory.
        if part.nbytes > part.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: {name!r} of shape {tuple(part.shape)} has more elements than it has memory",
                expected="tensors that are no expanded views",
                remedy="save .contiguous() copies",
            )


def _unpickled(path: Path) -> Any:
    error: Exception | None = None
    # Files of old versions of torch cannot be mapped.
    for mapped in (True, False):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as failed:
            # Damaged bytes make the unpickler raise anything.
            error = error or failed
    text = str(error)
    # torch's own words advise to run the code.
    needs = re.search(r"GLOBAL ([\w.]+)", text)
    if needs is not None or "Weights only load failed" in text:
        why = f"it needs code to be run{f' ({needs[1]})' if needs is not None else ''}"
    else:
        why = text.splitlines()[0][:200] if text else repr(error)
    raise CheckpointError(
        f"{path} cannot be read as a file of torch.save: {why}",
        expected="a state dict of tensors alone",
        remedy="save it again with torch.save(model.state_dict(), path)",
    ) from error


class ShardFolder:
    """safetensors files with an index of which tensor is in which, as large models are published.

    Args:
        folder: with ``model.safetensors.index.json`` in it.

    Raises:
        CheckpointError: the index, or a file that it names, is damaged or missing.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / _SHARDS
        try:
            found = json.loads(index.read_bytes().decode())["weight_map"]
            names = {name: Path(file).name == file for name, file in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
            raise CheckpointError(
                f"{index} is damaged: {type(error).__name__}: {error}", expected="names of files by tensor"
            ) from error
        outside = [name for name, plain in names.items() if not plain]
        if outside:
            raise CheckpointError(
                f"{index} has {outside[0]!r} in {found[outside[0]]!r}", expected="files in the same folder"
            )
        self._files: dict[str, SafetensorsFile] = {}
        try:
            for file in dict.fromkeys(found.values()):
                self._files[file] = SafetensorsFile(folder / file)
            descriptions = [Description.decode(f.metadata.get(METADATA_KEY)) for f in self._files.values()]
            self._where = {name: self._files[file] for name, file in found.items()}
            for name, opened in self._where.items():
                opened.spec(name)
        except BaseException:
            self.close()
            raise
        whole = Description(
            {name: entry for d in descriptions for name, entry in d.quantized.items()},
            {name: stored for d in descriptions for name, stored in d.aliases.items()},
        )
        self.metadata = {METADATA_KEY: whole.encode()} if whole.quantized or whole.aliases else {}

    def names(self) -> list[str]:
        """The tensors, file by file."""
        return [name for file in self._files.values() for name in file.names() if self._where.get(name) is file]

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor."""
        return self._where[name].spec(name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor of one of the files."""
        return self._where[name].read(name)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class UnderPrefix:
    """The tensors of a source whose names begin with a prefix, under the names without it.

    Args:
        source: with all the tensors.
        prefix: ``"model."`` for the model in a checkpoint of a training.

    Raises:
        OptionError: no tensor has such a name.
    """

    def __init__(self, source: TensorSource, prefix: str) -> None:
        self._source = source
        given = source.metadata.get(METADATA_KEY)
        description = Description.decode(given)

        def own(names: Mapping[str, Any]) -> dict[str, Any]:
            return {n.removeprefix(prefix): e for n, e in names.items() if n.startswith(prefix) and n != prefix}

        # Name -> the name in the source. An alias of a tensor that stays behind becomes that tensor.
        self._stored = own({name: name for name in source.names()})
        taken = {stored: name for name, stored in self._stored.items()}
        aliases = own(description.aliases)
        self._stored |= {alias: stored for alias, stored in aliases.items() if stored not in taken}
        if not self._stored:
            parts = sorted({f"{name.partition('.')[0]}." for name in source.names() if "." in name})
            raise OptionError(
                f"no tensor has a name that begins with {prefix!r}",
                expected="one of " + ", ".join(map(repr, parts[:8])) if parts else "no prefix",
            )
        kept = {alias: taken[stored] for alias, stored in aliases.items() if stored in taken}
        described = replace(description, quantized=own(description.quantized), aliases=kept)
        self.metadata = source.metadata if given is None else source.metadata | {METADATA_KEY: described.encode()}

    def names(self) -> list[str]:
        """The tensors, without the prefix."""
        return list(self._stored)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor."""
        return TensorSpec(*self._source.spec(self._stored[name]))

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the source."""
        return self._source.read(self._stored[name])

    def close(self) -> None:
        """Close the source."""
        close = getattr(self._source, "close", None)
        if close is not None:
            close()


def _is_torch_file(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(9)
    return start[8:9] != b"{" and start.startswith((b"PK\x03\x04", b"\x80"))


def _sharded(path: Path) -> TensorSource:
    from ottava.checkpoint.pieces import ShardedSource

    return ShardedSource(path)


#: What is tried in turn by :func:`open_source`: what recognizes a path, and what opens it.
_SOURCES: list[tuple[Callable[[Path], bool], Callable[[Path], TensorSource]]] = [
    (lambda path: (path / INDEX_NAME).is_file(), _sharded),
    (lambda path: (path / _SHARDS).is_file(), ShardFolder),
    (lambda path: (path / _SINGLE).is_file(), lambda path: SafetensorsFile(path / _SINGLE)),
    (_is_torch_file, SavedByTorch),
]


def register_source(recognizes: Callable[[Path], bool], opens: Callable[[Path], TensorSource]) -> None:
    """Have :func:`open_source` read another kind of file or folder; the last one that was registered is asked first."""
    _SOURCES.insert(0, (recognizes, opens))


def open_source(path: str | os.PathLike[str]) -> TensorSource:
    """What reads the tensors at ``path``: a safetensors file, a folder of such with an index, a file of ``torch.save``
    with a state dict, or a sharded checkpoint.

    Raises:
        CheckpointError: it is none of these, or damaged.
    """
    place = as_path(path)
    try:
        opens = next((opens for recognizes, opens in _SOURCES if recognizes(place)), None)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place} cannot be read: {error}", expected="a file or folder of tensors") from error
    if opens is None and place.is_dir():
        raise CheckpointError(
            f"{place} has neither {_SHARDS}, {_SINGLE} nor {INDEX_NAME}", expected="a folder of tensors"
        )
    return SafetensorsFile(place) if opens is None else opens(place)
