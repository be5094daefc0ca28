"""Identity keeps values; a hybrid is one quantizer along rows and another along columns."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import GridQuantizer, Layout, checkpoint
from ottava.distributed import (
    ShardRule,
    cast_master_weights_to_fp8,
    quantize_master_weights,
    rule_of,
)
from ottava.errors import OptionError, UsageError
from ottava.layout import Rotation
from ottava.tensors import QuantizedTensor, columnwise_layout
from ottava_custom import (
    CurrentScalingQuantizerRef,
    CustomRecipe,
    HybridQuantizer,
    IdentityQuantizer,
    by_direction,
    identity_factory,
)
from tests.choosing import cpu_products
from tests.comparing import assert_same
from tests.core.forking import python
from tests.core.layouts.layouts import PerTensor
from tests.samples import DTYPES, wide
from tests.strided import ROWS, VIEWS, check_places

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Two elements in a byte, groups that are padded, and a second level of scales on one side.
PACKED: dict[str, Any] = {"columnwise": "transposed", "rotation": Rotation(16, 0xD7E8, "both")}
ONE_LEVEL = Layout("E2M1", (1, 32), torch.float8_e8m0fnu, "even", **PACKED)
TWO_LEVELS = Layout("E2M1", (1, 16), E4M3, second_level="tensor", **PACKED)
BY_ROWS, BY_BLOCKS = Layout(E4M3, (1, None)), Layout(E5M2, (2, 2), torch.float8_e8m0fnu, "up")
reference = CurrentScalingQuantizerRef


# Pairs of very different kinds: one scale, scales on grids, none.
PAIRS: dict[str, tuple[Any, Any]] = {
    "formats": (reference(E4M3), reference(E5M2)),
    "grids": (GridQuantizer(BY_ROWS), GridQuantizer(BY_BLOCKS)),
    "packed": (GridQuantizer(ONE_LEVEL), GridQuantizer(TWO_LEVELS)),
    "rows and one": (GridQuantizer(BY_ROWS), reference(E5M2)),
    "one and identity": (reference(E4M3), IdentityQuantizer()),
}
PAIR = pytest.mark.parametrize("pair", PAIRS)


def hybrid(pair: str, **usages: bool) -> HybridQuantizer:
    return HybridQuantizer(*PAIRS[pair], **usages)


def values(tensor: Any, columnwise: bool) -> torch.Tensor:
    """The matrix that a product reads."""
    matrix, scale = tensor.gemm_operand(columnwise=columnwise, dtype=torch.float32)
    return matrix if scale is None else matrix * scale


# -- identity --


@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_gives_a_copy_of_its_values(dtype: torch.dtype) -> None:
    x = wide(2, 3, 4, dtype=dtype)
    for sides in ((IdentityQuantizer(), reference(E5M2)), (IdentityQuantizer(),) * 2):
        for quantizer in (IdentityQuantizer(), HybridQuantizer(*sides)):
            tensor = quantizer(x)
            tensor.dequantize().zero_()
            assert_same(tensor.dequantize(), x)
            source = x.clone()
            tensor = quantizer(source)
            source.zero_()
            assert_same(tensor.dequantize(), x)


@pytest.mark.parametrize("product", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        *((dtype, None) for dtype in DTYPES),
        *((torch.float32, dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_a_layer_of_identity_is_a_plain_layer(dtype: Any, autocast: Any, product: Any) -> None:
    """To the byte, whatever the machine multiplies in."""
    both = HybridQuantizer(IdentityQuantizer(), IdentityQuantizer())
    recipes = [None, CustomRecipe(identity_factory), CustomRecipe(lambda role: both)]
    for shape, bias in (((4, 3, 64), True), ((1, 64), False), ((32, 64), True)):
        results = []
        for recipe in recipes:
            torch.manual_seed(0)
            layer = ottava.nn.Linear(64, 48, bias=bias, dtype=dtype, recipe=recipe)
            x = (30 * torch.randn(shape, dtype=dtype)).requires_grad_()
            enabled = autocast is not None
            with cpu_products(product), torch.autocast("cpu", autocast, enabled=enabled):
                y = layer(x)
                y.backward(torch.randn_like(y))
                with torch.no_grad():
                    results.append([y, layer(x), x.grad, *(p.grad for p in layer.parameters())])
        for result in results[1:]:
            assert_same(result, results[0], note=shape)


def test_an_operand_of_identity_that_is_overwritten_is_refused_in_backward() -> None:
    layer = ottava.nn.Linear(4, 4, bias=False, recipe=CustomRecipe(identity_factory))
    x = torch.randn(2, 4)
    y = layer(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("factory", [identity_factory, by_direction("identity", "custom")])
def test_a_weight_that_is_kept_for_microbatches_does_not_change(factory: Any) -> None:
    layer, x = ottava.nn.Linear(6, 4, recipe=CustomRecipe(factory)), torch.randn(3, 6)
    first = layer(x, is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.add_(1.0)
    assert torch.equal(layer(x, is_first_microbatch=False), first)
    first.sum().backward()
    assert not torch.equal(layer(x, is_first_microbatch=True), first)


# -- hybrids --


@PAIR
@pytest.mark.parametrize("internal", [False, True])
def test_each_side_has_the_bytes_of_its_quantizer(pair: str, internal: bool) -> None:
    x, quantizer = wide(4, 6), hybrid(pair)
    quantizer.internal = internal
    tensor = quantizer(x)
    assert isinstance(tensor, QuantizedTensor) is not internal
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}
    for columnwise, own in enumerate(PAIRS[pair]):
        own = own.with_usage(not columnwise, bool(columnwise))
        assert_same(values(tensor, bool(columnwise)), values(own(x), bool(columnwise)))
        alone = quantizer.for_usage(bool(columnwise))(x)
        assert_same(alone.dequantize(), own(x).dequantize())
        # The class is shown by a short name.
        words = r"^HybridTensor(Storage)?\[\w+, \w+\] has no (rowwise|columnwise) data"
        one = quantizer.with_usage(not columnwise, bool(columnwise))(x)
        assert_same(one.dequantize(), own(x).dequantize())
        with pytest.raises(UsageError, match=words):
            one.gemm_operand(columnwise=not columnwise, dtype=torch.float32)
    assert_same(tensor.dequantize(), PAIRS[pair][0](x).dequantize())
    tensor.update_usage(rowwise_usage=False)
    assert tensor.get_usages() == {"rowwise": False, "columnwise": True}
    assert_same(tensor.dequantize(), one.dequantize())


def test_views_lie_where_plain_ones_do() -> None:
    for quantizer in (IdentityQuantizer(), reference(E4M3)):
        check_places(quantizer(torch.randn(96, 64)), set(VIEWS))
    # A packed tensor has the strides of a contiguous one, wherever its bytes lie.
    for pair in PAIRS.keys() - {"packed"}:
        check_places(hybrid(pair)(torch.randn(96, 64)), ROWS)


@PAIR
def test_hybrids_are_alike_where_both_sides_are(pair: str) -> None:
    one, (rows, columns) = hybrid(pair), PAIRS[pair]
    assert one.is_alike(hybrid(pair, columnwise=False))
    for sides in ((columns, rows), (rows, rows), (columns, columns)):
        assert one != HybridQuantizer(*sides)
        assert not one.is_alike(HybridQuantizer(*sides))
    assert not one.is_alike(rows)
    for fact, of in (("in_high_precision", all), ("aliases_operands", any)):
        assert getattr(one, fact) == of(getattr(side, fact) for side in PAIRS[pair])
    # A quantizer that becomes a side stays what it is.
    assert [rows.get_usages(), rows.internal] == [{"rowwise": True, "columnwise": True}, False]


@PAIR
@pytest.mark.parametrize("side", ["both", "rowwise", "columnwise", "columns left"])
def test_writes_reach_the_sides_that_are_held(pair: str, side: str) -> None:
    quantizer, x, master = hybrid(pair), torch.randn(6, 8), torch.randn(6, 8)

    def make(values: torch.Tensor) -> Any:
        if side == "columns left":
            tensor = quantizer(values)
            tensor.update_usage(rowwise_usage=False)
            return tensor
        return quantizer.with_usage(side != "columnwise", side != "rowwise")(values)

    expected = make(master)
    for source in (quantizer(master), make(master), master):
        tensor = make(x)
        tensor.copy_(source)
        assert_same(tensor.dequantize(), expected.dequantize())
    if pair == "packed" and side in ("columnwise", "columns left"):
        with pytest.raises(UsageError, match="keep the rowwise usage"):
            cast_master_weights_to_fp8([make(x)], [master.flatten()], [0])
        return
    for quantizers in (None, quantizer):
        tensor = make(x)
        cast_master_weights_to_fp8([tensor], [master.flatten()], [0], quantizers=quantizers)
        for inner in expected.inner_tensors:
            parts = (getattr(one, inner.attribute) for one in (tensor, expected))
            assert_same(*parts, note=inner.attribute)


@pytest.mark.parametrize("layout", ["shared", "transpose"])
def test_a_written_weight_has_no_stale_side(layout: Any) -> None:
    with columnwise_layout(layout):
        quantizer = HybridQuantizer(PerTensor(E4M3), PerTensor(E5M2))
        weight, master = quantizer(torch.zeros(6, 8)), torch.randn(6, 8)
        alias, whole = weight.detach(), quantizer(master)
        quantize_master_weights([weight], [master.flatten()], [0])
        for one in (weight, alias):
            for columnwise in (False, True):
                assert_same(values(one, columnwise), values(whole, columnwise))
        # Of columns alone a tensor holds elements too, which can be written to and gathered.
        columns = quantizer.with_usage(False, True)(master)
        assert_same(columns.dequantize(), PerTensor(E5M2)(master).dequantize())


def test_rows_are_independent_where_both_sides_say_so() -> None:
    def of_rows(number: int) -> GridQuantizer:
        cls = type("Rows", (GridQuantizer,), {"shards": ShardRule(rows=number)})
        return cls(BY_ROWS)  # type: ignore[no-any-return]

    rows = GridQuantizer(BY_ROWS)
    for sides, expected in (
        ((rows, IdentityQuantizer()), 1),
        ((rows, reference(E4M3)), None),
        ((of_rows(4), of_rows(6)), 12),
    ):
        quantizer = HybridQuantizer(*sides)
        assert rule_of(quantizer).independent_rows(quantizer) == expected


@PAIR
def test_a_hybrid_as_a_side_gives_its_own_side(pair: str) -> None:
    rows, columns = PAIRS[pair]
    other = IdentityQuantizer()
    assert HybridQuantizer(hybrid(pair), other) == HybridQuantizer(rows, other)
    assert HybridQuantizer(other, hybrid(pair)) == HybridQuantizer(other, columns)


@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
def test_an_option_of_a_side_is_not_set_on_the_hybrid(side: str) -> None:
    """It would have no effect there."""
    sides = [reference(E4M3), IdentityQuantizer()]
    quantizer: Any = HybridQuantizer(*(sides if side == "rowwise" else reversed(sides)))
    for name in ("fp8_dtype", "eps"):
        with pytest.raises(OptionError, match=rf"{name} is set on a Hybrid.*on {side}_quantizer"):
            setattr(quantizer, name, E5M2)
    getattr(quantizer, f"{side}_quantizer").fp8_dtype = E5M2
    quantizer.internal = True
    quantizer.note = "an attribute that no side has"
    assert quantizer.for_usage(side == "columnwise").dtype == E5M2


# -- in layers --


@pytest.mark.xdist_group("forking")
@pytest.mark.parametrize(
    "read",
    ["import pickle; w = pickle.load(open('w', 'rb'))", "w = checkpoint.load_file('w')['w']"],
    ids=["pickle", "safetensors"],
)
def test_a_fresh_process_reads_what_was_saved(read: str, tmp_path: Path) -> None:
    """One that has imported core and no recipe."""
    made: Any = by_direction("custom", "identity")("weight")
    tensor = made(torch.randn(4, 6))
    if "pickle" in read:
        (tmp_path / "w").write_bytes(pickle.dumps(tensor))
    else:
        checkpoint.save_file({"w": tensor}, tmp_path / "w")
    told = "print(type(w).__name__, w.dequantize().tolist())"
    done = python(f"from ottava import checkpoint\n{read}\n{told}", cwd=tmp_path)
    expected = f"{type(tensor).__name__} {tensor.dequantize().tolist()}\n"
    assert done.stdout == expected, done.stderr
