"""The features that sections of a configuration enable, and the base class for users' own."""

from ottava_debug.features.base import Feature
from ottava_debug.features.dump import DumpTensors
from ottava_debug.features.fake_quant import (
    DisableFP8GEMM,
    DisableFP8Layer,
    DisableQuantizationGEMM,
    DisableQuantizationLayer,
    FakeQuant,
)
from ottava_debug.features.per_tensor import PerTensorScaling
from ottava_debug.features.statistics import LogFp8TensorStats, LogTensorStats

#: The first-party features.
FEATURES: tuple[type[Feature], ...] = (
    FakeQuant,
    DisableFP8GEMM,
    DisableFP8Layer,
    DisableQuantizationGEMM,
    DisableQuantizationLayer,
    LogTensorStats,
    LogFp8TensorStats,
    PerTensorScaling,
    DumpTensors,
)
