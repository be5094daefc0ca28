"""A layer's weight: kept quantized for microbatches or from the beginning, moved, and replaced."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ottava.errors import DTypeError
from ottava.kernels import HIGH_PRECISION
from ottava.nn.layer import Layer
from ottava.recipes.base import Recipe, as_recipe
from ottava.recipes.region import regions
from ottava.recipes.role import QuantizerRole
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage
from ottava.tensors.declaration import check_flag
from ottava.torch_private import local_tensor, set_local_tensor, share_hooks

#: Gives what takes the place of a tensor.
TensorFunction = Callable[[torch.Tensor], torch.Tensor]


class microbatch(ContextDecorator):
    """A block in which every layer takes ``is_first_microbatch=first``, unless its call says
    otherwise.

    With ``first=True`` the layers quantize their weights and keep them; with False they use what
    they kept. What is no bool is refused with an OptionError.
    """

    def __init__(self, first: bool) -> None:
        check_flag("first of a microbatch", first)
        self.first = first

    def __enter__(self) -> "microbatch":
        # By no call, after which an interrupt could come: __exit__ would not be called.
        regions.microbatches += [self]
        return self

    def __exit__(self, *error: object) -> None:
        # Generators end their blocks in any order, and in any thread.
        blocks, place = regions.microbatches, -1
        try:
            while blocks[place] is not self:
                place -= 1
        except IndexError:
            return
        del blocks[place]


# The recipe of the innermost block of this thread, and the names of the layers whose weights it
# quantized; None outside any, and in one that is disabled.
_innermost: ContextVar[tuple[Recipe, list[str]] | None] = ContextVar(
    "quantized_model_init", default=None
)


@contextmanager
def quantized_model_init(
    recipe: Recipe | str | os.PathLike[str], *, enabled: bool = True
) -> Iterator[None]:
    """Inside, every :class:`~ottava.nn.Linear` that is made keeps its weight quantized by
    ``recipe`` only.

    The values before quantization stay available on the CPU as
    ``weight.get_high_precision_init_val()``, for an optimizer's master weights, until
    ``weight.clear_high_precision_init_val()``. Code that makes ``torch.nn.Linear`` layers is not
    affected, and a ``UserWarning`` says so where nothing was quantized. A ``recipe`` that is none
    is refused as by :func:`~ottava.get_recipe`.
    """
    check_flag("enabled", enabled)
    quantized: list[str] = []
    outer = _innermost.get()
    token = _innermost.set((as_recipe(recipe), quantized) if enabled else None)
    try:
        yield
    finally:
        _innermost.reset(token)
    if outer is not None:
        outer[1].extend(quantized)
    if enabled and not quantized:
        text = (
            "quantized_model_init quantized nothing: the code inside made no ottava.nn.Linear; "
            "make its layers of this class, or call ottava.convert(model, recipe, primary=True) "
            "afterwards"
        )
        warnings.warn(text, UserWarning, stacklevel=3)


def quantize_new_weight(layer: Any) -> None:
    """Replace the weight of a layer that was just made by a quantized one, inside
    ``quantized_model_init``."""
    block = _innermost.get()
    if block is None or layer.weight_is_transposed:
        return
    recipe, quantized = block
    layer.weight = quantized_parameter(layer.weight, recipe, layer.name, keep_initial_values=True)
    quantized.append(layer.name)


def quantized_parameter(
    weight: Any, recipe: Recipe, name: str, keep_initial_values: bool
) -> torch.nn.Parameter:
    """A parameter in place of the weight of the layer ``name``, quantized by ``recipe``, with its
    attributes, gradient and hooks.

    Args:
        weight: ``[out_features, in_features]``, in high precision.
        keep_initial_values: whether ``get_high_precision_init_val()`` gives them later.

    Raises:
        DTypeError: the recipe's quantizer makes no tensor that can be a parameter.
    """
    quantizer = recipe.quantizer(QuantizerRole("linear", "weight", name)).copy()
    keep_initial_values = keep_initial_values and not weight.is_meta
    # Columns can be made later of the initial values alone.
    later = keep_initial_values and quantizer.columns_when_asked and not torch.is_grad_enabled()
    quantizer.set_usage(rowwise=True, columnwise=not later)
    quantizer.internal = False
    with torch.no_grad():
        quantizer.initialize(weight.detach())
        quantized = quantizer.quantize(weight.detach())
    if not isinstance(quantized, QuantizedTensor):
        raise DTypeError(
            f"the quantizer of recipe {recipe.name!r} returned a {type(quantized).__name__} "
            f"for a weight",
            expected="a QuantizedTensor",
            remedy="FP8-primary weights need a quantizer whose results are tensors when internal "
            "is False",
        )
    parameter: Any = torch.nn.Parameter(quantized, requires_grad=weight.requires_grad)
    parameter.__dict__.update(weight.__dict__)
    parameter.grad = weight.grad
    share_hooks(weight, parameter)
    if keep_initial_values:
        parameter._high_precision_init_val = weight.detach().cpu().clone()
    return parameter  # type: ignore[no-any-return]


def apply_to_layer(
    layer: Layer, fn: TensorFunction, apply: Callable[[TensorFunction], Any]
) -> None:
    """``Module._apply`` of a layer: a quantized weight stays quantized, and the buffers of a state
    keep their dtypes, because scales are exact in a model that goes to bfloat16.

    Args:
        fn: gives what takes the place of a parameter or a buffer: moved, cast or emptied.
        apply: ``Module._apply`` of torch's class, for a function.
    """
    weight: Any = layer._parameters.get("weight")
    state: Any = layer._modules.get("recipe_state")
    weight_was_meta = layer.weight.is_meta
    state_was_meta = state is not None and _is_on_meta(state)
    of_others = _keeping_dtypes(fn, state)
    if isinstance(weight, QuantizedTensor):
        _apply_to_quantized(layer, weight, fn, of_others, apply)
    else:
        apply(of_others)
    if weight_was_meta and not layer.weight.is_meta:
        _share_shards(layer)
    if state_was_meta and not _is_on_meta(state):
        state.reset()


def _apply_to_quantized(
    layer: Layer,
    weight: Any,
    fn: TensorFunction,
    of_others: TensorFunction,
    apply: Callable[[TensorFunction], Any],
) -> None:
    """``Module._apply`` of a layer whose weight is kept quantized: ``fn`` for the weight, and
    ``of_others`` for all other tensors."""
    quantized = _still_quantized(weight, fn)
    if quantized.is_meta is not weight.is_meta:
        # A parameter that leaves the meta device, or goes there, cannot be given new data.
        apply(lambda tensor: quantized if tensor is weight else of_others(tensor))
        return
    # torch swaps a parameter of a subclass for another one, which has neither its attributes nor
    # its hooks. A plain parameter is given new data, and so is this one.
    if quantized is not weight:
        weight.data = quantized
    if weight.grad is not None:
        weight.grad.data = fn(weight.grad)
    layer._parameters["weight"] = None
    try:
        apply(of_others)
    finally:
        layer._parameters["weight"] = weight


def _still_quantized(weight: QuantizedTensor, fn: TensorFunction) -> Any:
    """What ``fn`` makes of a quantized weight, without dequantizing it."""
    with torch.no_grad():
        result: Any = fn(weight)
        if isinstance(result, QuantizedTensor) or result.dtype not in HIGH_PRECISION:
            return result
        # ``fn`` would dequantize the weight. Its bytes stay, and device and dtype change alone.
        if weight.is_meta and not result.is_meta:
            # It has no bytes; ``fn`` makes memory for them.
            placed: Any = weight.apply_to_inner(fn)
        else:
            placed = weight.to(result.device)
        return placed.to_dtype(result.dtype)


def _keeping_dtypes(fn: TensorFunction, state: torch.nn.Module | None) -> TensorFunction:
    """``fn``, which moves the buffers of a state and leaves their dtypes."""
    # The buffers themselves are kept, so that no other tensor gets the id of one.
    exact = {} if state is None else {id(buffer): buffer for buffer in state.buffers()}

    def applied(tensor: torch.Tensor) -> torch.Tensor:
        result = fn(tensor)
        if id(tensor) in exact and result.dtype != tensor.dtype:
            return tensor.to(result.device)
        return result

    return applied


def _is_on_meta(state: torch.nn.Module) -> bool:
    return any(buffer.is_meta for buffer in state.buffers())


def _share_shards(layer: Layer) -> None:
    """See that the first values of a quantized weight that was on meta are quantized as those of
    the whole."""
    weight: Any = layer.weight
    local = local_tensor(weight)
    if not isinstance(local, QuantizedTensor):
        return
    layer._binding.own_shard(layer, local)
    if local is weight or local._quantizer is None:
        return
    sharded = [
        dimension
        for dimension, placement in enumerate(weight.placements)
        if not placement.is_replicate()
    ]
    if len(sharded) == 1:
        group = weight.device_mesh.get_group(sharded[0])
        local.update_quantizer(local._quantizer.for_shards(group.group_name))


def gather_as(layer: Layer, before: Any) -> None:
    """Have a weight that was put in the place of another one (``assign=True``) be gathered as that
    was.

    Args:
        before: what the former weight held on this rank.
    """
    weight = layer.weight
    local = local_tensor(weight)
    is_gathered = isinstance(local, QuantizedTensorStorage) or hasattr(local, "high_precision")
    if is_gathered or not hasattr(before, "high_precision"):
        return
    replacement = type(before)(local.detach())
    if local is weight:
        parameter = torch.nn.Parameter(replacement, requires_grad=weight.requires_grad)
        layer._parameters["weight"] = parameter
    else:
        set_local_tensor(weight, replacement)
