"""The compiled module of the CUDA backend, or an ImportError that says why there is none to use."""

from __future__ import annotations

import torch

_OLDEST = (8, 0)

if torch.version.hip is not None:
    raise ImportError("the CUDA kernels are for NVIDIA GPUs, and this torch is built for those of AMD")


def _why_not() -> str:
    """What the build says of itself, if any of it was compiled."""
    try:
        from ottava import _cpu
    except ImportError:
        return "nothing of it is compiled"
    return f"{_cpu.without_cuda} when it was built" if _cpu.without_cuda else "ottava._cuda is missing"


try:
    from ottava import _cuda
except ImportError as error:
    if not isinstance(error, ModuleNotFoundError) and "cannot import name" not in str(error):
        raise
    raise ImportError(
        f"this build of ottava has no CUDA kernels: {_why_not()}; install the CUDA toolkit, put its nvcc on PATH, and "
        "reinstall ottava from source with OTTAVA_CUDA=on"
    ) from None


def refusal() -> str | None:
    """Why the kernels cannot serve the GPUs of this machine; None if they can, or if there are none."""
    if not torch.cuda.is_available():
        return None
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    if min(capabilities) >= _OLDEST:
        return None
    found = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    others = "; hide the older GPUs with CUDA_VISIBLE_DEVICES" if max(capabilities) >= _OLDEST else ""
    return f"the CUDA kernels are for compute capability 8.0 and later; here it is {found}{others}"


if (_reason := refusal()) is not None:
    raise ImportError(_reason)

__all__ = ["_cuda", "refusal"]
