"""Rules for shards: a rule goes with the quantization that it describes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ottava
from ottava import GridQuantizer, Layout, kernels
from ottava.distributed import (
    GridShards,
    MasterWeights,
    ShardRule,
    gather_quantized,
    quantize_master_weights,
    rule_of,
)
from ottava.errors import DTypeError
from tests.comparing import assert_same
from tests.core.layouts.layouts import OneQuantizer
from tests.ranks import on_ranks
from tests.strangers import AloneRows, ReducedRows, SilentOneScale, SilentRows

E4M3 = torch.float8_e4m3fn
ONE_SCALE = Layout(E4M3, (None, None))


class Derived(GridQuantizer):
    """Derives what it quantizes with, and the rule for it."""


class Halved(GridQuantizer):
    """Quantizes otherwise, and says nothing about it."""

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        return super().quantize_impl(tensor / 2, dtype)


class DeclaredHalved(Halved):
    shards = ShardRule(rows=2)


class Floored(GridQuantizer):
    """Scales of its own, by an option."""

    floor = 100.0
    shards = GridShards(
        lambda jobs, amaxes: kernels.scale_from_amax(amaxes, E4M3, jobs[0].quantizer.floor),
        options=("floor",),
    )

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
        raise AssertionError("only shards are quantized")


def test_a_rule_goes_with_its_quantization() -> None:
    def rule(quantizer: Any) -> tuple[ShardRule, Any, int | None]:
        found = rule_of(quantizer)
        return found, found.batch_for(quantizer), found.independent_rows(quantizer)

    declared = rule_of(GridQuantizer(ONE_SCALE))
    assert rule(Derived(ONE_SCALE)) == (declared, declared.batch, None)
    assert rule(Halved(ONE_SCALE))[1:] == (None, None)
    assert rule(DeclaredHalved(ONE_SCALE)) == (DeclaredHalved.shards, None, 2)
    assert rule(AloneRows())[1:] == (None, 1)
    assert rule(ReducedRows())[0] is ReducedRows.shards
    for silent in (SilentRows(), SilentOneScale()):
        assert rule(silent)[1:] == (None, None)
    # Rows and columns of blocks are whole.
    assert rule(GridQuantizer(Layout(E4M3, (1, 32))))[2] == 32


@pytest.mark.parametrize("value", [GridShards, "NoSuchRule", "math"])
def test_what_is_no_rule_is_refused(value: object) -> None:
    class Wrong(GridQuantizer):
        shards = value  # type: ignore[assignment]

    weight = Wrong(ONE_SCALE).quantize(torch.zeros(2, 2))
    message = rf"Wrong.shards is a {type(value).__name__}.*an ottava.distributed.ShardRule"
    with pytest.raises(DTypeError, match=message):
        quantize_master_weights([weight], [torch.ones(4)], [0])


@pytest.mark.parametrize("cls", [GridQuantizer, Derived, Halved, DeclaredHalved])
def test_shards_are_quantized_as_the_whole(cls: Any) -> None:
    quantizer, master = cls(ONE_SCALE), torch.randn(6, 8)
    weight, whole = quantizer.quantize(torch.zeros(6, 8)), quantizer.quantize(master)
    quantize_master_weights([weight], [master.flatten()], [0])
    assert_same(weight.inner_list(), whole.inner_list())


def test_weights_of_other_dtypes_are_quantized_apart() -> None:
    """An infinite scale becomes the largest value of the dtype of the weight."""
    quantizer = GridQuantizer(Layout(E4M3, (None, None), finite_as="input"))
    masters = [torch.full((4, 8), 1e-38).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    weights = [quantizer.quantize(torch.zeros_like(master)) for master in masters]
    quantize_master_weights(weights, masters, None)
    for weight, master in zip(weights, masters, strict=True):
        assert_same(weight.inner_list(), quantizer.quantize(master).inner_list())


def test_scales_by_a_function() -> None:
    """It sees the amaxes, and the options of the quantizer."""
    quantizer = Floored(ONE_SCALE)
    weight: Any = quantizer.make_empty((2, 4))
    plan = MasterWeights([weight], [torch.full((8,), 50.0)], start_offsets=[0])
    plan.quantize()
    assert_same(weight.dequantize(), torch.full((2, 4), 50.0), note="224 of 448 is 50 of 100")
    # A weight that gets another quantizer.
    before, other = weight._rowwise_scale_inv.clone(), quantizer.copy()
    other.floor = 200.0
    weight.update_quantizer(other)
    plan.quantize()
    assert_same(weight._rowwise_scale_inv, 2 * before)


@on_ranks(2)
def test_weights_with_other_options_are_no_batch(mesh: DeviceMesh) -> None:
    """FSDP gathers them together."""

    def factory(role: ottava.QuantizerRole) -> GridQuantizer:
        if role.tensor_type != "weight":
            return GridQuantizer(ONE_SCALE)
        quantizer = Floored(ONE_SCALE)
        quantizer.floor = 448.0 * (1 + int(role.name))
        return quantizer

    recipe = OneQuantizer()
    recipe.set_quantizer_factory(factory)
    layers = (torch.nn.Linear(8, 8) for _ in range(2))
    net: Any = gather_quantized(ottava.convert(torch.nn.Sequential(*layers), recipe))
    fully_shard(net, mesh=mesh).unshard()
    assert [layer.weight._rowwise_scale_inv.item() for layer in net] == [1.0, 2.0]
