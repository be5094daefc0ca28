"""Mistakes that an author of a recipe may make, each as a change of a few lines in what the
template gives.

Most are made in classes of one's own, as the template's README shows them; some in a recipe that is
a layout.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """One mistake.

    Attributes:
        name: what is wrong.
        changes: pairs of a text that stands in ``recipe.py`` once and what is put in its place.
        said: words that the kit's report has to have, each a regular expression.
        of_layout: whether that is the generated ``recipe.py``, and not the one that its README
            shows.
    """

    name: str
    changes: tuple[tuple[str, str], ...]
    said: tuple[str, ...]
    of_layout: bool = False

    def apply(self, source: str) -> str:
        """The source with the mistake."""
        for old, new in self.changes:
            assert source.count(old) == 1, (self.name, old)
            source = source.replace(old, new)
        return source


_TENSOR_BODY = '    """The same as a ``torch.Tensor``, for weights that are kept quantized."""\n'
_DEQUANTIZED = (
    "        return values.masked_fill(self._data == NAN, torch.nan).to(dtype or self.dtype)\n"
)
_ROWS = "    shards = ShardRule(rows=1)\n"
_RECIPE = "@dataclass(frozen=True)\nclass RowRecipe(Recipe):\n"

ALIASED_SCALE = Defect(
    "a clone that aliases its scale",
    (
        (
            _DEQUANTIZED,
            _DEQUANTIZED
            + '''
    def clone_storage(self) -> QuantizedTensorStorage:
        """A copy, of the data only."""
        (data, scale_inv, zero), spec = self.flatten_storage()
        return spec.build([data.clone(), scale_inv, zero.clone()])
''',
        ),
    ),
    ("clone-shares-nothing", r"writing to the clone's '_scale_inv' changed the original's"),
)

WRONG_TRANSPOSE = Defect(
    "a wrong transpose",
    (
        (
            _DEQUANTIZED,
            _DEQUANTIZED
            + '''
    def gemm_operand(
        self, *, columnwise: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The values; for products along columns in the order of a transposed matrix."""
        values, factor = super().gemm_operand(columnwise=columnwise, dtype=dtype)
        return (values.t().reshape(values.shape) if columnwise else values), factor
''',
        ),
    ),
    ("wrong transpose", r"columnwise operand \(gemm_operand\)"),
)

DROPPED_IN_PLACE_OP = Defect(
    "an in-place op that is dropped",
    (
        (
            _RECIPE,
            '''@implements(RowTensor, torch.ops.aten.mul_.Tensor, torch.ops.aten.add_.Tensor)
def in_place(op: Any, tensor: Any, other: Any, **options: Any) -> Any:
    """Compute, and keep the old data."""
    op(tensor.dequantize(), other, **options)
    return tensor


'''
            + _RECIPE,
        ),
        (
            "import InnerTensor, StaticField, check_values_dtype",
            "import InnerTensor, StaticField, check_values_dtype, implements",
        ),
    ),
    (r"an in-place op \(mul_\) on a RowTensor was dropped",),
)

RANDOM_CAST = Defect(
    "a cast that is not deterministic",
    (
        (
            "(finite / scale_inv).round()",
            "(finite / scale_inv + torch.rand_like(finite) - 0.5).round()",
        ),
    ),
    ("quantizing the same tensor twice gives different bytes", "is not deterministic"),
)

LOST_GRADIENTS = Defect(
    "gradients that are lost under accumulation",
    (
        (
            _ROWS,
            _ROWS
            + '''    custom = True

    def qgemm(
        self, qx: Any, qw: Any, *arguments: Any, accumulate: bool = False, **options: Any
    ) -> torch.Tensor:
        """The product, written over what was there."""
        names = ("m_params", "out_dtype", "sx", "sw", "bias", "out", "accumulate", "gemm_type")
        named = dict(zip(names, arguments))
        return super().qgemm(qx, qw, **(named | options | {"accumulate": False}))
''',
        ),
    ),
    ("gradients are lost under accumulation",),
)

PICKLED_CODE = Defect(
    "a pickle that needs code",
    (
        (
            _TENSOR_BODY,
            _TENSOR_BODY
            + """
    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_rows, (self._data, self._scale_inv, self._zero)
""",
        ),
        (
            "class RowQuantizer(Quantizer):\n",
            '''def rebuild_rows(*tensors: torch.Tensor, dtype: Any = torch.float32) -> RowTensor:
    """What a pickle calls."""
    named = dict(zip(("data", "scale_inv", "zero"), tensors))
    return RowTensor(**named, dtype=dtype, quantizer=RowQuantizer())


class RowQuantizer(Quantizer):
''',
        ),
    ),
    (r"the pickle of the RowTensor", r"needs code \(acme_rows\.recipe\.rebuild_rows\)"),
)

_GIVEN = "        return GridQuantizer(LAYOUT)\n"

RANDOM_LAYOUT = Defect(
    "a quantizer of a layout that is not deterministic",
    (
        (
            _RECIPE,
            '''class Dithered(GridQuantizer):
    """Noise before the values are rounded."""

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        """Quantize."""
        return super().quantize_impl(tensor * (1 + torch.rand_like(tensor) / 64), dtype)


'''
            + _RECIPE,
        ),
        (_GIVEN, "        return Dithered(LAYOUT)\n"),
    ),
    ("quantizing the same tensor twice gives different bytes", "is not deterministic"),
    of_layout=True,
)

WIDER_BLOCKS = Defect(
    "a layout with wider blocks than the spec says",
    (("Layout(torch.int8, (1, None))", "Layout(torch.int8, (8, None))"),),
    (r"block_size=\(1, None\) in the spec is not so",),
    of_layout=True,
)

COARSE_ELEMENTS = Defect(
    "a layout that is less exact than the spec says",
    (("Layout(torch.int8, (1, None))", "Layout(torch.float8_e5m2, (1, None))"),),
    ("linear", r"the output.* is off by 0\.07\d+ of its norm, where 0\.02 is allowed"),
    of_layout=True,
)

OF_CLASSES = (
    ALIASED_SCALE,
    WRONG_TRANSPOSE,
    DROPPED_IN_PLACE_OP,
    RANDOM_CAST,
    LOST_GRADIENTS,
    PICKLED_CODE,
)
DEFECTS = (*OF_CLASSES, RANDOM_LAYOUT, WIDER_BLOCKS, COARSE_ELEMENTS)
