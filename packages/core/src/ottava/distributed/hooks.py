"""FSDP2's hooks: of quantized tensors, derived from the storage declaration, and of weights in high
precision.

A gather moves the inner tensors that are declared with ``gather=True``, as bytes, and builds the
whole tensor around them; what derives from them is made again. Inner tensors that serve every usage
and are not gathered (the scale of a per-tensor recipe) are the same on every shard: checked at the
first gather, and kept so by :meth:`ottava.Quantizer.for_shards` from then on.

Weights in high precision are quantized by each rank as they are gathered, with scales that all
share. A shard that can be quantized by itself (rows of blocks) is. Where the scales depend on all
shards, the amaxes of all parameters of a group are reduced at once, when the first of them is
gathered. Where neither is possible (shards that cut blocks, a quantizer that has to see all values)
the values themselves are gathered, and quantized by the layer.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ottava import torch_private
from ottava.collectives import all_reduce_max
from ottava.distributed import fsdp2
from ottava.distributed.agreement import compare_weights
from ottava.distributed.rules import ShardBatches, rule_of
from ottava.distributed.shards import ShardJob, check_blocks, shard_output
from ottava.errors import DTypeError, ShapeError, UsageError, listed
from ottava.kernels.checks import check_dtype, check_high_precision
from ottava.tensors import (
    InnerTensor,
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    StorageSpec,
)
from ottava.torch_private import (
    KNOWS_BACKWARD,
    disabled_torch_function,
    graph_task_id,
    make_wrapper_subclass,
    tree_map,
)

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
_aten = torch.ops.aten

# What gives a weight of the same kind: views, copies, and what sharding and materializing make new
# ones with.
_KEEPS_CLASS = {
    *(
        _aten.alias.default,
        _aten.as_strided.default,
        _aten.view.default,
        _aten.detach.default,
        _aten.narrow.default,
    ),
    *(_aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default),
    *(
        _aten.clone.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_zeros.default,
    ),
    *torch_private.aten_overloads("_pin_memory", "_to_copy"),
}

# The version and the dtype of values, and the shard that was quantized of them together with those
# of its group.
_Made = tuple[int, torch.dtype, QuantizedTensor]
# By the module that owns the parameter.
_quantized: weakref.WeakKeyDictionary[torch.nn.Module, _Made] = weakref.WeakKeyDictionary()
# The first module of a group -> the versions of all values and the reduced amaxes of the weights,
# of the last gather.
_amaxes: weakref.WeakKeyDictionary[torch.nn.Module, tuple[list[int], list[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)


class GatherPlan(NamedTuple):
    """What the hook after a gather needs to know: which inner tensors come, with the shape of a
    rank's shard and whether that is padded, and everything that does not."""

    inner: tuple[tuple[InnerTensor, torch.Size, bool], ...]
    shared: dict[str, torch.Tensor | None]
    spec: StorageSpec
    size: torch.Size


def check_shard(shape: Sequence[int], size: Sequence[int], module: Any) -> None:
    """Refuse what gather hooks do not allow: shards of columns, and fewer of them after the forward
    pass."""
    if tuple(shape[1:]) != tuple(size[1:]):
        what = f"a weight of shape {tuple(size)} has shards of {tuple(shape)}"
        raise ShapeError(
            what, "shards of rows, the default of fully_shard", "leave shard_placement_fn out"
        )
    if fsdp2.resharded_to_fewer(module):
        raise UsageError(
            "reshard_after_forward is a number, which torch refuses for gather hooks",
            "True or False",
        )


def padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    """``values`` with zeros up to ``rows`` rows."""
    missing = rows - values.shape[0]
    return (
        torch.nn.functional.pad(values, [0, 0] * (values.dim() - 1) + [0, missing])
        if missing
        else values
    )


def pre_all_gather(
    tensor: QuantizedTensor, mesh: Any, size: torch.Size, module: Any
) -> tuple[tuple[torch.Tensor, ...], GatherPlan]:
    """What this rank sends, padded to the length of the longest shard, and the plan."""
    group = mesh.get_group()
    world = dist.get_world_size(group)
    if world > 1:
        # Before the ranks compare their weights: one whose shard no blocks make has no hook, and
        # takes no part.
        _check_rows(tensor, size, world)
    compare_weights(tensor, size, group, module)
    check_shard(tensor.shape, size, module)
    binding = getattr(module, "_binding", None)
    if binding is not None:
        binding.own_shard(module, tensor)
    _agree(tensor, size, group, module)
    fsdp2.drop_flat_copies(module)
    gathered = _to_gather(tensor, module)
    # With one rank nothing is gathered: FSDP copies the first input, and no other.
    sent = dict(list(gathered.items())[: None if world > 1 else 1])
    inputs, coming = [], []
    for inner, count in sent.items():
        data = inner.by_rows(getattr(tensor, inner.attribute))
        data = data if inner.block_rows else padded(data, math.ceil(size[0] / world))
        missing = count - data.numel() if world > 1 else 0
        coming.append((inner, data.shape, missing > 0))
        if missing > 0:
            data = torch.nn.functional.pad(data.reshape(1, -1), [0, missing])
        inputs.append(
            data.contiguous().view(torch.uint8) if data.element_size() == 1 else data.contiguous()
        )
    # Scales without the data that they are of say nothing.
    usages = {"both", *(inner.usage for inner in gathered)}
    kept = [i for i in tensor.inner_tensors if i in gathered or (i.shared and i.usage in usages)]
    others = [inner for inner in tensor.inner_tensors if inner not in sent]
    shared = {
        inner.argument: getattr(tensor, inner.attribute) if inner in kept else None
        for inner in others
    }
    return tuple(inputs), GatherPlan(tuple(coming), shared, tensor.flatten_storage()[1], size)


def post_all_gather(
    plan: GatherPlan,
    outputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    out: QuantizedTensor | None,
) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]] | None:
    """The whole tensor around the gathered bytes; with ``out``, its bytes were refilled and the
    rest follows."""
    whole: dict[str, torch.Tensor] = {}
    for (inner, shape, padded), output in zip(plan.inner, outputs, strict=True):
        if padded:
            # Each rank sent its shard as one row, with the padding at its end.
            output = output[:, : shape.numel()].reshape(-1, *shape[1:])
        # Only the last rank that has rows is padded, so that all padding lies at the end.
        whole[inner.argument] = inner.as_held(
            output[: plan.size[0]] if inner.block_rows is None else output
        )
    if out is not None:
        for inner in out.inner_tensors:
            if inner.shared or inner.gather:
                setattr(out, inner.attribute, (plan.shared | whole)[inner.argument])
        out.mark_written()
        return None
    fields = {
        f.argument: v
        for f, v in zip(plan.spec.cls.all_static_fields(), plan.spec.static, strict=True)
    }
    about = {"shape": tuple(plan.size), "dtype": dtype, "quantizer": plan.spec.quantizer}
    build: Any = plan.spec.cls
    built: QuantizedTensor = build(**plan.shared | whole | fields | about)
    # FSDP frees the gathered bytes after the pass, so that a transpose is made only where it is
    # read.
    built.rebuilds_derived = False
    return built, ()


def _to_gather(tensor: QuantizedTensor, module: Any) -> dict[InnerTensor, int]:
    """What is sent, and how many elements of each: rows in a forward pass, columns in a backward
    pass, or both."""
    held = {i: getattr(tensor, i.attribute) for i in tensor.inner_tensors if i.gather}
    both = {inner: int(data.numel()) for inner, data in held.items() if data is not None}
    if not both:
        what = f"{type(tensor).__name__} holds no inner tensor that can be gathered"
        raise UsageError(
            what, "one declared with gather=True", "keep the rowwise usage of sharded weights"
        )
    rowwise, columnwise = (
        {i: n for i, n in both.items() if i.usage != other} for other in ("columnwise", "rowwise")
    )
    if both in (rowwise, columnwise):
        return both
    if tensor.rowwise_serves_columnwise:
        return rowwise
    # FSDP allocates once, so that what is gathered in turns must have the same dtypes and lengths.
    alike = [held[inner].dtype for inner in rowwise] == [held[inner].dtype for inner in columnwise]
    once = getattr(module, "recomputes", False) or not fsdp2.resharded_after_forward(module)
    if not alike or once or not KNOWS_BACKWARD:
        return both
    lengths = map(max, rowwise.values(), columnwise.values())
    return dict(zip(rowwise if graph_task_id() == -1 else columnwise, lengths, strict=True))


def _check_rows(tensor: QuantizedTensor, size: torch.Size, world: int) -> None:
    """Refuse shards whose inner tensors do not make those of the whole, whichever pass is the
    first."""
    values = {
        inner: getattr(tensor, inner.attribute) for inner in tensor.inner_tensors if inner.gather
    }
    coming = [
        i for i, value in values.items() if value is not None or tensor.rowwise_serves_columnwise
    ]
    for inner in coming if size[0] % world else ():
        value = values[inner]
        # FSDP asks for the padded size of the parameter itself.
        if inner.block_rows or (
            value is not None and inner.by_rows(value).shape[1:] != tensor.shape[1:]
        ):
            what = (
                f"{size[0]} rows are sharded over {world} ranks, and {inner.argument!r} has "
                f"rows of another size"
            )
            remedy = "keep the weight in high precision, or choose its rows so"
            raise ShapeError(what, f"a number of rows that {world} divides", remedy)
    # Those of the first rank, so that all ranks say the same.
    check_blocks(
        coming, size, range(math.ceil(size[0] / world)), f"a shard of a {type(tensor).__name__}"
    )


# Module -> the name of the group whose ranks have compared the scales of a weight, and the size of
# the weight.
_agreed: weakref.WeakKeyDictionary[torch.nn.Module, set[tuple[str, torch.Size]]] = (
    weakref.WeakKeyDictionary()
)


def _agree(tensor: QuantizedTensor, size: torch.Size, group: Any, module: Any) -> None:
    """Check once that all shards hold the same scales, and have the quantizer keep it so, if it
    knows how."""
    # The name is kept, not the group, because a tensor must not keep a destroyed group alive.
    name = group.group_name
    if tensor._shard_group == name:
        return
    known = _agreed.setdefault(module, set()) if isinstance(module, torch.nn.Module) else set()
    shared, quantizer = tensor.shared_inner(), tensor._quantizer
    # FSDP pads the last shard again after a load, so that one rank may have a new tensor where the
    # others have not: a second comparison would wait for them forever.
    if shared and (name, size) not in known:
        values = torch.cat(
            [getattr(tensor, inner.attribute).float().reshape(-1) for inner in shared]
        )
        largest, smallest = all_reduce_max(torch.stack([values, -values]), group)
        if not torch.equal(largest, -smallest):
            what = (
                f"the shards of a {type(tensor).__name__} have different "
                f"{listed([i.argument for i in shared])}"
            )
            raise UsageError(
                what, "one value for all shards of a weight", "set the values before it is sharded"
            )
    if quantizer is not None:
        silent = type(quantizer).for_shards is Quantizer.for_shards
        if silent and shared and rule_of(quantizer).independent_rows(quantizer) is None:
            what = f"the shards of a {type(tensor).__name__} share {shared[0].argument!r}, and a "
            what += f"{type(quantizer).__name__} does not say how they are to keep one value"
            raise UsageError(
                what,
                "a quantizer that defines for_shards(group)",
                "define it, or keep high precision",
            )
        tensor.update_quantizer(quantizer.for_shards(name))
    known.add((name, size))
    tensor._shard_group = name
    # FSDP pads an uneven shard, so that it is a view; zeros are the same at any scale, so that it
    # may have its own.
    tensor._whole = None


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
        known = _quantized.pop(module, None)
        if known is None or known[:2] != (torch_private.version_of(values), dtype):
            if not _gathers_quantized(_quantizer_of(module), orig_size, world):
                return (
                    padded(values.to(dtype), math.ceil(orig_size[0] / world)).contiguous(),
                ), orig_size
            others = [
                parameter
                for parameter in fsdp2.gathered_together(module)
                if parameter[2] is not module
            ]
            _quantize_together([(self, orig_size, module), *others], mp_policy.param_dtype, group)
            known = _quantized.pop(module)
        return pre_all_gather(known[2], mesh, orig_size, module)

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
        kind = torch.Tensor if plan is None else plan.spec.cls
        if out is not None and (
            isinstance(out, QuantizedTensor) == (plan is None) or not isinstance(out, kind)
        ):
            what = (
                f"a weight that was gathered as a {type(out).__name__} is gathered as a "
                f"{kind.__name__}"
            )
            raise UsageError(
                what, "one kind of weight", "bind the recipe before fully_shard, and keep it then"
            )
        if out is not None and plan is not None:
            _check_format(out, plan.spec)
        if plan is not None:
            return post_all_gather(plan, outputs, param_dtype, out)
        # FSDP fills the same memory at every gather, so that one view of it stays the weight.
        return None if out is not None else (outputs[0][: metadata[0]].view(metadata), ())


def _check_format(weight: Any, spec: StorageSpec) -> None:
    """Refuse to bring a weight up to date with bytes of another format."""
    fields = weight.own_fields
    before = {field.argument: getattr(weight, field.attribute) for field in fields}
    now = dict(zip(before, spec.static[len(spec.static) - len(fields) :], strict=True))
    if before != now:
        what = (
            f"a weight that was gathered as a {type(weight).__name__} of {before} is one of {now}"
        )
        raise UsageError(
            what, "one recipe of a weight", "bind the recipe before fully_shard, and keep it then"
        )


def _quantizer_of(module: Any) -> Quantizer:
    binding = getattr(module, "_binding", None)
    quantizer: Quantizer | None = None if binding is None else binding.gather_quantizer(module)
    if quantizer is None:
        what = f"no recipe is bound to the {type(module).__name__} whose weight is gathered"
        raise UsageError(
            what,
            "a layer of ottava.convert(model, recipe)",
            "convert it before gather_quantized(model)",
        )
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
    return (
        even
        and rows % rule.rows_of_blocks(quantizer) == 0
        and (independent is None or len(size) > 1)
    )


def _quantize_together(
    parameters: Sequence[Any], param_dtype: torch.dtype | None, group: Any
) -> None:
    """Quantize the shards of parameters that are gathered together, with one all-reduce for all
    that need any."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    jobs: list[ShardJob] = []
    made: dict[torch.nn.Module, _Made] = {}
    local: Any
    for shard, size, module in parameters:
        if not isinstance(shard, HighPrecisionWeight):
            continue
        values = shard.high_precision()
        dtype, quantizer = param_dtype or values.dtype, _quantizer_of(module).with_usage(True, True)
        if not _gathers_quantized(quantizer, size, world):
            continue
        check_dtype(dtype, "a weight would be gathered in")
        if rule_of(quantizer).independent_rows(quantizer) is not None:
            local = quantizer.quantize_impl(values.to(dtype), dtype)
        else:
            check_high_precision(values, "a sharded weight")
            start = min(rank * math.ceil(size[0] / world), size[0]) * math.prod(size[1:])
            local = quantizer.make_empty(values.shape, dtype=dtype, device=values.device)
            output = shard_output(local, size, start, values.numel(), "a sharded weight")
            jobs.append(ShardJob(quantizer, values.reshape(-1), tuple(size), dtype, start, output))
        if not isinstance(local, QuantizedTensor):
            what = f"the quantizer of a {type(module).__name__} gives a {type(local).__name__}"
            raise UsageError(what, expected="a QuantizedTensor, which can be a parameter")
        local._shard_group = group.group_name
        made[module] = (torch_private.version_of(values), dtype, local)
    if jobs:
        batches, versions, first = (
            ShardBatches.of(jobs),
            [version for version, *_ in made.values()],
            next(iter(made)),
        )
        known = _amaxes.get(first)
        # A backward pass has the amaxes of the forward pass, because the values are the same.
        if graph_task_id() == -1 or known is None or known[0] != versions:
            known = _amaxes[first] = (versions, batches.amaxes(group))
        batches.cast(known[1])
    _quantized.update(made)


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
