"""The CUDA backend, or an ImportError that says why there is none to use.

Everything is queued on the current stream of the tensors' device. Nothing waits for the GPU, and nothing but scratch
memory is allocated, so that calls can be captured in a CUDA graph. What is made contiguous may be freed once the
kernels are queued, because its memory is used again on the same stream. The addresses of many tensors travel with the
launch: nothing is copied to the device for them.
"""

import re

import torch

from ottava.formats import FP8
from ottava.kernels.checks import Tensor
from ottava.kernels.compiled import Compiled, is_mx, matrix
from ottava.layout import Layout
from ottava.torch_private import raw_stream

_OLDEST = (8, 0)
# The blocks with float32 scales that there are kernels for, those of columnwise data among them.
_TILED = {(1, 128), (128, 128), (1, None)}

if torch.version.hip is not None:
    raise ImportError("the CUDA kernels are for NVIDIA GPUs, and this torch is built for those of AMD")


def _why_not() -> str:
    """What the build says of itself and what helps, if any of it was compiled."""
    try:
        from ottava import _cpu
    except ImportError:
        return "nothing of it is compiled: reinstall ottava with a C++ compiler at hand"
    return _cpu.without_cuda or "ottava._cuda is missing: reinstall ottava from source"


try:
    from ottava import _cuda
except ImportError as error:
    if not isinstance(error, ModuleNotFoundError) and "cannot import name" not in str(error):
        raise
    raise ImportError(f"this build of ottava has no CUDA kernels: {_why_not()}") from None


def has_code(target: str, capability: tuple[int, int]) -> bool:
    """Whether what was compiled for ``target``, in CMake's spelling, runs on a GPU of this compute capability."""
    found = re.fullmatch(r"(\d+)(\d)([af]?)(?:-(real|virtual))?", target)
    if found is None:
        return True
    built, special, kind = (int(found[1]), int(found[2])), found[3], found[4]
    if kind != "real" and not special and capability >= built:
        return True
    if kind == "virtual" and not special:
        return False
    # Code with a letter a uses what later GPUs need not have; other code runs on those of its own generation.
    return capability == built if special == "a" else capability[0] == built[0] and capability >= built


def refusal() -> str | None:
    """Why the kernels cannot serve the GPUs of this machine; None if they can, or if there are none."""
    if not torch.cuda.is_available():
        return None
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    served = [c for c in capabilities if any(has_code(target, c) for target in _cuda.targets.split())]
    found = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    if min(capabilities) < _OLDEST:
        others = "; hide the older GPUs with CUDA_VISIBLE_DEVICES" if max(capabilities) >= _OLDEST else ""
        return f"the CUDA kernels are for compute capability 8.0 and later; here it is {found}{others}"
    if len(served) < len(capabilities):
        remedy = "reinstall ottava from source on this machine, or with OTTAVA_CUDA=on for all generations"
        return f"the CUDA kernels were built for {_cuda.targets}; here it is {found}: {remedy}"
    return None


if (_reason := refusal()) is not None:
    raise ImportError(_reason)


class _CUDA(Compiled):
    native = _cuda

    def stream(self, x: Tensor) -> tuple[int, ...]:
        """The number of the device of ``x`` and the address of its current stream."""
        device = x.get_device()
        return device, raw_stream(device)

    def scratch_for(self, x: Tensor, layout: Layout | None = None) -> list[Tensor | None]:
        if layout is None:
            return [torch.empty(_cuda.scratch_floats, dtype=torch.float32, device=x.device)]
        # For the amaxes of whole rows and columns.
        return [x.new_zeros(sum(matrix(x)), dtype=torch.float32) if layout.block == (1, None) else None]

    def serves(self, layout: Layout, shards: bool = False) -> bool:
        tiled = layout.element in FP8 and layout.block in _TILED and layout.scale is torch.float32
        return is_mx(layout) or (tiled and not shards and layout.shared in (None, layout.block))


#: The kernels, by the names of the table.
BACKEND = _CUDA()
