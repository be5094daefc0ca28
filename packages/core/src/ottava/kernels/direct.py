"""When a kernel can do without its operator.

An operator costs a few microseconds a call, more than the launch of a small kernel, and is there for whoever looks at
operators: graphs that are being traced, modes, transforms, subclasses, autograd. Where nobody does, the function of the
backend is called itself.
"""

from __future__ import annotations

import torch

_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state
_profiling = torch._C._autograd._profiler_enabled
_keys_of = torch._C._dispatch_keys

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN_KEYS = ("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")


def _all_but(names: tuple[str, ...]) -> int:
    known = 0
    for name in names:
        known |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return ~known


# What torch's dispatcher knows of a tensor, unless it is memory of a CPU or a GPU that is read as it lies: that it has
# no memory (meta, fake), that its values are still to be negated, that it stands for others (transforms), and so on.
_STRANGE = _all_but(_PLAIN_KEYS)


def unobserved() -> bool:
    """Whether nothing that is active here would see an operator: no tracing, mode, transform or profiler."""
    # Compiled code first, which cannot look at what follows.
    return not (
        _is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _transforms() is not None
        or _tracing() is not None
        or _profiling()
    )


def is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether a kernel on these tensors needs no operator: they are plain memory without gradient, and nobody looks."""
    if not unobserved():
        return False
    gradients = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN_TYPES or _keys_of(tensor).raw_repr() & _STRANGE:
            return False
        if gradients and tensor.requires_grad:
            return False
    return True
