"""``export_model``: a folder that servers of a published format read."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ottava.contract import Contract
from ottava.errors import OptionError, UsageError, translated
from ottava.filesystem import AnyPath, Partial, as_path, sync
from ottava.nn.conversion import Filter
from ottava.recipes import Recipe
from ottava_integrations.exporting import (
    ExportReport,
    contract_of,
    export_report,
    tensors_of,
)
from ottava_integrations.formats.configurations import other_files, quantization_config
from ottava_integrations.names import of_transformers
from ottava_integrations.planning import Plan, plan_export

Tensor = torch.Tensor
_INDEX, _SINGLE, _CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
#: The key of the contracts in the headers of files: JSON, by their citations.
CONTRACTS_KEY = "ottava.contracts"
#: Bytes of a file, at most, unless one tensor has more.
SHARD_SIZE = 5 * 10**9


def export_model(
    model: torch.nn.Module,
    folder: AnyPath,
    format: str,
    *,
    recipe: Recipe | str | None = None,
    activations: str | None = None,
    include: Filter | None = None,
    exclude: Filter | None = None,
    input_amaxes: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
    files: Sequence[Path] = (),
    max_shard_size: int = SHARD_SIZE,
    force: bool = False,
) -> ExportReport:
    """Write a model in a published format: a folder that servers of the format read.

    The folder has ``model.safetensors``, or several files and their index; ``config.json``, which
    is the model's with ``quantization_config``; and other JSON that the format has. The headers of
    the files have the contracts of the bytes. It appears whole: if the export is interrupted, or
    the disk is full, there is no folder. Beside the model, memory holds one file at a time.

    Args:
        model, format, recipe, activations, include, exclude, input_amaxes: as of
            :func:`iter_exported`.
        folder: to write.
        config: the content of ``config.json``. None: that of a model of Transformers, or nothing
            but ``quantization_config``.
        files: other files to copy into the folder, such as those of a tokenizer.
        max_shard_size: bytes of a file.
        force: replace the folder if it is there.

    Raises:
        UsageError: the folder is there, or cannot be written; or adapters are not merged.
        OptionError, RecipeNotFoundError, DTypeError: as of :func:`iter_exported`.
    """
    target = as_path(folder)
    if type(max_shard_size) is not int or max_shard_size < 1:
        raise OptionError(f"max_shard_size is {max_shard_size!r}", expected="a number of bytes")
    if target.exists() and not force:
        raise UsageError(f"{target} exists", expected="a new folder", remedy="force replaces it")
    plan = plan_export(
        model,
        format,
        recipe=recipe,
        activations=activations,
        include=include,
        exclude=exclude,
        input_amaxes=input_amaxes,
    )
    if config is None and of_transformers(model):
        config = _config_of(model)
    expected = "a place that can be written, with room for the export"
    with translated(f"{target} cannot be written", expected, to=UsageError), Partial(target) as new:
        names, nbytes = _write_tensors(plan, new.path, max_shard_size)
        names += _write_json(plan, new.path, config or {})
        for file in files:
            if file.name not in names:
                shutil.copyfile(file, new.path / file.name)
                names.append(file.name)
        sync(new.path)
        _put_folder(new.path, target)
    return export_report(plan, tuple(sorted(names)), nbytes)


def _config_of(model: Any) -> dict[str, Any]:
    """The configuration of a model of Transformers, as ``save_pretrained`` writes it."""
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    # A converted model may have a class that Ottava derived from its own.
    own = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("ottava"))
    return config | {"architectures": [own.__name__]}


def _put_folder(new: Path, target: Path) -> None:
    """Have a folder take the place of another one, if that is there."""
    former = new.with_name(f"{new.name}.former")
    if target.exists():
        os.replace(target, former)
    try:
        os.replace(new, target)
    except BaseException:
        if former.exists():
            os.replace(former, target)
        raise
    if former.is_dir():
        shutil.rmtree(former, ignore_errors=True)
    sync(target.parent)


class _Shards:
    """Files that tensors are written to, each when it is full."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._tensors: dict[str, Tensor] = {}
        self._contracts: dict[str, Any] = {}
        self._size = 0
        self._files: list[list[str]] = []
        self.nbytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the current file, or to a new one if that is full."""
        if self._tensors and self._size + tensor.nbytes > self._limit:
            self._write()
        # Files hold no views, and a shard may outlive the tensor that it is a view of.
        self._tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        self._size += tensor.nbytes
        self.nbytes += tensor.nbytes

    def cite(self, citation: str, contract: Contract | None) -> None:
        """Have the current file say a contract, if there is one."""
        if contract is not None:
            self._contracts[citation] = contract.value()

    def _write(self) -> None:
        texts = {"format": "pt"}
        if self._contracts:
            texts[CONTRACTS_KEY] = json.dumps(self._contracts, sort_keys=True)
        save_file(self._tensors, self._folder / self._numbered(len(self._files)), texts)
        self._files.append(list(self._tensors))
        self._tensors, self._contracts, self._size = {}, {}, 0

    @staticmethod
    def _numbered(place: int) -> str:
        return f"shard-{place}.partial"

    def close(self) -> list[str]:
        """Write the last file, name all files, and write their index; their names."""
        self._write()
        count = len(self._files)
        if count == 1:
            os.replace(self._folder / self._numbered(0), self._folder / _SINGLE)
            return [_SINGLE]
        names = [f"model-{place + 1:05}-of-{count:05}.safetensors" for place in range(count)]
        file_of: dict[str, str] = {}
        for place, file in enumerate(names):
            os.replace(self._folder / self._numbered(place), self._folder / file)
            file_of |= dict.fromkeys(self._files[place], file)
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": file_of}
        _write_object(self._folder / _INDEX, index)
        return [*names, _INDEX]


def _write_tensors(plan: Plan, folder: Path, limit: int) -> tuple[list[str], int]:
    """The names of the files, and the bytes of their tensors."""
    shards = _Shards(folder, limit)
    for item in plan.items:
        for name, tensor, source in tensors_of(plan, item):
            shards.add(name, tensor)
            contract = None if source is None else contract_of(item, source)
            if source is not None and contract is not None:
                shards.cite(
                    contract.citation(source.recipe or source.scheme.loads_as.name), contract
                )
    return shards.close(), shards.nbytes


def _write_json(plan: Plan, folder: Path, config: Mapping[str, Any]) -> list[str]:
    """The names of the files of JSON beside the tensors."""
    schemes = plan.schemes()
    ignored = plan.ignored()
    options = quantization_config(schemes, ignored, plan.activations, plan.is_static)
    files = {_CONFIG: dict(config) | {"quantization_config": options}}
    files |= other_files(schemes, ignored, plan.activations)
    for name, value in files.items():
        _write_object(folder / name, value)
    return list(files)


def _write_object(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
