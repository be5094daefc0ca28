"""A layer's weight: blocks that say how it is quantized, and how it is moved and replaced."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from ottava.errors import DTypeError
from ottava.kernels import HIGH_PRECISION
from ottava.nn.layer import Layer
from ottava.recipes.backward import QUANTIZED
from ottava.recipes.base import Recipe, as_recipe
from ottava.recipes.region import regions
from ottava.recipes.role import QuantizerRole
from ottava.recipes.state import RecipeState
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage
from ottava.tensors.declaration import check_flag
from ottava.tensors.quantizer import Quantizer
from ottava.torch_private import local_tensor, set_local_tensor, share_hooks

#: Returns the tensor that takes the place of another one.
TensorFunction = Callable[[torch.Tensor], torch.Tensor]


class microbatch(ContextDecorator):
    """A block in which every layer takes ``is_first_microbatch=first``, unless its call says
    otherwise.

    With ``first=True`` the layers quantize their weights and keep them; with False they use the
    weights that they kept.

    Raises:
        OptionError: ``first`` is no bool.
    """

    def __init__(self, first: bool) -> None:
        check_flag("first of a microbatch", first)
        self.first = first

    def __enter__(self) -> "microbatch":
        # Not by a call: if it were interrupted, __exit__ would not be called.
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


class _Block(NamedTuple):
    """A block of ``quantized_model_init``: its recipe, and the names of the layers whose weights it
    quantized."""

    recipe: Recipe
    quantized: list[str]


# The innermost block of this thread; None outside any, and in one that is disabled.
_innermost: ContextVar[_Block | None] = ContextVar("quantized_model_init", default=None)


@contextmanager
def quantized_model_init(
    recipe: Recipe | str | os.PathLike[str], *, enabled: bool = True
) -> Iterator[None]:
    """Inside, every :class:`~ottava.nn.Linear` that is made keeps its weight quantized by
    ``recipe`` only.

    The values before quantization stay available on the CPU as
    ``weight.get_high_precision_init_val()``, for an optimizer's master weights, until
    ``weight.clear_high_precision_init_val()``. Code that makes ``torch.nn.Linear`` layers is not
    affected, and a ``UserWarning`` says so where nothing was quantized.

    Raises:
        OptionError: ``enabled`` is no bool.
        DTypeError, RecipeNotFoundError: ``recipe`` is neither a recipe nor the name of an installed
            one.
    """
    check_flag("enabled", enabled)
    outer = _innermost.get()
    block: _Block | None = None
    if enabled:
        block = _Block(as_recipe(recipe), quantized=[])
    token = _innermost.set(block)
    try:
        yield
    finally:
        _innermost.reset(token)
    if block is None:
        return
    if outer is not None:
        outer.quantized.extend(block.quantized)
    if not block.quantized:
        text = (
            "quantized_model_init quantized nothing: the code inside made no ottava.nn.Linear; "
            "make its layers of this class, or call ottava.convert(model, recipe, primary=True) "
            "afterwards"
        )
        warnings.warn(text, UserWarning, stacklevel=3)


def quantize_new_weight(layer: Layer) -> None:
    """Quantize the weight of a new layer, inside a block of ``quantized_model_init``."""
    block = _innermost.get()
    if block is None or layer.weight_is_transposed:
        return
    layer.weight = quantized_parameter(
        layer.weight, block.recipe, layer.name, keep_initial_values=True
    )
    block.quantized.append(layer.name)


def quantized_parameter(
    weight: torch.Tensor, recipe: Recipe, name: str, keep_initial_values: bool
) -> torch.nn.Parameter:
    """A quantized parameter in place of a weight, with its attributes, gradient and hooks.

    Args:
        weight: ``[out_features, in_features]``, in high precision.
        recipe: quantizes the weight.
        name: of the layer.
        keep_initial_values: whether ``get_high_precision_init_val()`` gives the values later.

    Raises:
        DTypeError: the recipe's quantizer makes no tensor that can be a parameter.
    """
    # Values on meta cannot be kept.
    keep_initial_values = keep_initial_values and not weight.is_meta
    quantizer = _quantizer_of_parameter(recipe, name, keep_initial_values)
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
    parameter = torch.nn.Parameter(quantized, requires_grad=weight.requires_grad)
    parameter.__dict__.update(weight.__dict__)
    parameter.grad = weight.grad
    share_hooks(weight, parameter)
    if keep_initial_values:
        parameter.__dict__["_high_precision_init_val"] = weight.detach().cpu().clone()
    return parameter


def _quantizer_of_parameter(recipe: Recipe, name: str, keep_initial_values: bool) -> Quantizer:
    """The quantizer of a parameter: the weight of the layer ``name``."""
    role = QuantizerRole("linear", "weight", name)
    quantizer = recipe.quantizer(role).copy()
    reads_columns = recipe.backward_reads(role)["dgrad", "weight"] == QUANTIZED
    # Some quantizers can make the columns later, of the initial values alone.
    later = keep_initial_values and quantizer.columns_when_asked and not torch.is_grad_enabled()
    quantizer.set_usage(rowwise=True, columnwise=reads_columns and not later)
    quantizer.internal = False
    return quantizer


def apply_to_layer(
    layer: Layer, fn: TensorFunction, apply: Callable[[TensorFunction], object]
) -> None:
    """``Module._apply`` of a layer: a quantized weight stays quantized, and the buffers of a state
    keep their dtypes, because scales are exact in a model that goes to bfloat16.

    Args:
        fn: returns the tensor that takes the place of a parameter or a buffer: moved, cast or
            emptied.
        apply: ``Module._apply`` of torch's class, for a function.
    """
    weight = layer._parameters.get("weight")
    state = layer._modules.get("recipe_state")
    weight_was_meta = layer.weight.is_meta
    state_was_meta = state is not None and _is_on_meta(state)
    fn_of_others = _keeping_dtypes(fn, state)
    if weight is not None and isinstance(weight, QuantizedTensor):
        _apply_to_quantized(layer, weight, fn, fn_of_others, apply)
    else:
        apply(fn_of_others)
    if weight_was_meta and not layer.weight.is_meta:
        _share_shards(layer)
    if isinstance(state, RecipeState) and state_was_meta and not _is_on_meta(state):
        state.reset()


def _apply_to_quantized(
    layer: Layer,
    weight: torch.nn.Parameter,
    fn: TensorFunction,
    fn_of_others: TensorFunction,
    apply: Callable[[TensorFunction], object],
) -> None:
    """``Module._apply`` of a layer whose weight is kept quantized.

    Args:
        fn: is applied to the weight.
        fn_of_others: is applied to all other tensors.
        apply: as of :func:`apply_to_layer`.
    """
    result = _without_dequantizing(fn, weight)
    if result.is_meta is not weight.is_meta:
        # A parameter that leaves the meta device, or goes there, cannot be given new data.
        apply(lambda tensor: result if tensor is weight else fn_of_others(tensor))
        return
    # torch swaps a parameter of a subclass for another one, which has neither its attributes nor
    # its hooks. This one is given new data instead, as torch does with a plain parameter.
    if result is not weight:
        weight.data = result
    if weight.grad is not None:
        weight.grad.data = fn(weight.grad)
    layer._parameters["weight"] = None
    try:
        apply(fn_of_others)
    finally:
        layer._parameters["weight"] = weight


def _without_dequantizing(fn: TensorFunction, weight: torch.Tensor) -> torch.Tensor:
    """The result of ``fn`` for a quantized weight, which stays quantized."""
    assert isinstance(weight, QuantizedTensor)
    with torch.no_grad():
        result = fn(weight)
        if isinstance(result, QuantizedTensor) or result.dtype not in HIGH_PRECISION:
            return result
        # ``fn`` would dequantize the weight. Keep its bytes and change only device and dtype.
        if weight.is_meta and not result.is_meta:
            # A weight on meta has no bytes; ``fn`` makes memory for them.
            return weight.apply_to_inner(fn).to_dtype(result.dtype)
        on_device = weight.to(result.device)
        assert isinstance(on_device, QuantizedTensor)
        return on_device.to_dtype(result.dtype)


def _keeping_dtypes(fn: TensorFunction, state: torch.nn.Module | None) -> TensorFunction:
    """``fn``, which moves the buffers of a state and leaves their dtypes."""
    # The dict refers to the buffers, so that no other tensor gets the id of one.
    buffers: dict[int, torch.Tensor] = {}
    if state is not None:
        buffers = {id(buffer): buffer for buffer in state.buffers()}

    def apply_to(tensor: torch.Tensor) -> torch.Tensor:
        result = fn(tensor)
        if id(tensor) in buffers and result.dtype != tensor.dtype:
            return tensor.to(result.device)
        return result

    return apply_to


def _is_on_meta(state: torch.nn.Module) -> bool:
    return any(buffer.is_meta for buffer in state.buffers())


def _share_shards(layer: Layer) -> None:
    """Have the shards of a weight that was on meta be quantized as the whole weight would be.

    The ranks of the shards then reduce the amaxes of the first values.
    """
    weight = layer.weight
    local = local_tensor(weight)
    if not isinstance(local, QuantizedTensor):
        return
    layer._binding.give_shard_quantizer(layer, local)
    if local is weight or local._quantizer is None:
        return
    group = _group_of_shards(weight)
    if group is not None:
        local.update_quantizer(local._quantizer.for_shards(group))


def _group_of_shards(weight: Any) -> str | None:
    """The name of the group of the ranks that have the shards of a DTensor; None if it is sharded
    in no dimension of its mesh, or in several."""
    sharded = [
        dimension
        for dimension, placement in enumerate(weight.placements)
        if not placement.is_replicate()
    ]
    if len(sharded) != 1:
        return None
    name: str = weight.device_mesh.get_group(sharded[0]).group_name
    return name


def gather_as(layer: Layer, former: torch.Tensor) -> None:
    """Have a weight that replaced another one (``assign=True``) be gathered as that was.

    Args:
        former: the local tensor of the former weight on this rank.
    """
    weight = layer.weight
    local = local_tensor(weight)
    is_gathered = isinstance(local, QuantizedTensorStorage) or hasattr(local, "high_precision")
    if is_gathered or not hasattr(former, "high_precision"):
        return
    replacement = type(former)(local.detach())
    if local is weight:
        parameter = torch.nn.Parameter(replacement, requires_grad=weight.requires_grad)
        layer._parameters["weight"] = parameter
    else:
        set_local_tensor(weight, replacement)
