"""Kernels without their operators: whoever looks at operators still sees them, and the results are
the same bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import forking
import pytest
import torch
from comparing import assert_same
from mx_arrays import mx
from sampling import VARIABLE, pairs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ottava import kernels
from ottava.errors import DeviceError, DTypeError, ShapeError
from ottava.kernels import for_layers
from ottava.kernels.direct import is_direct
from ottava.layout import Layout
from tests.core.conftest import FP8_DTYPES
from tests.core.sequential_grid import serving_cpu

E4M3 = torch.float8_e4m3fn
WHOLE = Layout(E4M3, (None, None)).text


def scalar(value: float = 1.0) -> torch.Tensor:
    return torch.tensor(value)


# Name of the operator -> a call of the public function, and one of the operator.
CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]] = {
    "amax": (kernels.amax, lambda x: torch.ops.ottava.amax(x)),
    "scale_from_amax": (
        lambda x: kernels.scale_from_amax(x.abs(), E4M3),
        lambda x: torch.ops.ottava.scale_from_amax(x.abs(), E4M3, 0.0, False),
    ),
    "quantize": (
        lambda x: kernels.quantize(x, E4M3, transposed=True),
        lambda x: torch.ops.ottava.quantize(x, E4M3, 0.0, False, True, True),
    ),
    "cast_amax": (
        lambda x: kernels.cast_amax(x, scalar(3.0), scalar(0.0), E4M3, transposed=True),
        lambda x: torch.ops.ottava.cast_amax(x, scalar(3.0), scalar(0.0), None, E4M3, True, True),
    ),
    "transpose": (
        lambda x: kernels.transpose(x.to(torch.uint8)),
        lambda x: torch.ops.ottava.transpose(x.to(torch.uint8)),
    ),
    "grid_decode": (
        lambda x: kernels.decode(x.to(torch.uint8), scalar(0.5), E4M3, torch.bfloat16),
        lambda x: torch.ops.ottava.grid_decode(
            x.to(torch.uint8), scalar(0.5), WHOLE, False, torch.bfloat16
        ),
    ),
}
FOR_LAYERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "quantize": lambda x: for_layers.quantize(x, E4M3, 0.0, False, True, True),
    "cast_amax": lambda x: for_layers.cast(x, scalar(3.0), scalar(0.0), None, E4M3, True, True),
    "grid_quantize": lambda x: for_layers.grid_quantize(x, mx(E4M3).text, True, True),
}
# Other functions of the same operators.
SAME: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
    ("cast_amax", lambda x: kernels.cast(x, scalar(3.0), E4M3)),
    ("cast_amax", lambda x: kernels.cast_transpose(x, scalar(3.0), E4M3)),
]
EVERY = [*((name, calls[0]) for name, calls in CALLS.items()), *FOR_LAYERS.items(), *SAME]
every_call = pytest.mark.parametrize(
    ("name", "call"), EVERY, ids=[f"{n}-{i}" for i, (n, _) in enumerate(EVERY)]
)


def leaves(result: Any) -> list[torch.Tensor]:
    found, _ = torch.utils._pytree.tree_flatten(result)
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


class Seen(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def values() -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


def test_the_bytes_are_those_of_the_operator(code_path: str) -> None:
    x = values()
    for name, (call, operator) in CALLS.items():
        made, expected = leaves(call(x)), leaves(operator(x))
        assert len(made) > 0, name
        assert_same(made, expected, note=name)


@every_call
def test_modes_see_the_operators(name: str, call: Callable[[torch.Tensor], Any]) -> None:
    with Seen() as seen:
        call(values())
    assert f"ottava::{name}" in seen.names

    functions: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            functions.append(str(func))
            return func(*args, **(kwargs or {}))

    with Functions():
        call(values())
    assert any(f"ottava.{name}" in entry for entry in functions)


@every_call
def test_graphs_hold_the_operators(name: str, call: Callable[[torch.Tensor], Any]) -> None:
    x = values() + 1
    expected = leaves(call(x))
    tracings: list[tuple[Any, bool]] = [
        ("real", False),
        ("real", True),
        ("fake", False),
        ("symbolic", True),
    ]
    for tracing, pre_dispatch in tracings:
        traced = make_fx(
            lambda x: leaves(call(x)), tracing_mode=tracing, pre_dispatch=pre_dispatch
        )(values())
        assert any(f"ottava.{name}." in str(node.target) for node in traced.graph.nodes), tracing
        assert_same(traced(x), expected, note=tracing)


@every_call
def test_fake_tensors_stay_fake(name: str, call: Callable[[torch.Tensor], Any]) -> None:
    expected = leaves(call(values()))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        made = leaves(call(mode.from_tensor(values())))
    assert [(type(m), m.shape, m.dtype) for m in made] == [
        (FakeTensor, e.shape, e.dtype) for e in expected
    ]


@pytest.mark.parametrize(
    "call",
    [CALLS["amax"][0], CALLS["quantize"][0], FOR_LAYERS["quantize"], FOR_LAYERS["grid_quantize"]],
)
def test_meta_tensors_stay_on_meta(call: Callable[[torch.Tensor], Any]) -> None:
    assert all(made.is_meta for made in leaves(call(values().to("meta"))))


def test_profiles_show_the_operators() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        kernels.amax(values())
    assert any(event.key == "ottava::amax" for event in profiled.key_averages())


def test_autograd_learns_of_what_has_no_gradient() -> None:
    x = values().requires_grad_()
    assert kernels.amax(x).requires_grad
    with torch.no_grad():
        assert not kernels.amax(x).requires_grad


def test_transforms() -> None:
    x = torch.stack([values(), 2 * values()])
    assert torch.equal(torch.func.vmap(kernels.amax)(x), x.abs().amax((1, 2)))
    assert torch.equal(torch.func.functionalize(kernels.amax)(x), x.abs().amax())
    kept: list[torch.Tensor] = []

    def leaks(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t.sum()

    torch.func.grad(leaks)(x)
    # What is left of a transform has no memory of its own.
    assert not is_direct(kept[0])
    assert torch.equal(kernels.amax(kept[0]), x.abs().amax())


class Named(torch.Tensor):
    """A subclass that says nothing else."""


def test_what_is_direct() -> None:
    x = values()
    for plain in (x, torch.nn.Parameter(x, requires_grad=False), x.t(), x.bfloat16(), x[:0]):
        assert is_direct(plain)
        assert is_direct(x, None, plain)
    with torch.inference_mode():
        assert is_direct(values(), x)
    assert not is_direct(x.clone().requires_grad_())
    with torch.no_grad():
        assert is_direct(torch.nn.Parameter(x))
    strange = [
        torch._neg_view(x),
        torch._efficientzerotensor((3,)),
        x.to("meta"),
        x.as_subclass(Named),
        x.to_sparse(),
        x.to_mkldnn(),
    ]
    for tensor in strange:
        assert not is_direct(tensor)
        assert not is_direct(x, tensor)


def test_a_negation_that_is_still_to_be_done_is_done() -> None:
    x = values()
    assert torch.equal(
        kernels.cast(torch._neg_view(x), scalar(), E4M3), kernels.cast(-x, scalar(), E4M3)
    )
    assert torch.equal(FOR_LAYERS["quantize"](torch._neg_view(x))[0], FOR_LAYERS["quantize"](-x)[0])


SHAPES = [(), (1,), (0,), (0, 5), (3, 0), (5, 7), (64, 96), (2, 3, 5)]
USAGES = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("every", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_what_layers_get_equals_the_kernels(
    code_path: str, fmt: str, every: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, every)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for shape, dtype, (rowwise, transposed) in pairs(SHAPES, dtypes, USAGES):
        # A scalar has no transpose.
        if shape or not transposed:
            check_for_layers(shape, dtype, FP8_DTYPES[fmt], rowwise, transposed)


def check_for_layers(
    shape: tuple[int, ...], dtype: torch.dtype, fp8: torch.dtype, rowwise: bool, transposed: bool
) -> None:
    note = (shape, dtype, rowwise, transposed)
    x = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    x.view(-1)[:3] = torch.tensor([math.nan, math.inf, -0.0])[: x.numel()]
    data, transpose, _, scale_inv, _ = kernels.quantize(
        x, fp8, 0.0, True, rowwise=True, transposed=transposed
    )
    expected = sides(data, transpose, scale_inv, rowwise, transposed)
    assert_contiguous(for_layers.quantize(x, fp8, 0.0, True, rowwise, transposed), expected, note)
    # Another order in memory.
    other = x.t().contiguous().t() if x.dim() == 2 else x
    assert_contiguous(
        for_layers.quantize(other, fp8, 0.0, True, rowwise, transposed), expected, note
    )

    scale, amaxes, counts = (
        scalar(3.0),
        [scalar(2.0), scalar(2.0)],
        [torch.tensor(5), torch.tensor(5)],
    )
    data, transpose, scale_inv = kernels.cast_amax(
        x, scale, amaxes[0], fp8, saturated=counts[0], transposed=transposed
    )
    expected = sides(data, transpose, scale_inv, rowwise, transposed)
    made = for_layers.cast(x, scale, amaxes[1], counts[1], fp8, rowwise, transposed)
    assert_contiguous(made, expected, note)
    assert_same((amaxes[1], counts[1]), (amaxes[0], counts[0]), note=note)
    # Without a place for the amax nothing is recorded.
    assert_contiguous(
        for_layers.cast(x, scale, None, None, fp8, rowwise, transposed), expected, note
    )
    assert scale == 3.0


def sides(data: Any, transpose: Any, scale_inv: Any, rowwise: bool, transposed: bool) -> Any:
    """Data and the one scale of rows, then of columns, as they are asked for."""
    rows = (data, scale_inv) if rowwise else (None, None)
    columns = (transpose, scale_inv) if transposed else (None, None)
    return *rows, *columns


def assert_contiguous(made: Any, expected: Any, note: Any) -> None:
    assert all(mine is None or mine.is_contiguous() for mine in made), note
    assert_same(made, expected, note=note)


def test_what_layers_get_in_blocks(code_path: str) -> None:
    shapes = [(), (5,), (0, 5), (3, 0), (33, 65), (2, 3, 40)]
    for shape, (rowwise, columnwise), square in itertools.product(shapes, USAGES, (False, True)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        expected = kernels.grid_quantize(
            x, mx(E4M3, square), rowwise=rowwise, columnwise=columnwise
        )
        made = for_layers.grid_quantize(x, mx(E4M3, square).text, rowwise, columnwise)
        wanted = [rowwise, rowwise, columnwise, columnwise]
        assert [mine is not None for mine in made] == wanted
        others = [other if asked else None for asked, other in zip(wanted, expected, strict=True)]
        assert_contiguous(made, others, (shape, rowwise, columnwise, square))


@pytest.mark.parametrize(
    ("scale", "amax", "saturated", "error"),
    [
        (torch.ones((), dtype=torch.float64), None, None, DTypeError),
        (torch.ones(2), None, None, ShapeError),
        (torch.ones((), device="meta"), None, None, DeviceError),
        (torch.ones(()), torch.ones((), dtype=torch.float16), None, DTypeError),
        (torch.ones(()), torch.ones(0), None, ShapeError),
        (torch.ones(()), torch.ones((), device="meta"), None, DeviceError),
        (torch.ones(()), torch.ones(()), torch.ones((), dtype=torch.int32), DTypeError),
        (torch.ones(()), torch.ones(()), torch.ones(3, dtype=torch.int64), ShapeError),
    ],
)
def test_state_that_does_not_fit(
    scale: Any, amax: Any, saturated: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        for_layers.cast(values(), scale, amax, saturated, E4M3, True, False)


FIRST = """
import torch

def run(x):
    from ottava import kernels
    from ottava.gemm import gemm
    product = gemm(x, x)
    return product, kernels.quantize(x, torch.float8_e4m3fn)[0], kernels.backends.backend_for('cpu')

x = torch.randn(16, 32)
compiled = torch.compile(run, fullgraph=True, backend='eager')(x)
assert all(map(torch.equal, compiled[:2], run(x)[:2]))
print(compiled[2])
"""


def test_the_first_kernel_of_a_process_may_be_in_compiled_code() -> None:
    """First a product, which asks for the backend while it is traced: what an operator does is not
    traced."""
    done = forking.python(FIRST, OTTAVA_BACKEND="reference")
    assert done.stdout == "reference\n", done.stderr[-2000:]


def test_every_backend_has_every_operation() -> None:
    from ottava.kernels import cpu, reference
    from ottava.kernels.table import OPERATIONS

    many = {"grid_multi_amax", "grid_multi_cast"}
    assert {"amax", "quantize", "grid_quantize", "grid_decode", "grid_scales"} < set(OPERATIONS)
    with serving_cpu() as cuda:
        for module in (cpu.BACKEND, cuda, reference):
            names = {*OPERATIONS, *many, "update_scales"}
            assert [name for name in names if not callable(getattr(module, name, None))] == [], (
                module
            )
