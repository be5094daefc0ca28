"""Checks of pickles and safetensors files."""

from __future__ import annotations

import pickletools
import sys
import tempfile
import types
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ottava import checkpoint
from ottava.tensors import QuantizedTensor
from ottava_testing.compare import CheckFailed, difference, plain, require, same, wide
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS, check


def reload(value: Any, title: str) -> Any:
    """A value after ``torch.save`` and ``torch.load(weights_only=True)``; ``title`` names it.

    Raises:
        CheckFailed: it cannot be pickled, or its pickle needs code.
    """
    buffer = BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        text = str(error).splitlines()[0]
        raise CheckFailed(
            f"the pickle of {title} needs code that cannot be saved: {type(error).__name__}: {text}"
        ) from error
    functions = functions_in(buffer)
    require(
        not functions,
        f"the pickle of {title} needs code ({', '.join(functions)}): loading it calls functions",
    )
    return load(buffer, title)


def load(file: BytesIO, title: str) -> Any:
    """The value in a file of ``torch.save``, loaded under ``weights_only=True``.

    Raises:
        CheckFailed: loading fails, for example because it needs code.
    """
    file.seek(0)
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:
        file.seek(0)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        if unsafe:
            reason = f"it needs code ({', '.join(unsafe)})"
        raise CheckFailed(
            f"torch.load(weights_only=True) refuses the pickle of {title}: {reason}"
        ) from error


def functions_in(file: BytesIO) -> list[str]:
    """The functions that a file of ``torch.save`` names, other than those of torch and Ottava.

    Functions that somebody has declared safe are included, because they are code all the same.
    """
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        data = next(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
    functions = []
    # torch.save writes protocol 2, in which an opcode has the whole name of a function.
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name != "GLOBAL":
            continue
        module, _, name = str(argument).partition(" ")
        value = getattr(sys.modules.get(module), name, None)
        is_own = module.partition(".")[0] in ("torch", "ottava")
        if isinstance(value, types.FunctionType) and not is_own:
            functions.append(f"{module}.{name}")
    return sorted(set(functions))


@check("pickle-needs-no-code", "files", "Pickles load under weights_only=True, with the same bytes")
def pickle_needs_no_code(subject: Subject) -> None:
    """Pickles of storages, tensors, parameters and state dicts."""
    for words, storage, _ in subject.quantized():
        loaded = reload(storage, words)
        require(
            type(loaded) is type(storage),
            f"the pickle of {words} loads as a {type(loaded).__name__}",
        )
        wrong = difference(loaded, storage)
        require(wrong is None, f"the pickle of {words} loads with another {wrong!r}")
        require(
            same(plain(loaded), plain(storage)), f"the pickle of {words} loads with other values"
        )
        quantizer = loaded._quantizer
        require(quantizer is not None, f"the pickle of {words} loses its quantizer")
        if storage._quantizer is not None and not subject.keeps_state(storage._quantizer):
            require(
                quantizer == storage._quantizer,
                f"the quantizer of {words} is another one after pickling",
            )
        if isinstance(storage, QuantizedTensor):
            parameter = torch.nn.Parameter(storage)
            again = reload({"weight": parameter}, f"a state dict with {words}")["weight"]
            require(again.requires_grad, f"{words} loses requires_grad in a pickle")
            wrong = difference(again, storage)
            require(wrong is None, f"a state dict with {words} loads with another {wrong!r}")


@check(
    "safetensors",
    "files",
    "A safetensors file holds quantized weights as plain tensors and gives the same bytes back",
    QUANTIZED_WEIGHTS,
)
def safetensors(subject: Subject) -> None:
    """save_file, load_file, save_model and load_model of ottava.checkpoint."""
    weight = subject.weight(wide(48, 40))
    cls = type(weight).__name__
    flat, _ = checkpoint.flatten_state_dict({"weight": weight, "bias": torch.ones(3)})
    for name, tensor in flat.items():
        is_plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, QuantizedTensor)
        require(is_plain, f"{name!r} of a flattened {cls} is a {type(tensor).__name__}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weight.safetensors"
        checkpoint.save_file({"weight": weight}, path)
        loaded = checkpoint.load_file(path)["weight"]
        require(
            type(loaded) is type(weight),
            f"a {cls} is a {type(loaded).__name__} in a safetensors file",
        )
        wrong = difference(loaded, weight)
        require(wrong is None, f"a {cls} has another {wrong!r} in a safetensors file")
        require(
            same(plain(loaded), plain(weight)), f"a {cls} has other values in a safetensors file"
        )
        model, other = subject.model(primary=True), subject.model(primary=True, seed=7)
        checkpoint.save_model(model, path)
        checkpoint.load_model(other, path)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            require(
                same(plain(one), plain(two)),
                f"a model with {cls} weights loads other values from its own file",
            )
