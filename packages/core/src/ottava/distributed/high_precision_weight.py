"""``HighPrecisionWeight``: a weight whose shards FSDP2 gathers as quantized bytes.

The weight stays in high precision. Each rank quantizes its shard as it is gathered, with scales
that all ranks share.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ottava import torch_private
from ottava.distributed import fsdp2
from ottava.distributed.agreement import compare_weights
from ottava.distributed.hooks import (
    GatherPlan,
    check_shard,
    padded,
    post_all_gather,
    pre_all_gather,
)
from ottava.distributed.quantized_shards import (
    ShardedWeight,
    bound_quantizer,
    gathers_quantized,
    quantize_together,
    take_quantized,
)
from ottava.errors import DTypeError, ShapeError, UsageError
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage, StorageSpec
from ottava.torch_private import disabled_torch_function, make_wrapper_subclass, tree_map

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
_aten = torch.ops.aten
_ONE_RECIPE = "bind the recipe before fully_shard, and keep it then"

# What gives a weight of the same kind: views, copies, and what sharding and materializing make new
# ones with.
_KEEPS_CLASS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.view.default,
    _aten.detach.default,
    _aten.narrow.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.chunk.default,
    _aten.clone.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    *torch_private.aten_overloads("_pin_memory", "_to_copy"),
}


class HighPrecisionWeight(torch.Tensor):
    """A weight in high precision whose shards ``fully_shard`` quantizes when it gathers them.

    It behaves as the tensor that it holds: optimizers, clipping and initialization work on
    high-precision values, and pickles and state dicts hold plain tensors. What comes of a gather is
    a quantized tensor, by the recipe that is bound to the layer.
    :func:`ottava.distributed.gather_quantized` makes them.
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
            raise ShapeError(
                f"new data has shape {tuple(plain.shape)}", expected=str(tuple(self.shape))
            )
        # Only torch's own setter changes the dtype and device that torch keeps of this tensor.
        torch.Tensor.data.__set__(self, HighPrecisionWeight(plain))  # type: ignore[attr-defined]
        self._plain = plain

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_plain"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], context: Any, size: Any, stride: Any
    ) -> "HighPrecisionWeight":
        return HighPrecisionWeight(inner["_plain"])

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = tree_map(
            lambda v: v._plain if isinstance(v, HighPrecisionWeight) else v, (args, kwargs or {})
        )
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
        """What this rank sends, padded to the length of the longest shard, and what the next hook
        needs: a plan, or the size of the whole where the values themselves are sent."""
        dtype = mp_policy.param_dtype or self.dtype
        group, values = mesh.get_group(), self._plain
        world = dist.get_world_size(group)
        compare_weights(self, orig_size, group, module)
        check_shard(values.shape, orig_size, module)
        shard = take_quantized(module, values, dtype)
        if shard is None:
            if not gathers_quantized(bound_quantizer(module), orig_size, world):
                rows = math.ceil(orig_size[0] / world)
                return (padded(values.to(dtype), rows).contiguous(),), orig_size
            weights = [ShardedWeight(values, orig_size, module), *_gathered_with(module)]
            shard = quantize_together(weights, mp_policy.param_dtype, group)
        return pre_all_gather(shard, mesh, orig_size, module)

    def fsdp_post_all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole weight, quantized, of dtype ``param_dtype`` around the bytes, or ``out``
        brought up to date."""
        plan = metadata if isinstance(metadata, GatherPlan) else None
        if out is not None:
            _check_kind(out, plan)
        if plan is not None:
            return post_all_gather(plan, outputs, param_dtype, out)
        # FSDP fills the same memory at every gather, so that one view of it stays the weight.
        return None if out is not None else (outputs[0][: metadata[0]].view(metadata), ())


def _gathered_with(module: Any) -> list[ShardedWeight]:
    """The other weights in high precision that FSDP gathers together with a layer's."""
    return [
        ShardedWeight(shard.high_precision(), size, owner)
        for shard, size, owner in fsdp2.gathered_together(module)
        if owner is not module and isinstance(shard, HighPrecisionWeight)
    ]


def _check_kind(weight: Any, plan: GatherPlan | None) -> None:
    """Refuse to bring a gathered weight up to date with bytes of another kind.

    Args:
        plan: of the gather; None where values in high precision were gathered.
    """
    was_quantized = isinstance(weight, QuantizedTensor)
    if plan is None:
        kind: type = torch.Tensor
        same = not was_quantized
    else:
        kind = plan.spec.cls
        same = was_quantized and isinstance(weight, kind)
    if not same:
        raise UsageError(
            f"a weight that was gathered as a {type(weight).__name__} is gathered as a "
            f"{kind.__name__}",
            "one kind of weight",
            _ONE_RECIPE,
        )
    if plan is not None:
        _check_format(weight, plan.spec)


def _check_format(weight: Any, spec: StorageSpec) -> None:
    """Refuse to bring a weight up to date with bytes of another format."""
    fields = weight.own_fields
    before = {field.argument: getattr(weight, field.attribute) for field in fields}
    now = dict(zip(before, spec.static[len(spec.static) - len(fields) :], strict=True))
    if before != now:
        raise UsageError(
            f"a weight that was gathered as a {type(weight).__name__} of {before} is one of {now}",
            "one recipe of a weight",
            _ONE_RECIPE,
        )


def gather_quantized(model: ModelT, *, recomputes: bool = False) -> ModelT:
    """Have ``fully_shard`` gather the weights of converted layers as quantized bytes, and return
    the model.

    The weights stay in high precision; each rank quantizes its shard when it is gathered, by the
    recipe that is bound to the layer, with the scales of the whole weight. Call it between
    :func:`ottava.convert` and ``fully_shard``, and make the optimizer afterwards: the weights
    become :class:`HighPrecisionWeight` parameters. Weights that are quantized already stay as they
    are, and so do those that a module of another kind shares (an embedding, say).

    Args:
        model: converted, not yet sharded.
        recomputes: the forward pass is recomputed in the backward pass, by activation
            checkpointing. Each gather then brings what serves rows and columns, where these have
            data of their own (blocks that are no squares).

    Raises:
        DTypeError: ``model`` is no module, or ``recomputes`` no bool.
        UsageError: no layer has a recipe bound, or the model is sharded already. Nothing is changed
            then.
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
        raise UsageError(
            "no layer of the model has a recipe bound", "layers of ottava.convert(model, recipe)"
        )
    if any(map(torch_private.is_distributed, chosen)):
        raise UsageError(
            "the model is sharded already",
            "a model before fully_shard",
            "call gather_quantized first",
        )
    for weight, places in chosen.items():
        if not isinstance(weight, (QuantizedTensorStorage, HighPrecisionWeight)):
            weight = torch.nn.Parameter(
                HighPrecisionWeight(weight.detach()), requires_grad=weight.requires_grad
            )
        for module, name in places:
            module.recomputes = recomputes  # type: ignore[assignment]
            module._parameters[name] = weight
    return model


def _is_gathered(place: tuple[torch.nn.Module, str]) -> bool:
    """Whether a parameter is the weight of a layer that quantizes it."""
    module, name = place
    bound = hasattr(module, "_binding") and getattr(module, "recipe", None) is not None
    return name == "weight" and bound and not getattr(module, "weight_is_transposed", False)
