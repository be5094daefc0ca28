"""FSDP2 trains every recipe as one process does, bit for bit: what ranks gather, reduce and
refuse."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import ottava
from ottava import GridQuantizer, Layout
from ottava.distributed import gather_quantized
from ottava.errors import DTypeError, OttavaError, ShapeError, UsageError
from ottava.tensors import columnwise_layout
from ottava_current import Float8CurrentScalingQuantizer
from ottava_custom import (
    CustomRecipe,
    by_direction,
    by_tensor,
    current_scaling_ref_quantizer_factory,
    mirror,
)
from tests.comparing import assert_same
from tests.fsdp import (
    GROUPS,
    KEPT,
    assert_trains_alike,
    batches,
    loss_of,
    make,
    optimizer_of,
    shard,
    train,
)
from tests.ranks import Collectives, on_ranks
from tests.strangers import AloneRows, OneQuantizer, ReducedRows, SilentOneScale, SilentRows

E4M3, E5M2 = ottava.Format.E4M3, ottava.Format.E5M2


def named(name: str, **options: Any) -> Callable[[], ottava.Recipe]:
    return partial(ottava.get_recipe, name, **options)


def grid(*layout: Any) -> Callable[[], ottava.Recipe]:
    return lambda: OneQuantizer(GridQuantizer(Layout(*layout)))


def hybrid(make: Callable[[], Any]) -> Callable[[], ottava.Recipe]:
    return lambda: CustomRecipe(make())


#: Whose weights have one scale: their shards may have any number of rows.
ONE_SCALE: dict[str, Callable[[], ottava.Recipe]] = {
    "current": named("current"),
    "delayed": named("delayed", amax_history_len=4),
    "formats": hybrid(
        lambda: by_direction(mirror("current", fp8_format=E4M3), mirror("current", fp8_format=E5M2))
    ),
}
#: Whose shards may not cut blocks.
BLOCKS: dict[str, Callable[[], ottava.Recipe]] = {
    "mxfp8": named("mxfp8"),
    "mxfp8 of squares": named("mxfp8", with_2d_quantization=True),
    "blockwise": named("blockwise"),
    "blockwise with any scales": named("blockwise", force_pow_2_scales=False),
    "blockwise of rows": named("blockwise", w_block_scaling_dim=1),
    "rowwise": named("rowwise"),
    "MX forward": hybrid(lambda: by_direction("mxfp8", "current")),
    "MX backward": hybrid(lambda: by_direction("current", "mxfp8")),
    "delayed and a hybrid": hybrid(
        lambda: by_tensor("delayed", weight=by_direction("current", "mxfp8"))
    ),
    "rows of a stranger": lambda: OneQuantizer(AloneRows()),
}
#: Whose shards are quantized when they are gathered, or not at all.
GATHERED: dict[str, Callable[[], ottava.Recipe]] = {
    "reference": lambda: CustomRecipe(current_scaling_ref_quantizer_factory),
    "silent rows": lambda: OneQuantizer(SilentRows()),
    "silent scale": lambda: OneQuantizer(SilentOneScale()),
    "reduced rows": lambda: OneQuantizer(ReducedRows()),
    # Layouts that no recipe has: whole blocks of columns, and some that shards of 32 rows cut.
    "one scale in two buffers": grid(torch.int8, (None, None)),
    "columns of whole blocks": grid(torch.float8_e4m3fn, (None, 4)),
    "columns of cut blocks": grid(torch.float8_e4m3fn, (None, 3)),
}
RECIPES = ONE_SCALE | BLOCKS | GATHERED
GATHER = "gathered quantized"
#: Rows and columns that two ranks cut into whole blocks.
SIZES = {name: 256 for name in BLOCKS if "blockwise" in name}
RAGGED = (33, 1)
#: How the weights are kept, rows (0: whole blocks), groups, reshard_after_forward.
SAMPLE = [
    ("gathered quantized", 0, "layers", True),
    ("gathered quantized", 33, "root", True),
    # By default the outermost module keeps its weights.
    ("gathered quantized", 1, "layers", None),
    ("quantized", 0, "layers", True),
    ("quantized", 0, "root", False),
    ("quantized", 33, "root", True),
    ("quantized", 1, "layers", False),
]
EVERY = list(itertools.product(KEPT, (0, *RAGGED), GROUPS, (True, False, None)))


def cases_of(name: str, cases: list[Any]) -> list[Any]:
    """Those that a recipe has."""
    cases = [case for case in cases if name not in GATHERED or case[0] != "quantized"]
    return [case for case in cases if name in ONE_SCALE or case[0] != "quantized" or not case[1]]


#: Whose other direction, or other scales, are in the sample.
SLOW = (
    *("blockwise with any scales", "MX backward", "formats", "silent rows", "silent scale"),
    *("reference", "columns of whole blocks"),
)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in RECIPES]
)
@on_ranks(2)
def test_training_equals_one_process(mesh: DeviceMesh, name: str, every: bool) -> None:
    """Whatever is gathered; of uneven and empty shards, and of blocks that are cut, too."""
    size = SIZES.get(name, 64)
    for kept, rows, groups, reshard in cases_of(name, EVERY if every else SAMPLE):
        alone, net = assert_trains_alike(
            mesh,
            RECIPES[name](),
            kept,
            groups=groups,
            rows=rows or size,
            width=size,
            # Scales of the second step on follow from amaxes.
            count=3 if "delayed" in name else 2,
            fully_shard_options={"reshard_after_forward": reshard},
        )
        if kept == "quantized" and groups == "layers":
            assert_whole_bytes(net.first, alone.first)


def assert_whole_bytes(layer: Any, alone: Any) -> None:
    """The gathered weight holds bytes and scales of the whole one, and not all of them."""
    layer.unshard()
    assert type(layer.weight) is type(alone.weight)
    assert layer.weight.dtype == alone.weight.dtype
    held = [i for i in layer.weight.inner_tensors if getattr(layer.weight, i.attribute) is not None]
    assert held
    for inner in held:
        expected = getattr(alone.weight, inner.attribute)
        if expected is not None:
            assert_same(getattr(layer.weight, inner.attribute), expected, note=inner.attribute)
    layer.reshard()


@pytest.mark.parametrize("name", ["current", "mxfp8"])
@on_ranks(2)
def test_no_copy_of_a_quantized_shard_is_left(mesh: DeviceMesh, name: str) -> None:
    """Memory is not doubled by a shard in high precision."""
    net = shard(make(RECIPES[name](), "quantized", 128, width=192), mesh)
    with torch.no_grad():
        net(next(batches(1, 192))[0])
    gc.collect()
    shards = {layer.weight.to_local().numel() for layer in (net.first, net.second)}
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    copies = [each for each in tensors if each.numel() in shards and each.element_size() > 1]
    assert not copies, [(each.shape, each.dtype) for each in copies]


@pytest.mark.parametrize("name", ["current", "delayed"])
@on_ranks(2)
def test_layouts_and_meshes(mesh: DeviceMesh, name: str) -> None:
    """A transpose for the columns; ranks that are alone, where FSDP gathers nothing; an optimizer
    that writes one weight after the other."""
    recipe = RECIPES[name]

    def one_by_one(net: Any, count: int) -> list[float]:
        return train(net, count, optimizer=optimizer_of(net, torch.optim.SGD, lr=0.02))

    if name != "delayed":
        # Its ranks record amaxes of their own shards then, which the next step reduces.
        assert_trains_alike(mesh, recipe(), "quantized", "one by one", loop=one_by_one)
    with columnwise_layout("transpose"):
        for kept, rows in (("quantized", 64), ("gathered quantized", 33)):
            assert_trains_alike(mesh, recipe(), kept, "transpose", rows=rows)
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ranks", "own"))["own"]
    for kept in KEPT:
        assert_trains_alike(own, recipe(), kept, "alone", rows=33)


@pytest.mark.parametrize("name", ["delayed", pytest.param("mxfp8", marks=pytest.mark.slow)])
@on_ranks(4)
def test_four_ranks(mesh: DeviceMesh, name: str) -> None:
    """Shards of four, and two replicas of shards of two; a smaller mesh is refused."""
    recipe = RECIPES[name]
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for ranks, kept, rows in (
        (mesh, "gathered quantized", 33),
        (mesh, "quantized", 128),
        (replicas, "gathered quantized", 64),
        (replicas, "gathered quantized", 33),
    ):
        assert_trains_alike(ranks, recipe(), kept, ranks.ndim, rows=rows, width=128)
    net = make(recipe(), "gathered quantized")
    shard(net, mesh, "root", reshard_after_forward=2)
    with pytest.raises((OttavaError, NotImplementedError)):
        loss_of(net, next(batches(1))).backward()


#: Bytes of the rowwise data of one of three weights; whether it serves the backward pass too; and
#: the all-reduces of a forward pass for each group. Rows and columns are 64 or those of `SIZES`.
TRAFFIC = {
    "current": (64 * 64, True, 1),
    "delayed": (64 * 64, True, 1),
    "mxfp8": (64 * 64 + 64 * 2, False, 0),
    "mxfp8 of squares": (64 * 64 + 64 * 2, True, 0),
    "blockwise": (256 * 256 + 4 * 2 * 2, True, 0),
    "rows of a stranger": (64 * 64 + 4 * 64, True, 0),
}


@pytest.mark.parametrize("name", TRAFFIC)
@on_ranks(2)
def test_weights_are_gathered_as_bytes(mesh: DeviceMesh, name: str) -> None:
    """A byte for an element and scales; one all-reduce for a group, none in a backward pass."""
    size = SIZES.get(name, 64)
    weight, serves_both, reductions = TRAFFIC[name]
    # Biases and the norm, of two bytes.
    others = 2 * 4 * size
    for kept, groups, reshard in (
        (GATHER, "layers", True),
        (GATHER, "root", False),
        ("quantized", "layers", False),
        ("quantized", "root", True),
    ):
        net = make(RECIPES[name](), kept, size, width=size)
        shard(net, mesh, groups, reshard_after_forward=reshard)
        optimizer, note = optimizer_of(net, torch.optim.SGD, lr=0.5, foreach=True), (kept, groups)
        for step, batch in enumerate(batches(2, size)):
            with Collectives() as forward:
                loss = loss_of(net, batch)
            with Collectives() as backward:
                loss.backward()
            with Collectives() as update:
                optimizer.step()
            if step == 0:
                # Ranks compare their weights.
                continue
            directions = 1 if reshard or serves_both else 2
            assert sum(forward.gathered) * 2 == directions * 3 * weight + others, note
            assert sum(backward.gathered) * 2 == (3 * weight + others if reshard else 0), note
            assert backward.count == 0, note
            number = (3 if groups == "layers" else 1) * reductions
            expected = (number if kept != "quantized" else 0) + (name == "delayed")
            assert forward.count == expected, (note, forward.count)
            # One for all weights of the optimizer.
            assert update.count == (reductions if kept == "quantized" else 0), (note, update.count)


@on_ranks(2)
def test_uneven_shards_are_gathered_as_bytes(mesh: DeviceMesh) -> None:
    """Where a weight has one scale: rows of the longest shard, a byte for an element."""
    net = shard(make("current", GATHER, 33), mesh, "root")
    for _ in range(2):
        with torch.no_grad(), Collectives() as forward:
            net(next(batches(1))[0])
        net.reshard()
    # Weights of 33 x 64, 64 x 33 and 64 x 64; biases and the norm, of 33 or 64 rows.
    weights, others = 17 * 64 + 32 * 33 + 32 * 64, 2 * (3 * 17 + 32)
    assert sum(forward.gathered) == weights + others


@on_ranks(2)
def test_scales_that_differ_between_ranks_are_refused(mesh: DeviceMesh) -> None:
    net = shard(make("current", "quantized"), mesh)
    with torch.no_grad():
        net.first.weight.to_local()._scale_inv.mul_(1 + mesh.get_rank())
    with pytest.raises(UsageError, match="different 'fp8_scale_inv'"):
        loss_of(net, next(batches(1)))


@on_ranks(2)
def test_a_quantizer_reduces_amaxes(mesh: DeviceMesh) -> None:
    """Each rank has the bytes of the whole."""
    quantizer = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, with_amax_reduction=True)
    values = torch.tensor([[1.0, -2.0], [8.0, 0.5]])
    whole = Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(values)
    own = quantizer(values[mesh.get_rank()])
    assert_same(own._scale_inv, whole._scale_inv)
    assert_same(own._data, whole._data[mesh.get_rank()])


def by_columns(parameter: torch.nn.Parameter) -> Any:
    return Shard(1) if parameter.dim() > 1 else None


#: Name of a recipe, how the weights are kept, options of `make`, options of `shard`; the error.
POLICY = {"mp_policy": MixedPrecisionPolicy(torch.float64)}
REFUSED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], Any, str]] = {
    "cut blocks": ("mxfp8", "quantized", {"rows": 96}, {}, ShapeError, "48 of 96, which cut the"),
    "uneven blocks": ("mxfp8", "quantized", {"rows": 65}, {}, ShapeError, "rows of another size"),
    "cut squares": (
        *("blockwise", "quantized", {"rows": 320, "width": 256}, {}, ShapeError),
        "rows 0 to 160 of 320, which cut the blocks",
    ),
    "cut columns": (
        *("blockwise of rows", "quantized", {"rows": 320, "width": 256}, {}, ShapeError),
        "rows 0 to 160 of 320, which cut the blocks",
    ),
    "columns as shards": (
        *("current", GATHER, {}, {"shard_placement_fn": by_columns}, ShapeError),
        "shards of rows",
    ),
    "columns of blocks as shards": (
        *("mxfp8", GATHER, {}, {"shard_placement_fn": by_columns}, ShapeError),
        "shards of rows",
    ),
    "float64 gathered": ("current", GATHER, {}, POLICY, DTypeError, r"gathered in torch\.float64"),
    "float64 blocks": ("mxfp8", GATHER, {}, POLICY, DTypeError, r"gathered in torch\.float64"),
    "silent scale": ("silent scale", "quantized", {}, {}, UsageError, "for_shards"),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_refused(mesh: DeviceMesh, case: str) -> None:
    name, kept, options, sharding, kind, message = REFUSED[case]
    net = shard(make(RECIPES[name](), kept, **options), mesh, "root", **sharding)
    with pytest.raises(kind, match=message):
        loss_of(net, next(batches(1, options.get("width", 64))))


@on_ranks(2)
def test_a_model_is_to_be_converted_before_it_is_sharded(mesh: DeviceMesh) -> None:
    sharded = shard(make("current", "high precision"), mesh, "root")
    with pytest.raises(UsageError, match="sharded already"):
        gather_quantized(sharded)
    net = shard(make("current", "gathered quantized"), mesh, "root")
    for layer in (net.first, net.second, net.last):
        layer.bind(None)
    with pytest.raises(UsageError, match="no recipe is bound"):
        loss_of(net, next(batches(1)))


@on_ranks(2)
def test_shards_of_float64_are_refused(mesh: DeviceMesh) -> None:
    """Their amaxes would be reduced."""
    policy = MixedPrecisionPolicy(torch.bfloat16)
    for name in ("current", "delayed"):
        net = shard(make(RECIPES[name](), GATHER).double(), mesh, "root", mp_policy=policy)
        with pytest.raises(DTypeError, match=r"a sharded weight has dtype torch\.float64"):
            loss_of(net, next(batches(1)))


@on_ranks(2)
def test_one_group_has_weights_of_several_options(mesh: DeviceMesh) -> None:
    """Recipes of one class, whose weights are quantized together."""
    losses = []
    for sharded in (False, True):
        torch.manual_seed(0)
        net: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
        for name, options in (("0", {}), ("1", {"fp8_format": E5M2, "amax_epsilon": 100.0})):
            ottava.convert(net, ottava.get_recipe("current", **options), include=name)
        if sharded:
            fully_shard(gather_quantized(net), mesh=mesh)
        losses.append([loss_of(net, batch).item() for batch in batches(2)])
    assert losses[0] == losses[1]


@on_ranks(2)
def test_another_format_after_the_first_gather_is_refused(mesh: DeviceMesh) -> None:
    """The memory of a gathered weight has the format of its first recipe."""
    # The shards of the reference are sent as they are.
    formats = (
        RECIPES["mxfp8"](),
        RECIPES["reference"](),
        ottava.get_recipe("current", fp8_format=E5M2),
    )
    for other in formats:
        net = shard(make(RECIPES["current"](), GATHER), mesh, "root", reshard_after_forward=True)
        batch = next(batches(1))
        loss_of(net, batch).backward()
        for layer in (net.first, net.second, net.last):
            layer.bind(other)
        with pytest.raises(UsageError, match="gathered as a"):
            loss_of(net, batch)
