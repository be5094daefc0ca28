"""A check that all ranks are about to gather the same weights, before the first gather.

Ranks whose recipes differ would take the bytes of other formats for theirs, or wait for ever. So
each rank describes its weights, one line for each, in words that are the same on all ranks that
agree. One small all-gather compares the lines. Each module is compared once for each group.
"""

import weakref
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ottava.collectives import Disagreement, check_alike
from ottava.distributed import fsdp2
from ottava.distributed.layers import is_converted
from ottava.errors import stable_repr
from ottava.tensors import QuantizedTensor, Quantizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_OTHER_WEIGHTS = Disagreement(
    "the ranks of the group gather other weights",
    "the same weights on all ranks, quantized by the same recipe with the same options",
    "convert the model in the same way on every rank, and call gather_quantized on all of them or "
    "none",
)
# Attributes of quantizers that say how a quantizer is used, which no gather sees.
_USAGES = ("rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm")
_PLAIN = (bool, int, float, str, torch.dtype, torch.Size, Enum, type(None))

# Module -> the names of the groups whose ranks have compared its weights.
_comparisons: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()


def compare_weights(
    shard: torch.Tensor, size: torch.Size, group: "ProcessGroup", module: torch.nn.Module
) -> None:
    """Compare all weights of the model that FSDP gathers over ``group``, once.

    Args:
        shard: this rank's shard of the weight that is about to be gathered.
        size: the size of the whole weight.
        group: the ranks that have the shards.
        module: the layer that owns the weight.

    Raises:
        UsageError: the ranks have other weights, recipes or options. All ranks raise it, and
            nothing is changed.
    """
    # The name is stored, not the group, because a module must not keep a destroyed group alive.
    name = group.group_name
    if dist.get_world_size(group) == 1 or name in _comparisons.get(module, ()):
        return
    own_weight = fsdp2.GatheredWeight("weight", shard, size, module)
    weights = fsdp2.gathered_over(module, group) or [own_weight]
    check_alike([_line(weight) for weight in weights], group, shard.device, _OTHER_WEIGHTS)
    for weight in (*weights, own_weight):
        _comparisons.setdefault(weight.module, set()).add(name)


def _line(weight: fsdp2.GatheredWeight) -> str:
    """A weight, its format and its recipe, in words that all ranks use."""
    shard, module = weight.shard, weight.module
    place = f"{weight.name} {list(weight.size)}"
    if not hasattr(shard, "fsdp_pre_all_gather"):
        return f"{place}: {shard.dtype}, gathered as it is"
    if isinstance(shard, QuantizedTensor):
        form = _quantized_form(shard)
    else:
        form = f"gathered by {_words(_bound_quantizer(module))}"
    recipe = module._binding.recipe if is_converted(module) else None
    # Each of these changes which bytes are gathered.
    options = {
        "dtype": weight.dtype or shard.dtype,
        "columns": tuple(shard.shape[1:]),
        "recomputes": getattr(module, "recomputes", False),
        "resharded": weight.resharded,
    }
    return f"{place}: {form}, for {stable_repr(recipe)} ({_listed(options)})"


def _quantized_form(shard: QuantizedTensor) -> str:
    """A shard that is kept quantized: its class and fields, the tensors that it sends, and its
    quantizer."""
    fields = {field.argument: getattr(shard, field.attribute) for field in shard.own_fields}
    gather_arguments = [
        inner.argument
        for inner in shard.inner_tensors
        if inner.gather and getattr(shard, inner.attribute) is not None
    ]
    kind = f"{type(shard).__name__}({_listed(fields)})"
    return f"a {kind} that sends {', '.join(gather_arguments)}, by {_words(shard._quantizer)}"


def _bound_quantizer(module: torch.nn.Module) -> Quantizer | None:
    """The quantizer of a layer's weight by the bound recipe, if there is one.

    Asking for it begins no step.
    """
    if not is_converted(module):
        return None
    binding = module._binding
    if binding.recipe is None:
        return None
    state = binding.state_for(module, binding.recipe)
    quantizer: Quantizer = state.quantizer("weight", rowwise=True, columnwise=True, recording=False)
    return quantizer


def _listed(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={_words(value)}" for name, value in options.items())


def _words(value: object) -> str:
    """An option in words that do not differ from rank to rank.

    An object whose ``repr`` may differ is described by its class.
    """
    if isinstance(value, Quantizer):
        hidden = {*value.process_attributes, *_USAGES}
        options = {
            name: option
            for name, option in vars(value).items()
            if name not in hidden and not isinstance(option, torch.Tensor)
        }
        return f"{type(value).__name__}({_listed(options)})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_words, value))})"
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, _PLAIN):
        return stable_repr(value)
    return type(value).__qualname__
