"""Recipes of your own for Ottava: quantizer factories, recipe files, and current scaling in plain
PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "CurrentScalingQuantizerRef": "ottava_custom.reference.quantizer",
    "CurrentScalingTensorRef": "ottava_custom.reference.tensor",
    "CurrentScalingTensorRefStorage": "ottava_custom.reference.tensor",
    "CustomRecipe": "ottava_custom.recipe",
    "HybridQuantizer": "ottava_custom.hybrid",
    "IdentityQuantizer": "ottava_custom.identity",
    "IdentityTensor": "ottava_custom.identity",
    "IdentityTensorStorage": "ottava_custom.identity",
    "by_direction": "ottava_custom.factories",
    "by_layer": "ottava_custom.factories",
    "by_tensor": "ottava_custom.factories",
    "current_scaling_ref_factory": "ottava_custom.factories",
    "current_scaling_ref_quantizer_factory": "ottava_custom.factories",
    "identity_factory": "ottava_custom.factories",
    "mirror": "ottava_custom.factories",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ottava_custom' has no attribute {name!r}")


if TYPE_CHECKING:
    from ottava_custom.factories import by_direction as by_direction
    from ottava_custom.factories import by_layer as by_layer
    from ottava_custom.factories import by_tensor as by_tensor
    from ottava_custom.factories import current_scaling_ref_factory as current_scaling_ref_factory
    from ottava_custom.factories import (
        current_scaling_ref_quantizer_factory as current_scaling_ref_quantizer_factory,
    )
    from ottava_custom.factories import identity_factory as identity_factory
    from ottava_custom.factories import mirror as mirror
    from ottava_custom.hybrid import HybridQuantizer as HybridQuantizer
    from ottava_custom.identity import IdentityQuantizer as IdentityQuantizer
    from ottava_custom.identity import IdentityTensor as IdentityTensor
    from ottava_custom.identity import IdentityTensorStorage as IdentityTensorStorage
    from ottava_custom.recipe import CustomRecipe as CustomRecipe
    from ottava_custom.reference.quantizer import (
        CurrentScalingQuantizerRef as CurrentScalingQuantizerRef,
    )
    from ottava_custom.reference.tensor import CurrentScalingTensorRef as CurrentScalingTensorRef
    from ottava_custom.reference.tensor import (
        CurrentScalingTensorRefStorage as CurrentScalingTensorRefStorage,
    )
