"""The names and shapes that the tensors of a model have in published files.

Transformers keeps some parameters otherwise than files do: experts that are fused in one parameter,
say. Its own mapping, by which ``save_pretrained`` writes files, is asked for one parameter at a
time, so that nothing else is copied.
"""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

Tensor = torch.Tensor


def of_transformers(model: torch.nn.Module) -> bool:
    """Whether a model is one of Transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def file_tensors(model: torch.nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """What files hold in the place of a parameter or buffer: several tensors for fused experts.

    Args:
        model: the parameter is of.
        name: of the parameter.
        tensor: plain, of the parameter's shape; on any device, meta included.

    Returns:
        Tensors by their names in files: views of ``tensor``, or copies of its parts.
    """
    if not of_transformers(model):
        return {name: tensor}
    loading = importlib.import_module("transformers.core_model_loading")

    result: dict[str, Tensor] = loading.revert_weight_conversion(model, {name: tensor})
    return result


def copy_from_files(
    model: torch.nn.Module, name: str, parameter: Tensor, values: Iterator[tuple[str, Tensor]]
) -> None:
    """Write what files hold for a parameter into it.

    Args:
        model, name: as of :func:`file_tensors`.
        parameter: plain and contiguous.
        values: by their names in files.
    """
    if parameter.numel() == 0:
        return
    dtype = torch.int32 if parameter.numel() < 2**31 else torch.int64
    places = torch.arange(parameter.numel(), dtype=dtype).view(parameter.shape)
    places_of = file_tensors(model, name, places)
    flat = parameter.view(-1)
    for file_name, value in values:
        index = places_of[file_name].reshape(-1).long().to(parameter.device)
        flat[index] = value.reshape(-1).to(parameter.device, parameter.dtype)


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor, torch.nn.Module]]:
    """(name, parameter or buffer, module that has it) of all that files hold, each tensor once.

    Buffers that no state dict has are left out.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        own: dict[str, Any] = dict(module._parameters)
        own |= {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        for leaf, tensor in own.items():
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield f"{prefix}.{leaf}" if prefix else leaf, tensor, module
