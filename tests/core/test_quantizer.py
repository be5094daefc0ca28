"""The contract of quantizers: configurations, products, and classes with a ``quantize_impl`` of
their own. The conformance kit has what holds for every recipe's quantizer."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import ottava
from ottava import GridQuantizer, Layout, Quantizer, kernels
from ottava.errors import DTypeError, OptionError
from ottava.formats import E4M3, E5M2, Format, fp8_format
from ottava.tensors import Option
from tests.comparing import assert_same


def test_attributes_compare_by_value_but_tensors_by_identity(quantizer: Any) -> None:
    assert quantizer.with_usage(True, True) is quantizer
    assert quantizer != "quantizer"
    one, two = quantizer.copy(), quantizer.copy()
    one.table, two.table = {"a": [1, 2]}, {"a": [1, 2]}
    assert one == two
    assert hash(one) == hash(two)
    two.table = {"a": [1, 3]}
    assert one != two
    for held in (torch.ones(1), [torch.ones(1)], {"a": (torch.ones(1),)}):
        one, two = quantizer.copy(), quantizer.copy()
        one.held = two.held = held
        assert one == one
        assert one != two
        assert len({one, two}) == 2
        # Code that was compiled for one serves the other, whatever its state.
        assert one.is_alike(two)


def test_a_pickle_has_no_group_of_processes() -> None:
    quantizer = GridQuantizer(Layout(torch.float8_e4m3fn, (1, 32)))
    quantizer.amax_reduction_group = "a group"
    loaded = pickle.loads(pickle.dumps(quantizer))
    assert loaded.amax_reduction_group is None
    assert quantizer.is_alike(loaded)


class Lines(GridQuantizer):
    """A quantizer with an option that the layout refuses, and not the option itself."""

    columns: Any = Option(lambda name, value: value)

    def __init__(self) -> None:
        self.columns = 32
        super().__init__(self.make_layout())

    def make_layout(self) -> Layout:
        return Layout(torch.float8_e4m3fn, (1, self.columns))


def test_an_option_that_is_refused_late_keeps_its_value() -> None:
    lines = Lines()
    with pytest.raises(OptionError, match="block"):
        lines.columns = -1
    assert lines == Lines()


def test_several_tensors_are_quantized_in_one_call(quantizer: Quantizer) -> None:
    both = quantizer.multi_quantize([torch.ones(2), torch.ones(3)])
    assert_same([t.dequantize() for t in both], [torch.ones(2), torch.ones(3)])
    assert quantizer.multi_quantize([]) == []


def test_the_product_of_a_quantizer_is_in_float32(quantizer: Quantizer) -> None:
    """``qgemm`` dequantizes both operands, unless a subclass does better."""
    a, b, bias = torch.randn(6, 4), torch.randn(5, 4), torch.randn(5)
    qa, qb = quantizer(a), quantizer(b)
    left, right = qa.dequantize(), qb.dequantize()
    made = quantizer.qgemm(qa, qb, None, torch.bfloat16, None, None, bias)
    assert_same(made, (left @ right.t() + bias).bfloat16())
    for kind, x, w, expected in (
        ("dgrad", quantizer(a), quantizer(b.t().contiguous()), left @ right.t()),
        ("wgrad", quantizer(a), quantizer(torch.ones(6, 3)), left.t() @ torch.ones(6, 3)),
    ):
        out = torch.ones_like(expected)
        options: dict[str, Any] = {"gemm_type": kind, "out": out}
        quantizer.qgemm(x, w, None, torch.float32, None, None, accumulate=True, **options)
        torch.testing.assert_close(out, expected + 1)
        assert quantizer.qgemm(x, w, None, torch.float32, None, None, **options) is out
        torch.testing.assert_close(out, expected)
    bare = quantizer.qgemm(None, None, None, torch.float32, None, None, qresult_x=qa, qresult_w=b)
    torch.testing.assert_close(bare, left @ b.t())
    with pytest.raises(OptionError, match=r"gemm_type is 'forward'.*fprop, dgrad or wgrad"):
        quantizer.qgemm(qa, qb, None, torch.float32, None, None, gemm_type="forward")


def test_formats_by_their_names_and_dtypes() -> None:
    """``test_formats.py`` compares their numbers with those of gfloat."""
    assert fp8_format(torch.float8_e4m3fn) is E4M3
    assert fp8_format(torch.float8_e5m2) is E5M2
    assert (Format.HYBRID.forward, Format.HYBRID.backward) == (E4M3, E5M2)
    assert (Format.E5M2.forward, Format.E4M3.backward) == (E5M2, E4M3)
    for wrong in (torch.float32, "e4m3", []):
        with pytest.raises(DTypeError):
            fp8_format(wrong)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout: torch.layout, quantizer: Any, recipe: Any) -> None:
    """They have no one shape; the error says what to quantize instead, and that is what it says."""
    parts = [torch.ones(2, 32), torch.ones(3, 32)]
    nested: torch.Tensor = torch.nested.nested_tensor(parts, layout=layout)
    held = quantizer(torch.zeros(5, 32))
    for ask in (
        lambda: quantizer(nested),
        lambda: quantizer.quantize(nested, out=held),
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


# -- classes with a function that takes a tensor alone --


class Doubled(Quantizer):
    """As quantizers are written that know no nominal dtype."""

    def __init__(self, inner: Quantizer) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.inner = inner

    def quantize_impl(self, tensor: torch.Tensor) -> Any:  # type: ignore[override]
        made = self.inner.copy()
        made.internal = self.internal
        made.set_usage(**self.get_usages())
        return made.quantize(2 * tensor)


class Wrong(Quantizer):
    def quantize_impl(self, tensor: torch.Tensor) -> Any:  # type: ignore[override]
        return tensor


@pytest.mark.parametrize("internal", [False, True])
def test_quantize_impl_may_take_a_tensor_alone(quantizer: Any, internal: bool) -> None:
    x, made = torch.randn(4, 8), Doubled(quantizer)
    made.internal = internal
    expected = quantizer.quantize(2 * x)
    for found in (made(x), made.quantize(x), made.quantize(x, dtype=torch.bfloat16)):
        assert_same(found._data, expected._data)
        assert_same(found.dequantize(torch.float32), expected.dequantize())
    assert found.dtype == torch.bfloat16
    into = made.update_quantized(-x, made(x))
    assert_same(into.dequantize(), quantizer.quantize(-2 * x).dequantize())
    with pytest.raises(DTypeError, match=r"Wrong.quantize_impl returned a Tensor.*Remedy"):
        Wrong()(x)


def test_a_layer_takes_such_a_quantizer(quantizer: Any, recipe: Any) -> None:
    recipe.set_quantizer_factory(lambda role: Doubled(quantizer.copy()))
    layer, x = ottava.nn.Linear(16, 8, bias=False, recipe=recipe), torch.randn(4, 16)
    y = layer(x)
    y.sum().backward()
    doubled, weight = (quantizer(2 * t.detach()).dequantize() for t in (x, layer.weight))
    torch.testing.assert_close(y, doubled @ weight.t())
    torch.testing.assert_close(layer.weight.grad, torch.full((8, 4), 2.0) @ doubled)
