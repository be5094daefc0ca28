"""The compiled CUDA kernels. Pointers are addresses of the device as integers, 0 where something is
absent.

Every operation is queued on ``stream``, the address of one of ``device``'s. A launch that fails is
a BackendError.
"""

from collections.abc import Sequence

from ottava.kernels.levels import NativeLevels

#: Floats of scratch memory that an amax and a quantization need.
scratch_floats: int
#: What the module was compiled for, as CMake names architectures.
targets: str

def amax(
    src: int, dtype: int, n: int, scratch: int, out: int, device: int, stream: int
) -> None: ...
def scale_from_amax(
    amax: int,
    n: int,
    fp8_max: float,
    epsilon: float,
    force_pow_2: bool,
    scale: int,
    scale_inv: int,
    device: int,
    stream: int,
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
    device: int,
    stream: int,
) -> None: ...
def quantize(
    src: int,
    dtype: int,
    rows: int,
    cols: int,
    epsilon: float,
    force_pow_2: bool,
    scratch: int,
    amax: int,
    scale: int,
    scale_inv: int,
    out: int,
    out_t: int,
    fmt: int,
    device: int,
    stream: int,
) -> None: ...
def transpose(src: int, rows: int, cols: int, out: int, device: int, stream: int) -> None: ...
def decode(
    src: int, fmt: int, n: int, scale_inv: int, out: int, out_dtype: int, device: int, stream: int
) -> None: ...
def mx_scale_from_amax(
    amax: int, n: int, fmt: int, floor: bool, exponents: int, device: int, stream: int
) -> None: ...

# Grids of scales. Rows and columns of a block and of a shared block (0 is all of them), whether it
# is stored as the transpose, addresses of data and scales. None and () leave a side out. `scratch`,
# for whole rows and columns, holds as many float32 zeros as there are of both.
_Side = tuple[int, int, int, int, bool, int, int] | tuple[()] | None

def grid_quantize(
    src: int,
    dtype: int,
    rows: int,
    cols: int,
    fmt: int,
    e8m0: bool,
    floor: bool,
    epsilon: float,
    largest: float,
    row_side: _Side,
    column_side: _Side,
    scratch: int,
    device: int,
    stream: int,
) -> None: ...
def grid_decode(
    data: int,
    fmt: int,
    rows: int,
    cols: int,
    scales: int,
    e8m0: bool,
    block_rows: int,
    block_cols: int,
    out: int,
    out_dtype: int,
    device: int,
    stream: int,
) -> None: ...

# A layout with small elements, two levels of scales, rotation or choices.
class LevelsPlan:
    def __init__(self, layout: NativeLevels) -> None: ...

# The addresses of data, scales and amaxes; 0 for what is left out. `scratch` has as many float32
# zeros as `levels_scratch` says.
_Levels = Sequence[int]

def levels_scratch(layout: LevelsPlan, rows: int, cols: int) -> int: ...
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
    scratch: int,
    device: int,
    stream: int,
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
    device: int,
    stream: int,
) -> None: ...

# After a product. `last` is scale_a, scale_b, bias and the code of the bias's dtype.
def epilogue32(
    acc: int,
    rows: int,
    cols: int,
    last: tuple[int, int, int, int],
    out: int,
    out_dtype: int,
    device: int,
    stream: int,
) -> None: ...

# Many tensors in one launch: of each its address, dtype, number of elements and the dtype it is
# rounded to; of a shard rows and columns of its matrix, and the element that it starts with. Amaxes
# are raised, from zeros.
_Source = tuple[int, int, int, int]
_Place = tuple[int, int, int]

def multi_amax(tensors: list[_Source], out: int, device: int, stream: int) -> None: ...
def multi_cast(
    tensors: list[tuple[_Source, int, int]], scales: int, device: int, stream: int
) -> None: ...

# Of MX blocks. Rows and columns of a block, with the addresses of scales and data, 0 without the
# direction.
_Block = tuple[int, int]
_CastSide = tuple[_Block, int, int]

def grid_multi_amax(
    shards: list[tuple[_Source, _Place, _Block, _Block, bool]],
    out: int,
    total: int,
    device: int,
    stream: int,
) -> None: ...
def grid_multi_cast(
    shards: list[tuple[_Source, _Place, int, bool, _CastSide, _CastSide]], device: int, stream: int
) -> None: ...
def update_scales(
    tensors: list[tuple[int, int, int]],
    length: int,
    maxima: list[float],
    most_recent: bool,
    last: int,
    device: int,
    stream: int,
) -> None: ...
