"""Calls without operators: whatever observes dispatch sees the operators, with the same bytes."""

from __future__ import annotations

import itertools
import json
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ottava import kernels
from ottava.kernels import for_layers
from tests import samples
from tests.comparing import assert_same
from tests.core import forking
from tests.core.kernels.test_grids import E4M3, LAYOUTS

Tensor = torch.Tensor
Call = Callable[[Tensor], Any]
MX, BLOCKS = LAYOUTS["mxfp8"], LAYOUTS["1x128"]


def scalar(value: float) -> Tensor:
    return torch.tensor(value)


def byte_values(x: Tensor) -> Tensor:
    return x.abs().to(torch.uint8)


def decode_blocks(x: Tensor) -> Tensor:
    data, scales, _, _ = kernels.grid_quantize(x, MX, columnwise=False)
    return kernels.grid_decode(data, scales, MX, torch.bfloat16)


def update(x: Tensor) -> list[Tensor]:
    scales, histories = [torch.ones(3)], [x.abs().float().reshape(-1)[:6].reshape(2, 3).clone()]
    kernels.update_scales(scales, histories, [448.0] * 3)
    return scales + histories


#: The name of an operator, and a call that reaches it.
CALLS: list[tuple[str, Call]] = [
    ("amax", kernels.amax),
    ("scale_from_amax", lambda x: kernels.scale_from_amax(x.abs().float(), E4M3)),
    ("quantize", lambda x: kernels.quantize(x, E4M3, transposed=True)),
    ("cast_amax", lambda x: kernels.cast(x, scalar(3.0), E4M3)),
    ("cast_amax", lambda x: kernels.cast_transpose(x, scalar(3.0), E4M3)),
    ("cast_amax", lambda x: kernels.cast_amax(x, scalar(3.0), scalar(0.0), E4M3)),
    ("transpose", lambda x: kernels.transpose(byte_values(x))),
    ("grid_decode", lambda x: kernels.decode(byte_values(x), scalar(0.5), E4M3, torch.float16)),
    ("grid_decode", decode_blocks),
    ("grid_quantize", lambda x: kernels.grid_quantize(x, BLOCKS)),
    ("grid_scales", lambda x: kernels.grid_scales(x.abs().float(), BLOCKS)),
    ("update_scales", update),
    ("quantize", lambda x: for_layers.quantize(x, E4M3, 0.0, False, True, True)),
    ("cast_amax", lambda x: for_layers.cast(x, scalar(3.0), scalar(0.0), None, E4M3, True, True)),
    ("grid_quantize", lambda x: for_layers.grid_quantize(x, MX.text, True, True)),
]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(CALLS)]
each_call = pytest.mark.parametrize(("name", "call"), CALLS, ids=IDS)


def leaves(result: Any) -> list[Tensor]:
    found, _ = torch.utils._pytree.tree_flatten(result)
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def values() -> Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


class Operators(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """The same of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Named(Tensor):
    """A subclass that says nothing else."""


@each_call
def test_observers_see_the_operator(name: str, call: Call) -> None:
    x = values()
    expected = leaves(call(x))
    with Operators() as operators:
        assert_same(leaves(call(x)), expected)
    assert f"ottava::{name}" in operators.names
    with Functions() as functions:
        assert_same(leaves(call(x)), expected)
    assert any(f"ottava.{name}" in entry for entry in functions.names)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = leaves(call(mode.from_tensor(x)))
    assert all(isinstance(fake, FakeTensor) for fake in fakes)
    assert [(f.shape, f.dtype) for f in fakes] == [(e.shape, e.dtype) for e in expected]
    for tracing, pre_dispatch in (("real", True), ("fake", False), ("symbolic", True)):
        graph = make_fx(
            lambda x: leaves(call(x)),
            tracing_mode=tracing,  # type: ignore[arg-type]
            pre_dispatch=pre_dispatch,
        )(x + 1)
        assert any(f"ottava.{name}." in str(node.target) for node in graph.graph.nodes), tracing
        assert_same(graph(x), expected, note=tracing)


@each_call
def test_any_tensor_has_the_bytes_of_its_values(name: str, call: Call) -> None:
    """Lazily negated ones, subclasses, parameters, wrappers that a transform has left."""
    x = values()
    expected = leaves(call(x))
    remaining: list[Tensor] = []
    torch.func.grad(lambda t: (remaining.append(t), t.sum())[1])(x)
    with torch.inference_mode():
        inference = x.clone()
    others = [
        torch._neg_view(-x),
        x.as_subclass(Named),
        torch.nn.Parameter(x, requires_grad=False),
        x.t().contiguous().t(),
        inference,
        *remaining,
    ]
    for other in others:
        assert_same([t.detach().as_subclass(Tensor) for t in leaves(call(other))], expected)
    with torch.no_grad():
        assert_same(leaves(call(torch.nn.Parameter(x))), expected)
    if name in ("amax", "quantize", "grid_quantize"):
        assert all(t.is_meta for t in leaves(call(x.to("meta"))))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transforms_autograd_and_profiles() -> None:
    x = torch.stack([values(), 2 * values()])
    assert torch.equal(torch.func.vmap(kernels.amax)(x), x.abs().amax((1, 2)))
    assert torch.equal(torch.func.functionalize(kernels.amax)(x), x.abs().amax())
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        kernels.amax(x)
    assert any(event.key == "ottava::amax" for event in profiled.key_averages())
    assert "ottava::amax" in str(torch.jit.trace(kernels.amax, (x,)).graph)
    # Autograd learns that a result has no gradient, and refuses to differentiate it.
    assert kernels.amax(x.requires_grad_()).requires_grad
    with torch.no_grad():
        assert not kernels.amax(x).requires_grad


@pytest.mark.xdist_group("compiler")
@pytest.mark.parametrize("shape", [(3, 0), (2, 3, 41)], ids=str)
def test_operators_are_well_formed(shape: tuple[int, ...]) -> None:
    """Schemas, shapes under tracing and symbolic sizes, by torch's own checks."""
    ops, x = torch.ops.ottava, samples.wide(*shape)
    for name, rowwise, columnwise in (("mxfp8", True, True), ("1x128", False, True)):
        arguments = (x, LAYOUTS[name].text, rowwise, columnwise)
        torch.library.opcheck(ops.grid_quantize.default, arguments)
    torch.library.opcheck(ops.grid_scales.default, (x.abs(), MX.text, torch.float32))
    data, scales = kernels.grid_quantize(x, MX)[2:]
    torch.library.opcheck(ops.grid_decode.default, (data, scales, MX.text, True, torch.bfloat16))
    torch.library.opcheck(ops.amax.default, (x,))
    torch.library.opcheck(ops.quantize.default, (x, E4M3, 0.0, False, True, bool(shape)))
    torch.library.opcheck(
        ops.cast_amax.default,
        (x, scalar(200.0), scalar(0.5), torch.tensor(7), E4M3, True, bool(shape)),
    )
    slots = [torch.ones(1)], [torch.ones(2, 1)], [448.0], False, None
    torch.library.opcheck(ops.update_scales.default, slots)


FIRST = """
import json, torch

def run(x):
    from ottava import kernels
    from ottava.gemm import gemm
    product = gemm(x, x)
    return product, kernels.quantize(x, torch.float8_e4m3fn)[0], kernels.backend_for('cpu')

x = torch.randn(16, 32)
compiled = torch.compile(run, fullgraph=True, backend='eager')(x)
print(json.dumps([all(map(torch.equal, compiled[:2], run(x)[:2])), compiled[2]]))
"""


@pytest.mark.slow
def test_the_first_kernel_of_a_process_may_be_in_compiled_code() -> None:
    """A product asks for the backend while it is traced."""
    done = forking.python(FIRST, OTTAVA_BACKEND="reference")
    assert json.loads(done.stdout) == [True, "reference"], done.stderr[-2000:]


# -- operands of layers, whose results the compiled module allocates itself --


def test_slots_of_a_layers_state(code_path: str) -> None:
    """Each slot has its scale, and its place in the first row of the history."""
    x, scales = 1000 * values(), [1.0, 2.0, 4.0]
    for slot, recording in itertools.product(range(3), (True, False)):
        state = {
            "scale": torch.tensor(scales),
            "amax_history": torch.zeros(4, 3),
            "saturated": torch.zeros(3, dtype=torch.int64),
        }
        amax, count = scalar(0.0), torch.tensor(0)
        data, _, scale_inv = kernels.cast_amax(x, scalar(scales[slot]), amax, E4M3, saturated=count)
        made = for_layers.cast_slot(x, state, slot, recording, E4M3, True, False)
        assert_same(made, (data, scale_inv, None, None), note=slot)
        assert count > 0
        history, counts = torch.zeros(4, 3), torch.zeros(3, dtype=torch.int64)
        if recording:
            history[0, slot], counts[slot] = amax, count
        wanted = (torch.tensor(scales), history, counts)
        assert_same(tuple(state.values()), wanted, note=(slot, recording))


def test_results_are_tensors_like_others() -> None:
    """Their memory is aligned as torch's own, and given back with the tensor."""
    x = torch.ones(1024, 1024)
    data, scale_inv, transpose, _ = for_layers.quantize(x, E4M3, 0.0, False, True, True)
    for made in (data, scale_inv, transpose):
        assert made is not None
        assert made.data_ptr() % 64 == 0
        assert (made.storage_offset(), made.requires_grad, made.is_inference()) == (0, False, False)
    assert data is not None
    before = data.clone()
    assert torch.equal(data.share_memory_(), before)
    version = data._version
    data.add_(1)
    assert data._version == version + 1
    for dims in range(1, 7):
        sides = for_layers.grid_quantize(torch.ones((1,) * (dims - 1) + (40,)), MX.text, True, True)
        assert not any(side.data_ptr() % 64 for side in sides if side is not None)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        for_layers.quantize(x, E4M3, 0.0, False, True, True)
    # In KiB; a call makes 2 MiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 50 << 10
