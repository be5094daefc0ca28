"""Ways in which stored tensors are laid out otherwise, each undone."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ottava_verify.numbers import format_of
from ottava_verify.stored import Shapes, Stored, power_of_two

Tensor = torch.Tensor
#: Stored tensors as the contract would have them; None where they are not laid out so.
View = Callable[[Stored, Shapes, str], Stored | None]

# Rows and columns of a tile of scales, as block-scaled products of GPUs read them.
_ROWS, _COLUMNS = 128, 4


def _padded(shapes: Shapes) -> tuple[int, int]:
    down, across = shapes.scales
    return down + -down % _ROWS, across + -across % _COLUMNS


def _cropped(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    padded = _padded(shapes)
    if stored.scales.numel() != padded[0] * padded[1]:
        return None
    return _with_scales(stored, shapes, stored.scales.reshape(padded))


def _swizzled(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    """Row 32 a + b, column c of a tile lies at place 16 b + 4 a + c."""
    down, across = _padded(shapes)
    if stored.scales.numel() != down * across:
        return None
    tiles = stored.scales.reshape(down // _ROWS, across // _COLUMNS, 32, 4, _COLUMNS)
    rows = tiles.permute(0, 3, 2, 1, 4).reshape(down, across)
    return _with_scales(stored, shapes, rows)


def _with_scales(stored: Stored, shapes: Shapes, padded: Tensor) -> Stored:
    down, across = shapes.scales
    return replace(stored, scales=padded[:down, :across])


def _scales_transposed(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    down, across = shapes.scales
    if stored.scales.numel() != down * across:
        return None
    if 1 in (down, across):
        return stored
    if stored.scales.dim() > 1 and tuple(stored.scales.shape) != (across, down):
        return None
    return replace(stored, scales=stored.scales.reshape(across, down).t())


def _data_transposed(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    data = stored.matrix().data
    if tuple(data.shape) != shapes.data[::-1]:
        return None
    return replace(stored, data=data.t())


def _as_codes(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    """Numbers as the codes of a format; None unless all are numbers of it."""
    if stored.scales.dtype != torch.float32 or format == "float32":
        return None
    if format == "E8M0":
        fraction, exponent = torch.frexp(stored.scales)
        if not bool(((fraction == 0.5) & (exponent >= -126)).all()):
            return None
        return replace(stored, scales=(exponent + 126).to(torch.uint8))
    magnitudes = torch.tensor(format_of(format).magnitudes)
    codes = torch.bucketize(stored.scales.contiguous(), magnitudes)
    if not torch.equal(magnitudes[codes.clamp(max=len(magnitudes) - 1)], stored.scales):
        return None
    return replace(stored, scales=codes.to(torch.uint8))


def _as_numbers(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    """Codes of E8M0 as the powers of two that they are."""
    if stored.scales.dtype != torch.uint8 or format != "float32":
        return None
    return replace(stored, scales=power_of_two(stored.scales.int() - 127))


def _repeated(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    """One number for each row or element, where one would do."""
    if stored.scales.numel() <= shapes.scales[0] * shapes.scales[1] or shapes.scales != (1, 1):
        return None
    first = stored.scales.reshape(-1)[:1]
    if not bool((stored.scales == first).all()):
        return None
    return replace(stored, scales=first.view(1, 1))


#: Name, sentence and view of each.
VIEWS: tuple[tuple[str, str, View], ...] = (
    ("scales-padded", "scales are padded to tiles of 128 x 4", _cropped),
    (
        "scales-swizzled",
        "scales are padded to tiles of 128 x 4 and in the order that products of GPUs read",
        _swizzled,
    ),
    ("scales-transposed", "scales are transposed", _scales_transposed),
    ("data-transposed", "data are transposed", _data_transposed),
    ("scales-as-numbers", "scales are stored as float32, not as codes", _as_codes),
    ("scales-as-codes", "scales are stored as codes of E8M0, not as float32", _as_numbers),
    ("scales-repeated", "the one scale of the tensor is stored many times", _repeated),
)
