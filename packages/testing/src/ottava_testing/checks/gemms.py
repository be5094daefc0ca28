"""Checks of products of quantized operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from ottava.gemm import gemm
from ottava.tensors import columnwise_layout
from ottava_testing.compare import close, normal, plain, relative, require, wide
from ottava_testing.subject import Subject
from ottava_testing.table import check

_M, _N, _K = 24, 48, 40
_LAYOUTS: tuple[Literal["shared", "transpose"], ...] = ("shared", "transpose")


def _operands(subject: Subject, make: Any = wide) -> dict[str, tuple[torch.Tensor, Any, Any]]:
    """By role, the values of an operand, and its storages for rowwise and for columnwise usage."""
    by_role = {}
    for role, shape in (("input", (_M, _K)), ("weight", (_N, _K)), ("grad_output", (_M, _N))):
        values = make(*shape, seed=len(role))
        rowwise, columnwise = (
            subject.quantizer(role, internal=True, rowwise=r, columnwise=not r)(values)
            for r in (True, False)
        )
        by_role[role] = (values, rowwise, columnwise)
    return by_role


@check(
    "operands",
    "products",
    "As an operand of a product a tensor has the values that it dequantizes to, in both directions",
)
def operands(subject: Subject) -> None:
    """gemm_operand of matrices that are square and not, so that a wrong transpose is found."""
    for layout in _LAYOUTS:
        with columnwise_layout(layout):
            for words, quantizer in subject.quantizers():
                for shape in ((48, 40), (32, 32), (2, 12, 40)):
                    values = wide(*shape, seed=11)
                    for columnwise in (False, True):
                        quantized = quantizer.with_usage(not columnwise, columnwise)(values)
                        matrix, factor = quantized.gemm_operand(
                            columnwise=columnwise, dtype=torch.float32
                        )
                        actual = matrix.float() if factor is None else matrix.float() * factor
                        expected = values.reshape(-1, shape[-1])
                        direction = "columnwise" if columnwise else "rowwise"
                        title = (
                            f"the {direction} operand (gemm_operand) of a {tuple(shape)} "
                            f"tensor by {words}"
                        )
                        close(title, actual, expected, max(subject.bound, 0.02) * 1.5)
                        close(title, actual, plain(quantized).reshape(expected.shape), 0.01)


@check("products", "products", "The three products of a linear layer are those of the values")
def products(subject: Subject) -> None:
    """fprop, dgrad and wgrad, compared with products of dequantized and of original operands."""
    for layout in _LAYOUTS:
        with columnwise_layout(layout):
            by_role = _operands(subject, normal)
            (x, qx, qx_columns), (w, qw, qw_columns), (dy, qdy, qdy_columns) = by_role.values()
            cases: dict[str, tuple[Any, Any, torch.Tensor, Callable[[Any, Any], torch.Tensor]]] = {
                "fprop": (qx, qw, x @ w.t(), lambda a, b: a @ b.t()),
                "dgrad": (qdy, qw_columns, dy @ w, lambda a, b: a @ b),
                "wgrad": (qdy_columns, qx_columns, dy.t() @ x, lambda a, b: a.t() @ b),
            }
            for name, (a, b, expected, product) in cases.items():
                for dtype in (torch.float32, torch.bfloat16):
                    actual = gemm(a, b, name, out_dtype=dtype)  # type: ignore[arg-type]
                    require(
                        actual.dtype == dtype,
                        f"the {name} product with out_dtype={dtype} is of {actual.dtype}",
                    )
                    title = f"the {name} product of {type(a).__name__} and {type(b).__name__}"
                    close(title, actual, expected, subject.bound)
                    close(
                        f"{title}, against the dequantized operands,",
                        actual,
                        product(plain(a), plain(b)),
                        0.02,
                    )


@check(
    "accumulating-products",
    "products",
    "A product with out= is written there, and with accumulate=True added to what is there",
)
def accumulating_products(subject: Subject) -> None:
    """Weight gradients are added into main_grad in this way."""
    (_, qx, qx_columns), (_, qw, qw_columns), (_, qdy, qdy_columns) = _operands(
        subject, normal
    ).values()
    cases: dict[str, tuple[Any, Any]] = {
        "fprop": (qx, qw), "dgrad": (qdy, qw_columns), "wgrad": (qdy_columns, qx_columns)
    }  # fmt: skip
    for name, (a, b) in cases.items():
        kind: Any = name
        product = gemm(a, b, kind, out_dtype=torch.float32)
        start = normal(*product.shape, seed=30) * 5
        out = start.clone()
        returned = gemm(a, b, kind, out=out)
        require(returned is out, f"the {name} product with out= returns another tensor")
        close(f"the {name} product with out=", out, product, 1e-3, before=start)
        out = start.clone()
        gemm(a, b, kind, out=out, accumulate=True)
        require(
            not relative(out, product) <= 1e-3,
            f"gradients are lost under accumulation: the {name} product with accumulate=True "
            f"overwrites out",
        )
        require(
            not torch.equal(out, start),
            f"gradients are lost under accumulation: the {name} product with accumulate=True adds "
            f"nothing to out",
        )
        close(f"the {name} product with accumulate=True, added to out,", out, start + product, 1e-3)


@check("product-bias", "products", "A bias is added to the product")
def product_bias(subject: Subject) -> None:
    """The bias is added once, in full precision."""
    (_, qx, _), (_, qw, _), _ = _operands(subject, normal).values()
    bias = normal(_N, seed=3) * 10
    without = gemm(qx, qw, "fprop", out_dtype=torch.float32)
    actual = gemm(qx, qw, "fprop", out_dtype=torch.float32, bias=bias)
    close("the fprop product with a bias", actual, without + bias, 1e-4, before=without)
