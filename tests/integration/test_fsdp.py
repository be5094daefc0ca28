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
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import ottava
from ottava.distributed import gather_quantized
from ottava.errors import DTypeError, OttavaError, ShapeError, UsageError
from ottava.tensors import columnwise_layout
from ottava_custom import (
    CustomRecipe,
    by_direction,
    by_tensor,
    current_scaling_ref_quantizer_factory,
    mirror,
)
from tests.cases import told
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
#: Whose shards may not cut blocks. The layouts' table has the others.
BLOCKS: dict[str, Callable[[], ottava.Recipe]] = {
    "mxfp8": named("mxfp8"),
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
}
RECIPES = ONE_SCALE | BLOCKS | GATHERED
GATHER = "gathered quantized"
#: How the weights are kept, rows (0: whole blocks), groups, reshard_after_forward.
SAMPLE = [
    (GATHER, 33, "root", True),
    # By default the outermost module keeps its weights.
    (GATHER, 1, "layers", None),
    ("quantized", 0, "root", False),
    ("quantized", 33, "root", True),
]
EVERY = list(itertools.product(KEPT, (0, 33, 1), GROUPS, (True, False, None)))
#: What is in the short run; the conformance kit trains each recipe, with fewer options.
SHORT = ("delayed", "mxfp8")


def cases_of(name: str, cases: list[Any]) -> list[Any]:
    """Those that a recipe has."""
    cases = [case for case in cases if name not in GATHERED or case[0] != "quantized"]
    return [case for case in cases if name in ONE_SCALE or case[0] != "quantized" or not case[1]]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in SHORT)) for n in RECIPES]
)
@on_ranks(2)
def test_training_equals_one_process(mesh: DeviceMesh, name: str, every: bool) -> None:
    """Whatever is gathered; of uneven and empty shards, and of blocks that are cut, too."""
    for kept, rows, groups, reshard in cases_of(name, EVERY if every else SAMPLE):
        assert_trains_alike(
            mesh,
            RECIPES[name](),
            kept,
            groups=groups,
            rows=rows or 64,
            fully_shard_options={"reshard_after_forward": reshard},
        )


@on_ranks(2)
def test_no_copy_of_a_quantized_shard_is_left(mesh: DeviceMesh) -> None:
    """Memory is not doubled by a shard in high precision."""
    for name in ("current", "mxfp8"):
        net = shard(make(RECIPES[name](), "quantized", 128, width=192), mesh)
        with torch.no_grad():
            net(next(batches(1, 192))[0])
        gc.collect()
        shards = {layer.weight.to_local().numel() for layer in (net.first, net.second)}
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        copies = [each for each in tensors if each.numel() in shards and each.element_size() > 1]
        assert not copies, [(name, each.shape, each.dtype) for each in copies]


@on_ranks(2)
def test_layouts_and_meshes(mesh: DeviceMesh) -> None:
    """A transpose for the columns; ranks that are alone, where FSDP gathers nothing; an optimizer
    that writes one weight after the other."""

    def one_by_one(net: Any, count: int) -> list[float]:
        return train(net, count, optimizer=optimizer_of(net, torch.optim.SGD, lr=0.02))

    # Under delayed scaling the ranks would record amaxes of their own shards.
    current, delayed = RECIPES["current"], RECIPES["delayed"]
    assert_trains_alike(mesh, current(), "quantized", "one by one", loop=one_by_one)
    with columnwise_layout("transpose"):
        for kept, rows in (("quantized", 64), (GATHER, 33)):
            assert_trains_alike(mesh, delayed(), kept, "transpose", rows=rows)
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ranks", "own"))["own"]
    assert_trains_alike(own, delayed(), GATHER, "alone", rows=33)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
@on_ranks(4)
def test_four_ranks(mesh: DeviceMesh, name: str) -> None:
    """Shards of four, and two replicas of shards of two; a smaller mesh is refused."""
    recipe, size = RECIPES[name], 64 if name in ONE_SCALE else 128
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for ranks, kept, rows in ((mesh, "quantized", size), (replicas, GATHER, 33)):
        assert_trains_alike(ranks, recipe(), kept, ranks.ndim, rows=rows, width=size)
    net = make(recipe(), GATHER)
    shard(net, mesh, "root", reshard_after_forward=2)
    with pytest.raises((OttavaError, NotImplementedError)):
        loss_of(net, next(batches(1))).backward()


#: A recipe; the bytes that one direction of one of three weights has; whether rows serve the
#: backward pass too; and the all-reduces of a forward pass for each group. Scales and amaxes of a
#: whole weight are not gathered.
TRAFFIC: dict[str, tuple[Callable[[], ottava.Recipe], int, bool, int]] = {
    "current": (named("current"), 64 * 64, True, 1),
    "delayed": (named("delayed", amax_history_len=4), 64 * 64, True, 1),
    "mxfp8": (named("mxfp8"), 64 * 64 + 64 * 2, False, 0),
    "mx": (named("mx"), 64 * 32 + 64 * 2, False, 0),
    "nvfp4": (named("nvfp4"), 64 * 32 + 4 * 4, True, 1),
    "nvfp4 of rows": (named("nvfp4", disable_2d_quantization=True), 64 * 32 + 64 * 4, False, 1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "current")) for n in TRAFFIC]
)
@on_ranks(2)
def test_weights_are_gathered_as_bytes(mesh: DeviceMesh, name: str) -> None:
    """One or half a byte for an element, and scales; one all-reduce for a group, none in a backward
    pass."""
    recipe, weight, serves_both, reductions = TRAFFIC[name]
    # Biases and the norm, of two bytes.
    others = 2 * 4 * 64
    for kept, groups, reshard in (
        (GATHER, "layers", True),
        (GATHER, "root", False),
        ("quantized", "layers", False),
        ("quantized", "root", True),
    ):
        net = make(recipe(), kept)
        shard(net, mesh, groups, reshard_after_forward=reshard)
        optimizer, note = optimizer_of(net, torch.optim.SGD, lr=0.5, foreach=True), (kept, groups)
        for step, batch in enumerate(batches(2)):
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


def by_columns(parameter: torch.nn.Parameter) -> Any:
    return Shard(1) if parameter.dim() > 1 else None


def other_scales(net: Any) -> None:
    with torch.no_grad():
        net.first.weight.to_local()._scale_inv.mul_(1 + torch.distributed.get_rank())


def unbound(net: Any) -> None:
    for layer in (net.first, net.second, net.last):
        layer.bind(None)


def nothing(net: Any) -> None:
    pass


def policy(dtype: torch.dtype) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(dtype)}


#: Name of a recipe, how the weights are kept, options of `make`, options of `shard`, what is done
#: to the sharded model; the error.
REFUSED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], Any, Any, str]] = {
    "blocks that shards cut": (
        *("mxfp8", "quantized", {"rows": 96}, {}, nothing),
        *(ShapeError, "48 of 96, which cut the"),
    ),
    "uneven blocks": (
        *("mxfp8", "quantized", {"rows": 65}, {}, nothing),
        *(ShapeError, "rows of another size"),
    ),
    "columns as shards": (
        *("current", GATHER, {}, {"shard_placement_fn": by_columns}, nothing),
        *(ShapeError, "shards of rows"),
    ),
    "gathers in float64": (
        *("mxfp8", GATHER, {}, policy(torch.float64), nothing),
        *(DTypeError, r"gathered in torch\.float64"),
    ),
    # Their amaxes would be reduced.
    "shards of float64": (
        *("delayed", GATHER, {}, policy(torch.bfloat16), torch.nn.Module.double),
        *(DTypeError, r"a sharded weight has dtype torch\.float64"),
    ),
    "a quantizer that says nothing of shards": (
        *("silent scale", "quantized", {}, {}, nothing),
        *(UsageError, "for_shards"),
    ),
    "scales that differ between ranks": (
        *("current", "quantized", {}, {}, other_scales),
        *(UsageError, "different 'fp8_scale_inv'"),
    ),
    "no recipe": ("current", GATHER, {}, {}, unbound, UsageError, "no recipe is bound"),
}


@on_ranks(2)
def test_refused(mesh: DeviceMesh) -> None:
    for case, (name, kept, options, sharding, change, kind, message) in REFUSED.items():
        with told(case):
            net = shard(make(RECIPES[name](), kept, **options), mesh, "root", **sharding)
            change(net)
            with pytest.raises(kind, match=message):
                loss_of(net, next(batches(1)))
    with pytest.raises(UsageError, match="sharded already"):
        gather_quantized(shard(make("current", "high precision"), mesh, "root"))


@on_ranks(2)
def test_one_group_has_weights_of_several_options(mesh: DeviceMesh) -> None:
    """Recipes of one class, whose weights are quantized together."""
    recipes = named("current")(), named("current", fp8_format=E5M2, amax_epsilon=100.0)()
    recipe = CustomRecipe(lambda role: ottava.QuantizerRequest(recipes[role.name == "first"]))
    assert_trains_alike(mesh, recipe, GATHER, groups="root")


@on_ranks(2)
def test_another_format_after_the_first_gather_is_refused(mesh: DeviceMesh) -> None:
    """The memory of a gathered weight has the format of its first recipe."""
    # The shards of the reference are sent as they are.
    for other in (RECIPES["mxfp8"](), RECIPES["reference"](), named("current", fp8_format=E5M2)()):
        net = shard(make(RECIPES["current"](), GATHER), mesh, "root", reshard_after_forward=True)
        batch = next(batches(1))
        loss_of(net, batch).backward()
        for layer in (net.first, net.second, net.last):
            layer.bind(other)
        with pytest.raises(UsageError, match="gathered as a"):
            loss_of(net, batch)
