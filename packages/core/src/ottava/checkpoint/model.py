"""A whole model in a file: everything is read and checked before the first byte of the model is changed."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ottava.checkpoint.files import load_file, save_file
from ottava.checkpoint.pieces import check_writable
from ottava.checkpoint.reader import as_path, named
from ottava.errors import CheckpointError, DTypeError, OptionError, OttavaError, ShapeError, UsageError
from ottava.kernels import HIGH_PRECISION
from ottava.nn.linear import Linear
from ottava.recipes.state import RecipeState
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.tensors.tensor import QuantizedTensor

_STATE = "recipe_state"


def save_model(model: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's parameters and buffers as one safetensors file, see :func:`save_file`.

    Raises:
        DTypeError: ``model`` is none, or keeps something in its state dict that is not a tensor.
        UsageError: the file cannot be written.
    """
    save_file(_module(model).state_dict(), path)


def load_model(model: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> tuple[list[str], ...]:
    """Load a safetensors file into a model's parameters and buffers, or change nothing.

    The file is read as a whole and compared with the model: checksums, names, shapes and kinds. Only then the model is
    written; should a module refuse its values after all, what was written is undone. While that goes on, the file and a
    copy of the model are in memory, on the CPU.

    A quantized tensor in the file is copied byte by byte into a parameter of the same kind. Into one of another kind,
    and from high precision, values are quantized by the parameter's own quantizer; into high precision they are
    dequantized.

    Args:
        model: the model, with memory of its own: not on meta, not sharded.
        path: the file.
        strict: whether the names of file and model have to be the same. Otherwise what only one of them has is left.

    Returns:
        The names that the file misses, and those that the model has no place for: empty lists where ``strict``.

    Raises:
        CheckpointError: the file is damaged, or its names, shapes or kinds are not those of the model.
        DTypeError, UsageError: the model cannot be loaded into.
        OttavaError: see :func:`load_file`.
    """
    if not isinstance(strict, bool):
        raise OptionError(f"strict is {strict!r}", expected="True or False")
    target = _targets(_module(model))
    state: dict[str, Any] = load_file(path)
    with named(as_path(path)):
        missing, unexpected = _compare_names(model, target, state)
        if strict and (missing or unexpected):
            what = [f"the file misses {_listed(missing)}"] if missing else []
            what += [f"the model has no place for {_listed(unexpected)}"] if unexpected else []
            raise CheckpointError("; ".join(what), expected="the names of the model", remedy="strict=False leaves them")
        for name in unexpected:
            del state[name]
        own = _own_states(model)
        for name, value in state.items():
            if name in target and not name.startswith(tuple(own)):
                state[name] = _fitting(name, target[name], value)
        _try_own_states(own, state)
        _write(model, target, state)
    return missing, unexpected


def _module(model: Any) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"the model is a {type(model).__name__}", expected="a torch.nn.Module")
    return model


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _targets(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    targets: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, tensor in targets.items():
        if not isinstance(tensor, torch.Tensor):
            raise DTypeError(f"{name!r} of the model is a {type(tensor).__name__}", expected="a tensor")
        if hasattr(tensor, "to_local"):
            raise DTypeError(f"{name!r} of the model is sharded", expected="whole tensors", remedy="use load_sharded")
        if tensor.is_meta:
            raise UsageError(
                f"{name!r} of the model is on meta", expected="memory to load into", remedy="call model.to_empty first"
            )
    return targets


def _own_states(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The states of recipes by the prefix of their names: they have a say in what fits them."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        state: Any = module
        if name and isinstance(state, RecipeState):
            found[f"{name}."] = module
    return found


def _compare_names(
    model: torch.nn.Module, target: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    # Layers keep the state of a recipe that a region has yet to bring.
    waiting = tuple(
        f"{prefix}.{_STATE}." if prefix else f"{_STATE}."
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Linear) and module.recipe is None and _STATE not in module._modules
    )
    missing = [name for name in target if name not in state and not name.startswith(waiting)]
    return missing, [name for name in state if name not in target and not name.startswith(waiting)]


def _fitting(name: str, target: torch.Tensor, value: Any) -> torch.Tensor:
    """The value as it is copied into the target, or an error where it cannot be."""
    try:
        return _checked(name, target, value)
    except OttavaError:
        raise
    except Exception as error:
        # The class of a quantized tensor may be anybody's, and what a file says to it anything.
        raise CheckpointError(
            f"{name!r} has no values that could be loaded: {type(error).__name__}: {error}",
            expected="a tensor like that of the model",
        ) from error


def _checked(name: str, target: torch.Tensor, value: Any) -> torch.Tensor:
    check_writable(name, target)
    if tuple(value.size()) != tuple(target.shape):
        raise ShapeError(
            f"{name!r} has shape {tuple(value.size())}", expected=f"{tuple(target.shape)}, as in the model"
        )
    if not isinstance(target, QuantizedTensor):
        if isinstance(value, QuantizedTensorStorage):
            value = value.dequantize(target.dtype if target.dtype in HIGH_PRECISION else torch.float32)
        kinds = [(t.dtype.is_floating_point, t.dtype.is_complex) for t in (target, value)]
        if kinds[0] != kinds[1] or (not any(kinds[0]) and value.dtype != target.dtype):
            raise DTypeError(f"{name!r} is of {value.dtype}", expected=f"{target.dtype}, as in the model")
        return value  # type: ignore[no-any-return]
    if not any(target.get_usages().values()):
        raise UsageError(f"{name!r} of the model holds no data", remedy="it was cleared or saved")
    if isinstance(value, QuantizedTensor):
        adopted = _of_its_kind(target, value)
        if adopted is not None:
            return adopted
    if target._quantizer is None:
        raise UsageError(
            f"{name!r} of the model has no quantizer, and the file has another kind of data for it",
            expected="a quantizer",
            remedy="set one with update_quantizer()",
        )
    if isinstance(value, QuantizedTensorStorage):
        return value.dequantize(torch.float32)
    if not value.dtype.is_floating_point:
        raise DTypeError(f"{name!r} is of {value.dtype}", expected="floating-point values to quantize")
    plain: torch.Tensor = value if value.dtype in HIGH_PRECISION else value.to(torch.float32)
    return plain


def _of_its_kind(target: QuantizedTensor, value: QuantizedTensor) -> QuantizedTensor | None:
    """The value if its bytes can be copied, with what the target's device needs besides made of them; else None."""
    if target.adopts_bytes_of(value) or value.inner_tensors != target.inner_tensors:
        return value if target.adopts_bytes_of(value) else None
    moved: Any = value.to(target.device)
    wanted = {f"{usage}_usage": True if held else None for usage, held in target.get_usages().items()}
    with contextlib.suppress(UsageError):
        moved.update_usage(**wanted)
    return moved if target.adopts_bytes_of(moved) else None


def _try_own_states(own: Mapping[str, torch.nn.Module], state: Mapping[str, Any]) -> None:
    """Load into copies: the states of recipes are small, and may take other shapes than they have."""
    for prefix, module in own.items():
        found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        for name, value in found.items():
            if isinstance(value, QuantizedTensorStorage):
                raise DTypeError(f"{prefix + name!r} is quantized", expected="a plain tensor, as in the model")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                copy.deepcopy(module).load_state_dict(found, strict=False)
        except RuntimeError as error:
            raise CheckpointError(
                f"{prefix!r} cannot be loaded: {error}", expected="the state of its recipe"
            ) from error


def _write(model: torch.nn.Module, target: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    backup: list[tuple[Any, Any]] = []
    waiting = [(module, module._loaded_state) for module in model.modules() if isinstance(module, Linear)]
    with torch.no_grad():
        for tensor in target.values():
            quantized = isinstance(tensor, QuantizedTensor)
            kept = tensor.apply_to_inner(lambda t: t.to("cpu", copy=True)) if quantized else tensor.to("cpu", copy=True)  # type: ignore[attr-defined]
            backup.append((tensor, kept))
    try:
        # Names were compared before.
        model.load_state_dict(state, strict=False)
    except BaseException as error:
        with torch.no_grad():
            for tensor, kept in backup:
                (tensor.copy_from_storage if isinstance(tensor, QuantizedTensor) else tensor.copy_)(kept)
        for layer, loaded in waiting:
            layer._loaded_state = loaded
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"a module refuses its values: {error}", expected="values that all modules take"
        ) from error
