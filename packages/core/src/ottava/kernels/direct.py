"""When a kernel can do without its operator.

An operator costs a few microseconds a call, more than the launch of a small kernel, and is there
for whoever looks at operators: graphs that are being traced, modes, transforms, subclasses,
autograd. Where nobody does, the function of the backend is called itself.
"""

from typing import Any

import torch

from ottava.torch_private import (
    any_autocast_enabled,
    constant_to_compiler,
    dispatch_keys,
    dispatch_modes,
    forward_ad,
    function_modes,
    profiling,
    strange_keys,
    tracing,
    transforms,
)

_is_compiling = torch.compiler.is_compiling
#: What a compiled module asks before it reads tensors itself, and which of them are plain.
QUESTIONS: dict[str, Any] = {
    "torch": torch,
    "tensor": torch.Tensor,
    "parameter": torch.nn.Parameter,
}
QUESTIONS |= {
    "dispatch_modes": dispatch_modes,
    "function_modes": function_modes,
    "transforms": transforms,
}
QUESTIONS |= {"tracing": tracing, "profiling": profiling, "grad_enabled": torch.is_grad_enabled}
QUESTIONS |= {"threads": torch.get_num_threads, "autocast": any_autocast_enabled}
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN_KEYS = (
    "CPU",
    "CUDA",
    "ADInplaceOrView",
    "AutogradCPU",
    "AutogradCUDA",
    "AutocastCPU",
    "AutocastCUDA",
)
# What torch's dispatcher knows of a tensor, unless it is memory of a CPU or a GPU that is read as
# it lies: that it has no memory (meta, fake), that its values are still to be negated, that it
# stands for others (transforms), and so on.
_STRANGE = strange_keys(_PLAIN_KEYS)


# Transforms that compiled code calls are active while it is traced.
@constant_to_compiler
def transform() -> str | None:
    """What code runs in that takes functions apart: a transform of torch.func, by its name, or
    ``"trace"``.

    None where a torch without the private names cannot tell.
    """
    for active in (transforms(), tracing()):
        if active is not None and active is not True:
            return (
                str(active.key()).rpartition(".")[2].lower() if hasattr(active, "key") else "trace"
            )
    return None


def in_dual_level() -> bool:
    """Whether forward-mode derivatives may be at work in eager code; False where torch cannot
    tell."""
    return forward_ad._current_level >= 0 and hasattr(forward_ad, "unpack_dual")


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Whether a forward-mode derivative flows through any of these."""
    given = [tensor for tensor in tensors if tensor is not None] if in_dual_level() else []
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)


def is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether a kernel on these tensors needs no operator: they are plain memory without gradient,
    and nobody looks: no tracing, mode, transform or profiler. Without tensors this alone is
    asked."""
    # Compiled code first, which cannot look at what follows.
    if _is_compiling() or dispatch_modes() or function_modes() or profiling():
        return False
    if transforms() is not None or tracing() is not None:
        return False
    gradients = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None:
            if type(tensor) not in _PLAIN_TYPES or dispatch_keys(tensor).raw_repr() & _STRANGE:
                return False
            if gradients and tensor.requires_grad:
                return False
    return True
