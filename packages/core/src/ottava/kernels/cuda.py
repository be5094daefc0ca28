"""The CUDA backend. Where it cannot be used, importing it raises an ImportError with the reason.

Kernels are queued on the current stream of the tensors' device. No call waits for the GPU, and none
allocates more than scratch memory, so that calls can be captured in a CUDA graph. A contiguous copy
of an input may be freed once the kernels are queued, because its memory is used again on the same
stream. The addresses of many tensors are arguments of the launch, so they are not copied to the
device.
"""

import re
from contextlib import suppress
from typing import Any

import torch

from ottava.formats import FP8, MX_BLOCK
from ottava.kernels.checks import Tensor
from ottava.kernels.compiled import DTYPE_CODES, Compiled, is_native, pointers
from ottava.layout import Layout, as_matrix_shape
from ottava.torch_private import raw_stream

# The blocks with float32 scales that have kernels, including the blocks of columnwise data.
_TILED = {(1, 128), (128, 128), (1, None)}
# The least compute capability.
_OLDEST = (8, 0)

if torch.version.hip is not None:
    raise ImportError(
        "the CUDA kernels are for NVIDIA GPUs, and this torch is built for those of AMD"
    )


try:
    from ottava import _cuda
except ImportError as error:
    if not isinstance(error, ModuleNotFoundError) and "cannot import name" not in str(error):
        raise
    _why = "nothing of it is compiled: reinstall ottava with a C++ compiler at hand"
    with suppress(ImportError):
        # The compiled CPU module, if there is one, knows why there is no CUDA module.
        from ottava import _cpu

        _why = _cpu.without_cuda or "ottava._cuda is missing: reinstall ottava from source"
    raise ImportError(f"this build of ottava has no CUDA kernels: {_why}") from None


def has_code(target: str, capability: tuple[int, int]) -> bool:
    """Whether code that was compiled for ``target`` runs on a GPU of this compute capability.

    ``target`` is in CMake's spelling, such as ``"90a-real"``.
    """
    match = re.fullmatch(r"(\d+)(\d)([af]?)(?:-(real|virtual))?", target)
    if match is None:
        return True
    major, minor, letter, kind = match.groups()
    built = int(major), int(minor)
    if kind != "real" and not letter:
        return capability >= built
    # Targets with the letter "a" use features that later GPUs may lack, so their code runs on that
    # capability alone. Other machine code runs on later GPUs of the same generation.
    if letter == "a":
        return capability == built
    return capability[0] == built[0] and capability >= built


def _capabilities() -> list[tuple[int, int]]:
    """The compute capabilities of the GPUs of this machine."""
    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    return [torch.cuda.get_device_capability(index) for index in range(count)]


def _check_gpus(capabilities: list[tuple[int, int]]) -> None:
    """Raise an ImportError unless the module has kernels for all of these GPUs."""
    names = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    if capabilities and min(capabilities) < _OLDEST:
        remedy = ""
        if max(capabilities) >= _OLDEST:
            remedy = "; hide the older GPUs with CUDA_VISIBLE_DEVICES"
        raise ImportError(
            f"the CUDA kernels are for compute capability 8.0 and later; here it is {names}{remedy}"
        )
    targets = _cuda.targets.split()
    for capability in capabilities:
        if not any(has_code(target, capability) for target in targets):
            raise ImportError(
                f"the CUDA kernels were built for {_cuda.targets}; here it is {names}: reinstall "
                f"ottava from source on this machine, or with OTTAVA_CUDA=on for all generations"
            )


_check_gpus(_capabilities())


class CUDABackend(Compiled):
    """The kernels of ``_cuda``, whose last arguments are a GPU and a stream."""

    native = _cuda

    def stream(self, x: Tensor) -> tuple[int, ...]:
        """The number of the device of ``x`` and the address of its current stream."""
        device = x.get_device()
        return device, raw_stream(device)

    def scratch_for(self, x: Tensor, layout: Layout | None = None) -> list[Tensor | None]:
        if layout is None:
            return [torch.empty(_cuda.scratch_floats, dtype=torch.float32, device=x.device)]
        if layout.block != (1, None):
            return [None]
        # Whole rows and columns have as many amaxes as the matrix has rows and columns.
        return [x.new_zeros(sum(as_matrix_shape(x.shape)), dtype=torch.float32)]

    def serves(self, layout: Layout, shards: bool = False) -> bool:
        if layout.element not in FP8 or not is_native(layout):
            return False
        if layout.scale is torch.float32:
            return not shards and layout.block in _TILED and layout.shared in (None, layout.block)
        shared = layout.shared in (None, (MX_BLOCK, MX_BLOCK))
        return shared and layout.block == (1, MX_BLOCK) and layout.columnwise == "own"

    def quantize_levels(
        self,
        x: Tensor,
        seed: Tensor | None,
        first_row: int,
        plan: Any,
        results: tuple[list[int], list[int]],
    ) -> None:
        # The seed stays on the GPU, so that nothing waits for it.
        shape = as_matrix_shape(x.shape)
        scratch = x.new_zeros(_cuda.levels_scratch(plan, *shape), dtype=torch.float32)
        source = x.data_ptr(), DTYPE_CODES[x.dtype], *shape
        (key,) = pointers(seed)
        last = scratch.data_ptr(), *self.place(x)
        _cuda.levels_quantize(plan, *source, key, first_row, *results, *last)


#: The backend.
BACKEND = CUDABackend()
