"""``max_blockwise_dynamic_range`` is what float64 arithmetic over the blocks gives."""

import math

import nvdlfw_inspect.api as debug_api
import pytest
import torch
from test_statistics import Writer

import ottava
import ottava_debug
from ottava.errors import OptionError

NAME = "max_blockwise_dynamic_range"


def direct(x, size, dims):
    """One block after the other."""
    rows, found = (1 if dims == 1 else size), [0.0]
    for at in range(0, x.shape[0], rows):
        for beside in range(0, x.shape[1], size):
            block = x[at : at + rows, beside : beside + size].double().abs()
            block = block[block.isfinite() & (block > 0)]
            if block.numel():
                found.append(math.log2(block.max().item()) - math.log2(block.min().item()))
    return max(found)


def spread(*shape):
    """Magnitudes of all sizes, zeros, and whole blocks of zeros."""
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, shape).float())
    x[torch.rand(shape) < 0.3] = 0
    x[:, :32] = 0
    return x


BLOCKS = [(32, 1), (32, 2), (16, 1), (1, 2), (7, 2), (1000, 1), (1000, 2)]


@pytest.mark.parametrize(("size", "dims"), BLOCKS)
def test_operands_are_looked_at_both_ways(size, dims):
    layer = ottava.nn.Linear(96, 64, bias=False, recipe="current")
    x, dy = spread(40, 96), spread(40, 64)
    stat = {NAME: {"block_size": size, "dims": dims}}
    with ottava_debug.statistics(
        layer, stat, tensors=["activation", "gradient", "weight", "output"]
    ) as run:
        y = layer(x)
        y.backward(dy)
        run.step()
    found = {tensor: value for (_, tensor, _), value in run.latest().items()}
    assert {stat for _, _, stat in run.latest()} == {f"{NAME}_block_size_{size}_dims_{dims}"}
    weight = layer.weight.detach()
    for tensor, values in (("activation", x), ("gradient", dy), ("weight", weight)):
        assert found[tensor] == pytest.approx(
            max(direct(values, size, dims), direct(values.t(), size, dims)), abs=1e-9
        )
    assert found["output"] == pytest.approx(direct(y.detach(), size, dims), abs=1e-9)


@pytest.mark.parametrize(
    ("fill", "expected"),
    [(0.0, 0.0), (3.0, 0.0), (math.inf, 0.0), (math.nan, 0.0)],
)
def test_blocks_without_a_range(fill, expected):
    layer = ottava.nn.Linear(64, 64, recipe="current")
    with ottava_debug.statistics(layer, NAME, tensors="activation") as run:
        layer(torch.full((32, 64), fill))
        run.step()
    assert run.latest() == {("", "activation", f"{NAME}_block_size_32_dims_1"): expected}


def test_microbatches_and_names_of_a_file(initialize):
    text = f"""
    it:
      enabled: True
      layers: {{layer_types: [layer]}}
      transformer_engine:
        LogTensorStats:
          enabled: True
          tensors: [output]
          stats:
            - max
            - {NAME}
            - {NAME}:
                block_size: 16
                dims: 2
    """
    writer = Writer()
    initialize(text, tb_writer=writer)
    layer = ottava.nn.Linear(64, 64, recipe="current", name="layer")
    outputs = [layer(spread(32, 64) * scale).detach() for scale in (1.0, 2.0)]
    debug_api.step()
    for size, dims in ((32, 1), (16, 2)):
        found = writer.scalars[f"layer_output_{NAME}_block_size_{size}_dims_{dims}", 0]
        assert found == pytest.approx(max(direct(y, size, dims) for y in outputs))


WRONG = [
    ({NAME: {"block_size": 0}}, "block_size 0.*from 1"),
    ({NAME: {"block_size": 2.5}}, r"block_size 2\.5"),
    ({NAME: {"dims": 3}}, "dims 3.*1 or 2"),
    ({NAME: {"dims": True}}, "dims True"),
    ({NAME: {"size": 3}}, "the key 'size'.*block_size"),
    ({NAME: 32}, "max_blockwise_dynamic_range: 32"),
    ({"max": {}}, "a mapping of max"),
    ([{}], "a mapping of nothing"),
    (f"{NAME}_block_size_0_dims_1", "one of .*max_blockwise_dynamic_range"),
]


@pytest.mark.parametrize(("stat", "told"), WRONG, ids=str)
def test_options_that_are_wrong(stat, told):
    layer = ottava.nn.Linear(64, 64, recipe="current")
    with pytest.raises(OptionError, match=told):
        ottava_debug.statistics(layer, stat)
    assert ottava_debug.products._watches == []
