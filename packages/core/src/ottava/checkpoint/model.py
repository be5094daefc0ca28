"""Whole models in one file: everything is read and checked before the first byte of a model
changes.

:func:`load_model` reads the file, compares the names, brings each value into the form of its
target, tries the small states of recipes in copies, and only then loads.
"""

import contextlib
import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from ottava.checkpoint.contracts import contract_of, warn_of_other_contracts
from ottava.checkpoint.files import check_memory
from ottava.checkpoint.flatten import Value, held_tensors, load_file, save_file
from ottava.checkpoint.published import PublishedWeights, find_published, weight_of
from ottava.contract import Contract
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
from ottava.torch_private import foreach_copy_, is_distributed, may_refuse_to_load

_T = TypeVar("_T")


def save_model(model: torch.nn.Module, path: AnyPath) -> None:
    """:func:`save_file` of a model's state dict; DTypeError if ``model`` is not a module."""
    save_file(_module(model).state_dict(), path)


def load_model(
    model: torch.nn.Module, path: AnyPath, *, strict: bool = True, verify: bool = True
) -> tuple[list[str], list[str]]:
    """Load a safetensors file into a model's parameters and buffers, or change nothing.

    The whole file is checked and compared with the model: names, shapes and kinds. Only then the
    values are copied from the mapped file; Ctrl-C waits until the copy is complete. If a module
    could still refuse its values (it has hooks or a loading method of its own, or values are
    quantized), the old values are kept on the CPU and restored if it does.

    Quantized tensors are copied byte by byte into parameters of the same kind. If a parameter is
    quantized in another way, its own quantizer quantizes the values. If it is in high precision,
    quantized values are dequantized. Where the file states another contract than the model's
    quantizer, a ``UserWarning`` names the fields that differ.

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
    targets = _targets_of(_module(model))
    state = load_file(path, verify=verify)
    published = find_published(state, as_path(path))
    published.refuse(path, _misread_names(published, targets, state, strict))
    with named(as_path(path)):
        missing, unexpected = _differing_names(model, targets, state)
        if strict:
            _check_names(missing, unexpected)
        for name in unexpected:
            del state[name]
        recipe_states = _recipe_states(model)
        contracts = _contracts(targets, state)
        for name, value in state.items():
            if name in targets and not name.startswith(tuple(recipe_states)):
                with of_any_class(name):
                    state[name] = _fitting(name, targets[name], value)
        for prefix, recipe_state in recipe_states.items():
            _try_state(prefix, recipe_state, state)
        warn_of_other_contracts(contracts)
        _write(model, targets, state)
    return missing, unexpected


def _contracts(
    targets: Mapping[str, torch.Tensor], state: Mapping[str, Value]
) -> dict[str, tuple[Contract | None, Contract | None]]:
    """The contracts of the tensors that are quantized in the file and in the model, by name."""
    pairs = {}
    for name, value in state.items():
        target: Value | None = targets.get(name)
        if not isinstance(value, QuantizedTensorStorage):
            continue
        if isinstance(target, QuantizedTensorStorage):
            pairs[name] = value.saved_contract, contract_of(target)
    return pairs


def _targets_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model to load into, by name.

    Raises:
        DTypeError, UsageError: one of them is not a whole tensor with memory.
    """
    targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in targets.items():
        subject = f"{name!r} of the model is"
        if not isinstance(tensor, torch.Tensor) or is_distributed(tensor):
            raise DTypeError(
                f"{subject} a {type(tensor).__name__}",
                expected="whole tensors",
                remedy="use load_sharded",
            )
        if tensor.is_meta:
            raise UsageError(
                f"{subject} on meta",
                expected="memory to load into",
                remedy="call model.to_empty first",
            )
    return targets


def _differing_names(
    model: torch.nn.Module, targets: Mapping[str, torch.Tensor], state: Mapping[str, Value]
) -> tuple[list[str], list[str]]:
    """The names of the model that the file misses, and those of the file that the model misses.

    Names of scaling states that may differ count as equal: a layer without a recipe keeps the state
    for a recipe that a region sets later, and a layer whose state is not in the file starts afresh.
    """
    may_differ = [
        f"{name}.recipe_state.".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Linear)
        and module.recipe is None
        and "recipe_state" not in module._modules
    ]
    for layer in layers_with_state(targets) - layers_with_state(state):
        if f"{layer}weight" in state:
            may_differ.append(f"{layer}recipe_state.")
    prefixes = tuple(may_differ)
    missing = [n for n in targets if n not in state and not n.startswith(prefixes)]
    unexpected = [n for n in state if n not in targets and not n.startswith(prefixes)]
    return missing, unexpected


def _check_names(missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise CheckpointError if there are any names that only the model or only the file has."""
    faults = []
    if missing:
        faults.append(f"the file misses {listed(missing)}")
    if unexpected:
        faults.append(f"the model has no place for {listed(unexpected)}")
    if faults:
        raise CheckpointError(
            "; ".join(faults),
            expected="the names of the model",
            remedy="strict=False leaves them",
        )


def _recipe_states(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The states of recipes in a model, by the prefix of the names of their tensors."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [name for name, module in modules.items() if name and isinstance(module, RecipeState)]
    return {f"{name}.": modules[name] for name in names}


def _try_state(prefix: str, recipe_state: torch.nn.Module, state: Mapping[str, Value]) -> None:
    """Load the state of a recipe into a copy, which is small and may accept other shapes.

    Raises:
        DTypeError: a value is quantized.
        CheckpointError: the copy refuses the values.
    """
    values = {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
    if any(isinstance(value, QuantizedTensorStorage) for value in values.values()):
        raise DTypeError(
            f"something of {prefix!r} is quantized", expected="plain tensors, as in the model"
        )
    refused = translated(f"{prefix!r} cannot be loaded", "the state of its recipe", of=RuntimeError)
    with warnings.catch_warnings(action="ignore"), refused:
        copy.deepcopy(recipe_state).load_state_dict(values, strict=False)


def without_state(state_dict: dict[str, _T]) -> dict[str, _T]:
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
    # The copy has the attributes of the dict, in which torch keeps the versions of modules.
    rest = copy.copy(state_dict)
    for name in state_dict:
        if OF_STATE.search(name):
            del rest[name]
    return rest


def _module(model: object) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"the model is a {type(model).__name__}", expected="a torch.nn.Module")
    return model


def _misread_names(
    published: PublishedWeights,
    targets: Mapping[str, torch.Tensor],
    state: Mapping[str, Value],
    strict: bool,
) -> list[str]:
    """The names of data of other tools that the model would take for values.

    With ``strict`` these are all names that the model has no place for.
    """
    names = []
    for name, scales in published.scales.items():
        target = targets.get(name)
        same_dtype = target is not None and target.dtype == published.dtypes[name]
        if same_dtype and all(scale in targets for scale in scales if scale in state):
            # The model holds such data and scales itself.
            continue
        if strict or name in targets or weight_of(name) in targets:
            names.append(name)
    return names


def _fitting(name: str, target: torch.Tensor, value: Value) -> Value:
    """The value in the form in which it is copied into the target.

    Raises:
        ShapeError, DTypeError, UsageError: it does not fit.
    """
    check_writable(name, target)
    if tuple(value.size()) != tuple(target.shape):
        raise ShapeError(
            f"{name!r} has shape {tuple(value.size())}",
            expected=f"{tuple(target.shape)}, the model's",
        )
    if isinstance(target, QuantizedTensor):
        return _fitting_quantized(name, target, value)
    plain = value
    if isinstance(value, QuantizedTensorStorage):
        plain = value.dequantize(_high_precision(target.dtype))
    if _kind_of(plain.dtype) != _kind_of(target.dtype):
        raise DTypeError(
            f"{name!r} is of {plain.dtype}", expected=f"{target.dtype}, as in the model"
        )
    return plain


def _high_precision(dtype: torch.dtype) -> torch.dtype:
    if dtype in HIGH_PRECISION:
        return dtype
    return torch.float32


def _kind_of(dtype: torch.dtype) -> str | torch.dtype:
    """Equal for dtypes between which torch copies without changing the meaning of values."""
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return "complex"
    return dtype


def _fitting_quantized(name: str, target: QuantizedTensor, value: Value) -> Value:
    """:func:`_fitting` for a target that is quantized.

    Returns:
        A quantized tensor whose bytes the target adopts, or values in high precision that the
        target's quantizer quantizes.
    """
    if not any(target.get_usages().values()):
        raise UsageError(f"{name!r} of the model holds no data", remedy="it was cleared or saved")
    if isinstance(value, QuantizedTensor):
        value = _with_usages_of(target, value)
        if target.adopts_bytes_of(value):
            return value
    if target._quantizer is None:
        raise UsageError(
            f"{name!r} of the model has no quantizer, and the file has another kind of data for it",
            expected="a quantizer",
            remedy="set one with update_quantizer()",
        )
    if isinstance(value, QuantizedTensorStorage):
        return value.dequantize(torch.float32)
    if not value.dtype.is_floating_point:
        raise DTypeError(
            f"{name!r} is of {value.dtype}", expected="floating-point values to quantize"
        )
    return value.to(_high_precision(value.dtype))


def _with_usages_of(target: QuantizedTensor, value: QuantizedTensor) -> QuantizedTensor:
    """The value with the usages of the target, as far as they can be derived from its bytes."""
    if target.adopts_bytes_of(value) or value.inner_tensors != target.inner_tensors:
        return value
    # On another device the tensor may need further usages.
    on_device = value.to(target.device)
    if not isinstance(on_device, QuantizedTensor):
        return value
    usages = {f"{usage}_usage": True for usage, has in target.get_usages().items() if has}
    with contextlib.suppress(UsageError):
        on_device.update_usage(**usages)
    return on_device


def _write(
    model: torch.nn.Module, targets: Mapping[str, torch.Tensor], state: Mapping[str, Value]
) -> None:
    """Load checked values into the modules, and restore the old values if a module refuses."""
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    loaded_before = [layer._binding.loaded for layer in layers]
    old_values: list[tuple[torch.Tensor, torch.Tensor]] = []
    if _may_refuse(model, targets, state):
        with torch.no_grad():
            old_values = [(tensor, _on_the_cpu(tensor)) for tensor in targets.values()]
    # Ctrl-C waits until everything is loaded.
    with uninterrupted(), translated("a module refuses its values", "values that all modules take"):
        try:
            model.load_state_dict(state, strict=False)
        except BaseException:
            _restore(old_values)
            for layer, loaded in zip(layers, loaded_before, strict=True):
                layer._binding.loaded = loaded
            raise


def _may_refuse(
    model: torch.nn.Module, targets: Mapping[str, torch.Tensor], state: Mapping[str, Value]
) -> bool:
    """Whether a module could still refuse its values: by hooks or a loading method of its own, or
    because they are quantized while they are copied."""
    for module in model.modules():
        # The states of recipes were tried in copies.
        if not isinstance(module, RecipeState) and may_refuse_to_load(module):
            return True
    for name in state.keys() & targets.keys():
        target = targets[name]
        # Copying bytes cannot fail.
        adopts = isinstance(target, QuantizedTensor) and isinstance(state[name], QuantizedTensor)
        if not adopts and type(target) not in (torch.Tensor, torch.nn.Parameter):
            return True
    return False


def _restore(old_values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, values in old_values:
            if isinstance(tensor, QuantizedTensor) and isinstance(values, QuantizedTensor):
                tensor.copy_from_storage(values)
            else:
                tensor.copy_(values)


def _on_the_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in an 8-bit float format as a uint8 view, because few ops support such formats;
    another tensor itself."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)
    return tensor


def check_writable(name: str, value: Value) -> None:
    """Check that a tensor can be written, by writing one element with its own value.

    So an error of torch is raised before any value changes.

    Raises:
        UsageError: it is an expanded view, was made in inference mode, or has no memory.
    """
    for tensor in held_tensors(value):
        sides = zip(tensor.shape, tensor.stride(), strict=True)
        if any(stride == 0 and size > 1 for size, stride in sides):
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
    if not pairs:
        return
    targets = [_as_bytes(target) for target, _ in pairs]
    values = [_as_bytes(value) for _, value in pairs]
    with uninterrupted(), torch.no_grad():
        foreach_copy_(targets, values)
