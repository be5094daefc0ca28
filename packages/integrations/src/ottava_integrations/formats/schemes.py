"""The table of published formats: how each stores the weight of a layer.

A *format* is what a configuration names (``"float-quantized"``, ``"fp8"``). A *scheme* is one way
in which a format stores a weight: with one scale for the tensor, say. A format has one or more.

Sources: the files that compressed-tensors 0.20, Transformers 5.24 and torchao 0.18 write, and
``hf_quant_config.json`` of published ModelOpt checkpoints.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch

from ottava.errors import OptionError
from ottava.layout import Block, grid_of
from ottava.recipes import Recipe, get_recipe


class Library(Enum):
    """The libraries whose formats the table has, by the name that users know."""

    COMPRESSED_TENSORS = "compressed-tensors"
    TRANSFORMERS = "Hugging Face FP8"
    MODELOPT = "ModelOpt"
    TORCHAO = "torchao"


@dataclass(frozen=True)
class Names:
    """What follows the name of a layer and a dot, in the names of its tensors.

    Attributes:
        data: of the elements.
        scales: of the scales of blocks.
        level: of the one scale of the tensor, beside those of its blocks; empty without one.
        input_scale: of the scale of the layer's input, where that is constant.
    """

    data: str
    scales: str
    level: str = ""
    input_scale: str = ""


@dataclass(frozen=True)
class RecipeChoice:
    """An installed recipe by name, with options.

    Attributes:
        name: of the recipe.
        options: names and values, in the place of the recipe's defaults.
    """

    name: str
    options: tuple[tuple[str, object], ...] = ()

    @classmethod
    def of(cls, name: str, **options: object) -> "RecipeChoice":
        """The choice with options as keywords."""
        return cls(name, tuple(options.items()))

    def make(self, **options: object) -> Recipe:
        """The recipe; ``options`` come before those of the choice.

        Raises:
            RecipeNotFoundError, PluginError: the package of the recipe is not installed.
            OptionError: the recipe refuses an option.
        """
        return get_recipe(self.name, **(dict(self.options) | options))


@dataclass(frozen=True)
class Scheme:
    """How a format stores the weight ``[out, in]`` of a layer.

    Attributes:
        format: the name of the format in :data:`FORMATS`.
        grain: ``"tensor"``, ``"channel"``, ``"block"`` or ``"group"``: what has one scale.
        library: whose format it is.
        element: the format of elements, as in :class:`ottava.Layout`.
        block: rows and columns that share a scale, where None means all.
        scale_dtype: of the scales in the file; None for the dtype of the layer's values. uint8 and
            float8_e8m0fnu have codes of E8M0.
        names: of the tensors.
        level_multiplies: whether the scale of the tensor multiplies when dequantizing, or divides.
        loads_as: the recipe whose weights have this scheme, with any scales.
        exports_as: the recipe that quantizes weights for it, whose scales the file can hold.
        activations: what has one scale in inputs as the format's servers quantize them by default:
            a word of :meth:`input_choice`, or ``"none"``.
        flat_scale: the shape of the one scale of a tensor.
        whole_rows: whether blocks have to divide the rows, too. They always divide the columns.
    """

    format: str
    grain: str
    library: Library
    element: torch.dtype | str
    block: Block
    scale_dtype: torch.dtype | None
    names: Names
    loads_as: RecipeChoice
    exports_as: RecipeChoice
    activations: str
    level_multiplies: bool = False
    flat_scale: tuple[int, ...] = (1,)
    whole_rows: bool = False

    def __str__(self) -> str:
        return f"{self.format}, {self.grain}"

    @property
    def is_packed(self) -> bool:
        """Whether two elements share a byte."""
        return self.element == "E2M1"

    def input_choice(self, activations: str) -> RecipeChoice:
        """The recipe that quantizes inputs as servers of the format do.

        Args:
            activations: what has one scale: the ``"tensor"``, a ``"token"``, a ``"block"`` of 128
                elements, or a ``"group"``, as in the weight.

        Raises:
            OptionError: it is another word.
        """
        choices = {"token": _ROWWISE, "tensor": _CURRENT, "block": _BLOCKWISE}
        if self.scale_dtype is torch.float8_e8m0fnu and self.grain == "block":
            # Servers of powers of two have powers of two for inputs, too, rounded up.
            choices["block"] = _BLOCKWISE_POWERS
        if self.grain == "group":
            choices["group"] = self.loads_as
        if activations not in choices:
            raise OptionError(
                f"activations {activations!r} of {self}",
                expected=f"one of {', '.join((*choices, 'none'))}",
            )
        return choices[activations]

    def divides(self, shape: tuple[int, int]) -> bool:
        """Whether blocks divide a weight ``[out, in]``; others stay in high precision."""
        sides = zip(shape, self.block, (self.whole_rows, True), strict=True)
        return all(side is None or not whole or size % side == 0 for size, side, whole in sides)

    def divides_columns(self, shape: tuple[int, int]) -> bool:
        """Whether blocks divide the columns of a weight ``[out, in]``, as of all published files.

        Some, those of DeepSeek-V3 among them, have parts of blocks in their last rows.
        """
        across = self.block[1]
        return across is None or shape[1] % across == 0

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """The shape of the scales of a weight ``[out, in]``."""
        if self.block == (None, None):
            return self.flat_scale
        return tuple(grid_of(shape, self.block))

    def data_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of the data of a weight ``[out, in]``, in bytes."""
        rows, columns = shape
        return rows, -(-columns // 2) if self.is_packed else columns


_E4M3 = torch.float8_e4m3fn
_WHOLE: Block = (None, None)
_ROW: Block = (1, None)
_SQUARE: Block = (128, 128)

_CURRENT = RecipeChoice.of("current", fp8_format="E4M3")
_CURRENT_POWERS = RecipeChoice.of("current", fp8_format="E4M3", force_pow_2_scales=True)
_ROWWISE = RecipeChoice.of("rowwise")
_ROWWISE_POWERS = RecipeChoice.of("rowwise", force_pow_2_scales=True)
_BLOCKWISE = RecipeChoice.of("blockwise", force_pow_2_scales=False)
_BLOCKWISE_POWERS = RecipeChoice.of("blockwise", force_pow_2_scales=True)
_MXFP8 = RecipeChoice.of("mxfp8")
_MXFP4 = RecipeChoice.of("mx", element="MXFP4")
_NVFP4 = RecipeChoice.of("nvfp4", disable_2d_quantization=True, disable_rht=True)

# compressed-tensors stores these scales in the dtype of the layer's values. Powers of two are exact
# in all of them, so weights are quantized with those.
_FLOAT_GRAINS = (
    ("channel", _ROW, _ROWWISE, _ROWWISE_POWERS, "token"),
    ("tensor", _WHOLE, _CURRENT, _CURRENT_POWERS, "tensor"),
    ("block", _SQUARE, _BLOCKWISE, _BLOCKWISE_POWERS, "block"),
)


def _float_quantized(format: str, weight_only: bool) -> Iterator[Scheme]:
    """The schemes of compressed-tensors for FP8 with numbers as scales."""
    for grain, block, recipe, powers, activations in _FLOAT_GRAINS:
        yield Scheme(
            format=format,
            grain=grain,
            library=Library.COMPRESSED_TENSORS,
            element=_E4M3,
            block=block,
            scale_dtype=None,
            names=Names("weight", "weight_scale", input_scale="input_scale"),
            loads_as=recipe,
            exports_as=powers,
            activations="none" if weight_only else activations,
        )


def _hugging_face() -> Iterator[Scheme]:
    """The schemes of Transformers' own FP8."""
    for format, grain, block, dtype, recipe in (
        ("fp8", "block", _SQUARE, torch.float32, _BLOCKWISE),
        ("fp8", "tensor", _WHOLE, torch.float32, _CURRENT),
        ("fp8-ue8m0", "block", _SQUARE, torch.float8_e8m0fnu, _BLOCKWISE_POWERS),
    ):
        yield Scheme(
            format=format,
            grain=grain,
            library=Library.TRANSFORMERS,
            element=_E4M3,
            block=block,
            scale_dtype=dtype,
            names=Names("weight", "weight_scale_inv", input_scale="activation_scale"),
            loads_as=recipe,
            exports_as=recipe,
            activations=grain,
            flat_scale=(1, 1),
            whole_rows=True,
        )


def _groups() -> Iterator[Scheme]:
    """The schemes with one scale for 16 or 32 elements of a row."""
    compressed, modelopt, torchao = Library.COMPRESSED_TENSORS, Library.MODELOPT, Library.TORCHAO
    packed = Names("weight_packed", "weight_scale")
    qdata = Names("_weight_qdata", "_weight_scale")
    mxfp8 = (_E4M3, 32, _MXFP8)
    mxfp4 = ("E2M1", 32, _MXFP4)
    nvfp4 = ("E2M1", 16, _NVFP4)
    for format, library, (element, size, recipe), scale_dtype, names in (
        ("mxfp8-quantized", compressed, mxfp8, torch.uint8, Names("weight", "weight_scale")),
        ("mxfp4-pack-quantized", compressed, mxfp4, torch.uint8, packed),
        (
            "nvfp4-pack-quantized",
            compressed,
            nvfp4,
            _E4M3,
            replace(packed, level="weight_global_scale", input_scale="input_global_scale"),
        ),
        (
            "modelopt-nvfp4",
            modelopt,
            nvfp4,
            _E4M3,
            Names("weight", "weight_scale", "weight_scale_2", "input_scale"),
        ),
        ("torchao-mxfp8", torchao, mxfp8, torch.float8_e8m0fnu, qdata),
        ("torchao-mxfp4", torchao, mxfp4, torch.float8_e8m0fnu, qdata),
        (
            "torchao-nvfp4",
            torchao,
            nvfp4,
            _E4M3,
            replace(qdata, level="_weight_per_tensor_scale"),
        ),
    ):
        yield Scheme(
            format=format,
            grain="group",
            library=library,
            element=element,
            block=(1, size),
            scale_dtype=scale_dtype,
            names=names,
            loads_as=recipe,
            exports_as=recipe,
            # The one scale of an input would be a constant, which training does not know.
            activations="none" if names.level else "group",
            level_multiplies=library is not compressed,
        )


def _rows_and_tensors() -> Iterator[Scheme]:
    """FP8 of ModelOpt and torchao, with float32 scales."""
    names = Names("weight", "weight_scale", input_scale="input_scale")
    qdata = Names("_weight_qdata", "_weight_scale")
    for format, library, grain, block, recipe, of_layer, flat in (
        ("modelopt-fp8", Library.MODELOPT, "tensor", _WHOLE, _CURRENT, names, ()),
        ("torchao-float8", Library.TORCHAO, "channel", _ROW, _ROWWISE, qdata, (1, 1)),
        ("torchao-float8", Library.TORCHAO, "tensor", _WHOLE, _CURRENT, qdata, (1, 1)),
    ):
        yield Scheme(
            format=format,
            grain=grain,
            library=library,
            element=_E4M3,
            block=block,
            scale_dtype=torch.float32,
            names=of_layer,
            loads_as=recipe,
            exports_as=recipe,
            activations={"channel": "token"}.get(grain, grain),
            flat_scale=flat,
        )


#: The schemes; the first of a format is its default.
SCHEMES: tuple[Scheme, ...] = (
    *_float_quantized("float-quantized", weight_only=False),
    *_float_quantized("naive-quantized", weight_only=True),
    *_hugging_face(),
    *_rows_and_tensors(),
    *_groups(),
)
#: The names of the formats that can be written.
FORMATS: tuple[str, ...] = tuple(
    dict.fromkeys(scheme.format for scheme in SCHEMES if scheme.library is not Library.TORCHAO)
)


def scheme_of(format: str, grain: str | None = None) -> Scheme:
    """The scheme of a format with a grain; its default if that is None.

    Raises:
        OptionError: there is no such format or grain.
    """
    schemes = schemes_of(format)
    for scheme in schemes:
        if grain in (None, scheme.grain):
            return scheme
    raise OptionError(
        f"format {format!r} with a scale for each {grain!r}",
        expected=" or ".join(repr(scheme.grain) for scheme in schemes),
    )


def schemes_of(format: str) -> tuple[Scheme, ...]:
    """The schemes of a format, its default first.

    Raises:
        OptionError: there is no such format.
    """
    schemes = tuple(scheme for scheme in SCHEMES if scheme.format == format)
    if not schemes:
        names = dict.fromkeys(scheme.format for scheme in SCHEMES)
        raise OptionError(f"format {format!r}", expected=f"one of {', '.join(names)}")
    return schemes
