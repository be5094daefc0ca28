"""Weights that are kept in high precision, and that FSDP2 gathers quantized by each rank, with scales that all share.

A shard that can be quantized by itself (rows of blocks) is. Where the scales depend on all shards, the amaxes of all
parameters of a group are reduced at once, when the first of them is gathered. Where neither is possible (shards that
cut blocks, a quantizer that has to see all values) the values themselves are gathered, and quantized by the layer.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ottava import torch_private
from ottava.distributed.fsdp2 import GatheredParameter, gathered_together
from ottava.distributed.hooks import GatherPlan, check_shard, padded, post_all_gather, pre_all_gather
from ottava.distributed.rules import ShardBatches, rule_of
from ottava.distributed.shards import ShardJob, shard_output
from ottava.errors import DTypeError, ShapeError, UsageError
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage, Quantizer
from ottava.torch_private import disabled_torch_function, graph_task_id, make_wrapper_subclass, tree_map, version_of

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
_aten = torch.ops.aten

# What gives a weight of the same kind: views, copies, and what sharding and materializing make new ones with.
_KEEPS_CLASS = {
    *(_aten.alias.default, _aten.as_strided.default, _aten.view.default, _aten.detach.default, _aten.narrow.default),
    *(_aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default),
    *(_aten.clone.default, _aten.empty_like.default, _aten.new_empty.default, _aten.new_zeros.default),
    *torch_private.aten_overloads("_pin_memory", "_to_copy"),
}

# The version and the dtype of values, and the shard that was quantized of them together with those of its group.
_Made = tuple[int, torch.dtype, QuantizedTensor]
# By the module that owns the parameter.
_quantized: weakref.WeakKeyDictionary[torch.nn.Module, _Made] = weakref.WeakKeyDictionary()
# The first module of a group -> the versions of all values and the reduced amaxes of the weights, of the last gather.
_amaxes: weakref.WeakKeyDictionary[torch.nn.Module, tuple[list[int], list[torch.Tensor]]] = weakref.WeakKeyDictionary()


class HighPrecisionWeight(torch.Tensor):
    """A weight in high precision whose shards ``fully_shard`` quantizes when it gathers them.

    It behaves as the tensor that it holds: optimizers, clipping and initialization work on high-precision values, and
    pickles and state dicts hold plain tensors. What comes of a gather is a quantized tensor, by the recipe that is
    bound to the layer. :func:`ottava.distributed.gather_quantized` makes them.
    """

    _plain: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, requires_grad: bool = False) -> "HighPrecisionWeight":
        about = {"dtype": values.dtype, "device": values.device, "layout": values.layout}
        about |= {"strides": values.stride(), "storage_offset": values.storage_offset()}
        return make_wrapper_subclass(cls, values.shape, **about, requires_grad=requires_grad)  # type: ignore[no-any-return]

    def __init__(self, values: torch.Tensor, requires_grad: bool = False) -> None:
        self._plain = values

    def high_precision(self) -> torch.Tensor:
        """The values as a plain tensor that shares their memory."""
        return self._plain

    @property
    def data(self) -> Any:
        """An alias without gradient; setting it takes over other values of the same shape."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor) or isinstance(value, QuantizedTensorStorage):
            raise DTypeError(f"new data is a {type(value).__name__}", expected="a plain tensor")
        plain = value._plain if isinstance(value, HighPrecisionWeight) else value.detach()
        if plain.shape != self.shape:
            raise ShapeError(f"new data has shape {tuple(plain.shape)}", expected=str(tuple(self.shape)))
        # Only torch's own setter changes the dtype and device that torch keeps of this tensor.
        torch.Tensor.data.__set__(self, HighPrecisionWeight(plain))  # type: ignore[attr-defined]
        self._plain = plain

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_plain"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: Any, size: Any, stride: Any) -> "HighPrecisionWeight":
        return HighPrecisionWeight(inner["_plain"])

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = tree_map(lambda v: v._plain if isinstance(v, HighPrecisionWeight) else v, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func in _KEEPS_CLASS:
            return tree_map(lambda r: cls(r) if isinstance(r, torch.Tensor) else r, result)
        if args and isinstance(args[0], cls) and result is args[0]._plain:
            # An in-place op returns its argument, so the wrapper is returned for it.
            return args[0]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HighPrecisionWeight({self._plain!r})"

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: torch.Size, stride: Sequence[int], module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], GatherPlan | torch.Size]:
        """What this rank sends, padded to the length of the longest shard, and what the next hook needs: a plan, or the
        size of the whole where the values themselves are sent."""
        dtype = mp_policy.param_dtype or self.dtype
        group, values = mesh.get_group(), self._plain
        world = dist.get_world_size(group)
        check_shard(values.shape, orig_size, module)
        known = _quantized.pop(module, None)
        if known is None or known[:2] != (version_of(values), dtype):
            if not _gathers_quantized(_quantizer_of(module), orig_size, world):
                return (padded(values.to(dtype), math.ceil(orig_size[0] / world)).contiguous(),), orig_size
            others = [p for p in gathered_together(module) if p.module is not module]
            together = [p for p in others if isinstance(p.shard, HighPrecisionWeight)]
            _quantize_together([GatheredParameter(self, orig_size, module), *together], mp_policy.param_dtype, group)
            known = _quantized.pop(module)
        return pre_all_gather(known[2], mesh, orig_size, module)

    def fsdp_post_all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        metadata: GatherPlan | torch.Size,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole weight, quantized, of dtype ``param_dtype`` around the bytes, or ``out`` brought up to date."""
        plan = metadata if isinstance(metadata, GatherPlan) else None
        kind = torch.Tensor if plan is None else plan.spec.cls
        if out is not None and (isinstance(out, QuantizedTensor) == (plan is None) or not isinstance(out, kind)):
            what = f"a weight that was gathered as a {type(out).__name__} is gathered as a {kind.__name__}"
            remedy = "bind the recipe before fully_shard, and do not change it afterwards"
            raise UsageError(what, expected="one kind of weight for the life of a sharded model", remedy=remedy)
        if plan is not None:
            return post_all_gather(plan, outputs, param_dtype, out)  # type: ignore[arg-type]
        # FSDP fills the same memory at every gather, so that one view of it stays the weight.
        return None if out is not None else (outputs[0][: metadata[0]].view(metadata), ())  # type: ignore[arg-type]


def _quantizer_of(module: Any) -> Quantizer:
    binding = getattr(module, "_binding", None)
    quantizer: Quantizer | None = None if binding is None else binding.gather_quantizer(module)
    if quantizer is None:
        what = f"no recipe is bound to the {type(module).__name__} whose weight is gathered"
        remedy = "convert the model before ottava.distributed.gather_quantized(model)"
        raise UsageError(what, expected="a layer of ottava.convert(model, recipe)", remedy=remedy)
    return quantizer


def _gathers_quantized(quantizer: Quantizer, size: torch.Size, world: int) -> bool:
    """Whether shards can be quantized where they are; the same on every rank."""
    rule, even = rule_of(quantizer), size[0] % world == 0
    independent = rule.independent_rows(quantizer)
    if independent is None and rule.batch_for(quantizer) is None:
        return False
    if world == 1 or (independent is None and rule.one_amax(quantizer)):
        # FSDP pads uneven shards, of which nothing but data is gathered then.
        return True
    rows = size[0] // world * math.prod(size[1:-1])
    return even and rows % rule.rows_of_blocks(quantizer) == 0 and (independent is None or len(size) > 1)


def _quantize_together(parameters: Sequence[GatheredParameter], param_dtype: torch.dtype | None, group: Any) -> None:
    """Quantize the shards of parameters that are gathered together, with one all-reduce for all that need any."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    jobs: list[ShardJob] = []
    made: dict[torch.nn.Module, _Made] = {}
    local: Any
    for shard, size, module in parameters:
        values: torch.Tensor = shard.high_precision()  # type: ignore[attr-defined]
        dtype, quantizer = param_dtype or values.dtype, _quantizer_of(module).with_usage(True, True)
        if not _gathers_quantized(quantizer, size, world):
            continue
        if rule_of(quantizer).independent_rows(quantizer) is not None:
            local = quantizer.quantize_impl(values.to(dtype), dtype)
        else:
            start = min(rank * math.ceil(size[0] / world), size[0]) * math.prod(size[1:])
            local = quantizer.make_empty(values.shape, dtype=dtype, device=values.device)
            output = shard_output(local, size, start, values.numel(), "a sharded weight")
            jobs.append(ShardJob(quantizer, values.reshape(-1), tuple(size), dtype, start, output))
        if not isinstance(local, QuantizedTensor):
            what = f"the quantizer of a {type(module).__name__} gives a {type(local).__name__}"
            raise UsageError(what, expected="a QuantizedTensor, which can be a parameter")
        local._shard_group = group.group_name
        made[module] = (version_of(values), dtype, local)
    if jobs:
        batches, versions, first = ShardBatches.of(jobs), [version for version, *_ in made.values()], next(iter(made))
        known = _amaxes.get(first)
        # A backward pass has the amaxes of the forward pass, because the values are the same.
        if graph_task_id() == -1 or known is None or known[0] != versions:
            known = _amaxes[first] = (versions, batches.amaxes(group))
        batches.cast(known[1])
    _quantized.update(made)


def gather_quantized(model: ModelT, *, recomputes: bool = False) -> ModelT:
    """Have ``fully_shard`` gather the weights of converted layers as quantized bytes, and return the model.

    The weights stay in high precision; each rank quantizes its shard when it is gathered, by the recipe that is bound
    to the layer, with the scales of the whole weight. Call it between :func:`ottava.convert` and ``fully_shard``, and
    make the optimizer afterwards: the weights become :class:`HighPrecisionWeight` parameters. Weights that
    are quantized already stay as they are, and so do those that a module of another kind shares (an embedding, say).

    Args:
        model: converted, not yet sharded.
        recomputes: the forward pass is recomputed in the backward pass, by activation checkpointing. Each gather then
            brings what serves rows and columns, where these have data of their own (blocks that are no squares).

    Raises:
        DTypeError: ``model`` is no module, or ``recomputes`` no bool.
        UsageError: no layer has a recipe bound, or the model is sharded already. Nothing is changed then.
    """
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
    if not isinstance(recomputes, bool):
        raise DTypeError(f"recomputes is {recomputes!r}", expected="True or False")
    owners: dict[Any, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, name))
    chosen = {weight: places for weight, places in owners.items() if all(map(_is_gathered, places))}
    if not chosen:
        what = "no layer of the model has a recipe bound"
        raise UsageError(what, expected="layers of ottava.convert(model, recipe)", remedy="convert the model first")
    if any(map(torch_private.is_distributed, chosen)):
        raise UsageError("the model is sharded already", "a model before fully_shard", "call gather_quantized first")
    for weight, places in chosen.items():
        if not isinstance(weight, (QuantizedTensorStorage, HighPrecisionWeight)):
            weight = torch.nn.Parameter(HighPrecisionWeight(weight.detach()), requires_grad=weight.requires_grad)
        for module, name in places:
            module.recomputes = recomputes  # type: ignore[assignment]
            module._parameters[name] = weight
    return model


def _is_gathered(place: tuple[torch.nn.Module, str]) -> bool:
    """Whether a parameter is the weight of a layer that quantizes it."""
    module, name = place
    bound = hasattr(module, "_binding") and getattr(module, "recipe", None) is not None
    return name == "weight" and bound and not getattr(module, "weight_is_transposed", False)
