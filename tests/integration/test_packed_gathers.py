"""FSDP2 gathers the packed bytes of weights of four bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ottava
from ottava.distributed import gather_quantized
from tests.cases import told
from tests.ranks import Collectives, on_ranks
from tests.samples import wide

#: Bytes that one pass gathers for each element of a weight: data, and the scales that rows of the
#: weight have of their own. Scales and amaxes of the whole weight are not gathered.
BYTES: list[tuple[str, dict[str, Any], float]] = [
    ("current", {}, 1.0),
    ("mxfp8", {}, 1 + 1 / 32),
    ("nvfp4", {"disable_2d_quantization": True}, 1 / 2 + 1 / 16),
    ("nvfp4", {}, 1 / 2 + 1 / 256),
    ("mx", {"element": "MXFP4"}, 1 / 2 + 1 / 32),
]
SIZES = (128, 64), (64, 192)


def sharded(mesh: DeviceMesh, recipe: str, options: dict[str, Any], *, primary: bool) -> Any:
    """A model whose weights have shards of whole blocks, and are all that is gathered."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(*size, bias=False) for size in SIZES]
    model = torch.nn.Sequential(*layers)
    model = ottava.convert(model, ottava.get_recipe(recipe, **options), primary=primary)
    if not primary:
        model = gather_quantized(model)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


@pytest.mark.parametrize("primary", [False, True])
@on_ranks(2)
def test_the_bytes_of_a_gather(mesh: DeviceMesh, primary: bool) -> None:
    """In a forward and in a backward pass; one all-reduce serves all weights of the group."""
    elements = sum(rows * columns for rows, columns in SIZES)
    gathered = {}
    for recipe, options, expected in BYTES:
        with told(recipe, options):
            net = sharded(mesh, recipe, options, primary=primary)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
            x = wide(32, 128, sigma=1.0)
            # Ranks compare their weights before the first gather.
            net(x).square().mean().backward()
            optimizer.step()
            with Collectives() as forward:
                loss = net(x).square().mean()
            with Collectives() as backward:
                loss.backward()
            with Collectives() as update:
                optimizer.step()
            # Each of the two ranks sends its half.
            assert 2 * sum(forward.gathered) == expected * elements
            assert 2 * sum(backward.gathered) == expected * elements
            spans_rows = recipe in ("current", "nvfp4")
            assert backward.count == 0
            assert forward.count == (spans_rows and not primary)
            assert update.count == (spans_rows and primary)
            gathered[recipe, bool(options)] = sum(forward.gathered)
    # Blocks of 1 x 16 in four bits, compared with a byte for each element and no scales.
    assert gathered["nvfp4", True] / gathered["current", False] == 0.5625
