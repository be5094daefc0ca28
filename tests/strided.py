"""Views of a quantized tensor lie in its storage where torch says that those of a plain tensor
do."""

from __future__ import annotations

from typing import Any

import torch

from ottava import QuantizedTensor
from ottava.errors import UsageError

#: What is made of a tensor [96, 64].
VIEWS: dict[str, Any] = {
    "rows": lambda t: t[4:8],
    "rows of blocks": lambda t: t[32:64],
    "rows of rows": lambda t: t[32:][32:],
    "no rows": lambda t: t[99:],
    "detached rows": lambda t: t[32:].detach(),
    "split": lambda t: t.split(32)[2],
    "columns": lambda t: t[:, 32:],
    "rows of the transpose": lambda t: t.t()[32:],
    "one row": lambda t: t[3],
}
#: Those that are rows.
ROWS = {"rows", "rows of blocks", "rows of rows", "no rows", "detached rows", "split"}
# Sizes and strides, to begin with the view, or so much later, or at a place of the whole's storage.
_LAYOUTS = [
    ((2, 64), (64, 1)),
    ((32, 64), (64, 1)),
    ((3, 2), (64, 1)),
    ((16, 16), (1, 64)),
    ((4, 32), (32, 1)),
]


def check_places(whole: QuantizedTensor, expected_views: set[str]) -> None:
    """Offsets of views, and ``as_strided`` of them, are those of the dequantized tensor."""
    values, kept = whole.dequantize(), set()
    for name, take in VIEWS.items():
        view, plain = take(whole), take(values)
        if type(view) is not type(whole):
            continue
        kept.add(name)
        assert (view.storage_offset(), view.stride()) == (plain.storage_offset(), plain.stride()), (
            name
        )
        own = plain.storage_offset()
        asked: list[tuple[Any, ...]] = [
            (plain.shape, plain.stride()),
            (plain.shape, plain.stride(), own),
        ]
        asked += [
            (*layout, *place)
            for layout in _LAYOUTS
            for place in ((), (own + 7,), (0,), (64 * 33,), (64 * 32,))
        ]
        for arguments in asked:
            _check_strided(view, plain, arguments, f"{name} as_strided{arguments}")
    assert kept == expected_views


def _check_strided(view: Any, plain: torch.Tensor, arguments: tuple[Any, ...], note: str) -> None:
    expected, made = (_strided(tensor, arguments) for tensor in (plain, view))
    if made is None:
        # A view has no elements but its own, and tells where these are only if there are no others
        # in between.
        assert expected is None or not _is_inside(plain, expected), note
        return
    assert expected is not None, note
    if isinstance(made, QuantizedTensor):
        assert (made.storage_offset(), made.stride()) == (
            expected.storage_offset(),
            expected.stride(),
        ), note
        made = made.dequantize()
    assert torch.equal(made, expected), note


def _strided(tensor: Any, arguments: tuple[Any, ...]) -> Any:
    try:
        return tensor.as_strided(*arguments)
    except (RuntimeError, UsageError):
        return None


def _is_inside(plain: torch.Tensor, part: torch.Tensor) -> bool:
    (first, last), (start, end) = _range(plain), _range(part)
    return plain.numel() == last - first and first <= start and end <= last


def _range(plain: torch.Tensor) -> tuple[int, int]:
    first = plain.storage_offset()
    return first, first + 1 + sum(
        (n - 1) * stride for n, stride in zip(plain.shape, plain.stride(), strict=True)
    )
