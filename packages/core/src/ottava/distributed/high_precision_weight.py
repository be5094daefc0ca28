"""``HighPrecisionWeight``: a weight in high precision that FSDP2 gathers as quantized bytes.

The optimizer works on high-precision shards. At each gather a rank quantizes its shard, with scales
that all ranks share (:mod:`ottava.distributed.quantized_on_gather`), and sends the bytes as if the
weight were quantized (:mod:`ottava.distributed.hooks`)::

    high-precision shard ── quantize_together ──> quantized shard ── pre_all_gather ──> bytes

Where a recipe cannot quantize shards, or its backward pass reads values, the values themselves are
gathered, and the layer quantizes the whole weight.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from ottava import torch_private
from ottava.distributed import fsdp2
from ottava.distributed.agreement import compare_weights
from ottava.distributed.hooks import (
    GatherMetadata,
    check_shard,
    pad_rows,
    post_all_gather,
    pre_all_gather,
)
from ottava.distributed.layers import gathers_values, is_converted, quantizer_for_gather
from ottava.distributed.quantized_on_gather import (
    ShardedWeight,
    can_quantize_shards,
    quantize_together,
    take_quantized,
)
from ottava.errors import DTypeError, ShapeError, UsageError
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage, StorageSpec
from ottava.torch_private import disabled_torch_function, make_wrapper_subclass, tree_map

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
#: A module, and the name of one of its parameters.
Place = tuple[torch.nn.Module, str]
_aten = torch.ops.aten
_ONE_RECIPE = "bind the recipe before fully_shard, and keep it then"

# The operators whose results are weights of this class: views, copies, and those that sharding and
# materializing make new weights with.
_KEEPS_CLASS: set[object] = {
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

    The weight behaves as the plain tensor that it wraps: optimizers, clipping and initialization
    work on high-precision values, and pickles and state dicts have plain tensors. A gather gives a
    quantized tensor, by the recipe that is bound to the layer.
    :func:`ottava.distributed.gather_quantized` makes such weights.
    """

    _plain: torch.Tensor
    #: The class and the dtypes of the first gather, for which FSDP keeps memory.
    _gathered: tuple[type, tuple[torch.dtype, ...]] | None = None

    @staticmethod
    def __new__(cls, values: torch.Tensor, requires_grad: bool = False) -> "HighPrecisionWeight":
        weight: HighPrecisionWeight = make_wrapper_subclass(
            cls,
            values.shape,
            dtype=values.dtype,
            device=values.device,
            layout=values.layout,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            requires_grad=requires_grad,
        )
        return weight

    def __init__(self, values: torch.Tensor, requires_grad: bool = False) -> None:
        self._plain = values

    def high_precision(self) -> torch.Tensor:
        """The values as a plain tensor that shares their memory."""
        return self._plain

    @property
    def data(self) -> torch.Tensor:
        """An alias without gradient; setting it takes over other values of the same shape."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor) or isinstance(value, QuantizedTensorStorage):
            raise DTypeError(f"new data is a {type(value).__name__}", expected="a plain tensor")
        plain = value.detach()
        if isinstance(value, HighPrecisionWeight):
            plain = value._plain
        if plain.shape != self.shape:
            raise ShapeError(
                f"new data has shape {tuple(plain.shape)}", expected=str(tuple(self.shape))
            )
        # Only torch's own setter changes the dtype and the device that torch has for this tensor.
        torch.Tensor.data.__set__(self, HighPrecisionWeight(plain))  # type: ignore[attr-defined]
        self._plain = plain

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_plain"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, size: torch.Size, stride: Sequence[int]
    ) -> "HighPrecisionWeight":
        return HighPrecisionWeight(inner["_plain"])

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        plain_args, plain_kwargs = tree_map(_plain_value, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func in _KEEPS_CLASS:
            return tree_map(_weight_of_class, result)
        if args and isinstance(args[0], cls) and result is args[0]._plain:
            # An in-place op returns its argument, so the wrapper is returned for it.
            return args[0]
        return result

    def __reduce_ex__(self, protocol: object) -> str | tuple[object, ...]:
        plain = self._plain.detach().requires_grad_(self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"HighPrecisionWeight({self._plain!r})"

    def fsdp_pre_all_gather(
        self,
        mesh: "DeviceMesh",
        orig_size: torch.Size,
        stride: Sequence[int],
        module: torch.nn.Module,
        mp_policy: "MixedPrecisionPolicy",
    ) -> tuple[tuple[torch.Tensor, ...], GatherMetadata | torch.Size]:
        """The tensors that this rank sends, padded to the length of the longest shard.

        Returns:
            The tensors; and the metadata for the next hook, which is the size of the whole weight
            where the values themselves are sent.

        Raises:
            UsageError: an earlier gather sent other tensors, for another recipe.
        """
        tensors, metadata = self._gather_inputs(mesh, orig_size, module, mp_policy)
        kind = metadata.spec.cls if isinstance(metadata, GatherMetadata) else torch.Tensor
        gathered = kind, tuple(tensor.dtype for tensor in tensors)
        if self._gathered is None:
            self._gathered = gathered
        elif self._gathered[1] != gathered[1]:
            raise _error_of_kinds(self._gathered[0], kind)
        return tensors, metadata

    def _gather_inputs(
        self,
        mesh: "DeviceMesh",
        orig_size: torch.Size,
        module: torch.nn.Module,
        mp_policy: "MixedPrecisionPolicy",
    ) -> tuple[tuple[torch.Tensor, ...], GatherMetadata | torch.Size]:
        """The tensors that this rank sends, and the metadata."""
        group = mesh.get_group()
        values = self._plain
        compare_weights(self, orig_size, group, module)
        check_shard(values.shape, orig_size, module)
        world = dist.get_world_size(group)
        shard = take_quantized(module)
        if shard is None and not _is_gathered_quantized(module, orig_size, world):
            dtype = mp_policy.param_dtype or self.dtype
            rows = math.ceil(orig_size[0] / world)
            return (pad_rows(values.to(dtype), rows).contiguous(),), orig_size
        if shard is None:
            weights = [ShardedWeight(values, orig_size, module), *_other_weights(module)]
            shard = quantize_together(weights, mp_policy.param_dtype, group)
        return pre_all_gather(shard, mesh, orig_size, module)

    def fsdp_post_all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        metadata: GatherMetadata | torch.Size,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole weight around the gathered tensors, of nominal dtype ``param_dtype``.

        With ``out``, the weight of an earlier gather, that one is brought up to date and the result
        is None.
        """
        if isinstance(metadata, GatherMetadata):
            whole = None
            if out is not None:
                whole = _checked_whole(out, metadata)
            return post_all_gather(metadata, outputs, param_dtype, whole)
        if out is None:
            return outputs[0][: metadata[0]].view(metadata), ()
        if isinstance(out, QuantizedTensor):
            raise _error_of_kinds(type(out), torch.Tensor)
        # FSDP fills the same memory at every gather, and ``out`` is a view of it.
        return None


def _is_gathered_quantized(module: torch.nn.Module, size: torch.Size, world: int) -> bool:
    """Whether ranks quantize their shards of a layer's weight, and no pass reads its values."""
    quantizer = quantizer_for_gather(module)
    if gathers_values(module):
        return False
    return can_quantize_shards(quantizer, size, world)


def _plain_value(value: object) -> object:
    if isinstance(value, HighPrecisionWeight):
        return value._plain
    return value


def _weight_of_class(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return HighPrecisionWeight(value)
    return value


def _other_weights(module: torch.nn.Module) -> list[ShardedWeight]:
    """The other weights in high precision that FSDP gathers together with a layer's."""
    return [
        ShardedWeight(shard.high_precision(), size, owner)
        for shard, size, owner in fsdp2.gathered_together(module)
        if owner is not module and isinstance(shard, HighPrecisionWeight)
    ]


def _checked_whole(weight: torch.Tensor, metadata: GatherMetadata) -> QuantizedTensor:
    """``weight`` itself, a gathered weight, if it has the class and the format of a new gather.

    Raises:
        UsageError: it has another class or format.
    """
    spec = metadata.spec
    if not isinstance(weight, QuantizedTensor) or not isinstance(weight, spec.cls):
        raise _error_of_kinds(type(weight), spec.cls)
    _check_format(weight, spec)
    return weight


def _error_of_kinds(before: type, kind: type) -> UsageError:
    """The error that a gathered weight is to become one of another kind."""
    return UsageError(
        f"a weight that was gathered as a {before.__name__} is gathered as a {kind.__name__}",
        "one kind of weight",
        _ONE_RECIPE,
    )


def _check_format(weight: QuantizedTensor, spec: StorageSpec) -> None:
    """Refuse to bring a weight up to date with bytes of another format."""
    fields = weight.own_fields
    before = {field.argument: getattr(weight, field.attribute) for field in fields}
    # The fields of the class itself are the last ones of the specification.
    first = len(spec.static) - len(fields)
    now = dict(zip(before, spec.static[first:], strict=True))
    if before != now:
        raise UsageError(
            f"a weight that was gathered as a {type(weight).__name__} of {before} is one of {now}",
            "one recipe of a weight",
            _ONE_RECIPE,
        )


def gather_quantized(model: ModelT, *, recomputes: bool = False) -> ModelT:
    """Have ``fully_shard`` gather the weights of converted layers as quantized bytes.

    The weights stay in high precision; each rank quantizes its shard when it is gathered, by the
    recipe that is bound to the layer, with the scales of the whole weight. Call it between
    :func:`ottava.convert` and ``fully_shard``, and make the optimizer afterwards: the weights
    become :class:`HighPrecisionWeight` parameters. Weights that are quantized already stay as they
    are, and so do those that a module of another kind shares (an embedding, say).

    Args:
        model: a converted model that is not yet sharded.
        recomputes: whether the forward pass is recomputed in the backward pass, by activation
            checkpointing. Each gather then brings rowwise and columnwise data, where they differ
            (blocks that are no squares).

    Returns:
        The model.

    Raises:
        DTypeError: ``model`` is no module, or ``recomputes`` no bool.
        UsageError: no layer has a recipe bound, or the model is sharded already. Nothing is changed
            then.
    """
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
    if not isinstance(recomputes, bool):
        raise DTypeError(f"recomputes is {recomputes!r}", expected="True or False")
    weights = {
        parameter: places
        for parameter, places in _places_of_parameters(model).items()
        if all(_is_weight_of_layer(place) for place in places)
    }
    if not weights:
        raise UsageError(
            "no layer of the model has a recipe bound", "layers of ottava.convert(model, recipe)"
        )
    if any(map(torch_private.is_distributed, weights)):
        raise UsageError(
            "the model is sharded already",
            "a model before fully_shard",
            "call gather_quantized first",
        )
    for weight, places in weights.items():
        parameter = weight
        if not isinstance(weight, (QuantizedTensorStorage, HighPrecisionWeight)):
            parameter = torch.nn.Parameter(
                HighPrecisionWeight(weight.detach()), requires_grad=weight.requires_grad
            )
        for module, name in places:
            module.recomputes = recomputes  # type: ignore[assignment]
            module._parameters[name] = parameter
    return model


def _places_of_parameters(model: torch.nn.Module) -> dict[torch.nn.Parameter, list[Place]]:
    """Each parameter of a model, once, with all of its places."""
    places: dict[torch.nn.Parameter, list[Place]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))
    return places


def _is_weight_of_layer(place: Place) -> bool:
    """Whether a parameter is the weight of a layer that quantizes it."""
    module, name = place
    if name != "weight" or not is_converted(module):
        return False
    return getattr(module, "recipe", None) is not None and not module.weight_is_transposed
