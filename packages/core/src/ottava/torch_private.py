"""The private names of torch that the packages use, and a fallback for each.

A version of torch may drop any name with an underscore, so no other module uses them. Each is
looked up once, when this module is imported. If torch lacks a name, the attribute of
:class:`Fallbacks` with the same name takes its place. :data:`PRIVATE` describes the fallback; if
there is none, functions that need the name raise a BackendError.

One name has no equivalent, and its absence causes a warning: without ``graph_task_id`` no code
counts as inside of a backward pass (docs/limits.md lists the consequences). FSDP2 then gathers the
data of both usages at once instead of in turns.

Some private names are used elsewhere:

- FSDP2's objects, in :mod:`ottava.distributed.fsdp2`;
- ``_ddp_params_and_buffers_to_ignore``, which ``ottava.convert`` sets and DistributedDataParallel
  reads; a version of torch that ignored it would copy the first rank's scaling state over that of
  the other ranks;
- the names that ``Module`` has for its subclasses (``_apply``, ``_parameters``, ``_modules``,
  ``_buffers``, ``_forward_pre_hooks``, ``_replicate_for_data_parallel``, and those that load and
  save).

:func:`pipeline_pass` uses names in another way: it reads the frames of its callers. If
``torch.distributed.pipelining`` renames its functions, code counts as outside of any pipeline.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from ottava.errors import BackendError, UsageError

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed import ProcessGroup

#: An object that torch gives no public type. A fallback may take its place.
Private = Any
_T = TypeVar("_T")

#: Types of devices that torch.autocast supports. The set is computed once, because the compiler of
#: torch 2.11 cannot trace ``is_autocast_available``.
WITH_AUTOCAST = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia"))
)

#: Name in this module -> the private name below ``torch``, and a description of its fallback.
PRIVATE: dict[str, tuple[str, str]] = {}
#: The names that this version of torch lacks: private name -> a description of its fallback.
MISSING: dict[str, str] = {}

_Function = TypeVar("_Function", bound=Callable[..., object])


class KeySet(Protocol):
    """A set of dispatch keys."""

    def raw_repr(self) -> int:
        """The set as bits."""


class Fallbacks:
    """Replacements for the private names, made from documented functions of torch."""

    # Without the private names no code is known to run inside of a backward pass, dispatch always
    # counts as observed, and tensors count as having all dispatch keys.
    graph_task_id = staticmethod(lambda: -1)
    current_node = top_hooks = staticmethod(lambda *_: None)
    dispatch_modes = function_modes = transforms = tracing = profiling = staticmethod(lambda: True)
    strange_keys, forward_ad = None, SimpleNamespace(_current_level=0)
    dispatch_keys = staticmethod(lambda tensor: SimpleNamespace(raw_repr=lambda: -1))
    raw_stream = staticmethod(lambda device: int(torch.cuda.current_stream(device).cuda_stream))
    unsafe_view = staticmethod(lambda tensor, size: tensor.reshape(tuple(size)).clone())
    any_autocast_enabled = staticmethod(lambda: any(map(torch.is_autocast_enabled, WITH_AUTOCAST)))
    foreach_copy_ = staticmethod(
        lambda targets, values: [t.copy_(v) for t, v in zip(targets, values, strict=True)]
    )
    foreach_maximum_ = staticmethod(
        lambda targets, others: [
            torch.maximum(t, o, out=t) for t, o in zip(targets, others, strict=True)
        ]
    )

    @staticmethod
    def scaled_mm(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
        _: None,
        out_dtype: torch.dtype,
        fast: bool,
    ) -> torch.Tensor:
        kind = torch.nn.functional.ScalingType.RowWise
        if scale_a.numel() == scale_b.numel() == 1:
            kind = torch.nn.functional.ScalingType.TensorWise
        return torch.nn.functional.scaled_mm(
            a,
            b,
            scale_a,
            kind,
            scale_b,
            kind,
            bias=bias,
            output_dtype=out_dtype,
            use_fast_accum=fast,
        )

    @staticmethod
    def mkldnn_bf16_supported() -> bool:
        if not torch.backends.mkldnn.is_available():
            return False
        return torch.backends.cpu.get_cpu_capability().startswith("AVX512")

    @classmethod
    def disabled_torch_function(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _refuse(path: str) -> NoReturn:
    raise BackendError(
        f"torch {torch.__version__} has no torch.{path}, for which torch documents nothing else",
        "a version of torch that `ottava` was tested with (docs/building.md lists them)",
        "install such a version, or a later ottava",
    )


def _ask(name: str, path: str, without: str) -> Private:
    """The object at ``path`` below ``torch``, or its fallback.

    If there is no fallback either, the result is a function that raises a BackendError. ``without``
    describes the fallback.
    """
    PRIVATE[name] = (path, without)
    value: object = torch
    for step in path.split("."):
        value = getattr(value, step, None)
    if value is not None:
        return value
    MISSING[path] = without
    return getattr(Fallbacks, name, lambda *_, **__: _refuse(path))


#: The number of the backward pass that the caller runs in; -1 outside of any.
graph_task_id: Callable[[], int] = _ask(
    "graph_task_id",
    "_C._current_graph_task_id",
    "recomputations by activation checkpointing count as forward passes: with delayed scaling "
    "each begins a step of its own, unless its region stays open around backward()",
)
#: Whether :data:`graph_task_id` can tell.
KNOWS_BACKWARD = graph_task_id is not Fallbacks.graph_task_id
if not KNOWS_BACKWARD:
    _lacking = "torch {} has no torch.{}: {}".format(torch.__version__, *PRIVATE["graph_task_id"])
    warnings.warn(_lacking, RuntimeWarning, stacklevel=2)

_TWICE = "a state sees what is recomputed twice; amaxes stay the same"
current_node: Callable[[], object] = _ask("current_node", "_C._current_autograd_node", _TWICE)
top_hooks: Callable[[bool], Sequence[object] | None] = _ask(
    "top_hooks", "_C._autograd._top_saved_tensors_default_hooks", _TWICE
)

_SLOWER = "every kernel goes through its operator: slower"
dispatch_modes: Callable[[], int] = _ask("dispatch_modes", "_C._len_torch_dispatch_stack", _SLOWER)
function_modes: Callable[[], int] = _ask("function_modes", "_C._len_torch_function_stack", _SLOWER)
transforms: Callable[[], object] = _ask(
    "transforms", "_C._functorch.peek_interpreter_stack", _SLOWER
)
tracing: Callable[[], object] = _ask("tracing", "_C._get_tracing_state", _SLOWER)
profiling: Callable[[], bool] = _ask("profiling", "_C._autograd._profiler_enabled", _SLOWER)
#: The set of dispatch keys of a tensor.
dispatch_keys: Callable[[torch.Tensor], KeySet] = _ask(
    "dispatch_keys", "_C._dispatch_keys", _SLOWER
)
_key_sets = _ask("strange_keys", "_C.DispatchKeySet", _SLOWER)
#: A module whose variable ``_current_level`` is -1 outside of forward-mode derivatives.
_ask("forward_ad", "autograd.forward_ad._current_level", "layers are autograd functions: slower")
forward_ad: Private = torch.autograd.forward_ad
if PRIVATE["forward_ad"][0] in MISSING:
    forward_ad = Fallbacks.forward_ad

any_autocast_enabled: Callable[[], bool] = _ask(
    "any_autocast_enabled",
    "_C._is_any_autocast_enabled",
    "torch.is_autocast_enabled, of each device",
)
scaled_mm: Callable[..., torch.Tensor] = _ask(
    "scaled_mm", "_scaled_mm", "torch.nn.functional.scaled_mm"
)
foreach_copy_: Callable[..., None] = _ask("foreach_copy_", "_foreach_copy_", "copy_, one by one")
foreach_maximum_: Callable[..., None] = _ask(
    "foreach_maximum_", "_foreach_maximum_", "torch.maximum, one by one"
)
#: Whether oneDNN, which computes torch's products on CPUs, supports bfloat16 on this machine.
mkldnn_bf16_supported: Callable[[], bool] = _ask(
    "mkldnn_bf16_supported",
    "ops.mkldnn._is_mkldnn_bf16_supported",
    "oneDNN is there, and the CPU has AVX-512",
)
#: The address of a GPU's current stream. Builds of torch for CPUs lack the private name.
raw_stream: Callable[[int], int] = _ask(
    "raw_stream", "_C._cuda_getCurrentRawStream", "torch.cuda: slower"
)
#: A reshaped tensor that autograd does not treat as a view.
unsafe_view: Callable[..., torch.Tensor] = _ask(
    "unsafe_view", "ops.aten._unsafe_view", "a reshaped copy: slower"
)
_PARAMETERS = "nothing: quantized parameters are refused, no others"
#: Makes a tensor of a subclass that has no memory of its own.
make_wrapper_subclass: Callable[..., Private] = _ask(
    "make_wrapper_subclass", "Tensor._make_wrapper_subclass", _PARAMETERS
)
tree_map: Callable[..., Private] = _ask("tree_map", "utils._pytree.tree_map", _PARAMETERS)
#: ``__torch_function__`` for classes that handle ops only below autograd.
disabled_torch_function: Private = _ask(
    "disabled_torch_function",
    "_C._disabled_torch_function_impl",
    "torch.DisableTorchFunctionSubclass: slower",
)
#: The process group with a name; a name keeps no group alive.
resolve_process_group: "Callable[[str], ProcessGroup]" = _ask(
    "resolve_process_group",
    "distributed.distributed_c10d._resolve_process_group",
    "nothing: quantized weights that share scales over ranks are refused with an error",
)

# Functions below look these names up on every call. Their docstrings describe fallbacks of names
# that have no entry here.
_LOCAL = "distributed.tensor.DTensor._local_tensor"
PRIVATE |= {
    "aliases_of": (
        "_ops.OpOverload._schema",
        "the values before and after an op that core does not know: slower",
    ),
    "version_of": (
        "Tensor._version",
        "what is derived from tensors is made anew for each use: slower",
    ),
    "local_tensor": (_LOCAL, "DTensor.to_local"),
    "set_local_tensor": (
        _LOCAL,
        "nothing: load_state_dict(assign=True) of sharded high-precision weights is refused",
    ),
}
_numbers = itertools.count()


def strange_keys(plain: Sequence[str]) -> int:
    """The bits of all dispatch keys except those named in ``plain``."""
    if _key_sets is None:
        return -1
    bits = 0
    for name in plain:
        bits |= _key_sets(getattr(torch._C.DispatchKey, name)).raw_repr()
    return ~bits


def constant_to_compiler(function: _Function) -> _Function:
    """Mark a function that the compiler calls while it traces, and whose result is then constant.

    ``torch.compiler.assume_constant_result`` sets the same mark, but imports the compiler, which
    takes seconds. A compiler that does not know the mark breaks its graph at the call.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: ``torch.compiler.is_exporting``, called while code is traced, because torch 2.11 replaces the
#: call by True in all code that it compiles.
is_exporting: Callable[[], bool] = constant_to_compiler(lambda: torch.compiler.is_exporting())


# The compiler calls this function while it traces. If it traced an exception instead, its own
# error would hide the message.
@constant_to_compiler
def refuse_export(fault: str, expected: str, remedy: str) -> None:
    """Raise a UsageError in code that is being exported."""
    raise UsageError(fault, expected=expected, remedy=remedy)


def aten_overloads(*names: str) -> "list[OpOverload]":
    """The default overloads of those private aten operators that this torch has.

    The others need no treatment, because nobody can call them.
    """
    operators = [getattr(torch.ops.aten, name, None) for name in names]
    return [operator.default for operator in operators if operator is not None]


def aliases_of(operator: object) -> list[tuple[int, str, bool]] | None:
    """The arguments whose memory an operator writes to, or shares with its results.

    Returns:
        Position, name, and whether the operator writes; None where torch does not show schemas.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return None
    return [
        (position, argument.name, bool(argument.alias_info.is_write))
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
    ]


def writes_of(operator: object) -> list[tuple[int, str]] | None:
    """Position and name of the arguments that an operator writes to.

    None where torch does not show schemas.
    """
    aliases = aliases_of(operator)
    if aliases is None:
        return None
    return [(position, name) for position, name, is_write in aliases if is_write]


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes that autograd has counted for a tensor.

    The tensor must not have been made in inference mode. Where torch does not show the number, each
    call gives another one.
    """
    version: int | None = getattr(tensor, "_version", None)
    if version is None:
        return next(_numbers)
    return version


def share_hooks(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Make the gradient hooks of one leaf run for another one too.

    Does nothing where torch does not show the hooks.
    """
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name, None)
        if hooks:
            setattr(other, name, hooks)


def may_refuse_to_load(module: torch.nn.Module) -> bool:
    """Whether ``load_state_dict`` of a module runs code that is neither torch's nor Ottava's.

    That code is in hooks, or in methods of the module. True where torch does not show the hooks.
    """
    cls = type(module)
    functions: list[object] = [
        cls.load_state_dict,
        cls._load_from_state_dict,
        cls.set_extra_state,
    ]
    for name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
        hooks: Mapping[int, object] | None = getattr(module, name, None)
        if hooks is None:
            return True
        functions += hooks.values()
    return not all(_is_known(function) for function in functions)


def _is_known(function: object) -> bool:
    """Whether a function is torch's or Ottava's."""
    package, _, _ = getattr(function, "__module__", "").partition(".")
    return package in ("torch", "ottava")


def is_distributed(tensor: object) -> bool:
    """Whether a tensor is a DTensor, found out without importing that class, which takes long."""
    return hasattr(tensor, "to_local")


def local_tensor(tensor: _T) -> _T | torch.Tensor:
    """The local tensor of a DTensor on this rank; other tensors are returned as they are.

    ``to_local`` gives it where torch does not show it.
    """
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    if local is not None:
        return local
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        return to_local()


def set_local_tensor(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor on this rank.

    Raises:
        BackendError: torch does not show the local tensor.
    """
    if not hasattr(tensor, "_local_tensor"):
        _refuse(_LOCAL)
    tensor._local_tensor = local


class PipelinePass(NamedTuple):
    """The work that a pipeline of ``torch.distributed.pipelining`` is doing."""

    #: The number of ranks of the pipeline, each of which has other stages.
    ranks: int
    #: The number of the microbatch whose forward pass a stage runs; None if no stage runs one.
    microbatch: int | None
    #: Whether a stage runs on meaningless values, to find out shapes and dtypes.
    infers: bool


_PIPELINING = "torch.distributed.pipelining."
#: The module that every program with a pipeline has imported.
PIPELINES = f"{_PIPELINING}stage"
_INFERRING = ("_forward_metadata_inference", "_shape_inference")


def pipeline_pass() -> PipelinePass | None:
    """The work of the pipeline that the caller runs in; None outside of any.

    It must not be called in code that is compiled.
    """
    if PIPELINES not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_PIPELINING):
            work = _pass_of(frame.f_code.co_name, frame.f_locals)
            if work is not None:
                return work
        frame = frame.f_back
    return None


def _pass_of(function: str, variables: Mapping[str, Private]) -> PipelinePass | None:
    """The work that the frame of a function of a stage or of a schedule shows.

    None: the frame of a caller may show it.
    """
    owner = variables.get("self")
    stages = getattr(owner, "_stages", None) or [getattr(owner, "_stage", owner)]
    ranks = getattr(stages[0], "group_size", None)
    of_stage = function in (*_INFERRING, "forward_one_chunk")
    if ranks is None or not (of_stage or stages[0] is not owner):
        return None
    return PipelinePass(ranks, variables.get("fwd_chunk_id"), function in _INFERRING)
