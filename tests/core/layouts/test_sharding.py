"""FSDP2: gathered weights have the bytes of the whole, and train and are saved as one process does
it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ottava
from ottava import GridQuantizer
from ottava.checkpoint import load_sharded, save_sharded
from ottava.distributed import gather_quantized
from ottava.errors import OttavaError
from ottava.nn import Linear
from tests.cases import told
from tests.comparing import assert_same
from tests.core.layouts.layouts import (
    ONLY_OTHER_BYTES,
    QUANTIZERS,
    ROTATED_ONCE,
    STOCHASTIC,
    OneQuantizer,
    RandomWeights,
    boundary,
    inner,
)
from tests.ranks import on_ranks
from tests.samples import wide

# One process forks all ranks.
pytestmark = pytest.mark.xdist_group("forks")


#: Whose shards are of whole blocks, or cut a block, or are uneven, or empty: the rows of a weight.
ROWS: tuple[Callable[[int], int], ...] = (
    lambda block: 2 * block,
    lambda block: 3 * block,
    lambda block: 33,
    lambda block: 1,
)
EVERY = [name for name in QUANTIZERS if name not in ROTATED_ONCE]
NAMES = [name for name in EVERY if name not in ONLY_OTHER_BYTES]
ALL = [(name, rows(boundary(name))) for name in EVERY for rows in ROWS]
#: Each row of the table with whole blocks, and with another kind of shards in turn.
SOME = [
    [(name, ROWS[kind](boundary(name))) for kind in (0, 1 + number % 3)]
    for number, name in enumerate(NAMES)
]
#: Two shards of 12 rows cut no block of 4, but squares of 8 whose blocks share a scale.
CUT_SQUARES = ("int8-E8M0-squares", 24)


def some_of_the_cases(first: int) -> pytest.MarkDecorator:
    """Every second row of the table from the first on; in the long run each by itself."""
    some = [*(case for cases in SOME[first::2] for case in cases), CUT_SQUARES]
    every = [
        pytest.param([case for case in ALL if case[0] == name], id=name, marks=pytest.mark.slow)
        for name in EVERY
    ]
    return pytest.mark.parametrize("cases", [pytest.param(some, id="some"), *every])


def has_whole_blocks(name: str, rows: int) -> bool:
    """Whether the shards of two ranks cut no block."""
    one_scale = QUANTIZERS[name].layout.block == (None, None)
    return one_scale or rows % (2 * boundary(name)) == 0


def layer_of(name: str, rows: int, *, primary: bool, seed: int = 0) -> Linear:
    recipe = RandomWeights(row=name) if name in STOCHASTIC else OneQuantizer(row=name)
    with ottava.quantized_model_init(recipe, enabled=primary):
        layer = Linear(70, rows, bias=False, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(wide(rows, 70, seed=seed, sigma=1.0))
    return layer


def step(*layers: Linear) -> list[torch.Tensor | None]:
    """Outputs and the gradient of the input; the weights take a step together."""
    x = wide(6, 70, seed=1, sigma=1.0).requires_grad_()
    outputs = [layer(x) for layer in layers]
    sum(y.square().sum() for y in outputs).backward()
    weights = [layer.weight for layer in layers]
    torch.optim.SGD(weights, lr=1e-2, foreach=len(weights) > 1).step()
    for layer in layers:
        layer.zero_grad()
    return [*(y.detach() for y in outputs), x.grad]


def whole_weight(layer: Linear) -> torch.Tensor:
    """What FSDP2 gathers."""
    layer.unshard()
    gathered = layer.weight
    held = gathered.detach().clone()
    layer.reshard()
    return held


def assert_bytes(gathered: torch.Tensor, expected: Any) -> None:
    """Those of the expected tensor, whose transposes the gathered one may lack."""
    assert type(gathered) is type(expected)
    found = inner(gathered)
    assert_same(found, [e if f is not None else None for f, e in zip(found, inner(expected))])
    assert_same(gathered.dequantize(), expected.dequantize())


@some_of_the_cases(1)
@on_ranks(2)
def test_quantized_weights(mesh: DeviceMesh, cases: list[tuple[str, int]]) -> None:
    for name, rows in cases:
        with told(name, rows):
            alone, layer = (layer_of(name, rows, primary=True) for _ in range(2))
            if name == "Float8Tensor" or not has_whole_blocks(name, rows):
                # The quantizer of the former declares nothing of shards.
                with pytest.raises(OttavaError):
                    fully_shard(layer, mesh=mesh).unshard()
                continue
            fully_shard(layer, mesh=mesh)
            for _ in range(2):
                assert_bytes(whole_weight(layer), alone.weight.detach())
                longest = -(-rows // 2)
                own = alone.weight.dequantize().split(longest)[mesh.get_rank() :]
                assert_same(
                    layer.weight.to_local().dequantize(), own[0] if own else torch.ones(0, 70)
                )
                assert_same(step(layer), step(alone))


@some_of_the_cases(0)
@on_ranks(2)
def test_weights_that_are_quantized_when_they_are_gathered(
    mesh: DeviceMesh, cases: list[tuple[str, int]]
) -> None:
    for name, rows in cases:
        is_quantized = has_whole_blocks(name, rows) and name != "Float8Tensor"
        with told(name, rows):
            alone, layer = (layer_of(name, rows, primary=False) for _ in range(2))
            fully_shard(gather_quantized(layer), mesh=mesh)
            for _ in range(2):
                gathered = whole_weight(layer)
                if is_quantized:
                    assert_bytes(gathered, QUANTIZERS[name](alone.weight.detach()))
                else:
                    assert type(gathered) is torch.Tensor
                    assert_same(gathered, alone.weight)
                assert_same(step(layer), step(alone))


@pytest.mark.parametrize("primary", [True, False])
@on_ranks(2)
def test_weights_that_are_rounded_at_random(mesh: DeviceMesh, primary: bool) -> None:
    """The first rank's generator decides the bytes, and the backward pass has those of the forward
    pass."""
    for name, layout in STOCHASTIC.items():
        rows = 2 * math.lcm(layout.block[0] or 1, layout.elements_per_byte) * (layout.block[1] or 1)
        with told(name, rows):
            torch.manual_seed(0)
            alone = [layer_of(name, rows, primary=primary, seed=seed) for seed in range(2)]
            torch.manual_seed(0)
            layers = [layer_of(name, rows, primary=primary, seed=seed) for seed in range(2)]
            for layer in layers:
                sharded = layer if primary else gather_quantized(layer)
                fully_shard(sharded, mesh=mesh, reshard_after_forward=True)
            for turn in range(3):
                for layer, one in zip(layers, alone, strict=True):
                    torch.manual_seed(turn)
                    expected = one.weight.detach()
                    if not primary:
                        expected = GridQuantizer(layout)(expected)
                    torch.manual_seed(turn + 10 * mesh.get_rank())
                    assert_bytes(whole_weight(layer), expected)
                torch.manual_seed(turn)
                steps = step(*alone)
                torch.manual_seed(turn + 10 * mesh.get_rank())
                assert_same(step(*layers), steps)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(NAMES[::2], id="some"),
        *(pytest.param([name], id=name, marks=pytest.mark.slow) for name in EVERY),
    ],
)
@on_ranks(2)
def test_checkpoints_of_shards(mesh: DeviceMesh, names: list[str], tmp_path: Path) -> None:
    """Two ranks read what they wrote, and so does one process."""
    for name in names:
        if name == "Float8Tensor":
            continue
        with told(name):
            rows, path = 2 * boundary(name), tmp_path / name
            weights = wide(rows, 70, sigma=1.0)
            saved, by_dcp, by_ottava, alone = (
                layer_of(name, rows, primary=True, seed=seed) for seed in range(4)
            )
            for layer in (saved, by_dcp, by_ottava):
                fully_shard(layer, mesh=mesh)
            save_sharded(saved.state_dict(), path / "sharded")
            for layer in (by_ottava, alone):
                load_sharded(layer.state_dict(), path / "sharded")
            dcp.save(saved.state_dict(), checkpoint_id=path / "dcp")
            dcp.load(by_dcp.state_dict(), checkpoint_id=path / "dcp")
            expected = QUANTIZERS[name](weights)
            assert_bytes(alone.weight.detach(), expected)
            for layer in (by_dcp, by_ottava):
                assert_bytes(whole_weight(layer), expected)
