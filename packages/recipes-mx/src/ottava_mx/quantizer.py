"""``MXQuantizer`` and ``MXTensor``: elements of four, six or eight bits in blocks of 32."""

from __future__ import annotations

from typing import ClassVar

from ottava.formats import E8M0, MX_BLOCK
from ottava.layout import Layout, Rotation
from ottava.tensors import (
    GridQuantizer,
    GridTensor,
    GridTensorStorage,
    PackedTensor,
    PackedTensorStorage,
)
from ottava.tensors.quantizer import choice_option, flag_option

#: The names of the formats -> the elements of layouts.
ELEMENTS = {
    "MXFP4": "E2M1",
    "MXFP6E2M3": "E2M3",
    "MXFP6E3M2": "E3M2",
    "MXINT8": "MXINT8",
    "MXINT8S": "MXINT8S",
}
#: The values of options.
FORMATS = tuple(ELEMENTS)
RULES = ("up", "floor", "even", "nearest")
SIZES = (0, 16, 32, 64, 128)
_DIRECTIONS = ("rowwise", "columnwise", "both")
# The signs of a rotation of 128: the leading 128 bits of the fractional part of pi. Smaller ones
# take as many of the lowest bits as they have elements.
_SIGNS = 0x243F6A8885A308D313198A2E03707344


class MXTensor(PackedTensor):
    """MX data as a ``torch.Tensor`` of its nominal dtype.

    ``_rowwise_data`` has a byte for each element, or for two of four bits, the even column in the
    low half; ``_rowwise_scale_inv`` the bytes of E8M0, ``[M, ceil(K / 32)]``. Columnwise data are
    those of the transpose. Arguments and errors: :class:`ottava.tensors.PackedTensor`'s.
    """


class MXQuantizer(GridQuantizer):
    """Quantizes along rows, columns or both, each from the high-precision values.

    Args:
        element: ``"MXFP4"``, ``"MXFP6E2M3"``, ``"MXFP6E3M2"``, ``"MXINT8"``, or ``"MXINT8S"``,
            which clamps symmetrically.
        rowwise, columnwise: usages to produce.
        scale_rounding: the rule from an amax to a scale: ``"up"``, ``"floor"``, ``"even"`` or
            ``"nearest"``.
        with_2d_quantization: one scale for each block of 32 × 32; both directions then hold the
            same values.
        stochastic_rounding: elements are rounded at random, in proportion to the distances.
        rotation: the size of the groups of a Hadamard transform, 16, 32, 64 or 128; 0 is none.
        rotated: which data are transformed: ``"rowwise"``, ``"columnwise"`` or ``"both"``.

    Raises:
        OptionError: an option has a value that is not allowed, or two options contradict each
            other.
    """

    storage_class: ClassVar[type[GridTensorStorage]] = PackedTensorStorage
    tensor_class: ClassVar[type[GridTensor]] = MXTensor
    element: str = choice_option(FORMATS)
    scale_rounding: str = choice_option(RULES)
    with_2d_quantization: bool = flag_option()
    stochastic_rounding: bool = flag_option()
    rotation: int = choice_option(SIZES)
    rotated: str = choice_option(_DIRECTIONS)

    def __init__(
        self,
        element: str = "MXFP4",
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        scale_rounding: str = "even",
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        rotation: int = 0,
        rotated: str = "columnwise",
    ) -> None:
        self.element = element
        self.scale_rounding = scale_rounding
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.rotation = rotation
        self.rotated = rotated
        super().__init__(self.make_layout(), rowwise=rowwise, columnwise=columnwise)

    def make_layout(self) -> Layout:
        rotation = None
        if self.rotation:
            signs = _SIGNS & ((1 << self.rotation) - 1)
            rotation = Rotation(self.rotation, signs, self.rotated)
        return Layout(
            ELEMENTS[self.element],
            (1, MX_BLOCK),
            E8M0.torch_dtype,
            self.scale_rounding,
            columnwise="transposed",
            shared=(MX_BLOCK, MX_BLOCK) if self.with_2d_quantization else None,
            stochastic=self.stochastic_rounding,
            rotation=rotation,
        )
