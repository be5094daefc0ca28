"""What a published file holds of a layer besides its weight: buffers of the layer, so that they
move with it and leave with an export."""

from dataclasses import dataclass

import torch

from ottava_integrations.formats.schemes import Scheme
from ottava_integrations.formats.tensors import PublishedLevel

_LEVEL, _INPUT_SCALE, _SCHEME = "published_level", "published_input_scale", "_published_scheme"


@dataclass(frozen=True)
class Companions:
    """What a file held of a layer besides data and scales.

    Attributes:
        scheme: of the file.
        level: the scale of the tensor as the file had it; None without one.
        input_scale: the constant scale of the layer's input; None without one.
    """

    scheme: Scheme
    level: PublishedLevel | None = None
    input_scale: torch.Tensor | None = None


def attach(layer: torch.nn.Module, companions: Companions) -> None:
    """Keep what a file held on the layer that was loaded of it; no state dict has it."""
    level = None if companions.level is None else companions.level.value
    layer.register_buffer(_LEVEL, level, persistent=False)
    layer.register_buffer(_INPUT_SCALE, companions.input_scale, persistent=False)
    layer.__dict__[_SCHEME] = companions.scheme


def companions_of(layer: torch.nn.Module) -> Companions | None:
    """What :func:`attach` has kept; None for a layer that was not loaded of a published file."""
    scheme = layer.__dict__.get(_SCHEME)
    if scheme is None:
        return None
    level = layer._buffers.get(_LEVEL)
    published = None if level is None else PublishedLevel(level, scheme.level_multiplies)
    return Companions(scheme, published, layer._buffers.get(_INPUT_SCALE))
