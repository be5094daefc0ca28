"""What the folders of recipes whose quantizers have layouts test alike. The bytes of a layout are
those of ``tests/core/layouts``; here a quantizer is one of its layout."""

from __future__ import annotations

from typing import Any

import torch

from ottava import GridQuantizer, Layout
from ottava.debug import fake_quantize
from tests import arrays
from tests.comparing import assert_same
from tests.samples import DTYPES, special, wide

SHAPES = ((), (0, 3), (1,), (33, 65), (2, 5, 130))


def assert_quantizes_by(quantizer: Any, layout: Layout) -> None:
    """The quantizer has the layout and the bytes of its oracle, for ragged and special values."""
    assert quantizer.layout == layout
    samples = [wide(130, 140, dtype=dtype) for dtype in DTYPES]
    samples += [wide(2, 3, 5), wide(0, 7), *(x for _, x in special(torch.bfloat16))]
    for x in samples:
        assert_same(list(quantizer(x).inner_list()), list(arrays.quantize(x, layout)))


def assert_fake_quantizes(name: str, layout: Layout) -> None:
    """A format has the values of a layout along rows, and the gradient of the identity."""
    rows = GridQuantizer(layout, columnwise=False)
    for shape in SHAPES:
        for dtype in DTYPES:
            x = wide(*shape, dtype=dtype, sigma=1.0)
            expected = rows(x).dequantize()
            x.requires_grad_()
            got = fake_quantize(x, name)
            assert_same(got, expected)
            got.sum().backward()
            assert_same(x.grad, torch.ones_like(x))


def assert_made_of(q: Any, cls: type, shapes: dict[str, tuple[int, ...]], **options: Any) -> Any:
    """A tensor has attributes for its parts, ``shapes`` by name, and is made of them again.

    Args:
        q: the tensor.
        cls: its class.
        shapes: the shapes of the parts by the names that the constructor has for them.
        options: what the constructor takes besides the parts.
    """
    assert type(q) is cls
    parts = {name: getattr(q, f"_{name}") for name in shapes}
    assert {name: tuple(part.shape) for name, part in parts.items()} == shapes
    made = cls(**parts, dtype=q.dtype, **options)
    assert_same(made.dequantize(), q.dequantize())
    return made


def parts_of(q: Any, **options: Any) -> dict[str, Any]:
    """The arguments that make a tensor again."""
    inner = zip(q.inner_tensors, q.inner_list(), strict=True)
    return {each.argument: tensor for each, tensor in inner} | {"dtype": q.dtype} | options
