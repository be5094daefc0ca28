"""``HighPrecisionWeight``: a weight in high precision that FSDP2 gathers as bytes; and models that have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from ottava.distributed.gathering import gather_inputs
from ottava.distributed.hooks import GatherPlan, post_all_gather
from ottava.errors import DTypeError, ShapeError, UsageError
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage
from ottava.torch_private import (
    aten_overloads,
    disabled_torch_function,
    is_distributed,
    make_wrapper_subclass,
    tree_map,
)

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
_aten = torch.ops.aten

# What gives a weight of the same kind: views, copies, and what sharding and materializing make new ones with.
_KEEPS_CLASS = {
    *(_aten.alias.default, _aten.as_strided.default, _aten.view.default, _aten.detach.default, _aten.narrow.default),
    *(_aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default),
    *(_aten.clone.default, _aten.empty_like.default, _aten.new_empty.default, _aten.new_zeros.default),
    *aten_overloads("_pin_memory", "_to_copy"),
}


class HighPrecisionWeight(torch.Tensor):
    """A weight in high precision whose shards ``fully_shard`` quantizes when it gathers them.

    It behaves as the tensor that it holds: optimizers, clipping and initialization work on high-precision values, and
    pickles and state dicts hold plain tensors. What comes of a gather is a quantized tensor, by the recipe that is
    bound to the layer. :func:`ottava.distributed.gather_quantized` makes them.
    """

    _plain: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, requires_grad: bool = False) -> HighPrecisionWeight:
        made: HighPrecisionWeight = make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
            layout=values.layout,
            requires_grad=requires_grad,
        )
        return made

    def __init__(self, values: torch.Tensor, requires_grad: bool = False) -> None:
        self._plain = values

    def high_precision(self) -> torch.Tensor:
        """The values as a plain tensor that shares their memory."""
        return self._plain

    @property
    def data(self) -> Any:
        """An alias without gradient; setting it takes over other values of the same shape, as of ``torch.Tensor``."""
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
    def __tensor_unflatten__(inner: dict[str, Any], context: Any, size: Any, stride: Any) -> HighPrecisionWeight:
        return HighPrecisionWeight(inner["_plain"])

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = func(*_unwrapped(args), **_unwrapped(kwargs or {}))
        if func in _KEEPS_CLASS:
            return tree_map(lambda r: cls(r) if isinstance(r, torch.Tensor) else r, result)
        if args and isinstance(args[0], cls) and result is args[0]._plain:
            # An in-place op returns its argument, so the wrapper is returned for it.
            return args[0]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = self._plain.detach().requires_grad_(self.requires_grad)
        return values.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HighPrecisionWeight({self._plain!r})"

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: torch.Size, stride: Sequence[int], module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """This rank's shard, quantized with the scales of the whole weight, as bytes, and what the next hook needs.

        The scales of all parameters that are gathered together come of one all-reduce.

        Raises:
            UsageError: no recipe is bound to the layer.
        """
        return gather_inputs(self, mesh, orig_size, module, mp_policy)

    def fsdp_post_all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole weight, quantized, of dtype ``param_dtype`` around the bytes, or ``out`` brought up to date.

        Raises:
            UsageError: it was of another kind when it was gathered before.
        """
        plan: GatherPlan | None = metadata if isinstance(metadata, GatherPlan) else None
        kind = torch.Tensor if plan is None else plan.spec.cls
        if out is not None and (isinstance(out, QuantizedTensor) is (plan is None) or not isinstance(out, kind)):
            raise UsageError(
                f"a weight that was gathered as a {type(out).__name__} is gathered as a {kind.__name__}",
                expected="one kind of weight for the life of a sharded model",
                remedy="bind the recipe before fully_shard, and do not change it afterwards",
            )
        if plan is not None:
            return post_all_gather(plan, outputs, param_dtype, out)  # type: ignore[arg-type]
        # FSDP fills the same memory at every gather, so that one view of it stays the weight.
        return None if out is not None else (outputs[0][: metadata[0]].view(metadata), ())


def _unwrapped(values: Any) -> Any:
    return tree_map(lambda value: value._plain if isinstance(value, HighPrecisionWeight) else value, values)


def gather_quantized(model: ModelT, *, recomputes: bool = False) -> ModelT:
    """Have ``fully_shard`` gather the weights of converted layers as quantized bytes, and return the model.

    The weights stay in high precision; each rank quantizes its shard when it is gathered, by the recipe that is bound
    to the layer, with the scales of the whole weight. Call it between :func:`ottava.convert` and ``fully_shard``, and
    make the optimizer afterwards: the weights become :class:`HighPrecisionWeight` parameters. Weights that
    are quantized already stay as they are, and so do those that a module of another kind shares (an embedding, say).

    Args:
        model: converted, not yet sharded.
        recomputes: the forward pass is recomputed in the backward pass, by activation checkpointing. Each gather then
            brings what serves rows and columns, where these have data of their own (one-dimensional MX blocks).

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
    chosen = {key: places for key, places in owners.items() if all(_is_gathered(*place) for place in places)}
    if not chosen:
        raise UsageError(
            "no layer of the model has a recipe bound",
            expected="layers of ottava.convert(model, recipe)",
            remedy="convert the model first",
        )
    if any(is_distributed(weight) for weight in chosen):
        raise UsageError(
            "the model is sharded already", expected="a model before fully_shard", remedy="call gather_quantized first"
        )
    for weight, places in chosen.items():
        if not isinstance(weight, (QuantizedTensorStorage, HighPrecisionWeight)):
            weight = torch.nn.Parameter(HighPrecisionWeight(weight.detach()), requires_grad=weight.requires_grad)
        for module, name in places:
            module.recomputes = recomputes  # type: ignore[assignment]
            module._parameters[name] = weight
    return model


def _is_gathered(module: torch.nn.Module, name: str) -> bool:
    """Whether a parameter is the weight of a layer that quantizes it."""
    return name == "weight" and hasattr(module, "gather_quantizer") and getattr(module, "recipe", None) is not None
