"""The quantizer contract."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ottava
from ottava import Float8Tensor, Quantizer, kernels
from ottava.errors import DTypeError, OptionError
from ottava.formats import E4M3, E5M2, Format, fp8_format


def test_equal_configurations_compare_and_hash_equal(quantizer: Quantizer) -> None:
    same = type(quantizer)(torch.float8_e4m3fn)  # type: ignore[call-arg]
    other = type(quantizer)(torch.float8_e5m2)  # type: ignore[call-arg]
    assert quantizer == same
    assert hash(quantizer) == hash(same)
    assert quantizer != other
    same.set_usage(columnwise=False)
    assert quantizer != same
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}


def test_quantizers_that_hold_tensors_compare_by_identity(quantizer: Quantizer) -> None:
    a, b = quantizer.copy(), quantizer.copy()
    a.state, b.state = torch.ones(1), torch.ones(1)  # type: ignore[attr-defined]
    assert a == a
    assert a != b
    assert len({a, b}) == 2


def test_copies_have_usages_of_their_own(quantizer: Quantizer) -> None:
    copied = quantizer.copy()
    copied.set_usage(rowwise=False)
    assert quantizer.rowwise_usage
    assert quantizer.with_usage(True, True) is quantizer
    assert quantizer.with_usage(True, False).get_usages() == {"rowwise": True, "columnwise": False}


def test_refusals(quantizer: Quantizer) -> None:
    for value in (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.complex64), 3.0):
        with pytest.raises(DTypeError):
            quantizer.quantize(value)  # type: ignore[arg-type]
        assert not quantizer.is_quantizable(value)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="nominal"):
        quantizer.quantize(torch.zeros(2), dtype=torch.int8)
    quantizer.set_usage(rowwise=False, columnwise=False)
    with pytest.raises(OptionError, match="usage"):
        quantizer.quantize(torch.zeros(2))


def test_nominal_dtype_and_multi(quantizer: Quantizer) -> None:
    q = quantizer.quantize(torch.randn(3), dtype=torch.bfloat16)
    assert isinstance(q, Float8Tensor)
    assert q.dtype == torch.bfloat16
    both = quantizer.multi_quantize([torch.randn(2), torch.randn(3)])
    assert [tuple(t.shape) for t in both] == [(2,), (3,)]
    again = quantizer(q)
    assert again.shape == q.shape


def test_formats_agree_with_torch() -> None:
    for fmt in (E4M3, E5M2):
        info = torch.finfo(fmt.torch_dtype)
        assert fmt.max == info.max
        assert fmt.min_normal == info.tiny
        assert fmt.min_subnormal == fmt.min_normal * 2.0**-fmt.mantissa_bits
        assert fmt.min_normal == 2.0 ** (1 - fmt.bias)
        assert math.isnan(
            torch.tensor([fmt.nan_code], dtype=torch.uint8).view(fmt.torch_dtype).float().item()
        )
        assert fp8_format(fmt.torch_dtype) is fmt
    assert (Format.HYBRID.forward, Format.HYBRID.backward) == (E4M3, E5M2)
    assert (Format.E5M2.forward, Format.E4M3.backward) == (E5M2, E4M3)
    with pytest.raises(DTypeError):
        fp8_format(torch.float32)
    with pytest.raises(DTypeError):
        fp8_format("e4m3")  # type: ignore[arg-type]


def test_configurations_of_lists_and_dicts_compare_by_value(quantizer: Quantizer) -> None:
    one, two = quantizer.copy(), quantizer.copy()
    one.table, two.table = {"a": [1, 2]}, {"a": [1, 2]}
    assert one == two
    assert hash(one) == hash(two)
    two.table = {"a": [1, 3]}
    assert one != two
    one.held, two.held = [torch.ones(1)], [torch.ones(1)]
    assert one != two
    assert one != one.copy()
    assert isinstance(hash(one), int)


def _nested(layout: torch.layout) -> torch.Tensor:
    made: torch.Tensor = torch.nested.nested_tensor(
        [torch.ones(2, 32), torch.ones(3, 32)], layout=layout
    )
    return made


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout: torch.layout, quantizer: Any, recipe: Any) -> None:
    """They have no one shape; the error says what to quantize instead, and that is what it says."""
    nested, held = _nested(layout), quantizer(torch.zeros(5, 32))
    for ask in (
        lambda: quantizer(nested),
        lambda: quantizer.quantize(nested, out=held),
        lambda: held.quantize_(nested),
        lambda: held.copy_(nested),
        lambda: kernels.amax(nested),
        lambda: ottava.debug.fake_quantize(nested, "FP8E4M3"),
        lambda: ottava.nn.Linear(32, 16, recipe=recipe)(nested),
    ):
        with pytest.raises(DTypeError, match=r"nested.*one tensor with a shape.*values\(\)"):
            ask()
    assert not quantizer.is_quantizable(nested)
    assert not held.dequantize().any()
    assert quantizer(nested.values()).shape == (5, 32) or layout == torch.strided


def test_a_sparse_tensor_is_not_copied(quantizer: Any) -> None:
    held = quantizer(torch.zeros(4, 4))
    with pytest.raises(DTypeError, match=r"source has layout torch\.sparse_coo.*to_dense"):
        held.copy_(torch.eye(4).to_sparse())


class Plain(Quantizer):
    """As quantizers are written that know no nominal dtype."""

    def __init__(self, inner: Quantizer) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.inner = inner

    def quantize_impl(self, tensor: torch.Tensor) -> Any:  # type: ignore[override]
        made = self.inner.copy()
        made.internal = self.internal
        made.set_usage(**self.get_usages())
        return made.quantize(tensor)


class Doubled(Plain):
    def quantize_impl(self, tensor: torch.Tensor) -> Any:  # type: ignore[override]
        return super().quantize_impl(2 * tensor)


class Wrong(Quantizer):
    def quantize_impl(self, tensor: torch.Tensor) -> Any:  # type: ignore[override]
        return tensor


@pytest.mark.parametrize("internal", [False, True])
def test_quantize_impl_may_take_a_tensor_alone(quantizer: Any, internal: bool) -> None:
    x = torch.randn(4, 8)
    for made, factor in ((Plain(quantizer), 1), (Doubled(quantizer), 2)):
        made.internal = internal
        expected = quantizer.quantize(factor * x)
        for found in (made(x), made.quantize(x), made.quantize(x, dtype=torch.bfloat16)):
            assert torch.equal(found._data, expected._data)
            assert torch.equal(found.dequantize(torch.float32), expected.dequantize())
        assert found.dtype == torch.bfloat16
        into = made.update_quantized(-x, made(x))
        assert torch.equal(into.dequantize(), quantizer.quantize(-factor * x).dequantize())
    with pytest.raises(DTypeError, match=r"Wrong.quantize_impl returned a Tensor.*Remedy"):
        Wrong()(x)


def test_a_layer_takes_a_quantizer_whose_quantize_impl_takes_a_tensor_alone(
    quantizer: Any, recipe: Any
) -> None:
    x, grads = torch.randn(4, 16), []
    for wrap in (Plain, lambda made: made):
        recipe.set_quantizer_factory(lambda role, wrap=wrap: wrap(quantizer.copy()))
        torch.manual_seed(0)
        layer = ottava.nn.Linear(16, 8, recipe=recipe)
        layer(x).square().sum().backward()
        grads.append(layer.weight.grad)
    assert torch.equal(*grads)
