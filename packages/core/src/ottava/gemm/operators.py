"""Products as operators: compiled code, modes and profilers see one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ottava.kernels.direct import is_direct
from ottava.kernels.table import define_product
from ottava.tensors.operand import Side

Tensor = torch.Tensor


def define(name: str, option: str, multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``multiply(a, b, bias, out_dtype, option)`` of two sides, in graphs one operator of this name
    and option."""

    def of_fields(
        a: Tensor,
        b: Tensor,
        scales_a: Tensor | None,
        amax_a: Tensor | None,
        layout_a: str,
        columnwise_a: bool,
        scales_b: Tensor | None,
        amax_b: Tensor | None,
        layout_b: str,
        columnwise_b: bool,
        *rest: Any,
    ) -> Tensor:
        left = Side(a, scales_a, layout_a, columnwise_a, amax=amax_a)
        right = Side(b, scales_b, layout_b, columnwise_b, amax=amax_b)
        return multiply(left, right, *rest)

    sides = ", ".join(
        f"Tensor? scales_{side}, Tensor? amax_{side}, str layout_{side}, bool columnwise_{side}"
        for side in "ab"
    )
    schema = (
        f"{name}(Tensor a, Tensor b, {sides}, Tensor? bias, ScalarType out_dtype, {option}) "
        f"-> Tensor"
    )
    operator = define_product(schema, of_fields, _sizes)

    def product(a: Side, b: Side, bias: Tensor | None, *rest: Any) -> Tensor:
        if is_direct(a.values, b.values, a.scales, b.scales, bias):
            return multiply(a, b, bias, *rest)
        return operator(a.values, b.values, *_fields_of(a), *_fields_of(b), bias, *rest)

    return product


def _fields_of(side: Side) -> tuple[Tensor | None, Tensor | None, str, bool]:
    return side.scales, side.amax, side.layout, side.columnwise


def _sizes(
    a: Any,
    b: Any,
    scales_a: Tensor | None,
    amax_a: Tensor | None,
    layout_a: str,
    columnwise_a: bool,
    scales_b: Tensor | None,
    amax_b: Tensor | None,
    layout_b: str,
    columnwise_b: bool,
    *_: Any,
) -> tuple[int, int, int]:
    """Rows, columns and the reduced size, from the shapes ``a`` and ``b`` of both values and the
    fields of both sides."""
    left = Side(a, scales_a, layout_a, columnwise_a)
    right = Side(b, scales_b, layout_b, columnwise_b)
    inner = a[not left.is_turned()] * left.elements_per_byte()
    return a[left.is_turned()], b[right.is_turned()], inner
