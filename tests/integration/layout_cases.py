"""Weights in high precision on two ranks, gathered by layouts whose directions differ in what
shards of rows cut."""

from __future__ import annotations

from typing import Any

import torch

import ottava
from ottava import GridQuantizer, Layout, QuantizerRole, Recipe
from ottava.distributed import gather_quantized
from ottava.tensors import QuantizedTensor
from tests.fsdp import losses, shard


class GridRecipe(Recipe):
    """One layout for all tensors."""

    name = "grid"

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def make_quantizer(
        self, role: QuantizerRole, *, amax_reduction_group: Any = None
    ) -> GridQuantizer:
        return GridQuantizer(self.layout)


def trains_as_alone(mesh: Any, layout: Layout, quantized: bool) -> None:
    """The losses of one process; ``quantized`` says what is gathered of the first weight, of 64
    rows."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(40, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)
        ).bfloat16()
        nets.append(ottava.convert(net, GridRecipe(layout)))
    expected = losses(nets[0], 40, 32)
    gather_quantized(nets[1])
    shard(nets[1], mesh, True)
    assert losses(nets[1], 40, 32) == expected
    nets[1][0].unshard()
    assert isinstance(nets[1][0].weight, QuantizedTensor) == quantized


def one_scale_in_two_buffers(mesh: Any) -> None:
    trains_as_alone(mesh, Layout(torch.int8, (None, None)), True)


def columns_of_whole_blocks(mesh: Any) -> None:
    trains_as_alone(mesh, Layout(torch.float8_e4m3fn, (None, 4)), True)


def columns_of_blocks_that_are_cut(mesh: Any) -> None:
    """Rows have one scale for all, which is reduced; what columns have of 3 rows each is cut by 32
    of them."""
    trains_as_alone(mesh, Layout(torch.float8_e4m3fn, (None, 3)), False)
