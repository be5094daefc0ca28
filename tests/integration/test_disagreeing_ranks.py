"""Ranks whose recipes or layers differ: all raise one error that names the difference, before
anything is changed, and the group goes on to serve models on which they agree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ottava
from ottava.distributed import gather_quantized
from ottava.errors import OttavaError, UsageError, stable_repr
from ottava_delayed import DelayedScaling
from tests.cases import told
from tests.comparing import unchanged
from tests.fsdp import GROUPS, Net, assert_states_equal, batches, loss_of, make, shard, state_of
from tests.ranks import Collectives, on_ranks

E5M2 = ottava.Format.E5M2


def assert_told_alike(error: pytest.ExceptionInfo[Any], *words: str) -> None:
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(error.value))
    assert texts == texts[:1] * len(texts)
    for word in words:
        assert word in texts[0], (word, texts[0])


# -- the state of delayed scaling, compared at the first step --


def model(recipe: Any, **options: Any) -> Any:
    return ottava.convert(Net().bfloat16(), recipe, **options)


def step(net: Any) -> None:
    loss_of(net, next(batches(1))).backward()


Make = Callable[[bool], tuple[Any, DelayedScaling]]


def options(**options: Any) -> Make:
    """Options that one rank alone has."""

    def make(other: bool) -> tuple[Any, DelayedScaling]:
        recipe = DelayedScaling(**(options if other else {}))
        return model(recipe), recipe

    return make


def without(one: str | None, other_one: str) -> Make:
    recipe = DelayedScaling()
    return lambda other: (model(recipe, exclude=other_one if other else one), recipe)


def copied(other: bool) -> tuple[Any, DelayedScaling]:
    """A copy compares what it is by itself, which may have been changed on one rank since."""
    net, recipe = model(DelayedScaling()), DelayedScaling(margin=int(other))
    step(net)
    again = copy.deepcopy(net)
    for layer in (again.first, again.second, again.last):
        layer.bind(recipe)
    return again, recipe


def converted_again(other: bool) -> tuple[Any, DelayedScaling]:
    net, recipe = model(DelayedScaling()), DelayedScaling(margin=int(other))
    step(net)
    return ottava.convert(net, recipe), recipe


def other_roles(other: bool) -> tuple[Any, DelayedScaling]:
    """A layer whose input alone another recipe serves on one rank."""
    recipe, request = DelayedScaling(), ottava.QuantizerRequest("current")
    if other:
        roles = {("second", "input"): request}
        recipe.set_quantizer_factory(lambda role: roles.get((role.name, role.tensor_type)))
    return model(recipe), recipe


def other_order(other: bool) -> tuple[Any, DelayedScaling]:
    layers = [ottava.nn.Linear(64, 64, name=name) for name in ("first", "second")]
    # Blocks of no other case have this recipe, of which the refused layers are a part.
    recipe = DelayedScaling(amax_history_len=8)
    return torch.nn.Sequential(*layers[:: -1 if other else 1]).bfloat16(), recipe


#: What a rank makes, or the other one; words of the error; and whether it trains in regions, which
#: know their layers when these have run once.
STATES: dict[str, tuple[Make, tuple[str, ...], bool]] = {
    "options": (options(amax_compute_algo="most_recent"), ("amax_compute_algo",), False),
    "copied": (copied, ("margin",), False),
    "converted again": (converted_again, ("margin",), False),
    "other layers": (without("last", "second"), ("second", "last"), False),
    "other roles": (other_roles, ("second",), False),
    "order in a block": (other_order, ("another order",), True),
}


@on_ranks(2)
def test_states(mesh: DeviceMesh) -> None:
    for case, (build, words, in_block) in STATES.items():
        with told(case):
            refused(*build(mesh.get_rank() == 1), words, in_block=in_block)
            agreed = model(DelayedScaling())
            for _ in range(2):
                step(agreed)


def refused(net: Any, recipe: DelayedScaling, words: tuple[str, ...], *, in_block: bool) -> None:
    if in_block:
        with ottava.autocast(recipe):
            step(net)
    with unchanged(net), pytest.raises(OttavaError) as caught:
        with ottava.autocast(recipe) if in_block else nullcontext():
            step(net)
    assert_told_alike(caught, *words)


@on_ranks(2)
def test_one_rank_that_reduces_waits_for_no_other(mesh: DeviceMesh) -> None:
    net, _ = options(reduce_amax=False)(mesh.get_rank() == 1)
    with pytest.raises(OttavaError, match="first") as caught:
        step(net)
    assert "nothing else" in str(caught.value)


@on_ranks(2)
def test_agreeing_ranks_compare_once(mesh: DeviceMesh) -> None:
    """One all-gather of 32 bytes at the first step, and one all-reduce a step; functions at other
    addresses are the same, as far as their names go."""

    class Largest:
        def __call__(self, history: torch.Tensor) -> torch.Tensor:
            return history.amax(0)

    functions = [Largest() for _ in range(mesh.get_rank() + 1)]
    for recipe in (DelayedScaling(), DelayedScaling(amax_compute_algo=functions[-1])):
        net = model(recipe)
        assert "0x" not in stable_repr(recipe)
        for number in range(3):
            with Collectives() as collectives:
                step(net)
            # Three slots of three layers.
            reduced = ("all_reduce", torch.float32, 4 * 9)
            compared = ("all_gather_into_tensor", torch.uint8, 32)
            assert collectives.calls == ([compared, reduced] if number == 0 else [reduced])


# -- weights that FSDP2 gathers, compared before the first of them --


GATHERED, KEPT = "gathered quantized", "quantized"


def unbound() -> Any:
    net = make("current", GATHERED)
    net.first.bind(None)
    return net


def fewer() -> Any:
    net = make("current", "high precision")
    gather_quantized(net.first)
    return net


def other(name: str, kept: str, **options: Any) -> Callable[[], Any]:
    """A model whose recipe has other options."""
    return partial(make, ottava.get_recipe(name, **options), kept)


#: The recipe of rank 0 and how its weights are kept, what rank 1 makes, and a word of the error.
WEIGHTS: dict[str, tuple[str, str, Callable[[], Any], str]] = {
    "no recipe": ("current", GATHERED, unbound, "for None"),
    "fewer layers": ("current", GATHERED, fewer, "gathered as it is"),
    "recomputes": (
        *("mxfp8", GATHERED),
        *(partial(make, "mxfp8", GATHERED, recomputes=True), "recomputes=True"),
    ),
    "kept and gathered": ("current", KEPT, other("current", GATHERED), "Float8Tensor"),
    "kept on one": ("mxfp8", KEPT, other("current", GATHERED), "MXFP8Tensor"),
    "elements": ("current", KEPT, other("current", KEPT, fp8_format=E5M2), "float8_e5m2"),
    "classes": ("delayed", GATHERED, other("mxfp8", GATHERED), "MXFP8"),
    # As many bytes, in the same places.
    "options": (
        *("mxfp8", GATHERED),
        *(other("mxfp8", GATHERED, scale_rounding="floor"), "scale_rounding='floor'"),
    ),
    "options of weights that are kept": (
        *("current", KEPT),
        *(other("current", KEPT, amax_epsilon=1.0), "amax_epsilon=1.0"),
    ),
}


@on_ranks(2)
def test_weights(mesh: DeviceMesh) -> None:
    """Gathered layer by layer or all at once, by turns; a second attempt is refused alike."""
    for number, (case, (name, kept, make_other, word)) in enumerate(WEIGHTS.items()):
        groups = GROUPS[number % 2]
        with told(case):
            net = shard(make_other() if mesh.get_rank() else make(name, kept), mesh, groups)
            before = state_of(net)
            for _ in range(2):
                with pytest.raises(UsageError) as caught:
                    step(net)
                assert_told_alike(caught, word, "rank 0 has", "rank 1")
            assert_states_equal(state_of(net), before, case)
            step(shard(make("current", GATHERED), mesh, groups))


@on_ranks(2)
def test_options_of_fully_shard(mesh: DeviceMesh) -> None:
    rank = mesh.get_rank()
    policy = MixedPrecisionPolicy(torch.float16 if rank else torch.float32)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"mp_policy": policy}, r"torch\.float16"),
        ({"reshard_after_forward": rank == 1}, "resharded=True"),
    ]
    for options, words in cases:
        net = shard(make("current", GATHERED), mesh, **options)
        with pytest.raises(UsageError, match=words):
            step(net)


@on_ranks(2)
def test_agreeing_weights_are_compared_once(mesh: DeviceMesh) -> None:
    """One all-gather of 32 bytes for all weights of a model, and none after the first gather."""
    for kept, groups in ((GATHERED, "layers"), (KEPT, "root")):
        net = shard(make("current", kept), mesh, groups)
        for expected in (1, 0):
            with Collectives() as collectives:
                step(net)
            assert collectives.gathered.count(32) == expected, groups


@on_ranks(2)
def test_weights_that_other_ranks_gather_may_differ(mesh: DeviceMesh) -> None:
    """As experts do, of which each rank has its own."""
    net = make("current", GATHERED)
    if mesh.get_rank() == 1:
        net.second.bind("mxfp8")
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "alone"))
    fully_shard(net.second, mesh=meshes["alone"])
    step(shard(net, meshes["all"], "root"))
