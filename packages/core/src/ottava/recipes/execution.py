"""Whether the caller is traced, runs in a backward pass, or is repeated by checkpointing."""

import torch

from ottava.kernels.direct import in_dual_level, transform
from ottava.torch_private import (
    current_node,
    graph_task_id,
    is_exporting,
    pipeline_pass,
    top_hooks,
)

#: The number that :func:`backward_task` gives outside of any backward pass.
NO_BACKWARD = -1


def forbids_steps(compiling: bool) -> bool:
    """Whether no step can begin here.

    That is so in a program that is exported, which has no backward pass, and inside transforms,
    ``torch.jit.trace`` and forward-mode derivatives, where layers refuse to run.
    """
    if transform() is not None:
        return True
    if compiling:
        return is_exporting()
    return in_dual_level()


def backward_task() -> int:
    """The number of the backward pass that this runs in; NO_BACKWARD outside any, and in compiled
    code."""
    if torch.compiler.is_compiling():
        return NO_BACKWARD
    return graph_task_id()


def repeats_forward() -> bool:
    """Whether activation checkpointing repeats a forward pass whose operands a state has seen.

    - A checkpoint that is not reentrant repeats the pass when a node of autograd asks for a saved
      tensor. This counts here.
    - A reentrant checkpoint is a node of autograd itself, whose function is written in Python. Its
      first pass ran without gradients and recorded nothing, so that its repetition does not count.
    """
    hooks, node = top_hooks(False), current_node()
    if hooks and getattr(hooks[0], "__qualname__", "").startswith("_recomputation_hook."):
        return True
    if node is None:
        return False
    function = getattr(type(node), "_forward_cls", None)
    return function is None or function.__module__.startswith("ottava.")


def infers_shapes() -> bool:
    """Whether a pipeline runs its stage to find out shapes, on values that no state is to see."""
    stage_pass = pipeline_pass()
    return stage_pass is not None and stage_pass.infers
