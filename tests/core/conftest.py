"""Fixtures of core's tests: the kernels' code paths, and a recipe written on core's base classes alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ottava import Recipe, kernels
from ottava.kernels.backends import use_backend
from ottava.tensors import Float8QuantizerBase

sys.path.insert(0, str(Path(__file__).parent))

from sequential_grid import serving_cpu

try:
    from ottava import _cpu
except ImportError:  # a checkout without the compiled module: its paths are reported as failing, not skipped
    _cpu = None

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
PATHS = ["reference", *(_cpu.available_isas() if _cpu is not None else ["cpu"]), "grid"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs the CUDA kernels as loops."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("code_path") == "grid" or "grid" in getattr(item, "fixturenames", ()):
            item.add_marker("grid")


@pytest.fixture(params=PATHS)
def code_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test on the reference, on every instruction set of this machine, and on the CUDA kernels as a loop."""
    if request.param == "reference":
        with use_backend("reference"):
            yield request.param
        return
    if request.param == "grid":
        with serving_cpu():
            yield request.param
        return
    assert _cpu is not None, "the compiled module is missing"
    before = _cpu.isa()
    _cpu.set_isa(request.param)
    with use_backend("cpu"):
        yield request.param
    _cpu.set_isa(before)


@pytest.fixture(params=list(FP8_DTYPES))
def fmt(request: pytest.FixtureRequest) -> str:
    """Name of an element format."""
    return str(request.param)


class SampleQuantizer(Float8QuantizerBase):
    """Per-tensor scaling with the kernels that core has."""

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        with_data, with_transpose = self.needs(tensor.device)
        data, transpose, _, scale_inv, _ = kernels.quantize(
            tensor, self.fp8_dtype, rowwise=with_data, transposed=with_transpose
        )
        return self.wrap(data if with_data else None, transpose if with_transpose else None, scale_inv, dtype)


class SampleRecipe(Recipe):
    """E4M3 forward, E5M2 for gradients."""

    name = "sample"

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> SampleQuantizer:
        return SampleQuantizer(torch.float8_e5m2 if role.is_gradient else torch.float8_e4m3fn)


@pytest.fixture
def recipe() -> SampleRecipe:
    return SampleRecipe()


@pytest.fixture
def quantizer() -> SampleQuantizer:
    return SampleQuantizer(torch.float8_e4m3fn)
