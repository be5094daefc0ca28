"""The reference of current scaling: its bytes against numbers, and its tensors."""

from __future__ import annotations

import copy
import io
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottava import kernels, prepare_for_saving, restore_from_saved
from ottava.distributed import is_custom
from ottava.errors import DTypeError, OptionError, ShapeError, UsageError
from ottava_custom import (
    CurrentScalingQuantizerRef,
    CurrentScalingTensorRef,
    CurrentScalingTensorRefStorage,
    current_scaling_ref_factory,
    current_scaling_ref_quantizer_factory,
)
from tests.cases import told

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

import oracle

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
FORMATS = pytest.mark.parametrize("quant_dtype", [E4M3, E5M2])
HIGH = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    6e-8,
    448.0,
    464.0,
    57344.0,
    3.4e38,
    -1.0,
]


def codes_of(tensor: Any) -> torch.Tensor:
    return tensor.data.view(torch.uint8)


def by_numbers(
    x: torch.Tensor, quant_dtype: torch.dtype, pow_2: bool, eps: float
) -> tuple[list[int], float]:
    """Codes and the inverse of the scale, by the scalar oracle."""
    values = [float(v) for v in x.flatten().float()]
    amax = max((abs(v) for v in values if not math.isnan(v)), default=0.0)
    scale, inverse = oracle.scale_from_amax(amax, oracle.MAX[NAMES[quant_dtype]], eps, pow_2)
    return [oracle.encode(oracle.float32(v * scale), NAMES[quant_dtype]) for v in values], inverse


@FORMATS
@pytest.mark.parametrize("pow_2", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-3])
@given(
    values=st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(width=32)), max_size=20),
    dtype=st.sampled_from(HIGH),
)
@settings(max_examples=60, deadline=None)
def test_bytes_and_scale_are_those_of_the_oracle(
    quant_dtype: torch.dtype, pow_2: bool, eps: float, values: list[float], dtype: torch.dtype
) -> None:
    x = torch.tensor(values, dtype=torch.float32).to(dtype)
    tensor = CurrentScalingQuantizerRef(quant_dtype, pow_2_scales=pow_2, eps=eps)(x)
    codes, inverse = by_numbers(x, quant_dtype, pow_2, eps)
    assert codes_of(tensor).tolist() == codes
    assert tensor.scale.item() == inverse


@FORMATS
def test_every_bfloat16_value_at_scale_one(quant_dtype: torch.dtype) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = x[x.abs() <= oracle.MAX[NAMES[quant_dtype]]]
    tensor = CurrentScalingQuantizerRef(quant_dtype)(finite)
    assert tensor.scale.item() == 1.0
    expected = finite.float().numpy().astype(NUMPY[quant_dtype]).view(np.uint8)
    assert np.array_equal(codes_of(tensor).numpy(), expected)
    assert torch.equal(
        tensor.dequantize(),
        torch.from_numpy(expected.view(NUMPY[quant_dtype]).astype(np.float32)).bfloat16(),
    )
    # Those beyond, and NaN.
    everything = CurrentScalingQuantizerRef(quant_dtype)(
        torch.cat([x, torch.tensor([math.inf]).bfloat16()])
    )
    assert set(codes_of(everything)[:-1][x.isnan()].tolist()) == {0x7F}
    top = oracle.encode(math.inf, NAMES[quant_dtype])
    assert set(codes_of(everything)[:-1][x > oracle.MAX[NAMES[quant_dtype]]].tolist()) == {top}


@FORMATS
@pytest.mark.parametrize("pow_2", [False, True])
def test_the_kernels_give_the_same(quant_dtype: Any, pow_2: bool) -> None:
    for dtype, shape in itertools.product(
        HIGH, [(), (0,), (1,), (7,), (5, 0), (33, 17), (2, 3, 4)]
    ):
        with told(dtype, shape):
            torch.manual_seed(len(shape))
            x = torch.randn(shape, dtype=dtype)
            tensor = CurrentScalingQuantizerRef(quant_dtype, pow_2_scales=pow_2)(x)
            data, _, _, scale_inv, _ = kernels.quantize(x, quant_dtype, 0.0, pow_2)
            assert torch.equal(codes_of(tensor), data)
            assert torch.equal(tensor.scale, scale_inv.reshape(()))
            assert torch.equal(
                tensor.dequantize(), kernels.decode(data, scale_inv, quant_dtype, dtype)
            )


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[::2], lambda x: x[:, 1:3], lambda x: x[1]]
)
def test_other_strides_are_read_right(view: Any) -> None:
    x = torch.randn(6, 8)
    quantizer = CurrentScalingQuantizerRef(E4M3)
    assert torch.equal(codes_of(quantizer(view(x))), codes_of(quantizer(view(x).contiguous())))


# -- usages and parts --


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, True), (True, False), (False, True)])
def test_the_parts_are_those_of_the_usages(rowwise: bool, columnwise: bool) -> None:
    for shape, internal in itertools.product([(4, 6), (2, 3, 4), (5,), (0, 3)], (False, True)):
        with told(shape, internal):
            check_parts(shape, rowwise, columnwise, internal)


def check_parts(shape: Any, rowwise: bool, columnwise: bool, internal: bool) -> None:
    x = torch.randn(shape)
    quantizer = CurrentScalingQuantizerRef(E4M3, rowwise, columnwise)
    quantizer.internal = internal
    tensor = quantizer(x)
    both = CurrentScalingQuantizerRef(E4M3)(x)
    assert type(tensor) is (CurrentScalingTensorRefStorage if internal else CurrentScalingTensorRef)
    assert tensor.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
    for held, data, scale, expected in (
        (rowwise, tensor.data, tensor.scale, codes_of(both)),
        (columnwise, tensor.data_t, tensor.scale_t, codes_of(both).movedim(-1, 0)),
    ):
        assert (data is not None) is (scale is not None) is held
        if held:
            assert data.dtype == E4M3
            assert torch.equal(data.view(torch.uint8), expected)
            assert torch.equal(scale, both.scale)
    assert tensor.quant_dtype == E4M3
    assert tensor.original_shape == tuple(tensor.size()) == shape
    assert torch.equal(tensor.dequantize(), both.dequantize())


def test_update_usage_turns_one_into_the_other() -> None:
    x = torch.randn(4, 6)
    tensor = CurrentScalingQuantizerRef(E4M3, columnwise=False)(x)
    values = tensor.dequantize()
    for rowwise, columnwise in (
        (True, True),
        (False, True),
        (True, True),
        (True, False),
        (False, True),
        (True, None),
    ):
        tensor.update_usage(rowwise, columnwise)
        assert tensor.get_usages()["rowwise"] is rowwise
        assert (tensor.data is not None, tensor.data_t is not None) == tuple(
            tensor.get_usages().values()
        )
        assert torch.equal(tensor.dequantize(), values)
        assert tensor.shape == (4, 6)
    with pytest.raises(OptionError):
        tensor.update_usage(False, False)


def test_a_transpose_is_never_stale() -> None:
    tensor = CurrentScalingQuantizerRef(E4M3)(torch.randn(4, 6))
    alias, copied = tensor.detach(), tensor.clone()
    before = copied.dequantize()
    tensor.copy_(torch.randn(4, 6))
    for one in (tensor, alias):
        assert torch.equal(one.data_t.view(torch.uint8), codes_of(one).t())
        assert torch.equal(one.dequantize(), tensor.dequantize())
    tensor._data.zero_()
    assert not tensor.data_t.view(torch.uint8).any()
    assert torch.equal(copied.dequantize(), before)


def test_it_is_built_from_its_parts() -> None:
    both = CurrentScalingQuantizerRef(E5M2)(torch.randn(2, 3, 4))
    rows = both.data.reshape(6, 4)
    for cls in (CurrentScalingTensorRef, CurrentScalingTensorRefStorage):
        for parts in (
            {"data": both.data, "scale": both.scale},
            {"data": codes_of(both), "scale": both.scale.reshape(1)},
            {"data": rows, "scale": both.scale, "original_shape": (2, 3, 4)},
            {"data_t": both.data_t, "scale_t": both.scale_t},
            {
                "data_t": rows.view(torch.uint8).t().contiguous(),
                "scale_t": both.scale,
                "original_shape": (2, 3, 4),
            },
            {
                "data": both.data,
                "scale": both.scale,
                "data_t": both.data_t,
                "scale_t": both.scale_t,
            },
        ):
            made = cls(**parts, dtype=torch.float32, quant_dtype=E5M2)
            assert torch.equal(made.dequantize(), both.dequantize())
            assert made.original_shape == (2, 3, 4)
            assert made.get_usages() == {
                "rowwise": "data" in parts,
                "columnwise": "data_t" in parts,
            }


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({}, UsageError),
        ({"scale": torch.ones(())}, UsageError),
        ({"data": torch.zeros(2, 2, dtype=torch.uint8)}, DTypeError),
        ({"data": torch.zeros(2, 2, dtype=torch.uint8), "scale": torch.ones(2)}, ShapeError),
        (
            {
                "data": torch.zeros(2, 2, dtype=torch.uint8),
                "scale": torch.ones((), dtype=torch.float64),
            },
            DTypeError,
        ),
        ({"data": torch.zeros(2, 2), "scale": torch.ones(())}, DTypeError),
        (
            {
                "data": torch.zeros(2, 2, dtype=torch.uint8),
                "scale": torch.ones(()),
                "original_shape": (3, 2),
            },
            ShapeError,
        ),
        (
            {
                "data": torch.zeros(2, 3, dtype=torch.uint8),
                "data_t": torch.zeros(2, 2, dtype=torch.uint8),
                "scale": torch.ones(()),
            },
            ShapeError,
        ),
        (
            {
                "data": torch.zeros(2, 2, dtype=torch.uint8),
                "scale": torch.ones(()),
                "quant_dtype": torch.int8,
            },
            DTypeError,
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: Any, error: Any) -> None:
    with pytest.raises(error):
        CurrentScalingTensorRef(**parts)


def test_data_of_a_parameter_is_what_torch_means() -> None:
    tensor = CurrentScalingQuantizerRef(E4M3)(torch.randn(4, 6))
    assert tensor.data.dtype == E4M3
    parameter = torch.nn.Parameter(tensor)
    assert isinstance(parameter.data, CurrentScalingTensorRef)
    assert not parameter.data.requires_grad
    parameter.data = torch.ones(4, 6)
    assert torch.equal(parameter.dequantize(), torch.ones(4, 6))
    tensor.data = torch.full((2, 3), 2.0)
    assert torch.equal(tensor.dequantize(), torch.full((2, 3), 2.0))


# -- saving, copying --


@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, True), (True, False), (False, True)])
def test_saving_and_restoring(rowwise: bool, columnwise: bool, internal: bool) -> None:
    quantizer = CurrentScalingQuantizerRef(E4M3, rowwise, columnwise)
    quantizer.internal = internal
    # Not of every tensor: quantizing values again, whose scale is computed anew, may give others.
    torch.manual_seed(0)
    tensor = quantizer(torch.randn(4, 6))
    values = tensor.dequantize()
    (back,) = restore_from_saved(*prepare_for_saving(tensor))
    tensors, owner = (
        copy.copy(tensor).prepare_for_saving()
        if not internal
        else quantizer(values).prepare_for_saving()
    )
    assert owner.restore_from_saved([*tensors, torch.ones(2)])[0].sum() == 2
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    for other in (back, owner, torch.load(file, weights_only=True), copy.deepcopy(tensor)):
        assert type(other) is type(tensor)
        assert other.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        assert torch.equal(other.dequantize(), values)


def test_copies_of_quantizers_and_equality() -> None:
    one = CurrentScalingQuantizerRef(E4M3, pow_2_scales=True, eps=0.5)
    other = one.copy()
    assert one == other
    assert hash(one) == hash(other)
    other.set_usage(columnwise=False)
    assert one.columnwise_usage
    assert one != CurrentScalingQuantizerRef(E4M3, pow_2_scales=True)
    assert one != CurrentScalingQuantizerRef(E5M2, pow_2_scales=True, eps=0.5)
    assert is_custom(one)
    assert is_custom(one(torch.ones(2, 2)))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"dtype": torch.int8}, DTypeError),
        ({"dtype": E4M3, "eps": -1.0}, OptionError),
        ({"dtype": E4M3, "eps": math.nan}, OptionError),
        ({"dtype": E4M3, "pow_2_scales": 1}, OptionError),
        ({"dtype": E4M3, "rowwise": None}, OptionError),
    ],
)
def test_wrong_options_are_refused(arguments: Any, error: Any) -> None:
    with pytest.raises(error):
        CurrentScalingQuantizerRef(**arguments)


def test_the_factory_has_the_formats_of_the_roles() -> None:
    formats = {
        t: current_scaling_ref_quantizer_factory(t).dtype
        for t in ("input", "weight", "output", "grad_output", "grad_input")
    }
    assert formats == {
        "input": E4M3,
        "weight": E4M3,
        "output": E5M2,
        "grad_output": E5M2,
        "grad_input": E5M2,
    }
    assert current_scaling_ref_factory is current_scaling_ref_quantizer_factory
    with pytest.raises(OptionError, match="tensor type 'bias'"):
        current_scaling_ref_quantizer_factory("bias")
