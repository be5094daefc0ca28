"""Preparing models for FSDP2."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ottava.distributed.high_precision import HighPrecisionWeight
from ottava.errors import DTypeError, UsageError
from ottava.tensors import QuantizedTensorStorage
from ottava.torch_private import is_distributed

ModelT = TypeVar("ModelT", bound=torch.nn.Module)


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
    owners: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    parameters: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
                parameters[id(parameter)] = parameter
    chosen = [key for key, places in owners.items() if all(_is_gathered(module, name) for module, name in places)]
    if not chosen:
        raise UsageError(
            "no layer of the model has a recipe bound",
            expected="layers of ottava.convert(model, recipe)",
            remedy="convert the model first",
        )
    if any(is_distributed(parameters[key]) for key in chosen):
        raise UsageError(
            "the model is sharded already", expected="a model before fully_shard", remedy="call gather_quantized first"
        )
    for key in chosen:
        given: Any = parameters[key]
        for module, _ in owners[key]:
            module.recomputes = recomputes  # type: ignore[assignment]
        if isinstance(given, (QuantizedTensorStorage, HighPrecisionWeight)):
            continue
        made = torch.nn.Parameter(HighPrecisionWeight(given.detach()), requires_grad=given.requires_grad)
        for module, name in owners[key]:
            module._parameters[name] = made
    return model


def _is_gathered(module: torch.nn.Module, name: str) -> bool:
    """Whether a parameter is the weight of a layer that quantizes it."""
    return name == "weight" and hasattr(module, "gather_quantizer") and getattr(module, "recipe", None) is not None
