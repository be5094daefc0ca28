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

    def of_fields(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        return multiply(Side(a, *rest[:3]), Side(b, *rest[3:6]), *rest[6:])

    sides = ", ".join(
        f"Tensor? scales_{side}, str layout_{side}, bool columnwise_{side}" for side in "ab"
    )
    schema = (
        f"{name}(Tensor a, Tensor b, {sides}, Tensor? bias, ScalarType out_dtype, {option}) "
        f"-> Tensor"
    )
    operator = define_product(schema, of_fields, _sizes)

    def product(a: Side, b: Side, bias: Tensor | None, *rest: Any) -> Tensor:
        if is_direct(a.values, b.values, a.scales, b.scales, bias):
            return multiply(a, b, bias, *rest)
        return operator(a.values, b.values, *_described(a), *_described(b), bias, *rest)

    return product


def _described(side: Side) -> tuple[Tensor | None, str, bool]:
    return side.scales, side.layout, side.columnwise


def _sizes(a: Any, b: Any, *fields: Any) -> tuple[int, int, int]:
    """Rows, columns and the reduced size, from the shapes of both values and the fields of both
    sides."""
    left, right = Side(a, *fields[:3]).is_turned(), Side(b, *fields[3:6]).is_turned()
    return a[left], b[right], a[not left]
