"""Ways in which stored tensors are laid out otherwise, each undone."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ottava_verify.formats import magnitudes, numbers_of_scales
from ottava_verify.stored import Shapes, Stored

#: Stored tensors as the contract would have them; None where they are not laid out so.
View = Callable[[Stored, Shapes, str], Stored | None]

# Rows and columns of a tile of scales, as block-scaled products of GPUs read them.
_ROWS, _COLUMNS = 128, 4


def _padded(
    stored: Stored, shapes: Shapes, format: str, is_swizzled: bool = False
) -> Stored | None:
    """Row 32 a + b, column c of a swizzled tile lies at place 16 b + 4 a + c."""
    down, across = shapes.scales
    tiles = -(-down // _ROWS), -(-across // _COLUMNS)
    rows, columns = tiles[0] * _ROWS, tiles[1] * _COLUMNS
    if stored.scales.numel() != rows * columns:
        return None
    scales = stored.scales.reshape(rows, columns)
    if is_swizzled:
        scales = scales.reshape(*tiles, 32, 4, _COLUMNS).permute(0, 3, 2, 1, 4)
        scales = scales.reshape(rows, columns)
    return replace(stored, scales=scales[:down, :across])


def _swizzled(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    return _padded(stored, shapes, format, is_swizzled=True)


def _scales_transposed(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    scales, turned = stored.scales, shapes.scales[::-1]
    if scales.numel() != math.prod(turned) or 1 in turned:
        return None
    if scales.dim() > 1 and tuple(scales.shape) != turned:
        return None
    return replace(stored, scales=scales.reshape(turned).t())


def _data_transposed(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    data = stored.matrix()
    if tuple(data.shape) != shapes.data[::-1]:
        return None
    return replace(stored, data=data.t())


def _as_codes(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    """Numbers as the codes of a format; None unless all are numbers of it."""
    if stored.scales.dtype != torch.float32 or format == "float32":
        return None
    if format == "E8M0":
        codes = (torch.frexp(stored.scales).exponent + 126).clamp(0, 254)
    else:
        codes = torch.bucketize(stored.scales.contiguous(), magnitudes(format))
    codes = codes.to(torch.uint8)
    if not torch.equal(numbers_of_scales(codes, format), stored.scales):
        return None
    return replace(stored, scales=codes)


def _as_numbers(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    """Codes of E8M0 as the powers of two that they are."""
    if stored.scales.dtype != torch.uint8 or format != "float32":
        return None
    return replace(stored, scales=numbers_of_scales(stored.scales, "E8M0"))


def _repeated(stored: Stored, shapes: Shapes, format: str) -> Stored | None:
    """One number for each row or element, where one would do."""
    first = stored.scales.reshape(-1)[:1]
    if shapes.scales != (1, 1) or not bool((stored.scales == first).all()):
        return None
    return replace(stored, scales=first.view(1, 1))


#: By the names that the turns have in ``turns.toml``.
VIEWS: dict[str, View] = {
    "scales-padded": _padded,
    "scales-swizzled": _swizzled,
    "scales-transposed": _scales_transposed,
    "data-transposed": _data_transposed,
    "scales-as-numbers": _as_codes,
    "scales-as-codes": _as_numbers,
    "scales-repeated": _repeated,
}
