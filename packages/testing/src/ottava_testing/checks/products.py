"""Checks of products of quantized operands."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ottava.gemm import gemm
from ottava.tensors import Quantizer, columnwise_layout
from ottava_testing import table
from ottava_testing.compare import close, normal, plain, relative, require, wide
from ottava_testing.subject import Subject

check = partial(table.check, "products")
#: How the data for columnwise usage lies where the hardware lets one choose.
LAYOUTS: Any = ("shared", "transpose")
USAGES = ("rowwise", "columnwise")
_M, _N, _K = 24, 48, 40


def _operand(subject: Subject, role: str, usage: str, values: torch.Tensor) -> Any:
    rowwise = usage == "rowwise"
    quantizer = subject.quantizer(role, internal=True, rowwise=rowwise, columnwise=not rowwise)
    return quantizer(values)


def _cases(subject: Subject) -> Iterator[tuple[Any, Any, Any, torch.Tensor]]:
    """Yields the name of each product, its two operands, and the product of their values."""
    x, w = normal(_M, _K, seed=5), normal(_N, _K, seed=6)
    dy = normal(_M, _N, seed=11)
    qx, qx_columns = (_operand(subject, "input", usage, x) for usage in USAGES)
    qw, qw_columns = (_operand(subject, "weight", usage, w) for usage in USAGES)
    qdy, qdy_columns = (_operand(subject, "grad_output", usage, dy) for usage in USAGES)
    yield "fprop", qx, qw, x @ w.t()
    yield "dgrad", qdy, qw_columns, dy @ w
    yield "wgrad", qdy_columns, qx_columns, dy.t() @ x


@check(over=Subject.quantizers)
def operands(subject: Subject, quantizer: Quantizer) -> None:
    """As an operand of a product a tensor has the values that it dequantizes to, in both
    directions.
    """
    for layout in LAYOUTS:
        with columnwise_layout(layout):
            # Matrices that are square and not, so that a wrong transpose is found.
            for shape in ((48, 40), (32, 32), (2, 12, 40)):
                for columnwise in (False, True):
                    _has_values(subject, quantizer, wide(*shape, seed=11), columnwise)


def _has_values(subject: Subject, quantizer: Any, values: torch.Tensor, columnwise: bool) -> None:
    quantized = quantizer.with_usage(not columnwise, columnwise)(values)
    matrix, factor = quantized.gemm_operand(columnwise=columnwise, dtype=torch.float32)
    actual = matrix.float() if factor is None else matrix.float() * factor
    direction = "columnwise" if columnwise else "rowwise"
    title = f"the {direction} operand (gemm_operand) of a {tuple(values.shape)} tensor"
    rows = values.reshape(-1, values.shape[-1])
    close(title, actual, rows, max(subject.bound, 0.02) * 1.5)
    close(title, actual, plain(quantized).reshape(rows.shape), 0.01)


@check()
def products(subject: Subject) -> None:
    """The three products of a linear layer are those of the values."""
    of_values: dict[str, Any] = {
        "fprop": lambda a, b: a @ b.t(),
        "dgrad": lambda a, b: a @ b,
        "wgrad": lambda a, b: a.t() @ b,
    }
    for layout in LAYOUTS:
        with columnwise_layout(layout):
            for name, a, b, expected in _cases(subject):
                title = f"the {name} product of {type(a).__name__} and {type(b).__name__}"
                dequantized = of_values[name](plain(a), plain(b))
                for dtype in (torch.float32, torch.bfloat16):
                    actual = gemm(a, b, name, out_dtype=dtype)
                    words = f"{title} with out_dtype={dtype} is of {actual.dtype}"
                    require(actual.dtype == dtype, words)
                    close(title, actual, expected, subject.bound)
                    close(f"{title}, against the dequantized operands,", actual, dequantized, 0.02)


@check()
def sparse_products(subject: Subject) -> None:
    """Products of operands with one value in 128, over ragged groups, are those of the values, also
    where the operands are rotated.
    """
    for name, a, b, expected in _sparse_cases(subject):
        actual = gemm(a, b, name, out_dtype=torch.float32)
        title = f"the {name} product of operands with one value in 128"
        close(title, actual, expected, subject.bound)


def _sparse(rows: int, seed: int) -> torch.Tensor:
    """``[rows, 152]`` with 4 or -4 in one place of each 128 columns, all else 0."""
    random = torch.Generator().manual_seed(seed)
    values = torch.zeros(rows, 152)
    for stop in (128, 152):
        # Few places, so that operands have some in common.
        places = stop - 1 - torch.randint(8, (rows, 1), generator=random)
        signs = torch.randint(2, (rows, 1), generator=random) * 2.0 - 1.0
        values.scatter_(1, places, 4.0 * signs)
    return values


def _sparse_cases(subject: Subject) -> Iterator[tuple[Any, Any, Any, torch.Tensor]]:
    """Yields the name of each product, its operands, and the product of their values.

    They sum over 152 elements, which are no whole groups of a rotation.
    """
    one, other = _sparse(24, 1), _sparse(40, 2)
    for name, role_a, role_b in (
        ("fprop", "input", "weight"),
        ("dgrad", "grad_output", "weight"),
        ("wgrad", "grad_output", "input"),
    ):
        a_by_column, b_by_column = name == "wgrad", name != "fprop"
        a = _operand(subject, role_a, USAGES[a_by_column], one.t() if a_by_column else one)
        b = _operand(subject, role_b, USAGES[b_by_column], other.t() if b_by_column else other)
        yield name, a, b, one @ other.t()


@check()
def accumulating_products(subject: Subject) -> None:
    """A product with out= is written there, and with accumulate=True added to what is there."""
    for name, a, b, _ in _cases(subject):
        product = gemm(a, b, name, out_dtype=torch.float32)
        start = normal(*product.shape, seed=30) * 5
        written, added = start.clone(), start.clone()
        returned = gemm(a, b, name, out=written)
        require(returned is written, f"the {name} product with out= returns another tensor")
        close(f"the {name} product with out=", written, product, 1e-3, before=start)
        gemm(a, b, name, out=added, accumulate=True)
        title = f"the {name} product with accumulate=True"
        lost = f"gradients are lost under accumulation: {title}"
        require(not relative(added, product) <= 1e-3, f"{lost} overwrites out")
        require(not torch.equal(added, start), f"{lost} adds nothing to out")
        close(f"{title}, added to out,", added, start + product, 1e-3)


@check()
def product_bias(subject: Subject) -> None:
    """A bias is added to the product."""
    _, qx, qw, _ = next(_cases(subject))
    bias = normal(_N, seed=3) * 10
    without = gemm(qx, qw, "fprop", out_dtype=torch.float32)
    actual = gemm(qx, qw, "fprop", out_dtype=torch.float32, bias=bias)
    close("the fprop product with a bias", actual, without + bias, 1e-4, before=without)
