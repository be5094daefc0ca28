"""The state is float32 and lies where its layer does, whatever torch's defaults are where a model
is built, converted and cast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ottava
from ottava_delayed import DelayedScaling
from tests.comparing import assert_same
from tests.integration.mixed_recipes import delayed_inputs


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def linear(**options: Any) -> torch.nn.Module:
    layers = (torch.nn.Linear(32, 32, **options) for _ in range(2))
    return torch.nn.Sequential(*layers)


def converted(**options: Any) -> torch.nn.Module:
    return ottava.convert(linear(**options), DelayedScaling(amax_history_len=4))


def bound(**options: Any) -> torch.nn.Module:
    layers = (ottava.nn.Linear(32, 32, recipe="delayed", **options) for _ in range(2))
    return torch.nn.Sequential(*layers)


def mixed(**options: Any) -> torch.nn.Module:
    return ottava.convert(linear(**options), delayed_inputs())


def primary(**options: Any) -> torch.nn.Module:
    with ottava.quantized_model_init("delayed"):
        return bound(**options)


def check_exact(model: torch.nn.Module, device: str = "cpu") -> None:
    buffers = {name: buffer for name, buffer in model.named_buffers() if "recipe_state" in name}
    assert len(buffers.keys() & model.state_dict().keys()) == 6
    dtypes = {"saturated": torch.int64, "weight_used": torch.bool}
    for name, buffer in buffers.items():
        assert buffer.dtype == dtypes.get(name.rpartition(".")[2], torch.float32), name
        assert buffer.device.type == device


def train(model: torch.nn.Module) -> list[torch.Tensor]:
    """Outputs and the state after some steps."""
    outputs = []
    for step, factor in enumerate((1.0, 3.3, 0.7)):
        random = torch.Generator().manual_seed(step)
        x = torch.randn(8, 32, generator=random, dtype=torch.float32).bfloat16()
        outputs.append(model(x * factor))
        outputs[-1].float().square().mean().backward()
    return [*outputs, *model.buffers()]


@pytest.mark.parametrize("make", [converted, bound, mixed, primary])
def test_under_a_default_dtype(make: Any) -> None:
    """Built as Lightning's bf16-true builds: under the default dtype, then cast."""
    model = make(dtype=torch.bfloat16)
    train(model)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with default_dtype(torch.bfloat16):
        other = make().bfloat16()
        check_exact(other)
        other.load_state_dict(saved)
        results = train(other)
        check_exact(other)
        quantizer = DelayedScaling().quantizer("input")
        assert quantizer(torch.ones(4, 4)).dequantize().eq(1).all()
    assert_same(results, train(model))
    assert results[0].dtype == torch.bfloat16


@pytest.mark.parametrize("make", [converted, mixed])
def test_under_a_default_device(make: Any) -> None:
    """The state goes where its layer is, not where torch makes tensors at that time."""
    torch.set_default_device("meta")
    try:
        check_exact(make(device="cpu"))
        with torch.device("meta"):
            check_exact(make(device="cpu"))
        model = make()
        check_exact(model, "meta")
    finally:
        torch.set_default_device(None)
    model.to_empty(device="cpu")
    check_exact(model)
    for name, buffer in model.named_buffers():
        assert bool((buffer == float(name.endswith("scale"))).all()), name
