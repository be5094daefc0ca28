"""What is private in torch, asked for here and nowhere else in the packages, and what serves where
it is gone.

A name with an underscore may go in any version of torch. Each is looked up once, when this module
is imported; where it is not found, what :class:`Fallbacks` has of the same name is bound in its
place. :data:`PRIVATE` says what that is; where that is nothing, what needs the name is refused with
a BackendError.

One has no equivalent and is answered for, with a warning: without ``graph_task_id`` no code counts
as inside of a backward pass (docs/limits.md says what follows). FSDP2 then gathers what rows and
columns need at once, not in turns.

Not here: FSDP2's objects, which are in :mod:`ottava.distributed.fsdp2`;
``_ddp_params_and_buffers_to_ignore``, which ``ottava.convert`` sets for DistributedDataParallel to
read (a version that does not copies the first rank's scaling state over that of the others); and
what ``Module`` has for classes that derive from it (``_apply``, ``_parameters``, ``_modules``,
``_buffers``, ``_forward_pre_hooks``, ``_replicate_for_data_parallel``, and what loads and saves).

Nor is :func:`pipeline_pass`, which reads the frames of the caller: where
``torch.distributed.pipelining`` has other names, code counts as outside of any pipeline.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from ottava.errors import BackendError, UsageError

#: Devices that torch.autocast knows. Asked here, because the compiler of torch 2.11 cannot trace
#: the question.
WITH_AUTOCAST = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia"))
)

#: Name in this module -> the private name below ``torch``, and what serves without it.
PRIVATE: dict[str, tuple[str, str]] = {}
#: Those of them that this torch was found to lack: the private name -> what serves without it.
MISSING: dict[str, str] = {}

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Fallbacks:
    """What serves instead of the private names, made of what torch documents."""

    # No code is known to run inside of a backward pass; somebody looks on, always, at tensors with
    # all keys.
    graph_task_id = staticmethod(lambda: -1)
    current_node = top_hooks = staticmethod(lambda *_: None)
    dispatch_modes = function_modes = transforms = tracing = profiling = staticmethod(lambda: True)
    strange_keys, forward_ad = None, SimpleNamespace(_current_level=0)
    dispatch_keys = staticmethod(lambda tensor: SimpleNamespace(raw_repr=lambda: -1))
    raw_stream = staticmethod(lambda device: int(torch.cuda.current_stream(device).cuda_stream))
    unsafe_view = staticmethod(lambda tensor, size: tensor.reshape(tuple(size)).clone())
    any_autocast_enabled = staticmethod(lambda: any(map(torch.is_autocast_enabled, WITH_AUTOCAST)))
    foreach_copy_ = staticmethod(
        lambda to, of: [t.copy_(each) for t, each in zip(to, of, strict=True)]
    )
    foreach_maximum_ = staticmethod(
        lambda to, of: [torch.maximum(t, o, out=t) for t, o in zip(to, of, strict=True)]
    )

    @staticmethod
    def scaled_mm(
        a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, _: None, out_dtype: Any, fast: bool
    ) -> Any:
        kinds: Any = torch.nn.functional.ScalingType
        kind = kinds.TensorWise if scale_a.numel() == scale_b.numel() == 1 else kinds.RowWise
        options: Any = {"bias": bias, "output_dtype": out_dtype, "use_fast_accum": fast}
        return torch.nn.functional.scaled_mm(a, b, scale_a, kind, scale_b, kind, **options)

    @staticmethod
    def mkldnn_bf16_supported() -> bool:
        there = torch.backends.mkldnn.is_available()
        return bool(there and torch.backends.cpu.get_cpu_capability().startswith("AVX512"))

    @classmethod
    def disabled_torch_function(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _refuse(path: str) -> NoReturn:
    what = f"torch {torch.__version__} has no torch.{path}, for which torch documents nothing else"
    expected = "a version of torch that `ottava` was tested with (docs/building.md lists them)"
    raise BackendError(what, expected=expected, remedy="install such a version, or a later ottava")


def _ask(name: str, path: str, without: str) -> Any:
    """What torch has at ``path``, else what :class:`Fallbacks` has, else a function that says what
    is missing."""
    PRIVATE[name] = (path, without)
    found: Any = torch
    for step in path.split("."):
        found = getattr(found, step, None)
    if found is None:
        MISSING[path] = without
    return getattr(Fallbacks, name, lambda *_, **__: _refuse(path)) if found is None else found


#: The number of the backward pass that this runs in; -1 outside any.
graph_task_id: Callable[[], int] = _ask(
    "graph_task_id",
    "_C._current_graph_task_id",
    "recomputations by activation checkpointing count as forward passes: with delayed scaling "
    "each begins a step of "
    "its own, unless its region stays open around backward()",
)
#: Whether :data:`graph_task_id` can tell.
KNOWS_BACKWARD = graph_task_id is not Fallbacks.graph_task_id
if not KNOWS_BACKWARD:
    _lacking = "torch {} has no torch.{}: {}".format(torch.__version__, *PRIVATE["graph_task_id"])
    warnings.warn(_lacking, RuntimeWarning, stacklevel=2)

_TWICE = "a state sees what is recomputed twice; amaxes stay the same"
current_node: Callable[[], Any] = _ask("current_node", "_C._current_autograd_node", _TWICE)
top_hooks: Callable[[bool], Any] = _ask(
    "top_hooks", "_C._autograd._top_saved_tensors_default_hooks", _TWICE
)

_SLOWER = "every kernel goes through its operator: slower"
dispatch_modes: Callable[[], int] = _ask("dispatch_modes", "_C._len_torch_dispatch_stack", _SLOWER)
function_modes: Callable[[], int] = _ask("function_modes", "_C._len_torch_function_stack", _SLOWER)
transforms: Callable[[], Any] = _ask("transforms", "_C._functorch.peek_interpreter_stack", _SLOWER)
tracing: Callable[[], Any] = _ask("tracing", "_C._get_tracing_state", _SLOWER)
profiling: Callable[[], bool] = _ask("profiling", "_C._autograd._profiler_enabled", _SLOWER)
#: The set of what torch's dispatcher knows of a tensor.
dispatch_keys: Callable[[torch.Tensor], Any] = _ask("dispatch_keys", "_C._dispatch_keys", _SLOWER)
_key_sets = _ask("strange_keys", "_C.DispatchKeySet", _SLOWER)
#: The module whose ``_current_level`` is -1 outside of forward-mode derivatives, and changes.
_ask("forward_ad", "autograd.forward_ad._current_level", "layers are autograd functions: slower")
forward_ad: Any = (
    Fallbacks.forward_ad if PRIVATE["forward_ad"][0] in MISSING else torch.autograd.forward_ad
)

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
#: Whether oneDNN, which multiplies for torch on CPUs, takes bfloat16 on this machine.
mkldnn_bf16_supported: Callable[[], bool] = _ask(
    "mkldnn_bf16_supported",
    "ops.mkldnn._is_mkldnn_bf16_supported",
    "oneDNN is there, and the CPU has AVX-512",
)
#: The address of a GPU's current stream. Builds of torch for CPUs do not have the private name.
raw_stream: Callable[[int], int] = _ask(
    "raw_stream", "_C._cuda_getCurrentRawStream", "torch.cuda: slower"
)
#: A reshaped tensor that is no view for autograd.
unsafe_view: Callable[..., torch.Tensor] = _ask(
    "unsafe_view", "ops.aten._unsafe_view", "a reshaped copy: slower"
)
_PARAMETERS = "nothing: quantized parameters are refused, no others"
#: A tensor of a subclass, without memory of its own.
make_wrapper_subclass: Callable[..., Any] = _ask(
    "make_wrapper_subclass", "Tensor._make_wrapper_subclass", _PARAMETERS
)
tree_map: Callable[..., Any] = _ask("tree_map", "utils._pytree.tree_map", _PARAMETERS)
#: ``__torch_function__`` of classes that answer below autograd only.
disabled_torch_function: Any = _ask(
    "disabled_torch_function",
    "_C._disabled_torch_function_impl",
    "torch.DisableTorchFunctionSubclass: slower",
)
#: The process group of a name, which keeps no group alive.
resolve_process_group: Callable[[str], Any] = _ask(
    "resolve_process_group",
    "distributed.distributed_c10d._resolve_process_group",
    "nothing: quantized weights that share scales over ranks are refused with an error",
)

# Looked up each time. Functions that have no entry say themselves what serves.
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
    """The bits of all dispatch keys but these."""
    known = 0
    for name in plain if _key_sets is not None else ():
        known |= _key_sets(getattr(torch._C.DispatchKey, name)).raw_repr()
    return ~known


def constant_to_compiler(function: _Function) -> _Function:
    """Have compiled code call ``function`` once, while it is traced, as
    ``torch.compiler.assume_constant_result`` does, which imports the compiler, and that takes
    seconds. A compiler that knows no such mark breaks its graph there."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: ``torch.compiler.is_exporting``, which torch 2.11 takes for True in all code that it compiles.
is_exporting: Callable[[], bool] = constant_to_compiler(lambda: torch.compiler.is_exporting())


@constant_to_compiler  # whose own error, for an exception in what it traces, would say nothing
def refuse_export(what: str, expected: str, remedy: str) -> None:
    """Raise a UsageError, in code that is being exported."""
    raise UsageError(what, expected=expected, remedy=remedy)


def aten_overloads(*names: str) -> list[Any]:
    """The default overloads of private aten operators, those that there are: nobody calls the
    others."""
    return [
        found.default
        for name in names
        if (found := getattr(torch.ops.aten, name, None)) is not None
    ]


def aliases_of(operator: Any) -> list[tuple[int, str, bool]] | None:
    """The arguments whose memory an operator writes to, or its results share: position, name,
    whether it writes.

    None where this torch does not say.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return None
    infos = [
        (place, argument.name, argument.alias_info)
        for place, argument in enumerate(schema.arguments)
    ]
    return [(place, name, bool(info.is_write)) for place, name, info in infos if info is not None]


def writes_of(operator: Any) -> list[tuple[int, str]] | None:
    """The arguments that an operator writes to, by position and name; None where this torch does
    not say."""
    aliases = aliases_of(operator)
    return (
        None
        if aliases is None
        else [(place, name) for place, name, is_write in aliases if is_write]
    )


def version_of(tensor: torch.Tensor) -> int:
    """How many writes autograd knows of, to a tensor that was not made in inference mode."""
    found = getattr(tensor, "_version", None)
    return next(_numbers) if found is None else found


def share_hooks(tensor: Any, other: Any) -> None:
    """Have the hooks of a leaf's gradient run for another one, too; none where torch does not show
    them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(tensor, name, None):
            setattr(other, name, hooks)


def may_refuse_to_load(module: torch.nn.Module) -> bool:
    """Whether ``load_state_dict`` of a module runs hooks or methods that are neither torch's nor
    Ottava's; True where torch does not show its hooks."""
    hooks = [
        getattr(module, f"_load_state_dict_{when}_hooks", {0: None}).values()
        for when in ("pre", "post")
    ]
    cls = type(module)
    called = (
        *hooks[0],
        *hooks[1],
        cls.load_state_dict,
        cls._load_from_state_dict,
        cls.set_extra_state,
    )
    return any(
        getattr(one, "__module__", "").partition(".")[0] not in ("torch", "ottava")
        for one in called
    )


def is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor, whose import takes long."""
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Any) -> Any:
    """What a DTensor holds on this rank, by ``to_local`` where it does not show it; other tensors
    themselves."""
    found = getattr(tensor, "_local_tensor", None)
    if found is not None or not is_distributed(tensor):
        return tensor if found is None else found
    with torch.no_grad():
        return tensor.to_local()


def set_local_tensor(tensor: Any, local: torch.Tensor) -> None:
    """Put another tensor in the place of what a DTensor holds here; a BackendError where torch has
    no such place."""
    if not hasattr(tensor, "_local_tensor"):
        _refuse(_LOCAL)
    tensor._local_tensor = local


class PipelinePass(NamedTuple):
    """What a pipeline of ``torch.distributed.pipelining`` is doing."""

    #: The ranks of the pipeline, each of which has other stages.
    ranks: int
    #: The number of the microbatch whose forward pass a stage runs; None where it is no stage that
    #: runs.
    microbatch: int | None
    #: Whether a stage runs to find out shapes and dtypes, on values that are nobody's.
    infers: bool


_PIPELINING = "torch.distributed.pipelining."
#: The module that is imported where there are pipelines.
PIPELINES = f"{_PIPELINING}stage"
_INFERRING = ("_forward_metadata_inference", "_shape_inference")


def pipeline_pass() -> PipelinePass | None:
    """What the pipeline does in which this runs; None outside of any. Not for code that is
    compiled."""
    frame: FrameType | None = sys._getframe(1) if PIPELINES in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_PIPELINING):
            found = _pass_of(frame.f_code.co_name, frame.f_locals)
            if found is not None:
                return found
        frame = frame.f_back
    return None


def _pass_of(function: str, variables: Any) -> PipelinePass | None:
    """What a function of a stage or of a schedule says; None where that is for its caller to
    say."""
    owner = variables.get("self")
    stages = getattr(owner, "_stages", None) or [getattr(owner, "_stage", owner)]
    ranks = getattr(stages[0], "group_size", None)
    of_stage = function in (*_INFERRING, "forward_one_chunk")
    if ranks is None or not (of_stage or stages[0] is not owner):
        return None
    return PipelinePass(ranks, variables.get("fwd_chunk_id"), function in _INFERRING)
