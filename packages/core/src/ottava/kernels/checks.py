"""The types of the arguments of kernels, and the checks that precede every read and write."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError
from ottava.formats import fp8_format
from ottava.layout import Layout, grid_of

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
_FLOATS = "torch.float32, torch.bfloat16 or torch.float16"

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
#: The results of a kernel, with None for each result that the caller does not ask for.
Outputs = Sequence[Tensor | None]
DTypes = Sequence[torch.dtype]
#: Rows and columns of each matrix.
Shapes = Sequence[tuple[int, int]]
Layouts = Sequence[Layout]
#: The scales and the data of one direction of each tensor; None leaves the direction out.
Pairs = Sequence[tuple[Tensor, Tensor] | None]


class Shards(NamedTuple):
    """Contiguous ranges of the elements of matrices.

    Attributes:
        xs: the ranges, as tensors of any shape.
        dtypes: the dtype to which the elements of each range are rounded first.
        shapes: rows and columns of the matrix to which each range belongs.
        starts: the position in the flattened matrix at which each range starts.
    """

    xs: Tensors
    dtypes: DTypes
    shapes: Shapes
    starts: Sequence[int]


def check_high_precision(x: Tensor, name: str = "input") -> None:
    """Raise DTypeError unless ``x`` is a strided tensor of float32, bfloat16 or float16."""
    if not isinstance(x, Tensor):
        raise DTypeError(
            f"{name} is a {type(x).__name__}", expected="a torch.Tensor", remedy="pass a tensor"
        )
    if x.dtype not in HIGH_PRECISION:
        remedy = "convert it first, for example with .to(torch.bfloat16)"
        raise DTypeError(f"{name} has dtype {x.dtype}", expected=_FLOATS, remedy=remedy)
    check_dense(x, name)


def check_dtype(dtype: object, name: str = "nominal dtype") -> None:
    """Raise DTypeError unless ``dtype`` is float32, bfloat16 or float16."""
    if dtype not in HIGH_PRECISION:
        raise DTypeError(f"{name} {dtype}", expected=_FLOATS)


def check_dense(x: Tensor, name: str) -> None:
    """Raise DTypeError for nested tensors and for other layouts than torch.strided.

    Nested tensors need their own check, because their layout may be torch.strided.
    """
    if x.is_nested:
        remedy = (
            "give tensor.values(), in which all rows lie one after the other, or a padded tensor"
        )
        raise DTypeError(
            f"{name} is nested ({x.layout})", expected="one tensor with a shape", remedy=remedy
        )
    # Dynamo cannot trace the layout inside a backward pass. Nothing is lost: the operators of a
    # graph check the layout again when they run.
    if not torch.compiler.is_compiling() and x.layout != torch.strided:
        raise DTypeError(
            f"{name} has layout {x.layout}",
            expected="a dense (strided) tensor",
            remedy="call .to_dense()",
        )


def check_tensor(x: object, name: str, dtype: torch.dtype, remedy: str = "") -> None:
    """Raise DTypeError unless ``x`` is a tensor of ``dtype``."""
    if not isinstance(x, Tensor) or x.dtype != dtype:
        kind = getattr(x, "dtype", type(x).__name__)
        raise DTypeError(f"{name} is of {kind}", expected=f"a tensor of {dtype}", remedy=remedy)


def check_scalar(scalar: Tensor, x: Tensor, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Raise an error unless ``scalar`` has one element, ``dtype``, and the device of ``x``."""
    check_tensor(
        scalar, name, dtype, f"torch.tensor(value, dtype={dtype}, device=x.device) makes one"
    )
    check_dense(scalar, name)
    if scalar.numel() != 1:
        raise ShapeError(f"{name} has shape {tuple(scalar.shape)}", expected="one element")
    check_device(scalar, x.device, name)


def check_data(data: Tensor) -> None:
    """Raise DTypeError unless ``data`` is a uint8 tensor."""
    check_tensor(data, "data", torch.uint8, "view a float8 tensor with .view(torch.uint8)")


def check_matrix(x: Tensor) -> None:
    """Raise ShapeError for a tensor without dimensions."""
    if x.dim() == 0:
        raise ShapeError(
            "a 0-dimensional tensor has no transpose", expected="at least one dimension"
        )


def check_layout(layout: object) -> None:
    """Raise DTypeError unless ``layout`` is a :class:`~ottava.Layout`."""
    if not isinstance(layout, Layout):
        raise DTypeError(f"the layout is a {type(layout).__name__}", expected="an ottava.Layout")


def check_grid(
    data: Tensor, scales: Tensor, layout: Layout, columnwise: bool, name: str = "the scales"
) -> None:
    """Raise an error unless ``scales`` fit the blocks of stored ``data``.

    Raises:
        DTypeError, ShapeError, DeviceError: dtype, shape or device is wrong.
    """
    check_layout(layout)
    check_data(data)
    if layout.elements_per_byte > 1 and not data.dim():
        raise ShapeError(
            f"data of {layout.element} elements have no dimensions",
            expected="at least one, because elements share bytes along the last",
        )
    check_tensor(scales, name, layout.stored_scale)
    expected = grid_of(
        layout.stored_matrix(data.shape, columnwise), layout.stored_block(columnwise)
    )
    if tuple(scales.shape) != expected:
        raise ShapeError(
            f"{name} of data {tuple(data.shape)} has shape {tuple(scales.shape)}",
            expected=f"{expected}, unpadded",
        )
    check_device(scales, data.device, name)


def check_amax(amax: Tensor, data: Tensor, layout: Layout, columnwise: bool) -> None:
    """Raise an error unless ``amax`` are those of the second level of stored data."""
    if layout.second_level == "none":
        raise OptionError(f"amax for {layout.text}", expected="a layout with a second level")
    check_tensor(amax, "amax", torch.float32)
    rows, columns = layout.stored_matrix(data.shape, columnwise)
    if columnwise and not layout.transposed:
        rows = columns
    expected = () if layout.second_level == "tensor" else (rows,)
    if tuple(amax.shape) != expected:
        raise ShapeError(
            f"amax of data {tuple(data.shape)} has shape {tuple(amax.shape)}",
            expected=f"{expected}",
        )
    check_device(amax, data.device, "amax")


def check_cast(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype, transposed: bool) -> None:
    """Raise an error unless ``x`` can be cast with a known ``scale``."""
    check_high_precision(x)
    check_scalar(scale, x, "scale")
    fp8_format(fp8_dtype)
    if transposed:
        check_matrix(x)


def check_epsilon(epsilon: float) -> None:
    """Raise OptionError unless ``epsilon`` is a finite number >= 0."""
    if isinstance(epsilon, bool) or not (
        isinstance(epsilon, (int, float)) and 0.0 <= epsilon < float("inf")
    ):
        raise OptionError(f"amax epsilon is {epsilon!r}", expected="a finite number >= 0")


def check_fits(x: Tensor, shape: tuple[int, ...], device: torch.device, name: str) -> None:
    """Raise an error unless ``x`` is a high-precision tensor of ``shape`` on ``device``."""
    check_high_precision(x, name)
    if tuple(x.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(x.shape)}", expected=str(shape))
    check_device(x, device, name)


def check_device(tensor: Tensor, device: torch.device, name: str) -> None:
    """Raise DeviceError unless ``tensor`` is on ``device``."""
    if tensor.device != device:
        raise DeviceError(
            f"{name} is on {tensor.device}, its operand on {device}",
            expected="the same device",
            remedy=f"move it with .to({str(device)!r})",
        )


def check_out(
    out: Tensor,
    shape: Sequence[int] | None,
    dtype: torch.dtype,
    device: torch.device,
    name: str = "out",
) -> None:
    """Raise an error unless ``out`` is contiguous and has this shape, dtype and device.

    With ``shape`` None any shape is accepted.
    """
    check_tensor(out, name, dtype)
    check_dense(out, name)
    fits = shape is None or tuple(out.shape) == tuple(shape)
    if not fits or not out.is_contiguous():
        expected = "one" if shape is None else tuple(shape)
        raise ShapeError(
            f"{name} has shape {tuple(out.shape)}", expected=f"a contiguous {expected}"
        )
    check_device(out, device, name)
