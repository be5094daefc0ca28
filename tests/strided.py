"""Views of a quantized tensor lie in its storage where torch says that those of a plain tensor do."""

from __future__ import annotations

from typing import Any

import torch

from ottava import QuantizedTensor

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
_LAYOUTS = [((2, 64), (64, 1)), ((32, 64), (64, 1)), ((3, 2), (64, 1)), ((16, 16), (1, 64)), ((4, 32), (32, 1))]


def check_places(whole: QuantizedTensor, expected_views: set[str]) -> None:
    """Offsets of views, and ``as_strided`` of them, are those of the dequantized tensor."""
    values, kept = whole.dequantize(), set()
    for name, take in VIEWS.items():
        view, plain = take(whole), take(values)
        if type(view) is not type(whole):
            continue
        kept.add(name)
        assert (view.storage_offset(), view.stride()) == (plain.storage_offset(), plain.stride()), name
        own = plain.storage_offset()
        asked: list[tuple[Any, ...]] = [(plain.shape, plain.stride()), (plain.shape, plain.stride(), own)]
        asked += [(*layout, *place) for layout in _LAYOUTS for place in ((), (own + 7,), (0,), (64 * 33,), (64 * 32,))]
        for arguments in asked:
            _check_strided(view, plain, arguments, f"{name} as_strided{arguments}")
    assert kept == expected_views


def _check_strided(view: Any, plain: torch.Tensor, arguments: tuple[Any, ...], note: str) -> None:
    try:
        expected = plain.as_strided(*arguments)
    except RuntimeError:
        expected = None
    try:
        made = view.as_strided(*arguments)
    except RuntimeError:
        made = None
    assert (made is None) == (expected is None), note
    if expected is None:
        return
    if isinstance(made, QuantizedTensor):
        assert (made.storage_offset(), made.stride()) == (expected.storage_offset(), expected.stride()), note
        made = made.dequantize()
    assert torch.equal(made, expected), note
