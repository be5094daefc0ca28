"""Operands of products, their products in float64, and what stands in for FP8 hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch

from ottava import Layout, kernels
from ottava.kernels import use_backend
from ottava.layout import as_matrix_shape
from ottava.tensors import Float8TensorStorage, PackedTensorStorage, QuantizedTensorStorage
from ottava.tensors.grid import GridTensorStorage
from tests import arrays
from tests.choosing import cpu_products, scaled_products

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
# The shapes of both operands of each kind of product, of (M, N, K).
SHAPES: dict[str, Callable[[int, int, int], Any]] = {
    "fprop": lambda m, n, k: ((m, k), (n, k)),
    "dgrad": lambda m, n, k: ((m, n), (n, k)),
    "wgrad": lambda m, n, k: ((m, n), (m, k)),
}
PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "fprop": lambda a, b: a @ b.t(),
    "dgrad": lambda a, b: a @ b,
    "wgrad": lambda a, b: a.t() @ b,
}
#: Whether each operand is read along its columns.
DIRECTIONS = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}
# Sizes that FP8 hardware takes as they are, ragged ones, and empty ones.
SIZES = [(64, 48, 32), (1, 1, 1), (17, 33, 65), (1, 16, 32), (0, 4, 3), (4, 0, 3), (4, 3, 0)]
# Half a unit in the last place.
ROUNDING = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}


def coded(
    shape: tuple[int, ...], seed: int, scale: float = 1e-3, element: torch.dtype = E4M3
) -> Float8TensorStorage:
    """Codes drawn from all finite ones, with one scale, columnwise data included."""
    generator = torch.Generator().manual_seed(seed)
    top = 0x7E if element == E4M3 else 0x7B
    data = torch.randint(0, top + 1, shape, dtype=torch.uint8, generator=generator)
    data |= torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator) << 7
    storage = Float8TensorStorage(
        data=data, fp8_scale_inv=torch.tensor(scale), fp8_dtype=element, dtype=BF16
    )
    storage.rebuild_derived()
    return storage


def blocks(shape: tuple[int, int], layout: Layout, seed: int = 0) -> GridTensorStorage:
    """Random values on a grid of blocks, each row of another magnitude."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[0])[:, None]
    sides = kernels.grid_quantize(values, layout)
    names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    return GridTensorStorage(**dict(zip(names, sides, strict=True)), layout=layout)


def pair(kind: str, sizes: tuple[int, int, int], *scales: float, formats: Any = FORMATS[0]) -> Any:
    """Both operands of a product."""
    shapes = SHAPES[kind](*sizes)
    scales = scales or (2.3e-3, 0.7e-3)
    return [coded(s, i, scales[i], formats[i]) for i, s in enumerate(shapes)]


def values(x: Any, *, columnwise: bool = False) -> torch.Tensor:
    """The float64 matrix that one direction of an operand stands for."""
    if isinstance(x, Float8TensorStorage):
        # Exact: a scale need not fit a code in float32.
        data, *_ = x.ordered(columnwise=False) or x.ordered(columnwise=True)
        matrix = data.contiguous().view(x._fp8_dtype).double() * x._scale_inv.double()
    elif isinstance(x, PackedTensorStorage):
        matrix = _packed_values(x, columnwise)
    elif isinstance(x, QuantizedTensorStorage) and x.grid_layout is not None:
        layout = x.grid_layout
        side = columnwise and not layout.one_buffer
        data, scales, _ = x.for_usage(side)
        matrix = arrays.decode(data, scales, layout, columnwise=side, dtype=torch.float64)
        matrix = matrix.movedim(0, -1) if side and layout.transposed else matrix
    else:
        matrix = x.detach().double()
    return matrix.reshape(matrix.shape[:-1].numel(), matrix.shape[-1])


def _packed_values(x: PackedTensorStorage, columnwise: bool) -> torch.Tensor:
    """The float64 matrix of a packed direction as products read it: rotated values in whole
    groups."""
    layout = x.grid_layout
    data, scales, amax = x.for_usage(columnwise)
    decoded = kernels.grid_decode(
        data, scales, layout, torch.float64, columnwise=columnwise, amax=amax
    )
    matrix = decoded.reshape(layout.stored_matrix(data.shape, columnwise))
    if columnwise and layout.transposed:
        matrix = matrix.t()
    rows, columns = layout.padded(as_matrix_shape(x.size()), columnwise)
    return matrix[:rows, :columns]


#: How a CPU multiplies: what it is told to have, or torch's own product of FP8 operands.
WAYS = ("reference", "fast bfloat16", "float32", "hardware")


def chosen(way: str) -> AbstractContextManager[object]:
    """Inside, a CPU multiplies in this way."""
    if way == "reference":
        return use_backend("reference")
    stack = ExitStack()
    stack.enter_context(use_backend("cpu"))
    stack.enter_context(cpu_products(F32 if way == "float32" else BF16))
    if way == "hardware":
        stack.enter_context(scaled_products())
    return stack


class Case(NamedTuple):
    """A bias and a dtype of the result of a product."""

    dtype: torch.dtype
    bias: torch.Tensor | None


def cases(columns: int) -> Iterator[Case]:
    """Every dtype of a result with no bias, and biases of any dtype, stride and address."""
    wide = torch.randn(columns + 1, 2)
    for dtype in (F32, BF16, F16):
        for bias in (None, wide[1:, 0], wide[1:, 0].bfloat16().contiguous(), wide.half()[1:, 1]):
            yield Case(dtype, bias)


def check(got: torch.Tensor, a: Any, b: Any, kind: str, **options: Any) -> None:
    """Sums in float32 of exact products, and one rounding: see `far`."""
    assert got.is_contiguous()
    differs, exact = far(got, a, b, kind, **options)
    note = kind, got.dtype, options.get("bias") is not None
    assert not differs.any(), (note, got.reshape(exact.shape)[differs], exact[differs])


def far(
    got: torch.Tensor, a: Any, b: Any, kind: str, *, directions: Any = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which elements are no product of the operands, and the exact product.

    Args:
        directions: whether each operand is read along its columns; by default as products do.
        options: ``bias`` and ``start`` are added; ``roundings`` is 2 where the product may be
            rounded before they are, and before scales are applied.
    """
    left, right = (
        values(x, columnwise=side)
        for x, side in zip((a, b), directions or DIRECTIONS[kind], strict=True)
    )
    exact, size = PRODUCTS[kind](left, right), PRODUCTS[kind](left.abs(), right.abs())
    unit = 1.01 * ROUNDING[got.dtype]
    earlier = unit * exact.abs() if options.get("roundings", 1) == 2 else 0.0
    for term in (options.get("bias"), options.get("start")):
        if term is not None:
            exact, size = exact + term.detach().double(), size + term.detach().double().abs()
    inner = left.shape[0 if kind == "wgrad" else 1]
    bound = (inner + 4) * 2.0**-24 * size + unit * exact.abs() + earlier
    difference = (got.detach().double().reshape(exact.shape) - exact).abs()
    return ~(difference <= bound * 1.01 + torch.finfo(got.dtype).tiny), exact


class Library:
    """torch's ``_scaled_mm``, with what a GPU's asks for: sizes, addresses, layouts, and the dtype
    of a bias.

    Attributes:
        capability: of the GPU; 0 calls torch's function for the CPU.
        calls: the arguments of each call.
    """

    def __init__(self, capability: int, function: Callable[..., torch.Tensor]) -> None:
        self.capability, self.function = capability, function
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any) -> torch.Tensor:
        names = ("a", "b", "scale_a", "scale_b", "bias", "scale_result", "dtype", "fast")
        call = dict(zip(names, args, strict=True))
        self.calls.append(call)
        if not self.capability:
            return self.function(*args)
        a, b, bias, dtype = call["a"], call["b"], call["bias"], call["dtype"]
        assert a.shape[1] == b.shape[0]
        assert min(*a.shape, *b.shape) > 0
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert {a.dtype, b.dtype} <= {E4M3, E5M2}
        assert (a.dtype, b.dtype) != (E5M2, E5M2)
        for matrix in (a, b.t()):
            assert matrix.data_ptr() % 16 == max(matrix.stride()) % 16 == 0
            turned = 100 <= self.capability < 120 and _is_row_major(matrix.t())
            assert _is_row_major(matrix) or turned
        scales = self._scales(call)
        assert call["scale_result"] is None
        result = a.float().double() @ b.float().double() * scales[0].double() * scales[1].double()
        if bias is not None:
            assert bias.dtype == dtype != F32
            assert bias.shape == (b.shape[1],)
            assert bias.is_contiguous()
            assert bias.data_ptr() % 16 == 0
            result = result + bias.double()
        return result.to(dtype)

    def _scales(self, call: dict[str, Any]) -> list[torch.Tensor]:
        a, b, scales = call["a"], call["b"], [call["scale_a"], call["scale_b"]]
        assert scales[0].dtype == scales[1].dtype == F32
        if scales[0].numel() == scales[1].numel() == 1:
            return [scale.reshape(()) for scale in scales]
        assert self.capability >= 90
        assert _is_row_major(a)
        assert _is_row_major(b.t())
        assert [scale.shape for scale in scales] == [(a.shape[0], 1), (1, b.shape[1])]
        assert all(scale.is_contiguous() for scale in scales)
        assert (call["dtype"], b.dtype) == (BF16, E4M3)
        return scales


def _is_row_major(matrix: torch.Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
