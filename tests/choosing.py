"""Choices that a machine makes for a process, made by a test: how products are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ottava.gemm import scaled
from ottava.kernels import products
from ottava.kernels.backends import changed


@contextmanager
def _chosen(module: Any, name: str, value: Callable[..., bool] | bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, value)
        changed()
        yield
    changed()


def cpu_products(dtype: torch.dtype) -> Any:
    """Inside a ``with`` block CPUs multiply bfloat16 operands as such or in float32, whatever the
    machine has."""
    return _chosen(products, "_bfloat16_is_fast", dtype == torch.bfloat16)


def scaled_products(wanted: bool = True) -> Any:
    """Inside a ``with`` block FP8 operands are multiplied as such, or decoded, whatever the device.

    torch's CPU library has the function too, slowly: what a GPU does can be tested with it.
    """
    return _chosen(scaled, "multiplies_fp8", lambda operand: wanted)
