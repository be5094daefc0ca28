"""Quantizing an operand of a layer in one call: the compiled module reads, allocates and writes
tensors itself."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mx_arrays import mx
from torch.utils._python_dispatch import TorchDispatchMode

from ottava import kernels
from ottava.kernels import backends, for_layers
from ottava.layout import Layout

_cpu = pytest.importorskip("ottava._cpu")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this torch has no table of DLPack's functions",
)
# Loading the backend tells the module how tensors are read.
kernels.amax(torch.ones(1))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def values() -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def plan(text: str) -> Any:
    return backends._loaded["cpu"].plan(text)


def quantize(x: Any) -> Any:
    return _cpu.quantize_operand(x, 0, 0.0, False, True, True)


def cast(x: Any) -> Any:
    return _cpu.cast_operand(
        x, torch.ones(()), torch.zeros(()), torch.zeros((), dtype=torch.int64), 0, True, True, -1
    )


def on_grid(x: Any) -> Any:
    return _cpu.grid_quantize_operand(x, plan(mx(E4M3).text), True, True)


every = pytest.mark.parametrize("call", [quantize, cast, on_grid])


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass that says nothing else."""


@every
def test_plain_memory_is_read(call: Callable[[Any], Any]) -> None:
    x = values()
    for plain in (
        x,
        x.bfloat16(),
        x.half(),
        x.t(),
        x[::2, 1:],
        torch.nn.Parameter(x, requires_grad=False),
    ):
        assert call(plain) is not None
    with torch.no_grad():
        assert call(torch.nn.Parameter(x)) is not None
    with torch.inference_mode():
        assert all(made is None or made.is_inference() for made in call(x))


@every
def test_what_is_left_to_python(call: Callable[[Any], Any]) -> None:
    x = values()
    kept: list[torch.Tensor] = []
    torch.func.grad(lambda t: (kept.append(t), t.sum())[1])(x)
    others = [
        torch._neg_view(x),
        torch._efficientzerotensor((3, 4)),
        x.to("meta"),
        x.as_subclass(Named),
        x.to_sparse(),
    ]
    others += [x.to_mkldnn(), x.double(), torch.nn.Parameter(x), kept[0]]
    for strange in (*others, None, 1.0):
        assert call(strange) is None
    with Nothing():
        assert call(x) is None
    assert torch.func.vmap(lambda row: (kept.append(call(row)), row)[1])(x) is not None
    assert kept[-1] is None


def test_state_that_is_not_read() -> None:
    x, one = values(), torch.ones(())
    for state in (
        None,
        torch.ones(2),
        one.double(),
        one.to("meta"),
        torch.ones((), requires_grad=True),
    ):
        assert _cpu.cast_operand(x, state, None, None, 0, True, False, -1) is None
    for amax in (torch.ones(2), one.double(), one.to("meta")):
        assert _cpu.cast_operand(x, one, amax, None, 0, True, False, -1) is None
    assert (
        _cpu.cast_operand(x, one, None, torch.zeros((), dtype=torch.int32), 0, True, False, -1)
        is None
    )


def of_slots(
    x: Any, scale: Any = None, history: Any = None, counts: Any = None, slot: int = 1
) -> Any:
    scale = torch.tensor([1.0, 2.0, 4.0]) if scale is None else scale
    return _cpu.cast_operand(x, scale, history, counts, 0, True, False, slot)


def test_the_slots_of_a_state() -> None:
    x = 1000 * values()
    scale, history = torch.tensor([1.0, 2.0, 4.0]), torch.zeros(4, 3)
    counts = torch.zeros(3, dtype=torch.int64)
    for slot in range(3):
        one = scale[slot].clone(), torch.zeros(()), torch.zeros((), dtype=torch.int64)
        made, alone = (
            of_slots(x, scale, history, counts, slot),
            _cpu.cast_operand(x, *one, 0, True, False, -1),
        )
        assert torch.equal(made[0], alone[0])
        assert torch.equal(made[1], alone[1])
        assert (history[0, slot], counts[slot]) == (one[1], one[2])
    assert counts.min() > 0
    assert not history[1:].any()


@pytest.mark.parametrize("slot", range(3))
def test_slots_in_plain_pytorch(slot: int) -> None:
    x, states = 1000 * values(), []
    for backend in ("cpu", "reference"):
        state = {
            "scale": torch.tensor([1.0, 2.0, 4.0]),
            "amax_history": torch.zeros(4, 3),
            "saturated": torch.zeros(3, dtype=torch.int64),
        }
        with backends.use_backend(backend):
            data, scale_inv, *_ = for_layers.cast_slot(x, state, slot, True, E4M3, True, False)
        states.append((data, scale_inv, *state.values()))
    assert states[0][4].sum() > 0
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_slots_that_are_not_read() -> None:
    x, history, counts = values(), torch.zeros(4, 3), torch.zeros(3, dtype=torch.int64)
    assert of_slots(x, None, history, counts) is not None
    assert of_slots(x, slot=3) is None
    assert of_slots(x, torch.ones(6)[::2]) is None
    assert of_slots(x, torch.ones(3).double()) is None
    assert of_slots(x, torch.ones(3, device="meta")) is None
    assert of_slots(x, None, torch.zeros(3, 4).t()) is None
    assert of_slots(x, None, torch.zeros(0, 3)) is None
    assert of_slots(x, None, torch.zeros(4, 1)) is None
    assert of_slots(x, None, history, torch.zeros(3)) is None


def test_results_are_tensors_like_others() -> None:
    data, scale_inv, transpose, same = quantize(values())
    assert same is scale_inv
    assert (data.dtype, data.shape, data.stride(), data.storage_offset()) == (
        torch.uint8,
        (16, 64),
        (64, 1),
        0,
    )
    assert (transpose.shape, scale_inv.shape, scale_inv.dtype) == ((64, 16), (), torch.float32)
    assert not any(
        made.requires_grad or made.is_inference() or made._version
        for made in (data, transpose, scale_inv)
    )
    before = data.clone()
    assert torch.equal(data.share_memory_(), before)
    assert torch.equal(torch.utils._pytree.tree_map(torch.clone, {"data": data})["data"], before)
    data.add_(1)
    assert data._version == 1


def test_memory_of_results() -> None:
    """It is aligned as torch's own, whatever the number of dimensions, and given back with the
    tensor."""
    for ndim in range(1, 7):
        assert not any(
            made.data_ptr() % 64 for made in on_grid(torch.ones((1,) * (ndim - 1) + (40,)))
        )
    x = torch.ones(1024, 1024)
    quantize(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        assert quantize(x)[2].data_ptr() % 64 == 0
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10
    )  # KiB; a step makes 2 MiB


LAYOUTS = [
    mx(E4M3),
    mx(E5M2, True),
    Layout(E4M3, (1, 128), rounding="floor", columnwise="transposed", finite_as="input"),
    Layout(E4M3, (128, 128), columnwise="transposed", finite_as="input"),
    Layout(E5M2, (1, None), epsilon=0.5),
    Layout(torch.int8, (4, 8)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.text)
def test_grids_are_those_of_the_operator(layout: Layout) -> None:
    for shape in ((16, 64), (5, 7), (3, 40, 70), (9,), (1, 1)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = (1e-6 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
            expected = torch.ops.ottava.grid_quantize(x, layout.text, True, True)
            made = _cpu.grid_quantize_operand(x, plan(layout.text), True, True)
            for mine, other in zip(made, expected, strict=True):
                assert (mine.dtype, mine.shape, mine.stride()) == (
                    other.dtype,
                    other.shape,
                    other.stride(),
                )
                assert torch.equal(mine, other)


@pytest.mark.parametrize("name", ["quantize", "cast", "grid_quantize"])
def test_another_backend_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, one = values(), torch.ones(())
    given: dict[str, tuple[Any, ...]] = {
        "quantize": (x, E4M3, 0.0, False, True, True),
        "cast": (x, one, None, None, E4M3, True, True),
        "grid_quantize": (x, mx(E4M3).text, True, True),
    }
    call = getattr(for_layers, name)
    expected = call(*given[name])
    with kernels.use_backend("reference"):
        kernels.amax(x)
        native = type("Native", (), {})()
        monkeypatch.setattr(backends._loaded["cpu"], "native", native, raising=False)
        made = call(*given[name])
    assert all(torch.equal(mine, other) for mine, other in zip(made, expected, strict=True))
