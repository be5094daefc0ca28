"""Tools that show what FP8 does to a model.

They are fake quantization, switches for high precision, statistics, and a report on checkpoints.

Importing this package changes nothing: :func:`register_features` makes the features available to
files of nvdlfw-inspect. Public names are resolved on first use, so neither torch nor nvdlfw-inspect
is imported before it is needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Module -> the public names that it defines.
_NAMES = {
    "analysis.analyze": "analyze",
    "analysis.output": "write_html write_json write_suggestion",
    "analysis.report": "Analysis",
    "features.base": "Feature",
    "features.dump": "DumpTensors",
    "features.fake_quant": "DisableFP8GEMM DisableFP8Layer FakeQuant",
    "features.per_tensor": "PerTensorScaling",
    "features.statistics": "LogFp8TensorStats LogTensorStats",
    "log_files": "Statistic",
    "manager": "on_error register_features",
    "measures": "Measures compare",
    "products": "Inspection Watch",
    "recipe_file": "Keep write_recipe_file",
    "served.comparing": "ServedComparison ServedLayer compare_served",
    "scoped": "Run Statistics fake_quant high_precision statistics",
}
_EXPORTS = {
    name: f"ottava_debug.{module}" for module, names in _NAMES.items() for name in names.split()
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ottava_debug' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_EXPORTS[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from ottava_debug.analysis.analyze import analyze as analyze
    from ottava_debug.analysis.output import write_html as write_html
    from ottava_debug.analysis.output import write_json as write_json
    from ottava_debug.analysis.output import write_suggestion as write_suggestion
    from ottava_debug.analysis.report import Analysis as Analysis
    from ottava_debug.features.base import Feature as Feature
    from ottava_debug.features.dump import DumpTensors as DumpTensors
    from ottava_debug.features.fake_quant import DisableFP8GEMM as DisableFP8GEMM
    from ottava_debug.features.fake_quant import DisableFP8Layer as DisableFP8Layer
    from ottava_debug.features.fake_quant import FakeQuant as FakeQuant
    from ottava_debug.features.per_tensor import PerTensorScaling as PerTensorScaling
    from ottava_debug.features.statistics import LogFp8TensorStats as LogFp8TensorStats
    from ottava_debug.features.statistics import LogTensorStats as LogTensorStats
    from ottava_debug.log_files import Statistic as Statistic
    from ottava_debug.manager import on_error as on_error
    from ottava_debug.manager import register_features as register_features
    from ottava_debug.measures import Measures as Measures
    from ottava_debug.measures import compare as compare
    from ottava_debug.products import Inspection as Inspection
    from ottava_debug.products import Watch as Watch
    from ottava_debug.recipe_file import Keep as Keep
    from ottava_debug.recipe_file import write_recipe_file as write_recipe_file
    from ottava_debug.scoped import Run as Run
    from ottava_debug.scoped import Statistics as Statistics
    from ottava_debug.scoped import fake_quant as fake_quant
    from ottava_debug.scoped import high_precision as high_precision
    from ottava_debug.scoped import statistics as statistics
    from ottava_debug.served.comparing import ServedComparison as ServedComparison
    from ottava_debug.served.comparing import ServedLayer as ServedLayer
    from ottava_debug.served.comparing import compare_served as compare_served
