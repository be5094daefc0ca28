"""Checks of pickles and safetensors files."""

from __future__ import annotations

import pickletools
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ottava import checkpoint
from ottava.tensors import QuantizedTensor
from ottava_testing import table
from ottava_testing.compare import CheckFailed, first_line, plain, require, require_same, same
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS

check = partial(table.check, "files")


def reload(value: Any, title: str) -> Any:
    """A value after ``torch.save`` and ``torch.load(weights_only=True)``; ``title`` names it.

    Raises:
        CheckFailed: it cannot be pickled, or its pickle needs code.
    """
    buffer = BytesIO()
    start = f"the pickle of {title} needs code"
    try:
        torch.save(value, buffer)
    except Exception as error:
        text = f"{start} that cannot be saved: {type(error).__name__}: {first_line(error)}"
        raise CheckFailed(text) from error
    functions = _functions_in(buffer)
    require(not functions, f"{start} ({', '.join(functions)}): loading it calls functions")
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
        text = f"torch.load(weights_only=True) refuses the pickle of {title}: {reason}"
        raise CheckFailed(text) from error


def _functions_in(file: BytesIO) -> list[str]:
    """The functions that a file of ``torch.save`` names, other than those of torch and Ottava.

    Functions that somebody has declared safe are included, because they are code all the same.
    """
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        data = next(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
    functions = set()
    # torch.save writes protocol 2, in which an opcode has the whole name of a function.
    for opcode, argument, _ in pickletools.genops(data):
        module, _, name = str(argument).partition(" ")
        if opcode.name != "GLOBAL" or module.partition(".")[0] in ("torch", "ottava"):
            continue
        if isinstance(getattr(sys.modules.get(module), name, None), types.FunctionType):
            functions.add(f"{module}.{name}")
    return sorted(functions)


@check(over=Subject.storages)
def pickle_needs_no_code(subject: Subject, storage: Any) -> None:
    """Pickles load under weights_only=True, with the same bytes."""
    loaded = reload(storage, "it")
    require(type(loaded) is type(storage), f"the pickle loads as a {type(loaded).__name__}")
    require_same("the pickle loads with", loaded, storage)
    require_same("the pickle loads with", plain(loaded), plain(storage))
    require(loaded._quantizer is not None, "the pickle loses the quantizer")
    if storage._quantizer is not None and not subject.keeps_state(storage._quantizer):
        words = "the quantizer is another one after pickling"
        require(loaded._quantizer == storage._quantizer, words)
    if isinstance(storage, QuantizedTensor):
        state = reload({"weight": torch.nn.Parameter(storage)}, "a state dict with it")
        require(state["weight"].requires_grad, "a pickle loses requires_grad")
        require_same("a state dict loads with", state["weight"], storage)


@check(QUANTIZED_WEIGHTS, over=Subject.weights)
def safetensors(subject: Subject, make: Callable[[], Any]) -> None:
    """A safetensors file holds quantized weights as plain tensors and gives the same bytes back."""
    weight = make().detach()
    flat, _ = checkpoint.flatten_state_dict({"weight": weight, "bias": torch.ones(3)})
    for name, tensor in flat.items():
        is_plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, QuantizedTensor)
        require(is_plain, f"{name!r}, flattened, is a {type(tensor).__name__}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weight.safetensors"
        checkpoint.save_file({"weight": weight}, path)
        loaded = checkpoint.load_file(path)["weight"]
        require(type(loaded) is type(weight), f"a file gives back a {type(loaded).__name__}")
        require_same("a safetensors file gives back", loaded, weight)
        require(same(plain(loaded), plain(weight)), "a safetensors file gives back other values")
        model, other = subject.model(primary=True), subject.model(primary=True, seed=7)
        checkpoint.save_model(model, path)
        checkpoint.load_model(other, path)
    words = "a model loads from its own file"
    require_same(words, list(other.parameters()), list(model.parameters()))
