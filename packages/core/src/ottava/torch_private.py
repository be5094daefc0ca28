"""What is private in torch, asked for here and nowhere else in the packages, and what serves where it is gone.

A name with an underscore may go in any version of torch. Each is looked up once, when this module is imported; where it
is not found, its fallback is bound in its place, made of what torch documents. :data:`PRIVATE` says what that is.

Not here: FSDP2's objects, which are in :mod:`ottava.distributed.fsdp2` (without them weights are gathered more often,
with the same values); what ``Module`` has for classes that derive from it (``_apply``, ``_parameters``, ``_modules``,
``_buffers``, ``_forward_pre_hooks``, ``_load_from_state_dict``, ``_save_to_state_dict``); and ``Tensor._version`` and
``Tensor._is_view``, which have no equivalent and which autograd's own checks rest on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch

from ottava.errors import BackendError

#: Name in this module -> the private name below ``torch``, and what serves without it.
PRIVATE: dict[str, tuple[str, str]] = {}

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _ask(name: str, path: str, fallback: Any, without: str) -> Any:
    PRIVATE[name] = (path, without)
    found: Any = torch
    for part in path.split("."):
        found = getattr(found, part, None)
    return fallback if found is None else found


def _refuse(path: str) -> NoReturn:
    raise BackendError(
        f"torch {torch.__version__} has no torch.{path}, for which torch documents nothing else",
        expected="a version of torch that `ottava` was tested with (docs/building.md lists them)",
        remedy="install such a version, or a later ottava",
    )


# -- which backward pass this is --

_BACKWARD_FRAMES = {
    ("torch.autograd", "backward"),
    ("torch.autograd", "grad"),
    ("torch.autograd.function", "BackwardCFunction.apply"),
    ("torch.utils.checkpoint", "_checkpoint_hook.__init__.<locals>.unpack_hook"),
}


def _graph_task_by_frames() -> int:
    """The outermost function of a backward pass on this thread's stack; a GPU's own thread has only the inner ones."""
    walked: Any = sys._getframe(1)
    found = -1
    while walked is not None:
        if (walked.f_globals.get("__name__"), walked.f_code.co_qualname) in _BACKWARD_FRAMES:
            found = id(walked)
        walked = walked.f_back
    return found


#: The number of the backward pass that this runs in; -1 outside any.
graph_task_id: Callable[[], int] = _ask(
    "graph_task_id",
    "_C._current_graph_task_id",
    _graph_task_by_frames,
    "the functions of torch.autograd are looked for on the stack: slower",
)

# -- who looks on: without one of these somebody always does, and every kernel goes through its operator: slower --

_LOOKED_AT = "every kernel goes through its operator: slower"
dispatch_modes: Callable[[], int] = _ask("dispatch_modes", "_C._len_torch_dispatch_stack", lambda: 1, _LOOKED_AT)
function_modes: Callable[[], int] = _ask("function_modes", "_C._len_torch_function_stack", lambda: 1, _LOOKED_AT)
transforms: Callable[[], Any] = _ask(
    "transforms", "_C._functorch.peek_interpreter_stack", lambda: "unknown", _LOOKED_AT
)
tracing: Callable[[], Any] = _ask("tracing", "_C._get_tracing_state", lambda: "unknown", _LOOKED_AT)
profiling: Callable[[], bool] = _ask("profiling", "_C._autograd._profiler_enabled", lambda: True, _LOOKED_AT)
#: The module whose ``_current_level`` is -1 outside of forward-mode derivatives, and changes.
forward_ad: Any = torch.autograd.forward_ad
if _ask("forward_ad", "autograd.forward_ad._current_level", None, "layers are autograd functions: slower") is None:
    forward_ad = SimpleNamespace(_current_level=0)

_key_sets = _ask("strange_keys", "_C.DispatchKeySet", None, _LOOKED_AT)
_keys_of_tensor = _ask("dispatch_keys", "_C._dispatch_keys", None, _LOOKED_AT)
#: The set of what torch's dispatcher knows of a tensor.
dispatch_keys: Callable[[torch.Tensor], Any] = _keys_of_tensor
if _key_sets is None or _keys_of_tensor is None:
    _unknown = SimpleNamespace(raw_repr=lambda: -1)

    def dispatch_keys(tensor: torch.Tensor) -> Any:
        """All of them."""
        return _unknown


def strange_keys(plain: Sequence[str]) -> int:
    """The bits of all dispatch keys but these."""
    known = 0
    for name in plain if _key_sets is not None else ():
        known |= _key_sets(getattr(torch._C.DispatchKey, name)).raw_repr()
    return ~known


def _any_autocast() -> bool:
    kinds = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
    return any(torch.amp.is_autocast_available(k) and torch.is_autocast_enabled(k) for k in kinds)


any_autocast_enabled: Callable[[], bool] = _ask(
    "any_autocast_enabled", "_C._is_any_autocast_enabled", _any_autocast, "torch.is_autocast_enabled, of each device"
)


PRIVATE["constant_to_compiler"] = ("_dynamo, whose mark this sets", "compiled code breaks its graph there")


def constant_to_compiler(function: _Function) -> _Function:
    """Have compiled code call ``function`` once, while it is traced.

    This sets what ``torch.compiler.assume_constant_result`` sets, which imports the compiler, and that takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# -- products, and operators over many tensors --


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    functional: Any = torch.nn.functional
    scaling = functional.ScalingType
    kind = scaling.TensorWise if scale_a.numel() == scale_b.numel() == 1 else scaling.RowWise
    made: torch.Tensor = functional.scaled_mm(
        a, b, scale_a, kind, scale_b, kind, bias=bias, output_dtype=out_dtype, use_fast_accum=use_fast_accum
    )
    return made


scaled_mm: Callable[..., torch.Tensor] = _ask("scaled_mm", "_scaled_mm", _scaled_mm, "torch.nn.functional.scaled_mm")


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _maximum_each(targets: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    for target, other in zip(targets, others, strict=True):
        torch.maximum(target, other, out=target)


foreach_copy_: Callable[..., None] = _ask("foreach_copy_", "_foreach_copy_", _copy_each, "copy_, one by one")
foreach_maximum_: Callable[..., None] = _ask(
    "foreach_maximum_", "_foreach_maximum_", _maximum_each, "torch.maximum, one by one"
)


def _mkldnn_by_instruction_set() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX512"))


#: Whether oneDNN, which multiplies for torch on CPUs, takes bfloat16 on this machine.
mkldnn_bf16_supported: Callable[[], bool] = _ask(
    "mkldnn_bf16_supported",
    "ops.mkldnn._is_mkldnn_bf16_supported",
    _mkldnn_by_instruction_set,
    "torch.backends: oneDNN is there, and the CPU has AVX-512",
)


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


#: The address of a GPU's current stream. Builds of torch for CPUs do not have the private name.
raw_stream: Callable[[int], int] = _ask(
    "raw_stream", "_C._cuda_getCurrentRawStream", _current_stream, "torch.cuda.current_stream: slower"
)


def _reshaped(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return tensor.reshape(tuple(size)).clone()


#: A reshaped tensor that is no view for autograd.
unsafe_view: Callable[..., torch.Tensor] = _ask(
    "unsafe_view", "ops.aten._unsafe_view", _reshaped, "a reshaped copy: slower"
)


PRIVATE["aten_overloads"] = ("ops.aten._to_copy, _pin_memory and _unsafe_view", "nothing is needed: nobody calls them")


def aten_overloads(*names: str) -> list[Any]:
    """The default overloads of private aten operators, those that there are: nobody calls the others."""
    found = [getattr(torch.ops.aten, name, None) for name in names]
    return [operator.default for operator in found if operator is not None]


def _moved(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    pinned = kwargs.pop("pin_memory", None)
    given = {name: value for name, value in kwargs.items() if value is not None and name != "layout"}
    moved = tensor.to(**given, copy=True)
    return moved.pin_memory() if pinned else moved


#: A copy of another dtype, or on another device.
to_copy: Callable[..., torch.Tensor] = _ask("to_copy", "ops.aten._to_copy", _moved, "Tensor.to")


PRIVATE["schema_of"] = ("_ops.OpOverload._schema", "nothing: ops that core does not know are refused with an error")


def schema_of(operator: Any) -> Any:
    """What an operator takes and writes.

    Raises:
        BackendError: this torch does not say.
    """
    schema = getattr(operator, "_schema", None)
    return _refuse("_ops.OpOverload._schema") if schema is None else schema


# -- tensor subclasses --


def _no_wrapper_subclass(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
    _refuse("Tensor._make_wrapper_subclass")


#: torch's documentation of tensor subclasses names it, and nothing else that makes one without memory of its own.
make_wrapper_subclass: Callable[..., Any] = _ask(
    "make_wrapper_subclass",
    "Tensor._make_wrapper_subclass",
    _no_wrapper_subclass,
    "nothing: quantized parameters are refused with an error, and layers with high-precision ones work",
)


def _by_dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with torch.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


#: ``__torch_function__`` of classes that answer below autograd only.
disabled_torch_function: Any = _ask(
    "disabled_torch_function",
    "_C._disabled_torch_function_impl",
    classmethod(_by_dispatch),
    "torch.DisableTorchFunctionSubclass: slower",
)


def _map_values(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return type(tree)((key, _map_values(function, value)) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map_values(function, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_values(function, value) for value in tree)
    return function(tree)


#: A function over the leaves of lists, tuples and dictionaries.
tree_map: Callable[..., Any] = _ask("tree_map", "utils._pytree.tree_map", _map_values, "a function of its own")

# -- process groups, DTensor --


def _no_group(name: str) -> NoReturn:
    _refuse("distributed.distributed_c10d._resolve_process_group")


#: The process group of a name, which keeps no group alive.
resolve_process_group: Callable[[str], Any] = _ask(
    "resolve_process_group",
    "distributed.distributed_c10d._resolve_process_group",
    _no_group,
    "nothing: quantized weights that share scales over ranks are refused with an error",
)


PRIVATE["local_tensor"] = ("distributed.tensor.DTensor._local_tensor", "DTensor.to_local")
PRIVATE["set_local_tensor"] = (
    "distributed.tensor.DTensor._local_tensor",
    "nothing: load_state_dict(assign=True) of sharded high-precision weights is refused with an error",
)


PRIVATE["may_refuse_to_load"] = (
    "nn.Module._load_state_dict_pre_hooks and _load_state_dict_post_hooks",
    "every module counts as one with hooks: load_model keeps a copy of the model until it has succeeded",
)


def may_refuse_to_load(module: torch.nn.Module) -> bool:
    """Whether ``load_state_dict`` of a module runs hooks, or methods that are neither torch's nor Ottava's."""
    hooks = [getattr(module, f"_load_state_dict_{when}_hooks", True) for when in ("pre", "post")]
    cls = type(module)
    methods = (cls.load_state_dict, cls._load_from_state_dict, cls.set_extra_state)
    return any(hooks) or any(m.__module__.partition(".")[0] not in ("torch", "ottava") for m in methods)


def is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor, whose import takes long."""
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Any) -> Any:
    """What a DTensor holds on this rank, by ``to_local`` where it does not show it; other tensors themselves."""
    found = getattr(tensor, "_local_tensor", None)
    if found is not None:
        return found
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def set_local_tensor(tensor: Any, local: torch.Tensor) -> None:
    """Put another tensor in the place of what a DTensor holds on this rank.

    Raises:
        BackendError: this torch has no place for it.
    """
    if not hasattr(tensor, "_local_tensor"):
        _refuse("distributed.tensor.DTensor._local_tensor")
    tensor._local_tensor = local
