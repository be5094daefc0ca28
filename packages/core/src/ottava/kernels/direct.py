"""Whether a kernel can be called without its operator.

An operator costs a few microseconds a call, more than the launch of a small kernel. It is needed
only where something observes dispatch or takes part in it: the tracing of graphs, dispatch and
function modes, transforms, profilers, tensor subclasses, autograd. Elsewhere the function of the
backend is called directly.
"""

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
#: For a compiled module that reads tensors itself: the functions that tell whether dispatch is
#: observed, the settings that it follows, and the classes of plain tensors.
QUESTIONS: dict[str, object] = {
    "torch": torch,
    "tensor": torch.Tensor,
    "parameter": torch.nn.Parameter,
    "dispatch_modes": dispatch_modes,
    "function_modes": function_modes,
    "transforms": transforms,
    "tracing": tracing,
    "profiling": profiling,
    "grad_enabled": torch.is_grad_enabled,
    "threads": torch.get_num_threads,
    "autocast": any_autocast_enabled,
}
#: The classes of tensors that are no subclass of another library.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN_KEYS = (
    "CPU",
    "CUDA",
    "ADInplaceOrView",
    "AutogradCPU",
    "AutogradCUDA",
    "AutocastCPU",
    "AutocastCUDA",
)
# The dispatch keys of tensors that are not plain memory of a CPU or a GPU: tensors without memory
# (meta, fake), lazily negated or conjugated ones, those that a transform wraps, and so on.
_STRANGE = strange_keys(_PLAIN_KEYS)


# The compiler calls this function while it traces, so that the result is a constant, because a
# transform that compiled code applies is active during tracing only.
@constant_to_compiler
def transform() -> str | None:
    """The transform that the caller runs in, because it takes functions apart.

    Returns:
        The name of a transform of torch.func, such as ``"vmap"``; ``"trace"`` in ``torch.jit``'s
        tracer; None outside of both, and where torch lacks the private names to tell.
    """
    for active in (transforms(), tracing()):
        # A fallback for a private name returns True, which says nothing.
        if active is None or active is True:
            continue
        if hasattr(active, "key"):
            return str(active.key()).rpartition(".")[2].lower()
        return "trace"
    return None


def in_dual_level() -> bool:
    """Whether eager code may compute forward-mode derivatives; False where torch cannot tell."""
    return forward_ad._current_level >= 0 and hasattr(forward_ad, "unpack_dual")


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Whether any of the tensors has a tangent, that is, a forward-mode derivative."""
    if not in_dual_level():
        return False
    return any(
        forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
        if tensor is not None
    )


def is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether a kernel on these tensors can be called without its operator.

    True if dispatch is not observed (no tracing, mode, transform or profiler), and every tensor is
    plain memory whose gradient autograd does not need. Without tensors only dispatch counts.
    """
    # This test comes first, because compiled code cannot call the functions that follow.
    if _is_compiling() or dispatch_modes() or function_modes() or profiling():
        return False
    if transforms() is not None or tracing() is not None:
        return False
    gradients = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None:
            if type(tensor) not in PLAIN_TYPES or dispatch_keys(tensor).raw_repr() & _STRANGE:
                return False
            if gradients and tensor.requires_grad:
                return False
    return True
