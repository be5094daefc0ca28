"""One table of layouts, which every file of this folder crosses with a behaviour."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ottava import GridQuantizer, Layout, Recipe, kernels
from ottava.layout import Rotation
from ottava.tensors import Float8QuantizerBase, QuantizedTensorStorage
from tests.comparing import assert_same

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
E8M0 = torch.float8_e8m0fnu


def nvfp4(block: tuple[int, int] = (1, 16), **fields: Any) -> Layout:
    fields = {"second_level": "tensor", "columnwise": "transposed"} | fields
    return Layout("E2M1", block, fields.pop("scale", E4M3), **fields)


def mx(element: Any, rounding: str, **fields: Any) -> Layout:
    fields = {"columnwise": "transposed"} | fields
    return Layout(element, (1, 32), E8M0, rounding, **fields)


#: The signs of NVFP4's transform: + + + - + - - - - - - + - + - -.
SIGNS = 0b1101_0111_1110_1000
HADAMARD = Rotation(16, SIGNS)
FOUR_SIX: dict[str, Any] = {"candidates": (1.0, 1.5), "bound": 256.0}
#: The layouts of the recipes, and strange ones: odd blocks, whole columns, transposed squares.
#: Append new rows: some tests choose a dtype or usages by the number of a row.
LAYOUTS: dict[str, Layout] = {
    "mxfp8": Layout(E4M3, (1, 32), E8M0, "up"),
    "mxfp8-E5M2-floor": Layout(E5M2, (1, 32), E8M0, "floor"),
    "mxfp8-squares": Layout(E4M3, (1, 32), E8M0, "up", shared=(32, 32)),
    "1x128": Layout(E4M3, (1, 128), rounding="floor", columnwise="transposed", finite_as="input"),
    "1x128-E5M2-epsilon": Layout(
        E5M2, (1, 128), epsilon=0.25, columnwise="transposed", finite_as="input"
    ),
    "128x128": Layout(
        E4M3, (128, 128), rounding="floor", columnwise="transposed", finite_as="input"
    ),
    "rows": Layout(E4M3, (1, None)),
    "rows-E5M2-floor-epsilon": Layout(E5M2, (1, None), rounding="floor", epsilon=1e-3),
    "rows-transposed": Layout(E4M3, (1, None), columnwise="transposed"),
    "columns": Layout(E4M3, (None, 1)),
    "bands": Layout(E4M3, (None, 4)),
    "tensor": Layout(E4M3, (None, None), columnwise="same"),
    "tensor-transposed": Layout(E5M2, (None, None), columnwise="transposed"),
    "int8-tensor": Layout(INT8, (None, None)),
    "int8-8x64": Layout(INT8, (8, 64), rounding="floor"),
    "int8-3x5": Layout(INT8, (3, 5)),
    "int8-E8M0-squares": Layout(INT8, (1, 4), E8M0, "up", columnwise="transposed", shared=(8, 8)),
    "4x4-same": Layout(E4M3, (4, 4), columnwise="same"),
    "4x4-transposed": Layout(E4M3, (4, 4), columnwise="transposed"),
    "4x8-transposed": Layout(E4M3, (4, 8), columnwise="transposed"),
    "mxfp6-E2M3-even": Layout("E2M3", (1, 32), E8M0, "even"),
    "mxfp6-E3M2-nearest": Layout("E3M2", (1, 32), E8M0, "nearest"),
    "mxint8-floor": Layout("MXINT8", (1, 32), E8M0, "floor"),
    "mxint8s-squares": Layout("MXINT8S", (1, 32), E8M0, "up", shared=(32, 32)),
    "E3M2-UE5M3": Layout("E3M2", (1, 16), "UE5M3", columnwise="transposed"),
    "E2M3-E4M3-squares": Layout("E2M3", (16, 16), E4M3, columnwise="transposed"),
    "E4M3-even": Layout(E4M3, (1, 32), E8M0, "even"),
    "int8-E4M3": Layout(INT8, (2, 16), E4M3),
    "nvfp4": nvfp4(),
    "nvfp4-squares": nvfp4((16, 16)),
    "nvfp4-rows": nvfp4(second_level="row"),
    "nvfp4-rotated": nvfp4(rotation=Rotation(16, 0b1011, "columnwise")),
    "nvfp4-rotated-both": nvfp4(rotation=Rotation(32, 0xDEADBEEF, "both")),
    "mxfp4": mx("E2M1", "even"),
    "mxfp4-squares": mx("E2M1", "even", shared=(32, 32)),
    "int4-rows": Layout("INT4", (1, None), columnwise="transposed"),
    "two-levels-own": Layout(E4M3, (1, 32), E4M3, second_level="row"),
    "two-levels-4x4": Layout(E4M3, (4, 4), "UE5M3", columnwise="transposed", second_level="tensor"),
    "two-levels-4x4-own": Layout(INT8, (4, 4), E4M3, second_level="tensor"),
    "two-levels-same": Layout(E4M3, (4, 4), E4M3, columnwise="same", second_level="tensor"),
}
#: Layouts with packed elements, a second level, candidates, a rotation or stochastic rounding.
LEVELS: dict[str, Layout] = {
    **{n: LAYOUTS[n] for n in ("int4-rows", "nvfp4", "nvfp4-squares", "nvfp4-rows")},
    "mxfp4-up": mx("E2M1", "up"),
    "mxfp4-floor": mx("E2M1", "floor"),
    "mxfp4-even": mx("E2M1", "even"),
    "mxfp4-nearest-squares": mx("E2M1", "nearest", shared=(32, 32)),
    "int4-nearest": mx("INT4", "nearest"),
    "int4-stochastic": Layout("INT4", (1, 8), columnwise="transposed", stochastic=True),
    "E2M1-tensor": Layout("E2M1", (None, None), rounding="floor", columnwise="transposed"),
    "E2M1-UE5M3": nvfp4(scale="UE5M3", second_level="none"),
    "E2M1-UE5M3-levels": nvfp4(scale="UE5M3"),
    "nvfp4-shared-squares": nvfp4(shared=(16, 16)),
    "nvfp4-rotated": nvfp4(rotation=HADAMARD),
    "nvfp4-gradients": nvfp4(rotation=HADAMARD, stochastic=True),
    "nvfp4-stochastic": nvfp4(stochastic=True),
    "nvfp4-rows-rotated": nvfp4(second_level="row", rotation=Rotation(32, SIGNS)),
    "nvfp4-squares-stochastic": nvfp4(block=(16, 16), stochastic=True),
    "nvfp4-rows-stochastic": nvfp4(second_level="row", stochastic=True),
    "4over6": nvfp4(**FOUR_SIX),
    "4over6-MSE-448": nvfp4(candidates=(1.0, 1.5), error="MSE"),
    "4over6-squares": nvfp4((16, 16), **FOUR_SIX),
    "4over6-squares-MSE": nvfp4((16, 16), error="MSE", **FOUR_SIX),
    "4over6-shared-squares": nvfp4(shared=(16, 16), **FOUR_SIX),
    "4over6-rows": nvfp4(second_level="row", **FOUR_SIX),
    "three-candidates-one-level": nvfp4(second_level="none", candidates=(1.0, 1.5, 0.75)),
    "candidates-of-powers": mx("E2M1", "even", candidates=(1.0, 0.5)),
    "candidates-of-floats": Layout("E3M2", (3, 5), candidates=(1.0, 1.25), error="MSE"),
    "rotated-32-both": mx("E2M1", "up", rotation=Rotation(32, 0x8421_1234, "both")),
    "rotated-64-rowwise": mx("E2M3", "nearest", rotation=Rotation(64, 5, "rowwise")),
    "rotated-128-rows": Layout(
        E4M3, (1, None), columnwise="transposed", rotation=Rotation(128, 1 << 127, "both")
    ),
    "E4M3-rotated-own": mx(E4M3, "up", columnwise="own", rotation=Rotation(16, 3, "rowwise")),
    "stochastic-rotated-both": mx(
        "E3M2", "floor", stochastic=True, rotation=Rotation(16, SIGNS, "both")
    ),
    "stochastic-tensor": Layout(E5M2, (None, None), stochastic=True),
    "stochastic-mxint8": mx("MXINT8", "floor", columnwise="own", stochastic=True),
    "E4M3-levels-own": Layout(E4M3, (1, 16), E4M3, second_level="row", columnwise="own"),
    "mxint8-levels-bound": Layout(
        "MXINT8S", (4, 8), "UE5M3", second_level="tensor", bound=1000.3, columnwise="own"
    ),
}
#: Rowwise and columnwise usage.
USAGES = {"both": (True, True), "rowwise": (True, False), "columnwise": (False, True)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PerTensor(Float8QuantizerBase):
    """One scale for the tensor, in the names of ``Float8Tensor``."""

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> QuantizedTensorStorage:
        rowwise, transposed = self.needs(tensor.device, tensor.dim())
        data, transpose, _, scale_inv, _ = kernels.quantize(
            tensor, self.fp8_dtype, rowwise=rowwise, transposed=transposed
        )
        return self.wrap(
            data if rowwise else None, transpose if transposed else None, scale_inv, dtype
        )


#: A quantizer for each layout, and one whose tensors have other names for their parts.
QUANTIZERS: dict[str, GridQuantizer] = {
    "Float8Tensor": PerTensor(E4M3),
    **{name: GridQuantizer(layout) for name, layout in LAYOUTS.items()},
}


#: Rows whose layout rotates one direction alone. A transpose of theirs has another layout, and a
#: product of a rotated and an unrotated operand is refused.
ROTATED_ONCE = {
    name
    for name, layout in LAYOUTS.items()
    if layout.rotation is not None and layout.rotation.directions != "both"
}
#: Rows that differ from others in bytes alone: other behaviours meet them in the long run.
ONLY_OTHER_BYTES = {
    "mxfp8-E5M2-floor",
    "1x128-E5M2-epsilon",
    "128x128",
    "rows-E5M2-floor-epsilon",
    "bands",
    "int8-8x64",
    "mxfp6-E2M3-even",
    "mxfp6-E3M2-nearest",
    "mxint8-floor",
    "mxint8s-squares",
    "E2M3-E4M3-squares",
    "E3M2-UE5M3",
    "E4M3-even",
    "int8-E4M3",
    "nvfp4-rows",
    "nvfp4-rotated-both",
    "mxfp4",
    "two-levels-own",
    "two-levels-4x4",
    "two-levels-same",
}


def _each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Runs a test on each of the rows."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=pytest.mark.slow) if name in ONLY_OTHER_BYTES else name
            for name in names
        ],
    )


#: Runs a test on each row of the table, and on each whose quantizer serves all operands of a layer.
EACH = _each(QUANTIZERS)
EACH_OF_A_LAYER = _each(name for name in QUANTIZERS if name not in ROTATED_ONCE)


@dataclass(frozen=True)
class OneQuantizer(Recipe):
    """A recipe whose quantizers are all those of one row of the table."""

    name = "one-quantizer"
    row: str = "mxfp8"

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> GridQuantizer:
        return QUANTIZERS[self.row].copy()


#: Layouts that round at random, without a rotation, which the other operands would have to have.
STOCHASTIC = {
    name: layout for name, layout in LEVELS.items() if layout.stochastic and layout.rotation is None
}


@dataclass(frozen=True)
class RandomWeights(Recipe):
    """A recipe that rounds weights at random, by one row of the table, and nothing else."""

    name = "random-weights"
    row: str = "nvfp4-stochastic"

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> GridQuantizer:
        layout = STOCHASTIC[self.row] if role.tensor_type == "weight" else LAYOUTS["mxfp8"]
        return GridQuantizer(layout)


def quantizer(name: str, usages: str = "both", *, internal: bool = False) -> GridQuantizer:
    """A quantizer of the table with these usages, which may be changed."""
    rowwise, columnwise = USAGES[usages]
    copied = QUANTIZERS[name].copy()
    copied.set_usage(rowwise=rowwise, columnwise=columnwise)
    copied.internal = internal
    return copied


def boundary(name: str) -> int:
    """A row and a column at which blocks of both directions begin, and their bytes."""
    layout = QUANTIZERS[name].layout
    sides = [side or 1 for side in (*layout.block, *(layout.shared or ()))]
    return math.lcm(*sides, *(layout.whole_elements(columnwise) for columnwise in (False, True)))


def has_one_scale(name: str) -> bool:
    """Whether all elements have a scale, or an amax of the second level, in common."""
    layout = QUANTIZERS[name].layout
    return layout.block == (None, None) or layout.second_level == "tensor"


def rows_share(name: str) -> bool:
    """Whether rows have a scale, or an amax of the second level, in common with all others."""
    layout = QUANTIZERS[name].layout
    return None in layout.block or layout.second_level != "none"


def assert_directions(found: Any, expected: Any) -> None:
    """The same bytes in each direction that is expected; columns may be made of rows for it."""
    for columnwise in (False, True):
        if expected.direction(columnwise=columnwise) is not None:
            assert_same(found.for_usage(columnwise), expected.for_usage(columnwise))


def inner(storage: QuantizedTensorStorage) -> list[torch.Tensor | None]:
    """The inner tensors of a storage as they are now."""
    return [None if tensor is None else tensor.clone() for tensor in storage.inner_list()]
