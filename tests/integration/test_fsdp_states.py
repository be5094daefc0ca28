"""States of models under FSDP2: made on meta, saved, loaded, copied; masters that are sharded
alike."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ottava
from ottava.distributed import HighPrecisionWeight, gather_quantized, quantize_master_weights
from ottava.errors import DTypeError, OptionError, ShapeError
from ottava_current import Float8CurrentScalingQuantizer
from tests.comparing import assert_same
from tests.fsdp import (
    Net,
    assert_states_equal,
    batches,
    loss_of,
    make,
    optimizer_of,
    shard,
    state_of,
    train,
)
from tests.ranks import Collectives, on_ranks

GATHERED, FULL = "gathered quantized", StateDictOptions(full_state_dict=True)


@on_ranks(2)
def test_a_model_is_made_on_meta(mesh: DeviceMesh) -> None:
    """Sharded without values, initialized, and given the values of another."""
    with torch.device("meta"):
        net = Net(33).bfloat16()
    net = shard(gather_quantized(ottava.convert(net, "delayed")), mesh)
    assert all(p.is_meta for p in net.parameters())
    net.to_empty(device="cpu")
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    state = state_of(net)
    assert 0.9 / 8 < state["first.weight"].float().abs().max() <= 1 / 8
    for name, value in state.items():
        if name.endswith("recipe_state.scale"):
            assert_same(value, torch.ones(3), note=name)
    alone = make("delayed", "high precision", 33)
    set_model_state_dict(net, alone.state_dict(), options=FULL)
    assert train(net) == train(alone)
    assert_states_equal(state_of(net), state_of(alone), "")


@pytest.mark.parametrize(
    ("way", "recipe", "rows"),
    [("assigned", "current", 64), ("dcp", "delayed", 33), ("full", "mxfp8", 33)],
)
@on_ranks(2)
def test_a_loaded_model_goes_on(
    mesh: DeviceMesh, way: str, recipe: str, rows: int, tmp_path: Path
) -> None:
    """As one that was not interrupted; files hold plain tensors."""
    net = shard(make(recipe, GATHERED, rows), mesh)
    train(net, 1)
    whole, reference = state_of(net), make(recipe, "high precision", rows)
    other = make(recipe, GATHERED, rows)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    shard(other, mesh)
    if way == "dcp":
        dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path)
        # A model that is not sharded reads the same file.
        for model in (other, reference):
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path)
            model.load_state_dict(state["model"])
        assert_states_equal(state_of(reference), whole, (recipe, way))
    elif way == "full":
        state = get_model_state_dict(net, options=FULL)
        assert {type(value) for value in state.values()} == {torch.Tensor}
        set_model_state_dict(other, state, options=FULL)
    else:
        other.load_state_dict(net.state_dict(), assign=True)
    assert_states_equal(state_of(other), whole, (recipe, way))
    reference.load_state_dict(whole, strict=False)
    assert train(other, 2) == train(reference, 2), (recipe, way)


@on_ranks(2)
def test_files_and_copies(mesh: DeviceMesh) -> None:
    """A rank's file of its shards holds plain tensors; a copy is another model of the kind."""
    net = make("delayed", GATHERED)
    twin = copy.deepcopy(net)
    assert isinstance(twin.first.weight, HighPrecisionWeight)
    # Not sharded it is the model that it was.
    assert train(net) == train(shard(twin, mesh)) == train(make("delayed", "high precision"))
    local = twin.first.weight.to_local()
    file = io.BytesIO()
    torch.save(local, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert type(read) is torch.Tensor
    assert_same(read, local.high_precision())


@on_ranks(2)
def test_a_copy_begins_its_step_at_a_gather(mesh: DeviceMesh) -> None:
    """As its forward pass would: weights gathered before it have the scale of the step."""
    net = make("delayed", GATHERED)
    train(net, 1)
    twin = shard(copy.deepcopy(net), mesh, "root")
    optimizer = optimizer_of(twin)
    twin.unshard()
    assert train(twin, optimizer=optimizer) == train(net)


@on_ranks(2)
def test_a_gather_in_evaluation_begins_no_step(mesh: DeviceMesh) -> None:
    net = shard(make("delayed", GATHERED), mesh, "root")
    train(net, 1)
    before = state_of(net)
    net.eval().unshard()
    net.reshard()
    assert_states_equal(state_of(net), before, "evaluation")


@on_ranks(2)
def test_sharded_masters(mesh: DeviceMesh) -> None:
    """Masters of this rank's rows are written into the shards of quantized weights, with the scales
    of the whole, by one all-reduce."""
    rank, world = mesh.get_rank(), mesh.size()
    for recipe, rows in (("delayed", 33), ("mxfp8", 128)):
        alone = make(recipe, "quantized", rows, width=128)
        net = shard(make(recipe, "quantized", rows, width=128), mesh, "root")
        mine, theirs = ([n.first.weight, n.second.weight, n.last.weight] for n in (net, alone))
        for step, batch in enumerate(batches(3, 128)):
            losses = [loss_of(n, batch) for n in (net, alone)]
            assert losses[0].item() == losses[1].item(), (recipe, rows, step)
            torch.autograd.backward(losses)
            random = torch.Generator().manual_seed(step)
            masters = [torch.randn(w.shape, generator=random) * 2.0**step for w in theirs]
            own: list[Any] = [
                distribute_tensor(master, mesh, weight.placements)
                for master, weight in zip(masters, mine, strict=True)
            ]
            starts: Any = None
            if step:
                # Local tensors with offsets.
                own = [master.to_local() for master in own]
                starts = [-(-len(m) // world) * rank * m.shape[1] for m in masters]
            with Collectives() as collectives:
                quantize_master_weights(mine, own, starts)
            assert collectives.count == 1
            for weight, master in zip(theirs, masters, strict=True):
                weight._quantizer.update_quantized(master.bfloat16(), weight)
            assert_states_equal(state_of(net), state_of(alone), (recipe, rows, step))


@on_ranks(2)
def test_masters_that_do_not_fit_the_shards(mesh: DeviceMesh) -> None:
    """Nothing is written or reduced."""
    net = shard(make("current", "quantized", 33), mesh, "root")
    weight, norm = net.first.weight, net.norm.weight
    local = weight.to_local()
    own, start = torch.randn(local.shape), min(mesh.get_rank() * 17, 33) * 64
    before = local._data.clone(), local._scale_inv.clone()
    refused: list[tuple[Any, ...]] = [
        (ShapeError, weight, torch.randn(33, 64), None, None),
        (ShapeError, weight, own[:-1], start, None),
        (OptionError, weight, own, start + 64, None),
        (DTypeError, norm, torch.randn(33), None, None),
        (OptionError, weight, own, None, [0, 1]),
    ]
    for kind, target, master, offset, group in refused:
        with Collectives() as collectives, pytest.raises(kind):
            quantize_master_weights([target], [master], None if offset is None else [offset], group)
        assert not collectives.calls
        assert_same((local._data, local._scale_inv), before)


@on_ranks(2)
def test_a_replicated_weight_is_written_on_every_rank(mesh: DeviceMesh) -> None:
    ones = Float8CurrentScalingQuantizer(torch.float8_e4m3fn).quantize(torch.ones(4, 64))
    weight = distribute_tensor(ones, mesh, [Replicate()], src_data_rank=None)
    quantize_master_weights([weight], [torch.full((4, 64), 3.0)], None)
    assert_same(weight.to_local().dequantize(), torch.full((4, 64), 3.0))


@on_ranks(2)
def test_weights_that_are_sharded_over_two_groups_are_refused(mesh: DeviceMesh) -> None:
    ones = Float8CurrentScalingQuantizer(torch.float8_e4m3fn).quantize(torch.ones(4, 64))
    both, places = init_device_mesh("cpu", (1, 2)), [Replicate(), Shard(0)]
    weights = [
        distribute_tensor(ones, both, order, src_data_rank=None) for order in (places, places[::-1])
    ]
    masters = [torch.full(weight.to_local().shape, 3.0) for weight in weights]
    with pytest.raises(OptionError, match="sharded over 2 groups"):
        quantize_master_weights(weights, masters, None)
