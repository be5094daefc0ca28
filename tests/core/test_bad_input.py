"""Bad input to kernels: a typed error before any write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava import Layout, kernels
from ottava.errors import (
    BackendError,
    DeviceError,
    DTypeError,
    OptionError,
    OttavaError,
    ShapeError,
)
from ottava.kernels import for_layers
from ottava.kernels.levels import native_levels
from tests.cases import told

Cases = dict[str, tuple[type[OttavaError], Callable[[], Any]]]
E4M3 = torch.float8_e4m3fn
MX = Layout(E4M3, (1, 32), torch.float8_e8m0fnu, "up")
X = torch.ones(4, 8)
ONE = torch.ones(())
DATA = torch.zeros(4, 8, dtype=torch.uint8)
SCALES = torch.zeros(4, 1, dtype=torch.uint8)


FOUR = Layout("E2M1", (1, 16), E4M3, columnwise="transposed", second_level="tensor")
RANDOM = Layout(E4M3, (1, 32), torch.float8_e8m0fnu, "up", stochastic=True)
SEED = torch.tensor(1)


def levels(layout: Layout, x: torch.Tensor = X, **options: Any) -> Any:
    return kernels.grid_quantize_levels(x, layout, **options)


def decode_four(amax: Any) -> Any:
    return kernels.grid_decode(DATA, SCALES, FOUR, torch.float32, amax=amax)


def decode(data: Any = DATA, scales: Any = SCALES, **options: Any) -> Any:
    return kernels.grid_decode(data, scales, MX, options.pop("dtype", torch.float32), **options)


def update(scales: Any = None, histories: Any = None, maxima: Any = None, **options: Any) -> Any:
    return kernels.update_scales(
        [torch.ones(3)] if scales is None else scales,
        [torch.ones(2, 3)] if histories is None else histories,
        [448.0] * 3 if maxima is None else maxima,
        **options,
    )


def cast_of_layer(scale: Any = ONE, amax: Any = None, saturated: Any = None) -> Any:
    return for_layers.cast(X, scale, amax, saturated, E4M3, True, False)


KERNELS: Cases = {
    "amax of integers": (DTypeError, lambda: kernels.amax(X.int())),
    "amax of float64": (DTypeError, lambda: kernels.amax(X.double())),
    "amax of a sparse tensor": (DTypeError, lambda: kernels.amax(X.to_sparse())),
    "amax of a nested tensor": (
        DTypeError, lambda: kernels.amax(torch.nested.nested_tensor([X, X]))),
    "amax of a list": (DTypeError, lambda: kernels.amax([1.0])),  # type: ignore[arg-type]
    "cast with a scale elsewhere": (DeviceError, lambda: kernels.cast(X, ONE.to("meta"), E4M3)),
    "cast with two scales": (ShapeError, lambda: kernels.cast(X, torch.ones(2), E4M3)),
    "cast with a wide scale": (DTypeError, lambda: kernels.cast(X, ONE.double(), E4M3)),
    "cast with a sparse scale": (
        DTypeError, lambda: kernels.cast(X, torch.ones(1).to_sparse(), E4M3)),
    "cast to a name": (DTypeError, lambda: kernels.cast(X, ONE, "e4m3")),  # type: ignore[arg-type]
    "transpose of a number": (ShapeError, lambda: kernels.cast_transpose(ONE, ONE, E4M3)),
    "an amax elsewhere": (
        DeviceError, lambda: kernels.cast_amax(X, ONE, ONE.to("meta"), E4M3)),
    "a counter of floats": (
        DTypeError, lambda: kernels.cast_amax(X, ONE, ONE, E4M3, saturated=ONE)),
    "quantize to int8": (DTypeError, lambda: kernels.quantize(X, torch.int8)),
    "quantize a number transposed": (
        ShapeError, lambda: kernels.quantize(ONE, E4M3, transposed=True)),
    "epsilon NaN": (OptionError, lambda: kernels.quantize(X, E4M3, math.nan)),
    "epsilon negative": (OptionError, lambda: kernels.scale_from_amax(ONE, E4M3, -1.0)),
    "epsilon True": (OptionError, lambda: kernels.scale_from_amax(ONE, E4M3, True)),
    "a wide amax": (DTypeError, lambda: kernels.scale_from_amax(ONE.double(), E4M3)),
    "transpose of a byte": (ShapeError, lambda: kernels.transpose(DATA[0, 0])),
    "transpose of floats": (DTypeError, lambda: kernels.transpose(X)),
    "decode to integers": (DTypeError, lambda: kernels.decode(DATA, ONE, E4M3, torch.int32)),
    "decode floats": (DTypeError, lambda: kernels.decode(X, ONE, E4M3, torch.float32)),
    "decode with scales": (
        ShapeError, lambda: kernels.decode(DATA, torch.ones(2), E4M3, torch.float32)),
    "quantize to a text": (DTypeError, lambda: kernels.grid_quantize(X, MX.text)),  # type: ignore[arg-type]
    "quantize in no direction": (
        OptionError, lambda: kernels.grid_quantize(X, MX, rowwise=False, columnwise=False)),
    "quantize float64 in blocks": (DTypeError, lambda: kernels.grid_quantize(X.double(), MX)),
    "scales to a dtype": (DTypeError, lambda: kernels.grid_scales(ONE, E4M3)),  # type: ignore[arg-type]
    "scales of bfloat16": (DTypeError, lambda: kernels.grid_scales(ONE.bfloat16(), MX)),
    "scales for integers": (DTypeError, lambda: kernels.grid_scales(ONE, MX, torch.int32)),
    "blocks of float8": (DTypeError, lambda: decode(DATA.view(E4M3))),
    "scales of int8": (DTypeError, lambda: decode(scales=SCALES.view(torch.int8))),
    "scales of another layout": (DTypeError, lambda: decode(scales=SCALES.float())),
    "too few scales": (ShapeError, lambda: decode(scales=SCALES[:-1])),
    "scales turned": (ShapeError, lambda: decode(scales=SCALES.t())),
    "scales of rows for columns": (ShapeError, lambda: decode(columnwise=True)),
    "scales elsewhere": (DeviceError, lambda: decode(scales=SCALES.to("meta"))),
    "no seed": (OptionError, lambda: levels(RANDOM)),
    "a seed in vain": (OptionError, lambda: levels(FOUR, seed=SEED)),
    "a seed that is an int": (DTypeError, lambda: levels(RANDOM, seed=1)),
    "a seed of int32": (DTypeError, lambda: levels(RANDOM, seed=SEED.int())),
    "a seed of floats": (DTypeError, lambda: levels(RANDOM, seed=SEED.float())),
    "two seeds": (ShapeError, lambda: levels(RANDOM, seed=torch.stack([SEED, SEED]))),
    "a seed elsewhere": (DeviceError, lambda: levels(RANDOM, seed=SEED.to("meta"))),
    "levels in no direction": (OptionError, lambda: levels(FOUR, rowwise=False, columnwise=False)),
    "levels of float64": (DTypeError, lambda: levels(FOUR, x=X.double())),
    "levels by a text": (DTypeError, lambda: kernels.grid_quantize_levels(X, FOUR.text)),  # type: ignore[arg-type]
    "one level for two": (OptionError, lambda: kernels.grid_quantize(X, FOUR)),
    "nearest for random": (OptionError, lambda: kernels.grid_quantize(X, RANDOM)),
    "an amax in vain": (OptionError, lambda: decode(amax=ONE)),
    "a wide amax of a level": (DTypeError, lambda: decode_four(amax=ONE.double())),
    "two amaxes of a tensor": (ShapeError, lambda: decode_four(amax=torch.ones(2))),
    "an amax of a level elsewhere": (DeviceError, lambda: decode_four(amax=ONE.to("meta"))),
    "shared bytes without dimensions": (
        ShapeError, lambda: kernels.grid_decode(DATA[0, 0], SCALES[:1], FOUR, torch.float32)),
    "updates with too few maxima": (ShapeError, lambda: update(maxima=[448.0])),
    "updates without a history": (ShapeError, lambda: update(histories=[])),
    "a history of one dimension": (ShapeError, lambda: update(histories=[torch.ones(3)])),
    "a history without rows": (ShapeError, lambda: update(histories=[torch.ones(0, 3)])),
    "histories of two lengths": (
        ShapeError,
        lambda: update([ONE.view(1)] * 2, [torch.ones(2, 1), torch.ones(4, 1)], [448.0] * 2),
    ),
    "a history of other slots": (ShapeError, lambda: update(histories=[torch.ones(2, 4)])),
    "strided scales": (ShapeError, lambda: update(scales=[torch.ones(6)[::2]])),
    "wide scales": (DTypeError, lambda: update(scales=[torch.ones(3).double()])),
    "updates elsewhere": (DeviceError, lambda: update(scales=[torch.ones(3, device="meta")])),
    "too few last amaxes": (ShapeError, lambda: update(last=torch.ones(2))),
    "a layer's wide scale": (DTypeError, lambda: cast_of_layer(ONE.double())),
    "a layer's two scales": (ShapeError, lambda: cast_of_layer(torch.ones(2))),
    "a layer's scale elsewhere": (DeviceError, lambda: cast_of_layer(ONE.to("meta"))),
    "a layer's narrow amax": (DTypeError, lambda: cast_of_layer(amax=ONE.half())),
    "a layer's empty amax": (ShapeError, lambda: cast_of_layer(amax=torch.ones(0))),
    "a layer's amax elsewhere": (DeviceError, lambda: cast_of_layer(amax=ONE.to("meta"))),
    "a layer's narrow counter": (DTypeError, lambda: cast_of_layer(ONE, ONE, SEED.int())),
    "a layer's three counters": (ShapeError, lambda: cast_of_layer(ONE, ONE, SEED.repeat(3))),
    "a backend that is no name": (BackendError, lambda: kernels.use_backend([]).__enter__()),  # type: ignore[arg-type]
    "an unknown backend": (BackendError, lambda: kernels.use_backend("gpu").__enter__()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_kernels() -> None:
    # Layers ask the compiled module first, once a kernel has chosen it.
    kernels.backend_for("cpu")
    for case, (error, call) in KERNELS.items():
        with told(case), pytest.raises(error):
            call()


# -- the compiled module, whose memory these would leave --

OUT_OF_RANGE = Layout(
    "E2M1",
    (1, 16),
    E4M3,
    columnwise="transposed",
    second_level="tensor",
    candidates=tuple(1.0 + i for i in range(9)),
)
SIDE = (3, 3, 4, 4, False, 0, 0)
MODULE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a dtype": ("dtype code 3", lambda m: m.decode(0, 0, 0, 0, 0, 3, 1)),
    "a size": ("negative: -1", lambda m: m.transpose(0, -1, 0, 0, 1)),
    "threads": ("at least 1", lambda m: m.transpose(0, 0, 0, 0, 0)),
    "a format": ("format code 2", lambda m: m.decode(0, 2, 0, 0, 0, 0, 1)),
    "an element": ("code 2", lambda m: m.grid_cast(0, 0, 0, 0, 0, 1, 1, 2, False, 0, 1)),
    "maxima": ("1 maxima for 0", lambda m: m.update_scales([(0, 0, 0)], 1, [1.0], False, 0)),
    "amaxes": ("1 of 0 amaxes", lambda m: m.grid_multi_amax([], 0, 1, 1)),
    "a shard": (
        "not within", lambda m: m.grid_multi_amax(
            [((0, 0, 5, 0), (2, 3, 2), (0, 0), (0, 0), True)], 0, 1, 1)),
    "shared blocks": (
        "whole blocks", lambda m: m.grid_quantize(
            0, 0, 0, 0, 0, False, False, 0.0, 1.0, SIDE, None, 1)),
    "candidates": ("too many", lambda m: m.LevelsPlan(native_levels(OUT_OF_RANGE))),
    "an instruction set": ("'none' is not available", lambda m: m.set_isa("none")),
}  # fmt: skip


def test_the_compiled_module() -> None:
    module = pytest.importorskip("ottava._cpu")
    for case, (words, call) in MODULE.items():
        with told(case), pytest.raises(ValueError, match=words):
            call(module)


# -- kernels on many shards --


def byte(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0xA5, dtype=torch.uint8)


def without_memory() -> torch.Tensor:
    x = torch.ones(5)
    x.untyped_storage().resize_(0)
    return x


#: Arguments for one tensor of five elements; a case replaces one of them.
GOOD: dict[str, Callable[[], Any]] = {
    "xs": lambda: torch.ones(5),
    "dtypes": lambda: torch.bfloat16,
    "shapes": lambda: (2, 3),
    "starts": lambda: 1,
    "layouts": lambda: MX,
    "rowwise": lambda: (byte(2, 1), byte(5)),
    "columnwise": lambda: (byte(1, 3), byte(5)),
}
SHARDS: list[tuple[str, Any, type[OttavaError]]] = [
    ("xs", 3.0, DTypeError),
    ("xs", torch.ones(5).int(), DTypeError),
    ("xs", torch.ones(5).to_sparse(), DTypeError),
    ("xs", torch.empty(5, device="meta"), DeviceError),
    ("xs", without_memory(), DTypeError),
    ("dtypes", torch.float64, DTypeError),
    ("dtypes", "float32", DTypeError),
    ("shapes", (6,), ShapeError),
    ("shapes", 6, ShapeError),
    ("shapes", (2.0, 3), DTypeError),
    ("shapes", (-2, -3), ShapeError),
    ("shapes", (2**40, 2**40), ShapeError),
    ("shapes", (1, 5), ShapeError),
    ("starts", 2, ShapeError),
    ("starts", -1, ShapeError),
    ("starts", 0.0, DTypeError),
    ("layouts", None, DTypeError),
    ("layouts", MX.text, DTypeError),
    ("rowwise", byte(5), ShapeError),
    ("rowwise", (byte(2, 1),), ShapeError),
    ("rowwise", (byte(1, 2), byte(5)), ShapeError),
    ("rowwise", (byte(2, 2)[:, :1], byte(5)), ShapeError),
    ("rowwise", (byte(2, 1).int(), byte(5)), DTypeError),
    ("rowwise", (None, byte(5)), DTypeError),
    ("rowwise", (byte(2, 1).to("meta"), byte(5)), DeviceError),
    ("rowwise", (byte(2, 1), byte(4)), ShapeError),
    ("rowwise", (byte(2, 1), byte(10)[::2]), ShapeError),
    ("rowwise", (byte(2, 1), byte(5).float()), DTypeError),
    ("rowwise", (byte(2, 1), None), DTypeError),
    ("rowwise", (byte(2, 1), byte(5).to("meta")), DeviceError),
    ("rowwise", (byte(2, 1), byte(5).to_sparse()), DTypeError),
    ("columnwise", (byte(2, 3), byte(5)), ShapeError),
]


def arguments_of(**replaced: Any) -> dict[str, list[Any]]:
    """Of two tensors; the second one's are replaced."""
    return {name: [make(), replaced.get(name, make())] for name, make in GOOD.items()}


def test_a_bad_shard() -> None:
    """Beside a good one; nothing is written."""
    for number, (name, wrong, error) in enumerate(SHARDS):
        with told(number, name):
            arguments = arguments_of(**{name: wrong})
            with pytest.raises(error):
                kernels.grid_multi_cast(*arguments.values())
            pairs = [*arguments["rowwise"][:1], *arguments["columnwise"][:1]]
            assert all((out == 0xA5).all() for _, out in pairs)
            if name not in ("rowwise", "columnwise"):
                with pytest.raises(error):
                    kernels.grid_multi_amax(*list(arguments.values())[:5])


def test_lists_of_shards() -> None:
    arguments = arguments_of()
    first, pairs = list(arguments.values())[:5], arguments["rowwise"] + arguments["columnwise"]
    kernels.grid_multi_amax(*first)
    kernels.grid_multi_cast(*arguments.values())
    assert all((out != 0xA5).all() for _, out in pairs)
    for key in arguments:
        short = {**arguments, key: arguments[key][:1]}
        with pytest.raises(ShapeError):
            kernels.grid_multi_cast(*short.values())
    one, nothing = arguments["rowwise"][0], [None, None]
    twice = [one, (byte(2, 1), one[1])]
    by_column = [None, (arguments["columnwise"][1][0], one[1])]
    for rowwise, columnwise in ((twice, nothing), ([one, None], by_column)):
        with pytest.raises(OptionError, match="a buffer of another result"):
            kernels.grid_multi_cast(*first, rowwise, columnwise)
