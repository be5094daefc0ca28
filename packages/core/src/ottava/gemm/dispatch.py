"""The three GEMMs, and which product computes one: the first that takes both operands.

1. ``qgemm`` of a quantizer whose user defined it.
2. The product of hardware that multiplies such elements as they are.
3. The product of the decoded values, which takes everything.
"""

from __future__ import annotations

from typing import Literal

import torch

from ottava.errors import DeviceError, OptionError, ShapeError, UsageError
from ottava.gemm.decoded import decoded_mm
from ottava.gemm.operand import Matrix, dense_side, side_of, stored
from ottava.gemm.scaled import product_of
from ottava.kernels import check_high_precision
from ottava.kernels.checks import check_dtype, check_fits
from ottava.kernels.products import compute_dtype, without_autocast
from ottava.kernels.table import rounded
from ottava.layout import Layout, as_matrix_shape
from ottava.tensors.operand import Side
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage

Tensor = torch.Tensor
GemmType = Literal["fprop", "dgrad", "wgrad"]

#: GEMM -> whether the product sums over the rows of ``a``, and whether over those of ``b``: whether
#: it reads their columnwise data.
BY_COLUMN: dict[str, tuple[bool, bool]] = {
    "fprop": (False, False),
    "dgrad": (False, True),
    "wgrad": (True, True),
}


def gemm(
    a: Tensor | QuantizedTensorStorage,
    b: Tensor | QuantizedTensorStorage,
    gemm_type: GemmType = "fprop",
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = True,
) -> Tensor:
    """The product for ``gemm_type``, in ``out_dtype``.

    =========  ======================  =================  ========
    gemm_type  a                       b                  result
    =========  ======================  =================  ========
    fprop      ``input [*, K]``        ``weight [N, K]``  ``[M, N]``
    dgrad      ``grad_output [*, N]``  ``weight [N, K]``  ``[M, K]``
    wgrad      ``grad_output [*, N]``  ``input [*, K]``   ``[N, K]``
    =========  ======================  =================  ========

    Sums are float32. Scales multiply them in float32, before the result is rounded to
    ``out_dtype``:

    - a scale for the tensor or for each row multiplies the whole sums,
    - a scale for each block multiplies the partial sums of the block,
    - scales that are powers of two are part of the operands' values.

    Hardware that multiplies FP8 reads the data. Elsewhere data are decoded, exactly within
    float32's normal range. The numerics page tells of one more rounding on CPUs with a fast product
    of bfloat16.

    Args:
        bias: ``[N]``, added in float32.
        out: write the result here (any high-precision dtype); with ``accumulate`` add it to the
            values of ``out``.
        use_split_accumulator: False allows fast accumulation where the hardware has it.

    Raises:
        OptionError: unknown ``gemm_type``, or ``accumulate`` without ``out``.
        ShapeError, DTypeError, DeviceError: operands that do not fit together.
    """
    if not isinstance(gemm_type, str) or gemm_type not in BY_COLUMN:
        raise OptionError(f"gemm_type is {gemm_type!r}", expected="fprop, dgrad or wgrad")
    if accumulate and out is None:
        raise OptionError(
            "accumulate=True without out",
            expected="the tensor to add to",
            remedy="pass out=main_grad",
        )
    sizes: list[int] = []
    for name, x, summed in zip("ab", (a, b), BY_COLUMN[gemm_type], strict=True):
        if not isinstance(x, QuantizedTensorStorage):
            check_high_precision(x, f"operand {name}")
        if not (size := tuple(x.size())):
            raise ShapeError(f"operand {name} has no dimensions", expected="at least one")
        sizes += reversed(as_matrix_shape(size)) if summed else as_matrix_shape(size)
    rows, inner, columns, reduced = sizes
    if a.device != b.device:
        raise DeviceError(f"operands on {a.device} and {b.device}", expected="one device")
    if inner != reduced:
        raise ShapeError(
            f"{gemm_type} of {tuple(a.size())} and {tuple(b.size())}: reduced dimensions "
            f"{inner} and {reduced}",
            expected="equal ones",
        )
    if bias is not None:
        check_fits(bias, (columns,), a.device, "bias")
        bias = bias.detach()
    if out is not None:
        check_fits(out, (rows, columns), a.device, "out")
    check_dtype(out_dtype if out is None else out.dtype, "result dtype")
    return multiply(a, b, gemm_type, out_dtype, bias, out, accumulate, use_split_accumulator)


def multiply(
    a: Matrix,
    b: Matrix,
    gemm_type: GemmType,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = True,
) -> Tensor:
    """:func:`gemm` for those whose operands fit together: nothing is checked, and ``bias`` needs no
    gradient."""
    result_dtype = out_dtype if out is None else out.dtype
    owner = _custom_quantizer(a) or _custom_quantizer(b)
    if owner is not None:
        return _product_of_user(
            owner, stored(a), stored(b), gemm_type, result_dtype, bias, out, accumulate
        )
    # Adding into out must round once: the product stays float32 until the sum.
    dtype = torch.float32 if accumulate else result_dtype
    result = _product(a, b, gemm_type, dtype, bias, not use_split_accumulator)
    if out is None:
        return result
    if accumulate:
        return out.add_(result)
    return out.copy_(result)


def _product(
    a: Matrix, b: Matrix, gemm_type: GemmType, dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    a_by_column, b_by_column = BY_COLUMN[gemm_type]
    left, right = side_of(a, a_by_column), side_of(b, b_by_column)
    check_rotations(left, right, gemm_type)
    if left is not None and right is not None:
        of_elements = product_of(left, right)
        if of_elements is not None:
            return of_elements(left, right, bias, dtype, fast)
    exact = _is_exact_in_bfloat16(a, left) and _is_exact_in_bfloat16(b, right)
    compute = compute_dtype(a.device, dtype, exact)
    if left is None:
        left = dense_side(a, a_by_column, compute)
    if right is None:
        right = dense_side(b, b_by_column, compute)
    return decoded_mm(left, right, bias, dtype, compute)


def check_rotations(left: Side | None, right: Side | None, gemm_type: str) -> None:
    """Refuse operands of which one is rotated along the summed dimension, or both differently.

    None stands for an operand in high precision, which is not rotated.

    Raises:
        UsageError: the rotations would not cancel in the product.
    """
    rotations = [None if side is None else _rotation_of(side) for side in (left, right)]
    if rotations[0] == rotations[1]:
        return
    first, second = map(_rotation_in_words, rotations)
    raise UsageError(
        f"{gemm_type} of an operand that is {first} and one that is {second}",
        expected="two operands with the same rotation along the summed dimension",
        remedy="quantize both by layouts with the same rotation",
    )


def _rotation_in_words(rotation: tuple[int, int] | None) -> str:
    if rotation is None:
        return "not rotated"
    size, signs = rotation
    return f"rotated in groups of {size} with signs {signs:#x}"


def _rotation_of(side: Side) -> tuple[int, int] | None:
    """Size and signs of the rotation of the values of a side; None if they are not rotated."""
    if not side.is_quantized():
        return None
    rotation = Layout.of(side.layout).rotation
    if rotation is None or not rotation.turns(side.columnwise):
        return None
    return rotation.size, rotation.signs


def _is_exact_in_bfloat16(x: Matrix, side: Side | None) -> bool:
    """Whether bfloat16 holds the values of an operand: elements fit, other values have the dtype of
    the matrix."""
    return side is not None or x.dtype == torch.bfloat16


def has_own_product(x: QuantizedTensorStorage) -> bool:
    """Whether the quantizer of a storage multiplies by its user's ``qgemm``."""
    return _custom_quantizer(x) is not None


def _custom_quantizer(x: Matrix) -> Quantizer | None:
    """The quantizer of a storage whose products its user defined."""
    if not isinstance(x, QuantizedTensorStorage):
        return None
    quantizer: Quantizer | None = x._quantizer
    if quantizer is None or not quantizer.custom:
        return None
    return quantizer


def _product_of_user(
    owner: Quantizer,
    a: Tensor | QuantizedTensorStorage,
    b: Tensor | QuantizedTensorStorage,
    gemm_type: GemmType,
    result_dtype: torch.dtype,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
) -> Tensor:
    scales = _scale_of(a), _scale_of(b)
    with without_autocast(a.device.type):
        result = owner.qgemm(
            a, b, None, result_dtype, *scales, bias, out, accumulate, gemm_type, a, b
        )
    return rounded(result) if out is None else result


def _scale_of(x: Tensor | QuantizedTensorStorage) -> Tensor | None:
    """The scale of an operand that has one. The view is made here, where the compiler sees it."""
    scalar = getattr(x, "_scalar", None)
    if scalar is None:
        return getattr(x, "_scale_inv", None)
    return scalar.view(1)  # type: ignore[no-any-return]
