"""A layer's weight: kept quantized for microbatches or from the beginning, moved, and replaced."""

import os
import warnings
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ottava.errors import DTypeError
from ottava.kernels import HIGH_PRECISION
from ottava.recipes.base import Recipe, as_recipe
from ottava.recipes.region import regions
from ottava.recipes.role import QuantizerRole
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage
from ottava.tensors.declaration import check_flag
from ottava.torch_private import local_tensor, set_local_tensor, share_hooks


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
    outer, token = (
        _innermost.get(),
        _innermost.set((as_recipe(recipe), quantized) if enabled else None),
    )
    try:
        yield
    finally:
        _innermost.reset(token)
    if outer is not None:
        outer[1].extend(quantized)
    if enabled and not quantized:
        what = "quantized_model_init quantized nothing: the code inside made no ottava.nn.Linear"
        remedy = (
            "make its layers of this class, or call ottava.convert(model, recipe, "
            "primary=True) afterwards"
        )
        warnings.warn(f"{what}; {remedy}", UserWarning, stacklevel=3)


def quantize_new_weight(layer: Any) -> None:
    """Replace the weight of a layer that was just made by a quantized one, inside
    ``quantized_model_init``."""
    block = _innermost.get()
    if block is not None and not layer.weight_is_transposed:
        layer.weight = quantized_parameter(
            layer.weight, block[0], layer.name, keep_initial_values=True
        )
        block[1].append(layer.name)


def quantized_parameter(weight: Any, recipe: Recipe, name: str, keep_initial_values: bool) -> Any:
    """A parameter in place of the weight of the layer ``name``, quantized by ``recipe``, with its
    attributes, gradient and hooks."""
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
        what = (
            f"the quantizer of recipe {recipe.name!r} returned a {type(quantized).__name__} "
            f"for a weight"
        )
        remedy = (
            "FP8-primary weights need a quantizer whose results are tensors when internal is False"
        )
        raise DTypeError(what, expected="a QuantizedTensor", remedy=remedy)
    parameter: Any = torch.nn.Parameter(quantized, requires_grad=weight.requires_grad)
    parameter.__dict__.update(weight.__dict__)
    parameter.grad = weight.grad
    share_hooks(weight, parameter)
    if keep_initial_values:
        parameter._high_precision_init_val = weight.detach().cpu().clone()
    return parameter


def apply_to_layer(layer: Any, fn: Any, apply: Any) -> None:
    """``Module._apply`` of a layer, by ``apply(fn)``: a quantized weight stays quantized, and the
    buffers of a state keep their dtypes, because scales are exact in a model that goes to
    bfloat16."""
    weight, state = layer._parameters.get("weight"), layer._modules.get("recipe_state")
    exact = {} if state is None else {id(buffer): buffer for buffer in state.buffers()}
    without_values, without_state = (
        layer.weight.is_meta,
        any(buffer.is_meta for buffer in exact.values()),
    )
    kept: Any = None
    if isinstance(weight, QuantizedTensor):
        with torch.no_grad():
            kept = fn(weight)
            if not isinstance(kept, QuantizedTensor) and kept.dtype in HIGH_PRECISION:
                # What would dequantize it keeps its data, if it has any.
                emptied = without_values and not kept.is_meta
                placed: Any = weight.apply_to_inner(fn) if emptied else weight.to(kept.device)
                kept = placed.to_dtype(kept.dtype)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = kept if tensor is weight and kept is not None else fn(tensor)
        return (
            tensor.to(made.device) if id(tensor) in exact and made.dtype != tensor.dtype else made
        )

    if kept is None or kept.is_meta is not without_values:
        apply(moved)
    else:
        # torch swaps a parameter of a subclass for another one, which has neither its attributes
        # nor its hooks. A plain parameter is given new data, and so is this one.
        if kept is not weight:
            weight.data = kept
        if weight.grad is not None:
            weight.grad.data = fn(weight.grad)
        layer._parameters["weight"] = None
        try:
            apply(moved)
        finally:
            layer._parameters["weight"] = weight
    if without_values and not layer.weight.is_meta:
        _share_shards(layer)
    if without_state and not any(buffer.is_meta for buffer in state.buffers()):
        state.reset()


def _share_shards(layer: Any) -> None:
    """See that the first values of a quantized weight that was on meta are quantized as those of
    the whole."""
    weight = layer.weight
    local = local_tensor(weight)
    if not isinstance(local, QuantizedTensor):
        return
    layer._binding.own_shard(layer, local)
    sharded = (
        []
        if local is weight
        else [d for d, p in enumerate(weight.placements) if not p.is_replicate()]
    )
    if len(sharded) == 1 and local._quantizer is not None:
        group = weight.device_mesh.get_group(sharded[0])
        local.update_quantizer(local._quantizer.for_shards(group.group_name))


def gather_as(layer: Any, before: Any) -> None:
    """Have a weight that was put in the place of another one (``assign=True``) be gathered as that
    was."""
    weight: Any = layer.weight
    local = local_tensor(weight)
    gathered = isinstance(local, QuantizedTensorStorage) or hasattr(local, "high_precision")
    if gathered or not hasattr(before, "high_precision"):
        return
    made = type(before)(local.detach())
    if local is weight:
        layer._parameters["weight"] = torch.nn.Parameter(made, requires_grad=weight.requires_grad)
    else:
        set_local_tensor(weight, made)
