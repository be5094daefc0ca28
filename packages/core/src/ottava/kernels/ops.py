"""Each kernel declared once: schema, shape function (fake) and eager implementation by backend.

The operators live in the ``torch.library`` namespace ``ottava``, so that ``torch.compile(fullgraph=True)`` sees
through them. They are defined with the low-level ``Library`` interface, whose calls cost a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ottava.kernels.backends import backend_module
from ottava.kernels.direct import is_direct
from ottava.torch_private import graph_task_id, schema_of

LIBRARY = torch.library.Library("ottava", "DEF")
Tensor = torch.Tensor


def kernel(schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define ``ottava::name`` whose implementation is the function ``name`` of the backend of its first tensor.

    Returns:
        What calls it: the operator, or the backend's function itself where nobody would see the operator.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)

    def by_backend(x: Tensor, *args: Any) -> Any:
        return getattr(backend_module(x.device.type), name)(x, *args)

    LIBRARY.impl(name, by_backend, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ottava::{name}", fake, lib=LIBRARY)
    operator: Any = getattr(torch.ops.ottava, name)
    # The first argument is a tensor always; these are the others.
    arguments = schema_of(operator.default).arguments
    tensors = [place for place, given in enumerate(arguments) if "Tensor" in str(given.type)]
    others = tensors[1:]

    def call(x: Tensor, *args: Any) -> Any:
        direct = is_direct(x, *(args[place - 1] for place in others)) if others else is_direct(x)
        return by_backend(x, *args) if direct else operator(x, *args)

    return call


def _scalar_like(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


def _codes_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.uint8)


def _transposed_like(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[-1], *x.shape[:-1]), dtype=torch.uint8)


def _fake_quantize(
    x: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool, rowwise: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    absent = x.new_empty((0,), dtype=torch.uint8)
    return (
        _codes_like(x) if rowwise else absent,
        _transposed_like(x) if transposed else x.new_empty((0,), dtype=torch.uint8),
        _scalar_like(x),
        _scalar_like(x),
        _scalar_like(x),
    )


amax = kernel("amax(Tensor x) -> Tensor", _scalar_like)
scale_from_amax = kernel(
    "scale_from_amax(Tensor amax, ScalarType fp8_dtype, float epsilon, bool force_pow_2) -> (Tensor, Tensor)",
    lambda amax, *_: tuple(amax.new_empty(amax.shape, dtype=torch.float32) for _ in range(2)),
)
cast = kernel("cast(Tensor x, Tensor scale, ScalarType fp8_dtype) -> Tensor", lambda x, *_: _codes_like(x))
cast_transpose = kernel(
    "cast_transpose(Tensor x, Tensor scale, ScalarType fp8_dtype) -> (Tensor, Tensor)",
    lambda x, *_: (_codes_like(x), _transposed_like(x)),
)
quantize = kernel(
    "quantize(Tensor x, ScalarType fp8_dtype, float epsilon, bool force_pow_2, bool rowwise, bool transposed)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_quantize,
)
cast_amax = kernel(
    "cast_amax(Tensor x, Tensor scale, Tensor(a!) amax, Tensor(b!)? saturated, ScalarType fp8_dtype, bool transposed)"
    " -> (Tensor, Tensor, Tensor)",
    lambda x, scale, amax, saturated, fp8_dtype, transposed: (
        _codes_like(x),
        _transposed_like(x) if transposed else x.new_empty((0,), dtype=torch.uint8),
        _scalar_like(x),
    ),
)
transpose = kernel("transpose(Tensor data) -> Tensor", _transposed_like)
decode = kernel(
    "decode(Tensor data, Tensor? scale_inv, ScalarType fp8_dtype, ScalarType dtype) -> Tensor",
    lambda data, scale_inv, fp8_dtype, dtype: data.new_empty(data.shape, dtype=dtype),
)


LIBRARY.define(
    "update_scales(Tensor(a!)[] scales, Tensor(b!)[] histories, float[] maxima, bool most_recent, Tensor? last) -> ()"
)


def _update_scales(scales: list[Tensor], *rest: Any) -> None:
    # No step begins in a backward pass. Compiled code cannot tell, and is run again there by activation checkpointing.
    if scales and graph_task_id() == -1:
        backend_module(scales[0].device.type).update_scales(scales, *rest)


LIBRARY.impl("update_scales", _update_scales, "CompositeExplicitAutograd")
torch.library.register_fake("ottava::update_scales", lambda *_: None, lib=LIBRARY)


def update_scales(
    scales: list[Tensor], histories: list[Tensor], maxima: list[float], most_recent: bool, last: Tensor | None
) -> None:
    """As what :func:`kernel` returns."""
    direct = is_direct(*scales, *histories, last)
    (_update_scales if direct else torch.ops.ottava.update_scales)(scales, histories, maxima, most_recent, last)
