"""The state is float32, whatever torch's defaults are where a model is built, converted and
cast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ottava
from ottava_delayed import DelayedScaling


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def linear(**options: Any) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(32, 32, **options), torch.nn.Linear(32, 32, **options)
    )


def converted(**options: Any) -> torch.nn.Module:
    return ottava.convert(linear(**options), DelayedScaling(amax_history_len=4))


def bound(**options: Any) -> torch.nn.Module:
    return torch.nn.Sequential(
        *(ottava.nn.Linear(32, 32, recipe="delayed", **options) for _ in range(2))
    )


def mixed(**options: Any) -> torch.nn.Module:
    """Delayed scaling for the input alone: its state is a part of the layer's."""
    recipe = ottava.get_recipe("current")
    request = ottava.QuantizerRequest(DelayedScaling(amax_history_len=4))
    recipe.set_quantizer_factory(lambda role: request if role.tensor_type == "input" else None)
    return ottava.convert(linear(**options), recipe)


def in_a_region(**options: Any) -> torch.nn.Module:
    model = torch.nn.Sequential(*(ottava.nn.Linear(32, 32, **options) for _ in range(2)))
    with ottava.autocast("delayed"):
        model(torch.ones(4, 32, dtype=torch.bfloat16))
    return model


def primary(**options: Any) -> torch.nn.Module:
    with ottava.quantized_model_init("delayed"):
        return bound(**options)


MAKERS = [converted, bound, mixed, in_a_region, primary]


def check_exact(model: torch.nn.Module, device: str = "cpu") -> None:
    buffers = {name: buffer for name, buffer in model.named_buffers() if "recipe_state" in name}
    assert len(buffers) == 6
    for name, buffer in buffers.items():
        assert buffer.dtype == (torch.int64 if name.endswith("saturated") else torch.float32), name
        assert buffer.device.type == device


def train(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    outputs = []
    for scale in (1.0, 3.3, 0.7):
        outputs.append(model(x * scale))
        outputs[-1].float().square().mean().backward()
    return outputs


@pytest.mark.parametrize("make", MAKERS)
def test_under_a_default_dtype(make: Callable[..., torch.nn.Module]) -> None:
    """Built as Lightning's bf16-true builds: under the default dtype, then cast."""
    torch.manual_seed(0)
    with default_dtype(torch.bfloat16):
        model = make()
        check_exact(model)
        model.bfloat16()
        check_exact(model)
        torch.manual_seed(1)
        x = torch.randn(8, 32)
        outputs = train(model, x)
    check_exact(model)
    torch.manual_seed(0)
    other = make(dtype=torch.bfloat16)
    other.load_state_dict(
        {n: v for n, v in model.state_dict().items() if "recipe_state" not in n}, strict=False
    )
    other.load_state_dict(model.state_dict())
    assert outputs[0].dtype == torch.bfloat16
    for (name, mine), theirs in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


def test_training_is_the_same_under_a_default_dtype() -> None:
    torch.manual_seed(0)
    model = converted(dtype=torch.bfloat16)
    with default_dtype(torch.bfloat16):
        other = converted()
        other.load_state_dict(model.state_dict())
        x = torch.randn(8, 32)
        theirs = train(other, x)
    mine = train(model, x)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))
    assert model[0].recipe_state.amax_history.any()  # type: ignore[union-attr,index]


@pytest.mark.parametrize("make", [converted, mixed])
def test_under_a_default_device(make: Callable[..., torch.nn.Module]) -> None:
    """The state goes where its layer is, not where torch makes tensors at that time."""
    torch.set_default_device("meta")
    try:
        check_exact(make(device="cpu"))
        with torch.device("meta"):
            check_exact(make(device="cpu"))
        meta = make()
        check_exact(meta, "meta")
    finally:
        torch.set_default_device(None)
    meta.to_empty(device="cpu")
    check_exact(meta)
    assert all(
        bool((buffer == 1).all()) for name, buffer in meta.named_buffers() if name.endswith("scale")
    )
    assert not any(
        buffer.any() for name, buffer in meta.named_buffers() if name.endswith("history")
    )


def test_quantizers_by_role() -> None:
    with default_dtype(torch.float16):
        quantizer = DelayedScaling().quantizer("input")
        assert quantizer(torch.ones(4, 4)).dequantize().eq(1).all()
