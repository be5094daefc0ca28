"""The table of published formats: how each stores the weight of a layer.

A *format* is what a configuration names (``"float-quantized"``, ``"fp8"``). A *scheme* is one way
in which a format stores a weight: with one scale for the tensor, say. A format has one or more.

Sources: the files that compressed-tensors 0.20, Transformers 5.24 and torchao 0.18 write, and
``hf_quant_config.json`` of published ModelOpt checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

import torch

from ottava.errors import OptionError
from ottava.layout import Block, grid_of
from ottava.recipes import Recipe, get_recipe


class Library(Enum):
    """The libraries whose formats the table has, by the name that users know."""

    COMPRESSED_TENSORS = "compressed-tensors"
    TRANSFORMERS = "Hugging Face FP8"
    MODELOPT = "ModelOpt"


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
        options: in the place of the recipe's defaults.
    """

    name: str
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

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
        weight_only: whether the format's readers leave the layer's input in high precision.
        loads_as: the recipe whose weights have this scheme, with any scales.
        exports_as: the recipe that quantizes weights for it, whose scales the file can hold.
        input_as: the recipe that quantizes inputs as the format's servers do when they run.
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
    input_as: RecipeChoice
    level_multiplies: bool = False
    weight_only: bool = False
    flat_scale: tuple[int, ...] = (1,)
    whole_rows: bool = False

    def __str__(self) -> str:
        return f"{self.format}, {self.grain}"

    @property
    def is_packed(self) -> bool:
        """Whether two elements share a byte."""
        return self.element == "E2M1"

    def divides(self, shape: tuple[int, int]) -> bool:
        """Whether blocks divide a weight ``[out, in]``; others stay in high precision."""
        sides = zip(shape, self.block, (self.whole_rows, True), strict=True)
        return all(side is None or not whole or size % side == 0 for size, side, whole in sides)

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
_PLAIN = {"data": "weight", "scales": "weight_scale", "input_scale": "input_scale"}
_PACKED = {"data": "weight_packed", "scales": "weight_scale"}

_CURRENT = RecipeChoice("current", MappingProxyType({"fp8_format": "E4M3"}))
_CURRENT_POWERS = RecipeChoice(
    "current", MappingProxyType({"fp8_format": "E4M3", "force_pow_2_scales": True})
)
_ROWWISE = RecipeChoice("rowwise")
_ROWWISE_POWERS = RecipeChoice("rowwise", MappingProxyType({"force_pow_2_scales": True}))
_BLOCKWISE = RecipeChoice("blockwise", MappingProxyType({"force_pow_2_scales": False}))
_BLOCKWISE_POWERS = RecipeChoice("blockwise", MappingProxyType({"force_pow_2_scales": True}))
_MXFP8 = RecipeChoice("mxfp8")
_MXFP4 = RecipeChoice("mx", MappingProxyType({"element": "MXFP4"}))
_NVFP4 = RecipeChoice(
    "nvfp4", MappingProxyType({"disable_2d_quantization": True, "disable_rht": True})
)

# compressed-tensors stores these scales in the dtype of the layer's values. Powers of two are exact
# in all of them, so weights are quantized with those.
_FLOAT_GRAINS = (
    ("channel", _ROW, _ROWWISE, _ROWWISE_POWERS),
    ("tensor", _WHOLE, _CURRENT, _CURRENT_POWERS),
    ("block", _SQUARE, _BLOCKWISE, _BLOCKWISE_POWERS),
)


def _float_quantized(format: str, weight_only: bool) -> list[Scheme]:
    return [
        Scheme(
            format=format,
            grain=grain,
            library=Library.COMPRESSED_TENSORS,
            element=_E4M3,
            block=block,
            scale_dtype=None,
            names=Names(**_PLAIN),
            loads_as=recipe,
            exports_as=powers,
            input_as=recipe,
            weight_only=weight_only,
        )
        for grain, block, recipe, powers in _FLOAT_GRAINS
    ]


#: The schemes, those of one format together; the first of a format is its default.
SCHEMES: tuple[Scheme, ...] = (
    *_float_quantized("float-quantized", weight_only=False),
    *_float_quantized("naive-quantized", weight_only=True),
    Scheme(
        format="mxfp8-quantized",
        grain="group",
        library=Library.COMPRESSED_TENSORS,
        element=_E4M3,
        block=(1, 32),
        scale_dtype=torch.uint8,
        names=Names(data="weight", scales="weight_scale"),
        loads_as=_MXFP8,
        exports_as=_MXFP8,
        input_as=_MXFP8,
    ),
    Scheme(
        format="mxfp4-pack-quantized",
        grain="group",
        library=Library.COMPRESSED_TENSORS,
        element="E2M1",
        block=(1, 32),
        scale_dtype=torch.uint8,
        names=Names(**_PACKED),
        loads_as=_MXFP4,
        exports_as=_MXFP4,
        input_as=_MXFP4,
    ),
    Scheme(
        format="nvfp4-pack-quantized",
        grain="group",
        library=Library.COMPRESSED_TENSORS,
        element="E2M1",
        block=(1, 16),
        scale_dtype=_E4M3,
        names=Names(**_PACKED, level="weight_global_scale", input_scale="input_global_scale"),
        loads_as=_NVFP4,
        exports_as=_NVFP4,
        input_as=_NVFP4,
    ),
    *(
        Scheme(
            format=format,
            grain=grain,
            library=Library.TRANSFORMERS,
            element=_E4M3,
            block=block,
            scale_dtype=dtype,
            names=Names("weight", "weight_scale_inv", input_scale="activation_scale"),
            loads_as=recipe,
            exports_as=recipe,
            input_as=inputs,
            flat_scale=(1, 1),
            whole_rows=True,
        )
        for format, grain, block, dtype, recipe, inputs in (
            ("fp8", "block", _SQUARE, torch.float32, _BLOCKWISE, _BLOCKWISE),
            ("fp8", "tensor", _WHOLE, torch.float32, _CURRENT, _CURRENT),
            (
                "fp8-ue8m0",
                "block",
                _SQUARE,
                torch.float8_e8m0fnu,
                _BLOCKWISE_POWERS,
                _BLOCKWISE_POWERS,
            ),
        )
    ),
    Scheme(
        format="modelopt-fp8",
        grain="tensor",
        library=Library.MODELOPT,
        element=_E4M3,
        block=_WHOLE,
        scale_dtype=torch.float32,
        names=Names(**_PLAIN),
        loads_as=_CURRENT,
        exports_as=_CURRENT,
        input_as=_CURRENT,
        flat_scale=(),
    ),
    Scheme(
        format="modelopt-nvfp4",
        grain="group",
        library=Library.MODELOPT,
        element="E2M1",
        block=(1, 16),
        scale_dtype=_E4M3,
        names=Names("weight", "weight_scale", "weight_scale_2", "input_scale"),
        loads_as=_NVFP4,
        exports_as=_NVFP4,
        input_as=_NVFP4,
        level_multiplies=True,
    ),
)
#: The names of the formats that can be written, in the order of the table.
FORMATS: tuple[str, ...] = tuple(dict.fromkeys(scheme.format for scheme in SCHEMES))


def schemes_of(format: str) -> tuple[Scheme, ...]:
    """The schemes of a format, its default first.

    Raises:
        OptionError: there is no such format.
    """
    schemes = tuple(scheme for scheme in SCHEMES if scheme.format == format)
    if not schemes:
        raise OptionError(f"format {format!r}", expected=f"one of {', '.join(FORMATS)}")
    return schemes
