"""The compiled CUDA kernels. Pointers are addresses of the device as integers, 0 where something is absent.

Every operation is queued on ``stream``, the address of one of ``device``'s. A launch that fails is a BackendError.
"""

#: Floats of scratch memory that an amax and a quantization need.
scratch_floats: int
#: What the module was compiled for, as CMake names architectures.
targets: str

def amax(src: int, dtype: int, n: int, scratch: int, out: int, device: int, stream: int) -> None: ...
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
def decode(src: int, fmt: int, n: int, scale_inv: int, out: int, out_dtype: int, device: int, stream: int) -> None: ...
