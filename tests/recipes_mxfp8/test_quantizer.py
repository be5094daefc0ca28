"""``MXFP8Quantizer``: bytes against the rules written out here, usages, destinations,
configuration, refusals."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava_mxfp8 import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
LARGEST_EXPONENT = {E4M3: 8, E5M2: 15}
INNER = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
SHAPES = [
    (),
    (1,),
    (5,),
    (32,),
    (70,),
    (0,),
    (0, 7),
    (7, 0),
    (1, 1),
    (33, 70),
    (64, 96),
    (2, 31, 65),
    (2, 0, 3),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
USAGES = {"both": (True, True), "rowwise": (True, False), "columnwise": (False, True)}


def sample(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0, sigma: float = 10.0
) -> Any:
    """Magnitudes that differ by many powers of two inside of a block."""
    random = torch.Generator().manual_seed(seed)
    sigma = min(sigma, 2.0) if dtype == torch.float16 else sigma
    values = torch.randn(shape, generator=random).sign() * torch.exp(
        sigma * torch.randn(shape, generator=random)
    )
    return values.clamp(-1e30, 1e30).to(dtype)


# The rules once more, on matrices: no product code is called.


def scale_of(amax: float, fp8_dtype: torch.dtype, rounding: str) -> int:
    if math.isinf(amax):
        return 254
    if amax == 0:
        return 0
    if rounding == "floor":
        exponent = math.frexp(amax)[1] - 1 - LARGEST_EXPONENT[fp8_dtype]
    else:
        inverse = torch.tensor(1.0 / torch.finfo(fp8_dtype).max)
        share = float(torch.tensor(amax) * inverse)
        if share == 0:
            return 0
        fraction, power = math.frexp(share)
        exponent = power - 1 if fraction == 0.5 else power
    return min(max(exponent + 127, 0), 254)


def block_scales(
    x: torch.Tensor, high: int, wide: int, fp8_dtype: torch.dtype, rounding: str
) -> torch.Tensor:
    """A scale for every block of ``high`` rows and ``wide`` columns of a matrix."""
    rows, columns = -(-x.shape[0] // high), -(-x.shape[1] // wide)
    scales = torch.zeros(rows, columns, dtype=torch.uint8)
    for i, j in itertools.product(range(rows), range(columns)):
        block = x[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
        scales[i, j] = scale_of(
            float(block.abs().nan_to_num(0.0, math.inf).max()), fp8_dtype, rounding
        )
    return scales


def elements(x: torch.Tensor, scales: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """Codes of the elements of a matrix, with a scale for each."""
    scaled = (x.double() * torch.exp2(127.0 - scales.double())).float()
    largest = torch.finfo(fp8_dtype).max
    data = scaled.clamp(-largest, largest).to(fp8_dtype).view(torch.uint8)
    return torch.where(x.isnan(), torch.tensor(0x7F, dtype=torch.uint8), data)


def spread(scales: torch.Tensor, shape: torch.Size, high: int, wide: int) -> torch.Tensor:
    return scales.repeat_interleave(high, 0)[: shape[0]].repeat_interleave(wide, 1)[:, : shape[1]]


def by_hand(
    x: torch.Tensor, fp8_dtype: torch.dtype, rounding: str, square: bool
) -> list[torch.Tensor]:
    columns = x.shape[-1] if x.dim() else 1
    matrix = x.reshape(math.prod(x.shape[:-1]), columns).float()
    made = []
    for high, wide in ((1, 32), (32, 1)):
        block = (32, 32) if square else (high, wide)
        each = spread(block_scales(matrix, *block, fp8_dtype, rounding), matrix.shape, *block)
        made += [elements(matrix, each, fp8_dtype).reshape(x.shape), each[::high, ::wide]]
    return made


def inner(q: Any) -> list[torch.Tensor | None]:
    return [getattr(q, name) for name in INNER]


def check_bytes(q: Any, expected: list[torch.Tensor | None]) -> None:
    for name, mine, theirs in zip(INNER, inner(q), expected, strict=True):
        if theirs is None:
            assert mine is None, name
            continue
        assert mine is not None, name
        assert mine.dtype == torch.uint8
        assert mine.shape == theirs.shape, name
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_bytes_of_any_shape_and_dtype(fmt: str, rounding: str, square: bool) -> None:
    fp8_dtype = FORMATS[fmt]
    quantizer = MXFP8Quantizer(fp8_dtype, with_2d_quantization=square, scale_rounding=rounding)
    for number, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            x = sample(shape, dtype, seed=number)
            q = quantizer(x)
            assert isinstance(q, MXFP8Tensor)
            assert q.shape == shape
            assert q.dtype == dtype
            check_bytes(q, by_hand(x, fp8_dtype, rounding, square))


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_nans_infinities_and_extremes(fmt: str, rounding: str, square: bool) -> None:
    x = sample((70, 70), seed=1)
    x[:32, :32] = 0.0
    x[3, 3] = -0.0
    x[32:64, :32] = math.nan
    x[0, 40], x[40, 40], x[41, 41] = math.nan, math.inf, -math.inf
    x[64:, 64:] = 2.0**-149
    x[69, 0], x[69, 69] = torch.finfo(torch.float32).max, -(2.0**-126)
    q = MXFP8Quantizer(FORMATS[fmt], with_2d_quantization=square, scale_rounding=rounding)(x)
    check_bytes(q, by_hand(x, FORMATS[fmt], rounding, square))
    values = q.dequantize()
    assert bool(values[32:64, :32].isnan().all())
    assert math.copysign(1.0, values[3, 3].item()) == -1.0
    assert torch.equal(values.isnan(), x.isnan())


def test_squares_differ_from_lines_and_floor_from_up() -> None:
    """What the tests above tell apart is different."""
    x = sample((64, 64))
    made = [
        MXFP8Quantizer(E4M3, with_2d_quantization=square, scale_rounding=rounding)(x)
        for square in (False, True)
        for rounding in ("up", "floor")
    ]
    for one, two in itertools.combinations(made, 2):
        assert not torch.equal(one._rowwise_scale_inv, two._rowwise_scale_inv)
    assert not torch.equal(made[0]._rowwise_data, made[0]._columnwise_data)
    assert torch.equal(made[2]._rowwise_data, made[2]._columnwise_data)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("usage", USAGES)
def test_one_direction_has_the_bytes_of_both(usage: str, square: bool) -> None:
    x = sample((70, 90))
    rowwise, columnwise = USAGES[usage]
    both = inner(MXFP8Quantizer(E4M3, with_2d_quantization=square)(x))
    wanted = [both[0], both[1]] if rowwise else [None, None]
    wanted += [both[2], both[3]] if columnwise else [None, None]
    quantizer = MXFP8Quantizer(
        E4M3, rowwise=rowwise, columnwise=columnwise, with_2d_quantization=square
    )
    q = quantizer(x)
    check_bytes(q, wanted)
    assert (
        q.get_usages() == quantizer.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
    )


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda x: x.t(),
        lambda x: x[::2, 1::3],
        lambda x: x[3:, 5:],
        lambda x: x.view(2, 35, 90).permute(2, 0, 1),
        lambda x: x[0].expand(4, 90),
        lambda x: x.flip(0),
        lambda x: x[:, 4],
    ],
)
def test_strides_do_not_matter(lay_out: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = lay_out(sample((70, 90)))
    q = MXFP8Quantizer(E4M3)(x)
    check_bytes(q, by_hand(x.contiguous(), E4M3, "up", False))
    assert q.is_contiguous()


@pytest.mark.parametrize("internal", [False, True])
def test_internal_gives_a_bare_storage(internal: bool) -> None:
    x = sample((33, 40), torch.bfloat16).requires_grad_()
    quantizer = MXFP8Quantizer(E4M3)
    quantizer.internal = internal
    q = quantizer(x)
    assert type(q) is (MXFP8TensorStorage if internal else MXFP8Tensor)
    assert isinstance(q, torch.Tensor) is not internal
    check_bytes(q, by_hand(x.detach(), E4M3, "up", False))
    assert q.dtype == torch.bfloat16
    empty = quantizer.make_empty((3, 4), dtype=torch.float16)
    assert type(empty) is type(q)
    assert empty.dtype == torch.float16


@pytest.mark.parametrize("nominal", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
def test_nominal_dtype(given: torch.dtype, nominal: torch.dtype) -> None:
    x = sample((9, 40), given, sigma=1.0)
    q = MXFP8Quantizer(E4M3)(x, dtype=nominal)
    assert q.dtype == q.dequantize().dtype == nominal
    check_bytes(q, by_hand(x, E4M3, "up", False))
    assert torch.equal(q.dequantize(), q.dequantize(torch.float64).to(nominal))


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("internal", [False, True])
def test_quantizing_into_a_destination(usage: str, internal: bool) -> None:
    """It keeps its buffers, usages and nominal dtype, whatever those of the quantizer are."""
    rowwise, columnwise = USAGES[usage]
    target = MXFP8Quantizer(E4M3, rowwise=rowwise, columnwise=columnwise)
    target.internal = internal
    new = sample((40, 70), torch.bfloat16, seed=2)
    expected = inner(target(new))
    for quantizer in (MXFP8Quantizer(E4M3), MXFP8Quantizer(E4M3, columnwise=False), target):
        for write in (
            lambda q, out: q.quantize(new, out=out),
            lambda q, out: q(new, out=out),
            lambda q, out: q.update_quantized(new, out),
            lambda q, out: q.update_quantized(new, out, noop_flag=torch.zeros(1)),
        ):
            out = target(sample((40, 70), seed=1))
            before = [None if t is None else t.data_ptr() for t in inner(out)]
            assert write(quantizer, out) is out
            check_bytes(out, expected)
            assert [None if t is None else t.data_ptr() for t in inner(out)] == before
            assert out.dtype == torch.float32


def test_noop_flag_leaves_everything() -> None:
    quantizer = MXFP8Quantizer(E4M3)
    out = quantizer(sample((40, 70)))
    before = [t.clone() for t in inner(out)]
    for flag in (torch.ones(1), torch.ones(()), torch.ones(1, 1)):
        quantizer.update_quantized(sample((40, 70), seed=3), out, noop_flag=flag)
        check_bytes(out, before)


def test_a_quantized_source_is_dequantized() -> None:
    first = MXFP8Quantizer(E4M3)(sample((40, 70)))
    again = MXFP8Quantizer(E5M2)
    expected = inner(again(first.dequantize()))
    check_bytes(again(first), expected)
    out = again(sample((40, 70), seed=4))
    again.update_quantized(first, out)
    check_bytes(out, expected)


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_empty_results(usage: str, device: str | None) -> None:
    rowwise, columnwise = USAGES[usage]
    quantizer = MXFP8Quantizer(
        E5M2, rowwise=rowwise, columnwise=columnwise, with_2d_quantization=True
    )
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        q = quantizer.make_empty(shape, dtype=dtype, device=device, requires_grad=True)
        like = quantizer(torch.zeros(shape))
        assert isinstance(q, MXFP8Tensor)
        assert (q.shape, q.dtype, q.device.type) == (shape, dtype, device or "cpu")
        assert q.requires_grad
        assert q.is_leaf
        for mine, theirs in zip(inner(q), inner(like), strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert (mine.shape, mine.dtype, mine.device.type) == (
                    theirs.shape,
                    torch.uint8,
                    device or "cpu",
                )
        assert "MXFP8Tensor" in repr(q)
        if device != "meta":
            values = sample(shape, dtype)
            quantizer.update_quantized(values, q)
            check_bytes(q, inner(quantizer(values)))
    assert quantizer.make_empty((2, 3)).requires_grad is False
    assert quantizer.make_empty([2, 3]).shape == (2, 3)
    assert quantizer.make_empty(torch.Size((2, 3))).dtype == torch.float32


def test_default_device_and_meta_tensors() -> None:
    quantizer = MXFP8Quantizer(E4M3)
    with torch.device("meta"):
        assert quantizer.make_empty((3,)).is_meta
    q = quantizer(torch.empty(33, 70, device="meta", dtype=torch.bfloat16))
    assert q.is_meta
    assert [tuple(t.shape) for t in inner(q)] == [(33, 70), (33, 3), (33, 70), (2, 70)]
    assert q.dequantize().is_meta


def test_usages_are_set_and_copied() -> None:
    quantizer = MXFP8Quantizer(E4M3)
    copied = quantizer.copy()
    assert copied is not quantizer
    assert copied == quantizer
    copied.set_usage(columnwise=False)
    assert copied.get_usages() == {"rowwise": True, "columnwise": False}
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    copied.set_usage(rowwise=False, columnwise=True)
    assert copied(sample((3, 4))).get_usages() == {"rowwise": False, "columnwise": True}
    copied.set_usage()
    assert copied.get_usages() == {"rowwise": False, "columnwise": True}
    assert quantizer.with_usage(True, True) is quantizer
    assert quantizer.with_usage(True, False).get_usages() == {"rowwise": True, "columnwise": False}


def test_many_at_once() -> None:
    quantizer = MXFP8Quantizer(E4M3)
    tensors = [sample(shape, seed=number) for number, shape in enumerate([(3, 40), (), (65, 2)])]
    made = quantizer.multi_quantize(tensors)
    assert len(made) == 3
    for q, x in zip(made, tensors, strict=True):
        check_bytes(q, by_hand(x, E4M3, "up", False))
    assert quantizer.multi_quantize([]) == []


def test_what_is_quantizable() -> None:
    quantizer = MXFP8Quantizer(E4M3)
    for dtype in DTYPES:
        for shape in SHAPES:
            assert quantizer.is_quantizable(torch.zeros(shape, dtype=dtype))
    for wrong in (
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2).int(),
        torch.eye(2).to_sparse(),
        [1.0],
        None,
    ):
        assert not quantizer.is_quantizable(wrong)


CONFIGURATIONS: list[dict[str, Any]] = [
    {"fp8_dtype": E4M3},
    {"fp8_dtype": E5M2},
    {"fp8_dtype": E4M3, "with_2d_quantization": True},
    {"fp8_dtype": E4M3, "scale_rounding": "floor"},
    {"fp8_dtype": E4M3, "rowwise": False},
    {"fp8_dtype": E4M3, "columnwise": False},
]


def test_equal_configurations_are_equal() -> None:
    quantizers = [MXFP8Quantizer(**options) for options in CONFIGURATIONS]
    for (i, one), (j, two) in itertools.product(enumerate(quantizers), repeat=2):
        assert (one == two) is (i == j)
    for one, options in zip(quantizers, CONFIGURATIONS, strict=True):
        streams = io.BytesIO()
        torch.save(one, streams)
        streams.seek(0)
        others = [
            MXFP8Quantizer(**options),
            one.copy(),
            copy.copy(one),
            copy.deepcopy(one),
            pickle.loads(pickle.dumps(one)),
            torch.load(streams, weights_only=True),
        ]
        for two in others:
            assert one == two
            assert hash(one) == hash(two)
        assert all(repr(value) in repr(one) for value in options.values())
    assert len({*quantizers, *[MXFP8Quantizer(**options) for options in CONFIGURATIONS]}) == len(
        CONFIGURATIONS
    )
    internal = quantizers[0].copy()
    internal.internal = True
    assert internal != quantizers[0]
    assert quantizers[0] != "quantizer"


def test_gradients_pass_straight_through() -> None:
    for shape in ((), (5,), (33, 70), (2, 3, 40)):
        for given, nominal in (
            (torch.float32, None),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float16),
        ):
            leaf = torch.randn(shape, dtype=given).requires_grad_()
            weights = torch.randint(-4, 5, shape).to(nominal or given)
            q = MXFP8Quantizer(E4M3)(leaf, dtype=nominal)
            assert q.requires_grad
            (q.dequantize() * weights).sum().backward()
            assert leaf.grad.dtype == given
            assert torch.equal(leaf.grad, weights.to(given))
            leaf.grad = None
            (MXFP8Quantizer(E4M3)(leaf, dtype=nominal) * weights).sum().backward()
            assert torch.equal(leaf.grad, weights.to(given))
    with torch.no_grad():
        assert not MXFP8Quantizer(E4M3)(leaf).requires_grad
    assert not MXFP8Quantizer(E4M3)(leaf.detach()).requires_grad


def test_quantizing_twice_gives_the_same() -> None:
    x = sample((33, 70), torch.bfloat16)
    for rounding, square in itertools.product(("up", "floor"), (False, True)):
        quantizer = MXFP8Quantizer(E4M3, with_2d_quantization=square, scale_rounding=rounding)
        check_bytes(quantizer(x), inner(quantizer(x.clone())))
