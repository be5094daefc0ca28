"""Statistics on two ranks are those of one process that sees the tensors of both."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ottava_debug
from tests.debug.by_hand import FullDisk, Writer, exponents, layer_of, losses, quantized, statistics
from tests.debug.yaml_files import section
from tests.ranks import on_ranks

VALUES = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]
LOSSES = ["underflows%", "sqnr", "mse", "scale_inv_min", "scale_inv_max"]


def share(rank: int, step: int = 0) -> torch.Tensor:
    """The input of a rank; sizes and magnitudes of ranks differ."""
    random = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4 + rank, 32, generator=random) * 100.0**rank
    x[0, :8] = 0
    x[0, 8] = 2.0 ** (-30 * rank)
    return x


def losses_of(shares: list[torch.Tensor]) -> dict[str, float]:
    """The losses of all shares together, each quantized with its own scale."""
    each = [quantized("current", "fprop", "activation", x) for x in shares]
    decoded = torch.cat([q.dequantize(torch.float32) for q in each])
    scales = [float(q.grid_operand(columnwise=False)[1]) for q in each]
    found = losses(torch.cat(shares), decoded)
    found |= {"scale_inv_min": min(scales), "scale_inv_max": max(scales)}
    return {stat: found[stat] for stat in LOSSES}


def values_of(x: torch.Tensor) -> dict[str, float]:
    found = statistics(x)
    counts = {f"exponents_{e}": count for e, count in exponents(x).items()}
    return {stat: found[stat] for stat in VALUES} | counts


def from_a_file(ranks: list[int], group: Any) -> None:
    """Each rank logs the statistics of ``ranks``; those of weights are each rank's own."""
    rank, writer, layer = dist.get_rank(), Writer(), layer_of("current", bias=False)
    stats = f"stats: [{', '.join(VALUES)}, exponents], freq: 2"
    text = section("LogTensorStats", f"tensors: [activation, weight], {stats}")
    text += f"    LogFp8TensorStats: {{enabled: True, tensors: activation, stats: {LOSSES}}}\n"
    text += "    DumpTensors: {enabled: True, tensors: weight, high_precision_tensor: True}\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "debug.yaml"
        path.write_text(text)
        ottava_debug.register_features()
        debug_api.initialize(config_file=str(path), log_dir=folder, tb_writer=writer)
        if group is not None:
            debug_api.set_tensor_reduction_group(group)
        for step in range(3):
            layer(share(rank, step))
            debug_api.step()
        debug_api.end_debug()
        dumps = [path.name for path in Path(folder).glob("tensor_dumps/*")]
        assert dumps == [f"rank-{rank:05d}"]
    expected = {}
    for step in range(3):
        shares = [share(other, step) for other in ranks]
        found = {f"activation_{stat}": v for stat, v in losses_of(shares).items()}
        if step % 2 == 0:
            found |= {f"activation_{s}": v for s, v in values_of(torch.cat(shares)).items()}
            found |= {f"weight_{s}": v for s, v in values_of(layer.weight.detach()).items()}
        expected |= {(f"layer_{name}", step): value for name, value in found.items()}
    assert writer.scalars == pytest.approx(expected, rel=1e-6)


@on_ranks(2)
def test_from_a_file(mesh: DeviceMesh) -> None:
    from_a_file([0, 1], None)
    groups = [dist.new_group([rank]) for rank in range(2)]
    from_a_file([mesh.get_rank()], groups[mesh.get_rank()])


@on_ranks(2)
def test_from_python(mesh: DeviceMesh) -> None:
    """With ``reduce=False`` the other rank need not take part."""
    rank, layer = mesh.get_rank(), layer_of("current", bias=False)
    for reduce, ranks in ((True, [0, 1]), (mesh.get_group(), [0, 1]), (False, [rank])):
        if reduce is False and rank:
            continue
        options = {"tensors": "activation", "reduce": reduce, "freq": 2}
        with tempfile.TemporaryDirectory() as folder:
            with ottava_debug.statistics(layer, VALUES, log_dir=folder, **options) as run:
                layer(share(rank))
                run.step()
            (file,) = Path(folder).rglob("*.log")
            assert file.name == f"nvdlfw_inspect_globalrank-{rank}.log"
        found = {stat: value for (_, _, stat), value in run.latest().items()}
        expected = statistics(torch.cat([share(other) for other in ranks]))
        assert found == pytest.approx({stat: expected[stat] for stat in VALUES})


@on_ranks(2)
def test_ranks_with_different_layers(mesh: DeviceMesh) -> None:
    """Each stage of a pipeline gets the statistics of its own layers, and none waits for
    another."""
    rank = mesh.get_rank()
    x = -1 - share(rank).abs()
    stage = torch.nn.ModuleDict(
        {f"stage{rank}": layer_of("current", bias=False), "shared": layer_of("current", bias=False)}
    )
    with ottava_debug.statistics(stage, ["max", "l1_norm", "sqnr"], tensors="activation") as run:
        for name, layer in stage.items():
            # The first rank does not run the layer that both have.
            if name != "shared" or rank:
                layer(x)
        run.step()
    found = {(layer, stat): value for (layer, _, stat), value in run.latest().items()}
    own = {stat: statistics(x)[stat] for stat in ("max", "l1_norm")}
    own["sqnr"] = losses_of([x])["sqnr"]
    names = [f"stage{rank}", *(["shared"] if rank else [])]
    expected = {(name, stat): value for name in names for stat, value in own.items()}
    assert found == pytest.approx(expected, rel=1e-6)


@on_ranks(2)
def test_a_nan_of_one_rank(mesh: DeviceMesh) -> None:
    """Also of a rank whose batch is empty."""
    rank, layer = mesh.get_rank(), layer_of("current", bias=False)
    for broken in range(2):
        x = share(rank)
        if rank == broken:
            x[1, 1] = float("nan")
        elif broken:
            x = x[:0]
        stats = ["min", "max", "cur_amax"]
        with ottava_debug.statistics(layer, stats, tensors="activation") as run:
            layer(x)
            run.step()
        found = [each.value for each in run.found]
        assert [value != value for value in found] == [True, True, False]
        assert found[2] <= max(share(other).abs().max().item() for other in range(2))


@on_ranks(2)
def test_a_rank_that_fails(mesh: DeviceMesh) -> None:
    """If the logger of one rank fails, the feature is switched off there, and the other goes on."""
    rank, layer = mesh.get_rank(), layer_of("current", bias=False)

    run = ottava_debug.statistics(
        layer,
        ["max"],
        tensors="activation",
        tb_writer=FullDisk() if rank else None,
        on_error="warn",
    )
    with run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            layer(share(rank, step))
            run.step()
    both = [max(share(other).max().item() for other in range(2))]
    alone = [share(0, step).max().item() for step in (1, 2)] if rank == 0 else []
    assert [each.value for each in run.found] == pytest.approx(both + alone)


@on_ranks(2)
def test_an_unfinished_step(mesh: DeviceMesh) -> None:
    """At the end of the block no rank waits for another, which may have failed."""
    rank, layer = mesh.get_rank(), layer_of("current", bias=False)
    run = ottava_debug.statistics(layer, ["max"], tensors="activation")
    layer(share(rank))
    run.step()
    layer(share(rank, 1))
    with pytest.warns(UserWarning, match="of this rank alone"):
        run.close()
    both = max(share(other).max().item() for other in range(2))
    assert [each.value for each in run.found] == [both, share(rank, 1).max().item()]
