"""How weights are kept under FSDP2: made, saved, copied, of other kinds. Each case raises where a
rank is wrong."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_training import (
    GROUPS,
    RECIPES,
    Counted,
    Net,
    batches,
    both,
    compare,
    full_state,
    made,
    recipe_of,
    sharded,
    train,
)
from random_weights import E4M3, OneScaleQuantizer, RowAmaxQuantizer, RowQuantizer
from sampling import each, pairs, some
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ottava
from ottava.distributed import HighPrecisionWeight, gather_quantized, quantize_master_weights
from ottava.errors import DTypeError, OptionError, OttavaError, ShapeError, UsageError
from ottava.tensors import QuantizedTensor
from ottava_current import Float8CurrentScalingQuantizer


def meta_device(mesh: Any) -> None:
    for recipe, hidden in each(RECIPES, (64, 33)):
        with torch.device("meta"):
            net = Net(hidden).bfloat16()
        net = sharded(gather_quantized(ottava.convert(net, recipe_of(recipe))), mesh)
        assert all(p.is_meta for p in net.parameters())
        net.to_empty(device="cpu")
        for module in net.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for name, value in full_state(net).items():
            assert not value.is_meta, name
            if name.endswith("first.weight"):
                assert 0.9 / 8 < value.float().abs().max() <= 1 / 8, (recipe, name)
            if name.endswith("recipe_state.scale"):
                assert torch.equal(value, torch.ones(3)), name
        alone = made(recipe, gathered=False, hidden=hidden)
        set_model_state_dict(
            net, alone.state_dict(), options=StateDictOptions(full_state_dict=True)
        )
        assert train(net) == train(alone), (recipe, hidden)
        compare(alone, net, f"meta {recipe}")


#: How a model takes a state back.
WAYS = ("load_state_dict", "dcp", "full")


def saving(mesh: Any) -> None:
    """Checkpoints hold plain values, and a model goes on from them as if it had not been
    interrupted."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    for place, (recipe, hidden) in enumerate(each(RECIPES, (64, 33))):
        shards = sharded(made(recipe, gathered=True, hidden=hidden), mesh)
        train(shards, 2)
        whole = full_state(shards)
        expected = copy.deepcopy(shards.state_dict())
        alone = made(recipe, gathered=False, hidden=hidden)
        alone.load_state_dict(whole)
        # A file of this rank's shards, read as anyone would.
        local = {
            n: v.to_local() if hasattr(v, "to_local") else v for n, v in shards.state_dict().items()
        }
        path = os.path.join(folder[0], f"{recipe}{hidden}.{dist.get_rank()}")
        torch.save(local, path)
        for name, value in torch.load(path, weights_only=True).items():
            assert type(value) is torch.Tensor, (name, type(value))
            held = local[name]
            held = held.high_precision() if hasattr(held, "high_precision") else held
            assert torch.equal(value, held), name
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        for name, value in get_model_state_dict(shards, options=options).items():
            assert type(value) is torch.Tensor, (name, type(value))
            assert torch.equal(value, whole[name]), name
        dcp.save({"model": shards.state_dict()}, checkpoint_id=path[:-2] + "dcp")
        # Back into another model of the kind, in three ways.
        for way in some(WAYS[place % 3 : place % 3 + 1], WAYS):
            other = made(recipe, gathered=True, hidden=hidden)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            sharded(other, mesh)
            if way == "load_state_dict":
                other.load_state_dict(expected)
            elif way == "dcp":
                state = {"model": other.state_dict()}
                dcp.load(state, checkpoint_id=path[:-2] + "dcp")
                other.load_state_dict(state["model"])
            else:
                set_model_state_dict(
                    other, dict(whole), options=StateDictOptions(full_state_dict=True)
                )
            for name, value in full_state(other).items():
                # Of plain tensors that differ, here the counts of each rank, torch saves one
                # rank's.
                assert name.endswith("saturated") or torch.equal(value, whole[name]), (way, name)
            reference = made(recipe, gathered=False, hidden=hidden)
            reference.load_state_dict(whole)
            assert train(other, 3) == train(reference, 3), (recipe, hidden, way)
            compare(reference, other, f"{recipe} {way}")
        # Into a model that is not sharded, by DCP.
        lone = made(recipe, gathered=False, hidden=hidden)
        state = {"model": lone.state_dict()}
        dcp.load(state, checkpoint_id=path[:-2] + "dcp")
        for name, value in lone.state_dict().items():
            assert name.endswith("saturated") or torch.equal(value, whole[name]), name


def copying(mesh: Any) -> None:
    """Models before they are sharded: copies, pickles and one process."""
    for recipe in RECIPES:
        alone, net = made(recipe, gathered=False), made(recipe, gathered=True)
        twin = copy.deepcopy(net)
        assert isinstance(twin.first.weight, HighPrecisionWeight)
        assert isinstance(twin.first.weight, torch.nn.Parameter)
        assert (
            twin.first.weight.high_precision().data_ptr()
            != net.first.weight.high_precision().data_ptr()
        )
        expected = train(alone)
        # Not sharded it is the model that it was.
        assert train(net) == expected, recipe
        compare(alone, net, f"unsharded {recipe}")
        assert train(sharded(twin, mesh)) == expected, recipe
        compare(alone, twin, f"copy {recipe}")


class ThirdParty(ottava.Recipe):
    name = "third-party"

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def make_quantizer(self, role: Any, *, amax_reduction_group: Any = None) -> Any:
        return self.make() if role.tensor_type == "weight" else Float8CurrentScalingQuantizer(E4M3)

    def __repr__(self) -> str:
        return f"ThirdParty({self.make.__name__})"


def third_party(mesh: Any) -> None:
    """Those that say nothing about shards are gathered in high precision, the others as bytes."""
    kinds = ((RowQuantizer, 2), (OneScaleQuantizer, 2), (RowAmaxQuantizer, 1))
    for (make, size), groups, hidden in pairs(kinds, GROUPS, (64, 33, 1)):
        recipe = ThirdParty(make)
        with Counted() as counted:
            both(mesh, recipe, "third party", groups=groups, hidden=hidden)
        world = dist.get_world_size()
        for whole, handed in counted.handed:
            if hidden == 64:
                # A float32 scale for each row of 64.
                assert handed * world == whole * size + (whole // 64 * 4 if size == 1 else 0), (
                    make,
                    handed,
                )


def hybrid(mesh: Any) -> None:
    """Replicas of shards."""
    both_ways = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards")
    )
    for recipe, hidden, groups in pairs(RECIPES, (64, 33), GROUPS):
        both(both_ways, recipe, "hybrid", hidden=hidden, groups=groups)


def primary(recipe: str, hidden: int = 64) -> torch.nn.Module:
    torch.manual_seed(0)
    chosen = recipe_of(recipe)
    net = Net(hidden).bfloat16()
    with ottava.quantized_model_init(chosen):
        for name, layer in list(net.named_children()):
            if isinstance(layer, torch.nn.Linear):
                bias = layer.bias is not None
                new = ottava.nn.Linear(
                    layer.in_features, layer.out_features, bias=bias, dtype=torch.bfloat16
                )
                setattr(net, name, new)
    return ottava.convert(net, chosen)


def fp8_primary(mesh: Any) -> None:
    """Weights in FP8 only, next to norms and biases in one group; an optimizer's fused operation
    reduces once."""
    kinds = (("current", 64), ("current", 33), ("delayed", 33), ("delayed", 64), ("mxfp8", 64))
    for (recipe, hidden), groups in each(kinds, GROUPS):
        if recipe == "mxfp8" and dist.get_world_size() > 2:
            continue
        alone, shards = primary(recipe, hidden), sharded(primary(recipe, hidden), mesh, groups)
        expected = train(alone, optimizer=torch.optim.SGD(alone.parameters(), lr=0.5, foreach=True))
        seen = train(shards, optimizer=torch.optim.SGD(shards.parameters(), lr=0.5, foreach=True))
        assert seen == expected, (recipe, hidden, groups, seen, expected)
        compare(alone, shards, f"primary {recipe} {hidden} {groups}")
        x, y = next(batches(1))
        optimizer = torch.optim.SGD(shards.parameters(), lr=0.5, foreach=True)
        torch.nn.functional.mse_loss(shards(x), y).backward()
        with Counted() as counted:
            optimizer.step()
        assert counted.reductions == (0 if recipe == "mxfp8" else 1), (recipe, counted.reductions)


def sharded_masters(mesh: Any) -> None:
    """Masters of this rank's rows, written into the shards of FP8-primary weights with the scales
    of the whole."""
    for recipe in RECIPES:
        for hidden in (64, 33) if recipe != "mxfp8" else (64,):
            if recipe == "mxfp8" and dist.get_world_size() > 2:
                continue
            alone, shards = primary(recipe, hidden), sharded(primary(recipe, hidden), mesh, "root")
            weights = [
                [getattr(net, n).weight for n in ("first", "second", "last")]
                for net in (alone, shards)
            ]
            for step, (x, y) in enumerate(batches(3)):
                losses = []
                for net in (alone, shards):
                    loss = torch.nn.functional.mse_loss(net(x), y)
                    loss.backward()
                    losses.append(loss.item())
                    net.zero_grad()
                assert losses[0] == losses[1], (recipe, hidden, step, losses)
                random = torch.Generator().manual_seed(step)
                masters = [torch.randn(w.shape, generator=random) * 2.0**step for w in weights[0]]
                with Counted() as counted:
                    own = [
                        torch.distributed.tensor.distribute_tensor(m, mesh, w.placements)
                        for m, w in zip(masters, weights[1], strict=True)
                    ]
                    counted.reductions = 0
                    if step == 0:
                        quantize_master_weights(weights[1], own, None)
                    else:
                        # None where nothing is held, and offsets where something is.
                        local = [w.to_local() for w in own]
                        rank = dist.get_rank()
                        starts = [
                            min(rank * -(-m.shape[0] // mesh.size()), m.shape[0]) * m.shape[1]
                            for m in masters
                        ]
                        held = [value.numel() > 0 for value in local]
                        quantize_master_weights(
                            weights[1],
                            [v if h else None for v, h in zip(local, held, strict=True)],
                            [s if h else None for s, h in zip(starts, held, strict=True)],
                        )
                assert counted.reductions == 1, counted.reductions
                for weight, master in zip(weights[0], masters, strict=True):
                    weight._quantizer.update_quantized(master.bfloat16(), weight)
                compare(alone, shards, f"masters {recipe} {hidden} {step}")


def refused_masters(mesh: Any) -> None:
    """Masters that do not fit the shards, before anything is written or reduced."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net = sharded(primary("current", 33), mesh, "root")
    weight = net.first.weight
    local = weight.to_local()
    own = torch.randn(local.shape)
    start = min(rank * -(-33 // world), 33) * 64
    before = local._data.clone(), local._scale_inv.clone()
    ones = Float8CurrentScalingQuantizer(E4M3).quantize(torch.ones(4, 64))
    replicated = distribute_tensor(ones, mesh, [Replicate()], src_data_rank=None)
    for kind, weights, masters, offsets, group in (
        (ShapeError, [weight], [torch.randn(33, 64)], None, None),
        (ShapeError, [weight], [own[:-1]], [start], None),
        (OptionError, [weight], [own], [start + 64], None),
        (OptionError, [weight], [own], [float(start)], None),
        (DTypeError, [weight], [own.double()], None, None),
        (DTypeError, [net.norm.weight], [torch.randn(33)], None, None),
        (DTypeError, [weight], [net.norm], None, None),
        (OptionError, [weight], [own], None, 1),
        (OptionError, [weight], [own], None, [0, 1]),
        (OttavaError, [weight], [own], None, "no such group"),
    ):
        with Counted() as counted, pytest.raises(kind):
            quantize_master_weights(weights, masters, offsets, group)
        assert counted.reductions == 0
        assert torch.equal(local._data, before[0])
        assert torch.equal(local._scale_inv, before[1])
    # What is on every rank is written on every rank.
    if isinstance(replicated.to_local(), QuantizedTensor):
        quantize_master_weights([replicated], [torch.full((4, 64), 3.0)], None)
        assert torch.equal(replicated.to_local().dequantize(), torch.full((4, 64), 3.0))


def refused(mesh: Any) -> None:
    """What cannot be done is said."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with pytest.raises(UsageError, match="no layer of the model has a recipe bound"):
        gather_quantized(net)
    with pytest.raises(DTypeError, match="model is a str"):
        gather_quantized("model")
    net = sharded(made("current", gathered=False), mesh, "root")
    with pytest.raises(UsageError, match="sharded already"):
        gather_quantized(net)
    net = sharded(made("current", gathered=True), mesh, "root")
    for layer in net.children():
        if hasattr(layer, "bind"):
            layer.bind(None)
    with pytest.raises(UsageError, match="no recipe is bound"):
        net(next(batches(1))[0])
    # A dtype that nothing is quantized from.
    for recipe in RECIPES:
        net = sharded(
            made(recipe, gathered=True), mesh, "root", mp_policy=MixedPrecisionPolicy(torch.float64)
        )
        with pytest.raises(DTypeError, match=r"gathered in torch\.float64"):
            net(next(batches(1))[0])
    # Shards of it, whose largest magnitudes all ranks would reduce.
    for recipe in ("current", "delayed"):
        made_wide, policy = (
            made(recipe, gathered=True).double(),
            MixedPrecisionPolicy(torch.bfloat16),
        )
        with pytest.raises(DTypeError, match=r"a sharded weight has dtype torch\.float64"):
            sharded(made_wide, mesh, "root", mp_policy=policy)(next(batches(1))[0])
    # Columns in place of rows; and what torch does not do for tensors that gather themselves.
    for recipe in RECIPES:
        net = sharded(made(recipe, gathered=True), mesh, "root", shard_placement_fn=by_columns)
        with pytest.raises(ShapeError):
            net(next(batches(1))[0])


def by_columns(parameter: torch.nn.Parameter) -> Any:
    return Shard(1) if parameter.dim() > 1 else None


def resharded_to_fewer(mesh: Any) -> None:
    """torch gathers such tensors over the whole mesh alone."""
    for recipe in RECIPES:
        net = sharded(made(recipe, gathered=True), mesh, "root", reshard_after_forward=2)
        with pytest.raises((OttavaError, NotImplementedError)):
            net(next(batches(1))[0]).sum().backward()
