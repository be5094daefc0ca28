"""Reads and converts checkpoints of other tools and of Ottava; adds the command ``ottava export``.

Public names are resolved on first use, so that listing the commands imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Conversion": "converting",
    "ExportCheck": "checking",
    "ExportReport": "exporting",
    "ExportedLayer": "exporting",
    "LoadReport": "loading",
    "PublishedCheckpoint": "formats.recognized",
    "PublishedLayer": "formats.recognized",
    "ServedRecipe": "served",
    "check_export": "checking",
    "convert_file": "converting",
    "export_model": "writing",
    "iter_exported": "exporting",
    "load_quantized": "loading",
    "quantized_from": "formats.recognized",
    "read_state": "ottava.checkpoint",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ottava_integrations' has no attribute {name!r}")
    module = _EXPORTS[name]
    if not module.startswith("ottava."):
        module = f"ottava_integrations.{module}"
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from ottava.checkpoint import read_state as read_state
    from ottava_integrations.checking import ExportCheck as ExportCheck
    from ottava_integrations.checking import check_export as check_export
    from ottava_integrations.converting import Conversion as Conversion
    from ottava_integrations.converting import convert_file as convert_file
    from ottava_integrations.exporting import ExportedLayer as ExportedLayer
    from ottava_integrations.exporting import ExportReport as ExportReport
    from ottava_integrations.exporting import iter_exported as iter_exported
    from ottava_integrations.formats.recognized import PublishedCheckpoint as PublishedCheckpoint
    from ottava_integrations.formats.recognized import PublishedLayer as PublishedLayer
    from ottava_integrations.formats.recognized import quantized_from as quantized_from
    from ottava_integrations.loading import LoadReport as LoadReport
    from ottava_integrations.loading import load_quantized as load_quantized
    from ottava_integrations.served import ServedRecipe as ServedRecipe
    from ottava_integrations.writing import export_model as export_model
