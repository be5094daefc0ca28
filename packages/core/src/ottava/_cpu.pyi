"""The compiled CPU kernels. Pointers are addresses as integers, 0 where something is absent."""

from collections.abc import Sequence

from torch import Tensor

from ottava.kernels.levels import NativeLevels

# Why the build has no CUDA kernels; empty if it has.
without_cuda: str

def amax(src: int, dtype: int, n: int, out: int, threads: int) -> None: ...
def scale_from_amax(
    amax: int, n: int, fp8_max: float, epsilon: float, force_pow_2: bool, scale: int, scale_inv: int
) -> None: ...
def quantize(
    src: int,
    dtype: int,
    rows: int,
    cols: int,
    epsilon: float,
    force_pow_2: bool,
    amax: int,
    scale: int,
    scale_inv: int,
    out: int,
    out_t: int,
    fmt: int,
    threads: int,
) -> None: ...
def cast(
    src: int,
    dtype: int,
    rows: int,
    cols: int,
    scale: int,
    amax: int,
    saturated: int,
    scale_inv: int,
    out: int,
    out_t: int,
    fmt: int,
    threads: int,
) -> None: ...
def update_scales(
    tensors: list[tuple[int, int, int]],
    length: int,
    maxima: list[float],
    most_recent: bool,
    last: int,
) -> None: ...
def transpose(src: int, rows: int, cols: int, out: int, threads: int) -> None: ...
def decode(
    src: int, fmt: int, n: int, scale_inv: int, out: int, out_dtype: int, threads: int
) -> None: ...

# After a product. `last` is scale_a, scale_b, bias and the code of the bias's dtype; `out` may be
# the sums.
def epilogue32(
    sums: int,
    rows: int,
    cols: int,
    last: tuple[int, int, int, int],
    out: int,
    out_dtype: int,
    threads: int,
) -> None: ...
def mx_scale_from_amax(
    amax: int, n: int, fmt: int, floor: bool, exponents: int, threads: int
) -> None: ...

# Rows and columns of a block and of a shared block (0 is all of them), whether it is stored as the
# transpose, addresses of data and scales. None and () leave a side out.
_Side = tuple[int, int, int, int, bool, int, int] | tuple[()] | None

def grid_quantize(
    src: int,
    dtype: int,
    rows: int,
    cols: int,
    element: int,
    e8m0: bool,
    floor: bool,
    epsilon: float,
    largest: float,
    row_side: _Side,
    column_side: _Side,
    threads: int,
) -> None: ...
def grid_amax(
    src: int,
    dtype: int,
    rows: int,
    cols: int,
    block_rows: int,
    block_cols: int,
    out: int,
    threads: int,
) -> None: ...
def grid_cast(
    src: int,
    dtype: int,
    rows: int,
    cols: int,
    multipliers: int,
    block_rows: int,
    block_cols: int,
    element: int,
    turned: bool,
    out: int,
    threads: int,
) -> None: ...
def grid_decode(
    data: int,
    element: int,
    rows: int,
    cols: int,
    scales: int,
    e8m0: bool,
    block_rows: int,
    block_cols: int,
    out: int,
    dtype: int,
    threads: int,
) -> None: ...

# A layout with small elements, two levels of scales, rotation or choices.
class LevelsPlan:
    def __init__(self, layout: NativeLevels) -> None: ...

# The addresses of data, scales and amaxes; 0 for what is left out.
_Levels = Sequence[int]

def levels_quantize(
    layout: LevelsPlan,
    src: int,
    dtype: int,
    rows: int,
    cols: int,
    seed: int,
    first_row: int,
    by_row: _Levels,
    by_column: _Levels,
    threads: int,
) -> None: ...
def levels_decode(
    layout: LevelsPlan,
    data: int,
    rows: int,
    cols: int,
    scales: int,
    block_rows: int,
    block_cols: int,
    amaxes: int,
    by_column: bool,
    out: int,
    dtype: int,
    threads: int,
) -> None: ...

# A tensor among many: address, dtype, number of elements, the dtype that they are rounded to.
_Source = tuple[int, int, int, int]
# Rows and columns of a matrix, and the element that a shard of it starts with.
_Place = tuple[int, int, int]

def multi_amax(tensors: list[_Source], out: int, threads: int) -> None: ...
def multi_cast(tensors: list[tuple[_Source, int, int]], scales: int, threads: int) -> None: ...

# Rows and columns of a block, 0 being all; with the addresses of multipliers and data, (0, 0)
# without the direction.
_Block = tuple[int, int]
_CastSide = tuple[_Block, int, int]

def grid_multi_amax(
    shards: list[tuple[_Source, _Place, _Block, _Block, bool]], out: int, total: int, threads: int
) -> None: ...
def grid_multi_cast(
    shards: list[tuple[_Source, _Place, int, bool, _CastSide, _CastSide]], threads: int
) -> None: ...
def isa() -> str: ...
def available_isas() -> list[str]: ...
def set_isa(name: str) -> None: ...

# Operands of layers: the module itself reads and allocates tensors. It returns None where Python
# has to do it, because a tensor is not plain memory of a CPU, or because dispatch is observed.

# Data and scales of rows, then of columns; None for a direction that is not asked for.
_Sides = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

class GridPlan:
    def __init__(
        self,
        element: int,
        e8m0: bool,
        floor: bool,
        epsilon: float,
        largest_of_input: bool,
        row_side: tuple[int, int, int, int, bool],
        column_side: tuple[int, int, int, int, bool],
    ) -> None: ...

# The capsule with DLPack's table of functions, and what direct.QUESTIONS has; whether tensors can
# be read.
def connect(exchange: object, questions: dict[str, object]) -> bool: ...
def quantize_operand(
    x: Tensor, fmt: int, epsilon: float, force_pow_2: bool, rowwise: bool, transposed: bool, /
) -> _Sides | None: ...

# With a slot, scale, amax and saturated are those of a layer's state: the first row of each has the
# slot.
def cast_operand(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    saturated: Tensor | None,
    fmt: int,
    rowwise: bool,
    transposed: bool,
    slot: int,
    /,
) -> _Sides | None: ...
def grid_quantize_operand(
    x: Tensor, plan: GridPlan, rowwise: bool, columnwise: bool, /
) -> _Sides | None: ...

# Of one operand: the code of its elements, rows and columns as stored, whether scales are part of
# the values, whether those are E8M0, rows and columns of a block, address and dtype of the values,
# and these as torch multiplies them.
_PlannedSide = tuple[int, int, int, bool, bool, int, int, int, int, Tensor]

class ProductPlan:
    # What multiplies the values, of (values, values, scale, scale, bias, dtype), and the dtype; the
    # code of that dtype where the module is to finish torch's product itself, or -1.
    def __init__(
        self,
        left: _PlannedSide,
        right: _PlannedSide,
        multiply: object,
        dtype: object,
        finished: int,
    ) -> None: ...

def planned_product(
    plan: ProductPlan,
    a: Tensor,
    scales_a: Tensor | None,
    b: Tensor,
    scales_b: Tensor | None,
    bias: Tensor | None,
    /,
) -> Tensor | None: ...

# Of slots that fit together, one maximum for each. None where Python has to do it, or has something
# to refuse. The last says whether they are a layer's own, of which less is asked.
def update_slots(
    scales: Sequence[Tensor],
    histories: Sequence[Tensor],
    maxima: Sequence[float],
    most_recent: bool,
    own: bool,
    /,
) -> bool | None: ...
