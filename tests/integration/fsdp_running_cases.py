"""Ways to run a model under FSDP2. Each case raises where a rank differs from one process."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_training import (
    FLAGS,
    GROUPS,
    RECIPES,
    Between,
    Counted,
    Net,
    batches,
    both,
    compare,
    made,
    plain,
    sharded,
    train,
)
from sampling import each, pairs, some
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.distributed import HighPrecisionWeight, fsdp2, gather_quantized
from ottava.errors import UsageError


def training(mesh: Any) -> None:
    for recipe, groups, reshard in pairs(RECIPES, GROUPS, FLAGS):
        both(mesh, recipe, "training", groups=groups, reshard_after_forward=reshard)


def uneven_rows(mesh: Any) -> None:
    """Empty shards, and blocks that are cut, too."""
    rows = ((33, "layers"), (33, "root"), (1, "layers"), (40, "layers"))
    for recipe, (hidden, groups) in each(RECIPES, rows):
        both(mesh, recipe, "rows", hidden=hidden, groups=groups)


def world_of_one(mesh: Any) -> None:
    own = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ranks", "own"))[
        "own"
    ]
    for recipe, reshard in each(RECIPES, FLAGS):
        both(own, recipe, "a world of one", hidden=33, reshard_after_forward=reshard)


def collectives(mesh: Any) -> None:
    """One all-reduce for each group and forward pass, none in the backward; a byte an element."""
    world = dist.get_world_size()
    for recipe, (groups, number) in pairs(RECIPES, (("layers", 3), ("root", 1))):
        net = sharded(made(recipe, gathered=True), mesh, groups, reshard_after_forward=True)
        for x, y in batches(3):
            with Counted() as forward:
                loss = torch.nn.functional.mse_loss(net(x), y)
            with Counted() as backward:
                loss.backward()
            # Delayed scaling reduces at the beginning of each step too; blocks within shards need
            # nothing.
            blocks = recipe == "mxfp8" and (64 // world) % 32 == 0
            expected = 0 if recipe == "mxfp8" else number
            assert forward.reductions == expected + (recipe == "delayed"), (
                recipe,
                groups,
                forward.reductions,
            )
            # What does not need one for its scales needs none in the backward.
            assert backward.reductions == 0, (recipe, groups, backward.reductions)
            for whole, handed in forward.handed + backward.handed:
                if recipe != "mxfp8":
                    assert handed * world == whole, (recipe, whole, handed)
                elif blocks:
                    assert handed * world == whole * 33 // 32, (whole, handed)


def mixed_precision(mesh: Any) -> None:
    """Float32 parameters, cast to bfloat16 before they are quantized."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for recipe, (hidden, groups) in pairs(RECIPES, ((64, "layers"), (33, "root"))):
        shards = sharded(
            made(recipe, gathered=True, hidden=hidden, dtype=torch.float32),
            mesh,
            groups,
            mp_policy=policy,
        )
        masters = made(recipe, gathered=False, hidden=hidden, dtype=torch.float32)
        narrow = copy.deepcopy(masters).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(masters.parameters(), lr=0.02)
        expected = []
        for x, y in batches(3):
            with torch.no_grad():
                for own, master in zip(narrow.parameters(), masters.parameters(), strict=True):
                    own.copy_(master)
            loss = torch.nn.functional.mse_loss(narrow(x).float(), y.float())
            loss.backward()
            for own, master in zip(narrow.parameters(), masters.parameters(), strict=True):
                master.grad, own.grad = own.grad.float(), None
            optimizer.step()
            expected.append(loss.item())
        seen = []
        wide = torch.optim.AdamW(shards.parameters(), lr=0.02)
        for x, y in batches(3):
            loss = torch.nn.functional.mse_loss(shards(x.float()).float(), y.float())
            loss.backward()
            wide.step()
            wide.zero_grad()
            seen.append(loss.item())
        assert seen == expected, (recipe, hidden, seen, expected)
        for (name, a), b in zip(masters.named_parameters(), shards.parameters(), strict=True):
            assert b.dtype == torch.float32, name
            assert torch.equal(a, plain(b)), (recipe, name)
        for name, value in shards.state_dict().items():
            if "recipe_state" in name and not name.endswith("saturated"):
                assert torch.equal(value, narrow.state_dict()[name]), (recipe, hidden, name)


def compiled(mesh: Any) -> None:
    for recipe, groups in some([("delayed", "layers")], pairs(RECIPES, GROUPS)):
        alone, shards = (made(recipe, gathered=False) for _ in range(2))
        # A graph of both passes is traced around what the first of them gathers.
        gather_quantized(shards, recomputes=recipe == "mxfp8")
        sharded(shards, mesh, groups)
        torch._dynamo.reset()
        run = torch.compile(shards, backend="aot_eager")
        assert train(shards, run=run) == train(alone), (recipe, groups)
        compare(alone, shards, f"compiled {recipe} {groups}")


def clipped(net: torch.nn.Module, count: int, change: Between) -> list[float]:
    """A norm that is exact in either order: nothing is clipped by it."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    seen = []
    for x, y in batches(count):
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e6)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def clipping(mesh: Any) -> None:
    """The norm is summed shard by shard, so it differs in the last bits, but not in what it
    does."""
    for recipe in RECIPES:
        alone, shards = made(recipe, gathered=False), sharded(made(recipe, gathered=True), mesh)
        for x, y in batches(1):
            for net in (alone, shards):
                torch.nn.functional.mse_loss(net(x), y).backward()
            before = torch.cat([p.grad.float().flatten() for p in alone.parameters()]).norm()
            found = plain(torch.nn.utils.clip_grad_norm_(shards.parameters(), 0.01)).float()
            torch.testing.assert_close(found, before, rtol=0.02, atol=0)
            after = torch.cat([plain(p.grad).float().flatten() for p in shards.parameters()]).norm()
            torch.testing.assert_close(after, torch.tensor(0.01), rtol=0.02, atol=0)
        both(mesh, recipe, "clipped", change=lambda net, step: None, loop=clipped)


def accumulating(way: str) -> Callable[..., list[float]]:
    def loop(net: torch.nn.Module, count: int, change: Between) -> list[float]:
        optimizer, seen = torch.optim.AdamW(net.parameters(), lr=0.02), []
        under_fsdp = hasattr(net, "set_requires_gradient_sync")
        for step, (x, y) in enumerate(batches(2 * count)):
            last = step % 2 == 1
            if under_fsdp and "sync" in way:
                net.set_requires_gradient_sync(last)
            if under_fsdp and "keep" in way:
                net.set_reshard_after_backward(last)
            if not last:
                # Garbage would take part in reductions until it is collected, on each rank at
                # another time.
                gc.collect()
                region = ottava.autocast() if "region" in way else contextlib.nullcontext()
                region.__enter__()
            loss = torch.nn.functional.mse_loss(net(x), y)
            loss.backward()
            seen.append(loss.item())
            if last:
                region.__exit__(None, None, None)
                optimizer.step()
                optimizer.zero_grad()
        return seen

    return loop


def accumulation(mesh: Any) -> None:
    ways = ("plain", "sync", "region", "sync region")
    for recipe, groups, way, reshard in each(RECIPES, GROUPS, ways, FLAGS):
        both(
            mesh,
            recipe,
            way,
            groups=groups,
            loop=accumulating(way),
            count=2,
            reshard_after_forward=reshard,
        )
    for recipe, groups in each(RECIPES, GROUPS):
        # The weights of the first microbatch serve the second: in one region, where scales do not
        # change.
        both(mesh, recipe, "keep", groups=groups, loop=accumulating("sync keep region"), count=2)


def unsharding(net: torch.nn.Module, count: int, change: Between) -> list[float]:
    optimizer, seen = torch.optim.AdamW(net.parameters(), lr=0.02), []
    for step, (x, y) in enumerate(batches(count)):
        if hasattr(net, "unshard"):
            if step == 1:
                net.unshard()
                net.reshard()
            handle = net.unshard(async_op=step == 0)
            if handle is not None:
                handle.wait()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def explicit(mesh: Any) -> None:
    for recipe, groups in each(RECIPES, GROUPS):
        both(mesh, recipe, "unshard", groups=groups, loop=unsharding)

    def prefetch(net: Any) -> None:
        net.set_modules_to_forward_prefetch([net.first, net.second])
        net.first.set_modules_to_forward_prefetch([net.second])
        net.second.set_modules_to_backward_prefetch([net.first])

    for recipe, reshard in each(RECIPES, FLAGS):
        both(mesh, recipe, "prefetch", prepare_sharded=prefetch, reshard_after_forward=reshard)


def evaluation(mesh: Any) -> None:
    """Forward passes between the steps, in every mode: a step begins where one process would begin
    it."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).bfloat16() * 9

    def run(training: bool, grad: bool) -> Between:
        def between(net: torch.nn.Module, step: int) -> None:
            net.train(training)
            with torch.set_grad_enabled(grad):
                net(x)
            # FSDP keeps what no backward pass follows, quantized with the scale of the evaluation.
            for module in net.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
            net.train()

        return between

    modes = tuple(itertools.product(FLAGS, FLAGS))
    for recipe, (training, grad), groups, reshard in pairs(
        ("current", "delayed"), modes, GROUPS, FLAGS
    ):
        what, change = f"training={training} grad={grad}", run(training, grad)
        both(
            mesh, recipe, what, groups=groups, change=change, count=4, reshard_after_forward=reshard
        )


class Recomputed(Net):
    """Activation checkpointing of each layer."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(layer: Any, value: torch.Tensor) -> torch.Tensor:
            return checkpoint(layer, value, use_reentrant=self.reentrant)

        x = x.requires_grad_()
        return run(
            self.last, run(self.second, torch.nn.functional.gelu(self.norm(run(self.first, x))))
        )


class Reentrant(Recomputed):
    reentrant = True


def recomputation(mesh: Any) -> None:
    for recipe, groups, make, reshard in pairs(RECIPES, GROUPS, (Recomputed, Reentrant), FLAGS):
        # Blocks along rows and along columns are not gathered for one backward pass.
        limit = recipe == "mxfp8" and reshard and (64 // dist.get_world_size()) % 32 == 0
        with (
            pytest.raises(UsageError, match="no rowwise data")
            if limit
            else contextlib.nullcontext()
        ):
            both(
                mesh, recipe, make.__name__, groups=groups, make=make, reshard_after_forward=reshard
            )


def recomputed_in_blocks(mesh: Any) -> None:
    """Told of the recomputation, a gather brings what both passes need."""
    for groups, make in each(GROUPS, (Recomputed, Reentrant)):
        alone, shards = (made("mxfp8", gathered=False, make=make) for _ in range(2))
        expected = train(alone)
        sharded(gather_quantized(shards, recomputes=True), mesh, groups, reshard_after_forward=True)
        assert train(shards) == expected, (groups, make)
        compare(alone, shards, f"{groups} {make}")


def unusual(kind: str) -> Callable[..., list[float]]:
    """Loops that few write."""

    def loop(net: torch.nn.Module, count: int, change: Between) -> list[float]:
        options = {"lr": 0.5}
        optimizer, seen = torch.optim.SGD(net.parameters(), **options), []
        each = {p: torch.optim.SGD([p], **options) for p in net.parameters()}
        if kind == "optimizer in backward":
            for parameter in net.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda p: each[p].step() or each[p].zero_grad()
                )
        for step, (x, y) in enumerate(batches(count)):
            if kind == "toggled" and hasattr(net, "set_reshard_after_forward"):
                net.set_reshard_after_forward(step % 2 == 0)
            loss = torch.nn.functional.mse_loss(net(x), y)
            if kind == "two backward passes":
                loss.backward(retain_graph=True)
            loss.backward()
            if kind != "optimizer in backward":
                optimizer.step()
                optimizer.zero_grad()
            if kind == "written through .data":
                for parameter in net.parameters():
                    parameter.data.mul_(1.25)
            seen.append(loss.item())
        return seen

    return loop


def unusual_loops(mesh: Any) -> None:
    kinds = ("two backward passes", "optimizer in backward", "written through .data")
    for recipe, kind, groups in pairs(RECIPES, kinds, GROUPS):
        both(mesh, recipe, kind, groups=groups, loop=unusual(kind))
    for recipe in ("current", "delayed"):
        both(mesh, recipe, "toggled", loop=unusual("toggled"))


def written_by_one_rank(mesh: Any) -> None:
    """One rank alone writes its shards between the passes: the backward pass reduces nothing, so no
    rank waits for another."""
    refused = AssertionError("an all-reduce that the other ranks do not begin")
    for recipe, groups in each(("current", "delayed"), GROUPS):
        net = sharded(made(recipe, gathered=True), mesh, groups, reshard_after_forward=True)
        for x, y in batches(2):
            loss = torch.nn.functional.mse_loss(net(x), y)
            if dist.get_rank() == 0:
                for parameter in net.parameters():
                    shard = parameter._local_tensor
                    if isinstance(shard, HighPrecisionWeight):
                        shard.high_precision().mul_(0.5)
            with mock.patch.object(dist, "all_reduce", side_effect=refused):
                loss.backward()
            for parameter in net.parameters():
                assert parameter.grad.to_local().isfinite().all(), (recipe, groups)


def under_torch_autocast(mesh: Any) -> None:
    """Float32 parameters and gathers, products in bfloat16."""
    for recipe in RECIPES:
        nets = [made(recipe, gathered=gathered, dtype=torch.float32) for gathered in (False, True)]
        sharded(nets[1], mesh)
        seen: list[list[float]] = [[], []]
        for net, losses in zip(nets, seen, strict=True):
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
            for x, y in batches(3, dtype=torch.float32):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = torch.nn.functional.mse_loss(net(x).float(), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert seen[0] == seen[1], (recipe, seen)
        compare(*nets, f"autocast {recipe}")


def frozen(mesh: Any) -> None:
    def freeze(name: str) -> Callable[[torch.nn.Module], None]:
        return lambda net: (
            [p.requires_grad_(name not in n) for n, p in net.named_parameters()] and None
        )

    for recipe, name, groups in pairs(
        RECIPES, ("first.weight", "second", "last.weight", "weight"), GROUPS
    ):
        both(mesh, recipe, f"frozen {name}", groups=groups, prepare=freeze(name))


class Tied(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 64)
        self.first = torch.nn.Linear(64, hidden)
        self.second = torch.nn.Linear(hidden, 64)
        self.head = torch.nn.Linear(64, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x.float().abs().mul(10).long().clamp(max=63)[:, 0]
        return self.head(self.second(self.first(self.embedding(ids))))


class TiedLinears(torch.nn.Module):
    """Two layers that have one weight, and are both quantized."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            torch.nn.Linear(64, 64, bias=b) for b in (False, True, True)
        )
        self.last.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.nn.functional.gelu(self.second(self.first(x))))


def tied(mesh: Any) -> None:
    for recipe, reshard in each(RECIPES, FLAGS):
        both(mesh, recipe, "embedding and head", make=Tied, reshard_after_forward=reshard)
        both(
            mesh,
            recipe,
            "two linears",
            make=TiedLinears,
            groups="root",
            reshard_after_forward=reshard,
        )


@contextlib.contextmanager
def fsdp_keeps_its_modules(names: dict[str, Any] | None) -> Iterator[None]:
    """Inside, whoever asks torch which modules are sharded finds no such module of torch's, or one
    with these names."""
    private = "torch.distributed._composable_state"
    known = sys.modules[private]
    substitute: Any = None if names is None else types.SimpleNamespace(**names)
    sys.modules[private] = substitute
    fsdp2._groups.clear()
    fsdp2._resharded.clear()
    try:
        yield
    finally:
        sys.modules[private] = known


def without_private_names(mesh: Any) -> None:
    """Results are those of one process; what is gathered and reduced is more, and correct."""
    x, y = next(batches(1))
    for recipe, groups, names in each(
        RECIPES, GROUPS[::-1], (None, {}, {"_module_state_mapping": {}})
    ):
        with fsdp_keeps_its_modules(names):
            both(mesh, recipe, f"private names: {names}", groups=groups, reshard_after_forward=True)
            net = sharded(made(recipe, gathered=True), mesh, groups, reshard_after_forward=True)
            with Counted() as counted:
                torch.nn.functional.mse_loss(net(x), y).backward()
        known = sharded(made(recipe, gathered=True), mesh, groups, reshard_after_forward=True)
        with Counted() as usual:
            torch.nn.functional.mse_loss(known(x), y).backward()
        if recipe == "current" and groups == "root":
            # Each weight's scale by itself, where otherwise one reduction serves the group.
            assert (usual.reductions, counted.reductions) == (1, 3)
        if recipe == "mxfp8" and dist.get_world_size() == 2:
            # Rows and columns in each pass.
            assert sum(size for _, size in counted.handed) > sum(size for _, size in usual.handed)
