"""Identity keeps values; a hybrid is one quantizer along rows and another along columns."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint, kernels
from ottava.distributed import (
    ShardRule,
    cast_master_weights_to_fp8,
    quantize_master_weights,
    rule_of,
)
from ottava.errors import DTypeError, OptionError, UsageError
from ottava.tensors import Float8QuantizerBase, QuantizedTensor, columnwise_layout
from ottava_custom import (
    CurrentScalingQuantizerRef,
    CustomRecipe,
    HybridQuantizer,
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
    by_direction,
    identity_factory,
)
from tests.choosing import cpu_products

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from comparing import assert_same
from rows import RowQuantizer
from strided import ROWS, VIEWS, check_places

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def reference(quant_dtype: torch.dtype) -> CurrentScalingQuantizerRef:
    return CurrentScalingQuantizerRef(quant_dtype)


class PerTensor(Float8QuantizerBase):
    """Core's per-tensor tensors, which keep a transpose on some devices."""

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        with_data, with_transpose = self.needs(tensor.device)
        data, transpose, _, scale_inv, _ = kernels.quantize(
            tensor, self.fp8_dtype, rowwise=with_data, transposed=with_transpose
        )
        return self.wrap(
            data if with_data else None, transpose if with_transpose else None, scale_inv, dtype
        )


# Pairs of very different kinds: one scale, a scale for each row, none.
PAIRS = {
    "formats": (reference(E4M3), reference(E5M2)),
    "rows and one": (RowQuantizer(), reference(E5M2)),
    "one and identity": (reference(E4M3), IdentityQuantizer()),
}
PAIR = pytest.mark.parametrize("pair", PAIRS)


def hybrid(pair: str, **usages: bool) -> HybridQuantizer:
    return HybridQuantizer(*PAIRS[pair], **usages)


# -- identity --


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3)])
def test_identity_keeps_the_values(shape: Any, dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype)
    tensor = IdentityQuantizer()(x)
    assert type(tensor) is IdentityTensor
    assert torch.equal(tensor.dequantize(), x)
    before = x.clone()
    x.zero_()
    assert torch.equal(tensor.dequantize(), before)
    tensor.dequantize().zero_()
    assert torch.equal(tensor.dequantize(), before)
    assert IdentityQuantizer().is_requantization_safe()


def test_identity_has_the_usages_that_it_was_given() -> None:
    for rowwise, columnwise in ((True, True), (True, False), (False, True)):
        tensor = IdentityQuantizer(rowwise=rowwise, columnwise=columnwise)(torch.ones(2, 3))
        assert tensor.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
    tensor.update_usage(rowwise_usage=True)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}
    with pytest.raises(UsageError, match="holds no data"):
        IdentityTensorStorage(dtype=torch.float32, rowwise=True, columnwise=True).dequantize()


@pytest.mark.parametrize("product", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_of_identity_is_a_plain_layer(
    dtype: Any, autocast: Any, bias: bool, product: torch.dtype
) -> None:
    """To the byte, whatever the machine multiplies in."""
    both = HybridQuantizer(IdentityQuantizer(), IdentityQuantizer())
    recipes = [None, CustomRecipe(identity_factory), CustomRecipe(lambda role: both)]
    if autocast is not None and dtype != torch.float32:
        return
    for shape in ((4, 3, 256), (1, 256), (64, 256)):
        made = []
        for recipe in recipes:
            torch.manual_seed(0)
            layer = ottava.nn.Linear(256, 64, bias=bias, dtype=dtype, recipe=recipe)
            x = (30 * torch.randn(shape, dtype=dtype)).requires_grad_()
            with (
                cpu_products(product),
                torch.autocast("cpu", autocast, enabled=autocast is not None),
            ):
                y = layer(x)
                y.backward(torch.randn_like(y))
                with torch.no_grad():
                    made.append([y, layer(x), x.grad, *(p.grad for p in layer.parameters())])
        for other in made[1:]:
            assert_same(other, made[0], note=shape)


def test_an_operand_that_is_overwritten_is_refused_in_backward() -> None:
    layer = ottava.nn.Linear(4, 4, bias=False, recipe=CustomRecipe(identity_factory))
    x = torch.randn(2, 4)
    y = layer(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- hybrids --


@PAIR
@pytest.mark.parametrize("internal", [False, True])
def test_each_side_is_its_quantizers(pair: str, internal: bool) -> None:
    x = torch.randn(4, 6)
    quantizer = hybrid(pair)
    quantizer.internal = internal
    made = quantizer(x)
    assert isinstance(made, QuantizedTensor) is not internal
    assert made.get_usages() == {"rowwise": True, "columnwise": True}
    for columnwise, own in enumerate(PAIRS[pair]):
        own = own.copy()
        own.set_usage(rowwise=not columnwise, columnwise=bool(columnwise))
        assert torch.equal(
            quantizer.for_usage(bool(columnwise))(x).dequantize(), own(x).dequantize()
        )
        values, scale = made.gemm_operand(columnwise=bool(columnwise), dtype=torch.float32)
        expected, expected_scale = own(x).gemm_operand(
            columnwise=bool(columnwise), dtype=torch.float32
        )
        assert torch.equal(values, expected)
        assert (scale is None and expected_scale is None) or torch.equal(scale, expected_scale)
    assert torch.equal(made.dequantize(), PAIRS[pair][0](x).dequantize())


@PAIR
def test_one_side_alone(pair: str) -> None:
    x = torch.randn(4, 6)
    rows, columns = hybrid(pair, columnwise=False)(x), hybrid(pair, rowwise=False)(x)
    assert rows.get_usages() == {"rowwise": True, "columnwise": False}
    assert columns.get_usages() == {"rowwise": False, "columnwise": True}
    assert torch.equal(columns.dequantize(), PAIRS[pair][1](x).dequantize())
    for tensor, columnwise in ((rows, True), (columns, False)):
        with pytest.raises(
            UsageError, match=f"has no {'columnwise' if columnwise else 'rowwise'} data"
        ):
            tensor.gemm_operand(columnwise=columnwise, dtype=torch.float32)
    both = hybrid(pair)(x)
    both.update_usage(rowwise_usage=False)
    assert both.get_usages() == {"rowwise": False, "columnwise": True}
    assert torch.equal(both.dequantize(), columns.dequantize())


@PAIR
def test_everything_is_derived_from_the_two_declarations(pair: str, tmp_path: Path) -> None:
    tensor = hybrid(pair)(torch.randn(4, 6))
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    checkpoint.save_file({"w": tensor}, tmp_path / "w.safetensors")
    loaded = checkpoint.load_file(tmp_path / "w.safetensors")["w"]
    for other in (
        torch.load(file, weights_only=True),
        copy.deepcopy(tensor),
        tensor.clone(),
        tensor.to("cpu", copy=True),
        loaded,
    ):
        assert type(other) is type(tensor)
        for columnwise in (False, True):
            a, b = (
                t.gemm_operand(columnwise=columnwise, dtype=torch.float32)[0]
                for t in (tensor, other)
            )
            assert torch.equal(a, b)
    copied = tensor.clone()
    copied.mul_(2)
    assert not torch.equal(copied.dequantize(), tensor.dequantize())
    assert torch.equal(copied.dequantize(), hybrid(pair)(2 * tensor.dequantize()).dequantize())


def test_views_lie_where_plain_ones_do() -> None:
    for quantizer in (IdentityQuantizer(), reference(E4M3)):
        check_places(quantizer(torch.randn(96, 64)), set(VIEWS))
    for pair in PAIRS.values():
        check_places(HybridQuantizer(*pair)(torch.randn(96, 64)), ROWS)


@PAIR
def test_equality_and_copies(pair: str) -> None:
    one, other = hybrid(pair), hybrid(pair).copy()
    assert one == other
    assert hash(one) == hash(other)
    assert one.is_alike(other)
    turned = HybridQuantizer(*reversed(PAIRS[pair]))
    assert one != turned
    assert not one.is_alike(turned)
    other.set_usage(columnwise=False)
    assert one.columnwise_usage


@PAIR
def test_shards_of_master_weights_make_the_whole(pair: str) -> None:
    quantizer, master = hybrid(pair), torch.randn(6, 8)
    weight = quantizer(torch.zeros(6, 8))
    quantize_master_weights([weight], [master.flatten()], [0])
    whole = quantizer(master)
    for inner in weight.inner_tensors:
        got, expected = getattr(weight, inner.attribute), getattr(whole, inner.attribute)
        assert (got is None and expected is None) or torch.equal(got, expected), inner.attribute


@PAIR
@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("made", [True, False], ids=["made with one", "dropped"])
def test_one_side_is_written_as_two(pair: str, side: str, made: bool) -> None:
    """Of a hybrid that holds data of one side, that is all that a write needs."""
    quantizer, x, master = hybrid(pair), torch.randn(6, 8), torch.randn(6, 8)

    def one(values: torch.Tensor) -> Any:
        if made:
            return quantizer.with_usage(side == "rowwise", side == "columnwise")(values)
        tensor = quantizer(values)
        tensor.update_usage(rowwise_usage=side == "rowwise", columnwise_usage=side == "columnwise")
        return tensor

    expected = one(master).dequantize()
    for source in (quantizer(master), one(master), master):
        tensor = one(x)
        tensor.copy_(source)
        assert torch.equal(tensor.dequantize(), expected)
    for quantizers in (None, quantizer):
        tensor = one(x)
        cast_master_weights_to_fp8([tensor], [master.flatten()], [0], quantizers=quantizers)
        assert torch.equal(tensor.dequantize(), expected)
    both = quantizer(x)
    both.copy_(one(master))
    torch.testing.assert_close(both.dequantize(), expected, rtol=0.2, atol=0.1)


def test_rows_are_independent_where_both_say_so() -> None:
    def independent(*sides: Any) -> int | None:
        quantizer = HybridQuantizer(*sides)
        return rule_of(quantizer).independent_rows(quantizer)

    assert independent(RowQuantizer(), IdentityQuantizer()) == 1
    assert independent(RowQuantizer(), reference(E4M3)) is None

    class FourRows(RowQuantizer):
        shards = ShardRule(rows=4)

    class SixRows(RowQuantizer):
        shards = ShardRule(rows=6)

    assert independent(FourRows(), SixRows()) == 12


class Stateful(RowQuantizer):
    stateful = True


@pytest.mark.parametrize(
    ("rows", "columns", "error"),
    [
        (None, reference(E4M3), DTypeError),
        (reference(E4M3), "current", DTypeError),
        (reference(E4M3), HybridQuantizer(reference(E4M3), reference(E5M2)), DTypeError),
        (Stateful(), reference(E4M3), OptionError),
        (reference(E4M3), Stateful(), OptionError),
    ],
)
def test_what_cannot_be_a_side_is_refused(rows: Any, columns: Any, error: Any) -> None:
    with pytest.raises(error, match=r"(rowwise|columnwise)_quantizer is a"):
        HybridQuantizer(rows, columns)


@pytest.mark.parametrize(("sides", "named"), [((0, 1), "rowwise"), ((1, 0), "columnwise")])
def test_an_option_of_a_side_is_not_one_of_the_hybrid(sides: Any, named: str) -> None:
    """It would be set without any effect."""
    quantizers = [reference(E4M3), IdentityQuantizer()]
    quantizer: Any = HybridQuantizer(*(quantizers[side] for side in sides))
    for name in ("fp8_dtype", "eps"):
        with pytest.raises(OptionError, match=rf"{name} is set on a Hybrid.*on {named}_quantizer"):
            setattr(quantizer, name, E5M2)
    getattr(quantizer, f"{named}_quantizer").fp8_dtype = E5M2
    assert quantizer(torch.ones(2, 2)).dequantize().equal(torch.ones(2, 2))
    quantizer.internal = True
    quantizer.note = "an attribute that no side has"


def test_errors_show_short_names() -> None:
    rows = HybridQuantizer(reference(E4M3), IdentityQuantizer(), columnwise=False)(torch.ones(2, 2))
    name = r"HybridTensor\[CurrentScalingTensorRefStorage, IdentityTensorStorage\]"
    with pytest.raises(UsageError, match=f"^{name} has no columnwise data"):
        rows.gemm_operand(columnwise=True, dtype=torch.float32)


@pytest.mark.parametrize("primary", [False, True])
def test_a_layer_reads_each_side_in_its_direction(primary: bool) -> None:
    recipe = CustomRecipe(by_direction("custom", lambda role: reference(E5M2)))
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe, enabled=primary):
        layer = ottava.nn.Linear(8, 4, bias=False, recipe=recipe)
    source = layer.weight.get_high_precision_init_val() if primary else layer.weight.detach()
    x, dy = torch.randn(5, 8, requires_grad=True), torch.randn(5, 4)
    y = layer(x)
    y.backward(dy)
    forward, backward = reference(E4M3), reference(E5M2)
    wide = {"dtype": torch.float64}
    qdy = backward(dy).dequantize(**wide)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(
        y.detach().double(),
        forward(x.detach()).dequantize(**wide) @ forward(source).dequantize(**wide).t(),
        **tolerance,
    )
    torch.testing.assert_close(
        x.grad.double(), qdy @ backward(source).dequantize(**wide), **tolerance
    )
    torch.testing.assert_close(
        layer.weight.grad.double(), qdy.t() @ backward(x.detach()).dequantize(**wide), **tolerance
    )


@pytest.mark.parametrize("primary", [False, True])
def test_layers_of_every_pair_compile(primary: bool) -> None:
    torch.manual_seed(0)
    layers = []
    for pair in PAIRS:
        recipe = CustomRecipe(lambda role, pair=pair: hybrid(pair))
        with ottava.quantized_model_init(recipe, enabled=primary):
            layers.append(ottava.nn.Linear(8, 8, recipe=recipe))
    model = torch.nn.Sequential(*layers)
    x = torch.randn(3, 8, requires_grad=True)
    found = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        x.grad = None
        model.zero_grad()
        run(x).square().sum().backward()
        found.append([x.grad, *(layer.weight.grad for layer in layers)])
    for name, eager, compiled in zip(["the input", *PAIRS], *found, strict=True):
        assert torch.equal(eager, compiled), name


@pytest.mark.parametrize("layout", ["shared", "transpose"])
def test_a_written_weight_has_no_stale_side(layout: Any) -> None:
    with columnwise_layout(layout):
        quantizer = HybridQuantizer(PerTensor(E4M3), PerTensor(E5M2))
        weight, master = quantizer(torch.zeros(6, 8)), torch.randn(6, 8)
        alias = weight.detach()
        quantize_master_weights([weight], [master.flatten()], [0])
        whole = quantizer(master)
        for one in (weight, alias):
            for columnwise in (False, True):
                got, expected = (
                    t.gemm_operand(columnwise=columnwise, dtype=torch.float32) for t in (one, whole)
                )
                assert torch.equal(got[0], expected[0])
                assert got[1] is expected[1] is None


@pytest.mark.parametrize(
    "sides", [(IdentityQuantizer(), reference(E5M2)), (IdentityQuantizer(), IdentityQuantizer())]
)
def test_a_hybrid_with_identity_keeps_values_of_its_own(sides: Any) -> None:
    x = torch.randn(4, 6)
    before = x.clone()
    made = HybridQuantizer(*sides)(x)
    made.mul_(3)
    assert torch.equal(x, before)
    values = made.dequantize()
    x.zero_()
    assert torch.equal(made.dequantize(), values)


@pytest.mark.parametrize("pair", ["identity", "hybrid"])
def test_a_weight_that_is_kept_does_not_change_with_the_weight(pair: str) -> None:
    factory = identity_factory if pair == "identity" else by_direction("identity", "custom")
    layer = ottava.nn.Linear(6, 4, recipe=CustomRecipe(factory))
    x = torch.randn(3, 6)
    first = layer(x, is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.add_(1.0)
    assert torch.equal(layer(x, is_first_microbatch=False), first)
    first.sum().backward()
    assert not torch.equal(layer(x, is_first_microbatch=True), first)


# Forks of a process that has imported core and no recipe.
READ_ELSEWHERE = """
import os, pickle, sys, torch
import ottava.tensors
from ottava import checkpoint
for path in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    kind = path.rpartition(".")[2]
    if kind == "pickle":
        made = pickle.load(open(path, "rb"))
    elif kind == "torch":
        import ottava_custom
        quantizer = ottava_custom.by_direction("custom", "identity")("weight")
        made = torch.load(path, weights_only=True)
    else:
        made = checkpoint.load_file(path)["w"]
    print(kind, type(made).__name__, made.dequantize().double().sum().item(), flush=True)
    os._exit(0)
"""


def test_fresh_processes_read_what_was_saved(tmp_path: Path) -> None:
    made = by_direction("custom", "identity")("weight")(torch.randn(4, 6))
    paths = {kind: tmp_path / f"w.{kind}" for kind in ("pickle", "torch", "safetensors")}
    paths["pickle"].write_bytes(pickle.dumps(made))
    torch.save(made, paths["torch"])
    checkpoint.save_file({"w": made}, paths["safetensors"])
    command = [sys.executable, "-W", "ignore", "-c", READ_ELSEWHERE, *map(str, paths.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    values = made.dequantize().double().sum().item()
    assert done.stdout.splitlines() == [
        f"{kind} {type(made).__name__} {values}" for kind in paths
    ], done.stderr


def test_a_hybrid_is_explained_in_each_direction() -> None:
    recipe = CustomRecipe(lambda role: IdentityQuantizer())
    recipe.set_quantizer_factory(lambda role: HybridQuantizer(reference(E4M3), reference(E5M2)))
    explanation = recipe.explain("weight")
    assert "E4M3" in explanation.rowwise
    assert "E5M2" not in explanation.rowwise
    assert "E5M2" in explanation.columnwise
    assert "E4M3" not in explanation.columnwise
