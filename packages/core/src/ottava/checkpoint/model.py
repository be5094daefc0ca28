"""Whole models in one file: everything is read and checked before the first byte of a model
changes."""

import contextlib
import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ottava.checkpoint.files import check_memory
from ottava.checkpoint.flatten import held_tensors, load_file, save_file
from ottava.checkpoint.published import Codes, find_codes, weight_of
from ottava.errors import (
    CheckpointError,
    DTypeError,
    ShapeError,
    UsageError,
    listed,
    named,
    of_any_class,
    translated,
)
from ottava.filesystem import AnyPath, as_path, uninterrupted
from ottava.kernels import HIGH_PRECISION
from ottava.nn.linear import Linear
from ottava.nn.loading import OF_STATE, layers_with_state
from ottava.recipes.state import RecipeState
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage
from ottava.tensors.declaration import check_flag
from ottava.torch_private import foreach_copy_, may_refuse_to_load


def save_model(model: torch.nn.Module, path: AnyPath) -> None:
    """:func:`save_file` of a model's state dict; DTypeError if ``model`` is not a module."""
    save_file(_module(model).state_dict(), path)


def load_model(
    model: torch.nn.Module, path: AnyPath, *, strict: bool = True, verify: bool = True
) -> tuple[list[str], ...]:
    """Load a safetensors file into a model's parameters and buffers, or change nothing.

    The whole file is checked and compared with the model: names, shapes and kinds. Only then the
    values are copied from the mapped file; Ctrl-C waits until the copy is complete. If a module
    could still refuse its values (it has hooks or a loading method of its own, or values are
    quantized), the old values are kept on the CPU and restored if it does.

    Quantized tensors are copied byte by byte into parameters of the same kind. If a parameter is
    quantized in another way, its own quantizer quantizes the values. If it is in high precision,
    quantized values are dequantized.

    Args:
        model: the model, with memory of its own: not on meta, not sharded.
        path, verify: as of :func:`load_file`.
        strict: whether file and model must have the same names. Otherwise other names are ignored.

    Returns:
        The names that the file misses, and those that the model has no place for: empty lists where
        ``strict``.

    Raises:
        DTypeError, UsageError: the model cannot be loaded into.
        CheckpointError: the file has weights that another tool has quantized.
        OttavaError: as of :func:`load_file`, or names, shapes or kinds are not those of the model.
    """
    check_flag("strict", strict)
    targets: dict[str, Any] = _module(model).state_dict(keep_vars=True)
    for name, tensor in targets.items():
        what = f"{name!r} of the model is"
        if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "to_local"):
            raise DTypeError(
                f"{what} a {type(tensor).__name__}",
                expected="whole tensors",
                remedy="use load_sharded",
            )
        if tensor.is_meta:
            raise UsageError(
                f"{what} on meta",
                expected="memory to load into",
                remedy="call model.to_empty first",
            )
    state: dict[str, Any] = load_file(path, verify=verify)
    codes = find_codes(state, as_path(path))
    codes.refuse(path, _misread(codes, targets, state, strict))
    modules = dict(model.named_modules(remove_duplicate=False))
    # Some state may differ: a layer without a recipe keeps it for a recipe that a region sets
    # later, and a layer whose state is not in the file starts afresh.
    bare = {n: m for n, m in modules.items() if isinstance(m, Linear) and m.recipe is None}
    waiting = tuple(
        f"{n}.recipe_state.".lstrip(".")
        for n, m in bare.items()
        if "recipe_state" not in m._modules
    )
    afresh = layers_with_state(targets) - layers_with_state(state)
    waiting += tuple(f"{layer}recipe_state." for layer in afresh if f"{layer}weight" in state)
    with named(as_path(path)):
        missing = [name for name in targets if name not in state and not name.startswith(waiting)]
        unexpected = [
            name for name in state if name not in targets and not name.startswith(waiting)
        ]
        differing = {"the file misses": missing, "the model has no place for": unexpected}
        if strict and (missing or unexpected):
            what = "; ".join(
                f"{whose} {listed(names)}" for whose, names in differing.items() if names
            )
            raise CheckpointError(
                what, expected="the names of the model", remedy="strict=False leaves them"
            )
        state = {name: value for name, value in state.items() if name not in unexpected}
        own: dict[str, Any] = {
            f"{n}.": m for n, m in modules.items() if n and isinstance(m, RecipeState)
        }
        for name in [name for name in state if name in targets and not name.startswith(tuple(own))]:
            with of_any_class(name):
                state[name] = _fitting(name, targets[name], state[name])
        for prefix, module in own.items():
            # Loading is tried in a copy, because the state of a recipe is small and may accept
            # other shapes.
            found = {
                name.removeprefix(prefix): value
                for name, value in state.items()
                if name.startswith(prefix)
            }
            if any(isinstance(value, QuantizedTensorStorage) for value in found.values()):
                raise DTypeError(
                    f"something of {prefix!r} is quantized",
                    expected="plain tensors, as in the model",
                )
            with warnings.catch_warnings(action="ignore"):
                with translated(
                    f"{prefix!r} cannot be loaded", "the state of its recipe", of=RuntimeError
                ):
                    copy.deepcopy(module).load_state_dict(found, strict=False)
        _write(model, targets, state)
    return missing, unexpected


def without_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict without the state of recipes, which loads strictly into a model in high
    precision.

    Raises:
        DTypeError: ``state_dict`` is not a dict.
    """
    if not isinstance(state_dict, dict):
        raise DTypeError(
            f"the state dict is a {type(state_dict).__name__}",
            expected="what model.state_dict() gives",
        )
    # Copied with its attributes: torch keeps the versions of modules there.
    kept = copy.copy(state_dict)
    for name in [name for name in kept if OF_STATE.search(name)]:
        del kept[name]
    return kept


def _module(model: Any) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"the model is a {type(model).__name__}", expected="a torch.nn.Module")
    return model


def _misread(
    codes: Codes, targets: Mapping[str, Any], state: Mapping[str, Any], strict: bool
) -> list[str]:
    """The names of data of other tools that the model would take for values.

    With ``strict`` these are all names that the model has no place for.
    """

    def has_place(name: str) -> bool:
        target = targets.get(name)
        own = target is not None and target.dtype == codes.dtypes[name]
        return own and all(scale in targets for scale in codes.scales[name] if scale in state)

    lost = [name for name in codes.scales if not has_place(name)]
    return [n for n in lost if strict or not targets.keys().isdisjoint((n, weight_of(n)))]


def _fitting(name: str, target: Any, value: Any) -> Any:
    """The value in the form in which it is copied into the target; an error if it does not fit."""
    check_writable(name, target)
    if tuple(value.size()) != tuple(target.shape):
        raise ShapeError(
            f"{name!r} has shape {tuple(value.size())}",
            expected=f"{tuple(target.shape)}, the model's",
        )
    quantized = isinstance(value, QuantizedTensorStorage)
    if not isinstance(target, QuantizedTensor):
        if quantized:
            value = value.dequantize(
                target.dtype if target.dtype in HIGH_PRECISION else torch.float32
            )
        dtypes = [target.dtype, value.dtype]
        if (
            len(
                {
                    "float" if d.is_floating_point else "complex" if d.is_complex else d
                    for d in dtypes
                }
            )
            > 1
        ):
            raise DTypeError(
                f"{name!r} is of {value.dtype}", expected=f"{target.dtype}, as in the model"
            )
        return value
    if not any(target.get_usages().values()):
        raise UsageError(f"{name!r} of the model holds no data", remedy="it was cleared or saved")
    if isinstance(value, QuantizedTensor):
        if not target.adopts_bytes_of(value) and value.inner_tensors == target.inner_tensors:
            # The target's device may need further usages; some of them can be derived from the
            # bytes.
            value = value.to(target.device)
            with contextlib.suppress(UsageError):
                value.update_usage(
                    **{
                        f"{usage}_usage": held or None
                        for usage, held in target.get_usages().items()
                    }
                )
        if target.adopts_bytes_of(value):
            return value
    if target._quantizer is None:
        what = (
            f"{name!r} of the model has no quantizer, and the file has another kind of data for it"
        )
        raise UsageError(what, expected="a quantizer", remedy="set one with update_quantizer()")
    if not quantized and not value.dtype.is_floating_point:
        raise DTypeError(
            f"{name!r} is of {value.dtype}", expected="floating-point values to quantize"
        )
    values = value.dequantize(torch.float32) if quantized else value
    return values if values.dtype in HIGH_PRECISION else values.to(torch.float32)


def _write(model: torch.nn.Module, targets: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Load checked values into the modules, and restore the old values if a module refuses."""
    waiting = [
        (layer._binding, layer._binding.loaded)
        for layer in model.modules()
        if isinstance(layer, Linear)
    ]
    # The states of recipes were tried in copies, and copying bytes cannot fail.
    refusing = any(
        may_refuse_to_load(module)
        for module in model.modules()
        if not isinstance(module, RecipeState)
    )
    for name in state.keys() & targets.keys():
        adopts = isinstance(targets[name], QuantizedTensor) and isinstance(
            state[name], QuantizedTensor
        )
        refusing |= not adopts and type(targets[name]) not in (torch.Tensor, torch.nn.Parameter)
    with torch.no_grad():
        before = [(tensor, _on_the_cpu(tensor)) for tensor in targets.values()] if refusing else []
    # Ctrl-C waits until everything is loaded.
    with uninterrupted(), translated("a module refuses its values", "values that all modules take"):
        try:
            model.load_state_dict(state, strict=False)
        except BaseException:
            with torch.no_grad():
                for tensor, values in before:
                    (
                        tensor.copy_from_storage
                        if isinstance(tensor, QuantizedTensor)
                        else tensor.copy_
                    )(values)
            for binding, loaded in waiting:
                binding.loaded = loaded
            raise


def _on_the_cpu(tensor: Any) -> Any:
    return tensor.to("cpu", copy=True)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in an 8-bit float format as a uint8 view, because few ops support such formats;
    another tensor itself."""
    return (
        tensor.view(torch.uint8)
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
        else tensor
    )


def check_writable(name: str, value: Any) -> None:
    """Check that a tensor can be written, by writing one element with its own value.

    So an error of torch is raised before any value changes.
    """
    for tensor in held_tensors(value):
        if any(
            stride == 0 and size > 1
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise UsageError(
                f"{name!r} is an expanded view: several of its elements are one", remedy="clone it"
            )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise UsageError(
                f"{name!r} was made in inference mode", remedy="load it in torch.inference_mode()"
            )
        if tensor.numel():
            check_memory(name, tensor)
            # ``.data`` has a count of writes of its own, so tensors saved by autograd stay valid.
            first = _as_bytes(tensor.data)[(0,) * tensor.dim()]
            first.copy_(first.clone())


def write_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy into each tensor its new value, in one call into torch, which Ctrl-C cannot
    interrupt."""
    if pairs:
        targets, values = zip(
            *[(_as_bytes(target), _as_bytes(value)) for target, value in pairs], strict=True
        )
        with uninterrupted(), torch.no_grad():
            foreach_copy_(targets, values)
