"""What a published file holds of a layer besides its weight: buffers of the layer, so that they
move with it and leave with an export."""

from dataclasses import dataclass

import torch

from ottava.torch_private import version_of
from ottava_integrations.formats.schemes import Scheme
from ottava_integrations.formats.tensors import PublishedLevel

_LEVEL, _INPUT_SCALE = "published_level", "published_input_scale"
_SCHEME, _VERSION = "_published_scheme", "_published_writes"


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
    layer.__dict__[_VERSION] = version_of(layer.get_parameter("weight"))


def is_as_published(layer: torch.nn.Module) -> bool:
    """Whether nothing has written to a weight since it was loaded, so that another tool made its
    bytes."""
    version = layer.__dict__.get(_VERSION)
    return version is not None and version == version_of(layer.get_parameter("weight"))


def companions_of(layer: torch.nn.Module) -> Companions | None:
    """What :func:`attach` has kept; None for a layer that was not loaded of a published file."""
    scheme = layer.__dict__.get(_SCHEME)
    if scheme is None:
        return None
    level = layer._buffers.get(_LEVEL)
    published = None if level is None else PublishedLevel(level, scheme.level_multiplies)
    return Companions(scheme, published, layer._buffers.get(_INPUT_SCALE))
