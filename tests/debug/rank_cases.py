"""Statistics on several ranks: those of one process that saw the tensors of all of them."""

from __future__ import annotations

import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import torch.distributed as dist

import ottava
import ottava_debug

STATS = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]
OF_QUANTIZED = ["underflows%", "sqnr", "mse", "scale_inv_min", "scale_inv_max"]
FILE = f"""
it:
  enabled: True
  layers: {{layer_types: [layer]}}
  transformer_engine:
    LogTensorStats:
      {{enabled: True, tensors: [activation, weight], stats: [{", ".join(STATS)}, exponents],
       freq: 2}}
    LogFp8TensorStats: {{enabled: True, tensors: [activation], stats: [{", ".join(OF_QUANTIZED)}]}}
"""


class Writer:
    """A writer of TensorBoard."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.found[name, step] = value


def share(rank: int, step: int = 0) -> torch.Tensor:
    """What a rank sees: of another size and other magnitudes on each."""
    random = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4 + rank, 32, generator=random) * 100.0**rank
    x[0, :8] = 0
    x[0, 8] = 2.0 ** (-30 * rank)
    return x


def direct(x: torch.Tensor) -> dict[str, float]:
    x = x.double()
    magnitudes = x.abs()
    found = {
        "min": x.min(),
        "max": x.max(),
        "mean": x.mean(),
        "std": x.std(),
        "l1_norm": magnitudes.sum(),
        "l2_norm": x.norm(),
        "cur_amax": magnitudes.max(),
        "dynamic_range": (magnitudes.max() / magnitudes[magnitudes > 0].min()).log2(),
    }
    return {stat: value.item() for stat, value in found.items()}


def lost(shares: list[torch.Tensor]) -> dict[str, float]:
    """What per-tensor scaling of each share loses of all of them."""
    factors = [448 / x.abs().max() for x in shares]
    scales = [1 / factor for factor in factors]
    rounded = [
        (x * factor).to(torch.float8_e4m3fn) for x, factor in zip(shares, factors, strict=True)
    ]
    made = [(bits.float() * scale).double() for bits, scale in zip(rounded, scales, strict=True)]
    x, q = torch.cat(shares).double(), torch.cat(made)
    noise = (x - q).square()
    found = {
        "underflows%": 100 * ((x != 0) & (q == 0)).double().mean(),
        "sqnr": 10 * (x.square().sum() / noise.sum()).log10(),
        "mse": noise.mean(),
        "scale_inv_min": min(scales),
        "scale_inv_max": max(scales),
    }
    return {stat: float(value) for stat, value in found.items()}


def layer_of(rank: int = 0) -> ottava.nn.Linear:
    torch.manual_seed(rank)
    return ottava.nn.Linear(32, 16, bias=False, recipe="current", name="layer")


def from_a_file(ranks: list[int], group: Any) -> None:
    """Each rank logs the statistics of ``ranks``; with ``freq`` in some steps alone, and weights as
    they are."""
    rank, writer, layer = dist.get_rank(), Writer(), layer_of()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "debug.yaml"
        path.write_text(textwrap.dedent(FILE))
        ottava_debug.register_features()
        debug_api.initialize(config_file=str(path), log_dir=folder, tb_writer=writer)
        if group is not None:
            debug_api.set_tensor_reduction_group(group)
        for step in range(3):
            layer(share(rank, step))
            debug_api.step()
        debug_api.end_debug()
    for step in range(3):
        shares = [share(other, step) for other in ranks]
        expected = {f"activation_{stat}": value for stat, value in lost(shares).items()}
        if step % 2 == 0:
            expected |= {
                f"activation_{stat}": value for stat, value in direct(torch.cat(shares)).items()
            }
            expected |= {
                f"weight_{stat}": value for stat, value in direct(layer.weight.detach()).items()
            }
        for name, value in expected.items():
            assert writer.found[f"layer_{name}", step] == pytest.approx(value, rel=1e-6), (
                name,
                step,
            )
    counts = torch.frexp(torch.cat([share(other) for other in ranks]))[1] - 1
    values = torch.cat([share(other) for other in ranks])
    for exponent in set(counts[values != 0].tolist()):
        found = writer.found[f"layer_activation_exponents_{exponent}", 0]
        assert found == int(((counts == exponent) & (values != 0)).sum())
    assert ("layer_activation_min", 1) not in writer.found


def all_ranks(mesh: Any) -> None:
    from_a_file([0, 1], None)


def reduction_group(mesh: Any) -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    from_a_file([mesh.get_rank()], groups[mesh.get_rank()])


def from_python(mesh: Any) -> None:
    """``reduce=False`` is for this rank alone, also where other ranks do not take part."""
    rank, layer = mesh.get_rank(), layer_of()
    for reduce, ranks in ((True, [0, 1]), (mesh.get_group(), [0, 1]), (False, [rank])):
        if reduce is False and rank:
            continue
        with ottava_debug.statistics(layer, STATS, tensors="activation", reduce=reduce) as run:
            layer(share(rank))
            run.step()
        expected = direct(torch.cat([share(other) for other in ranks]))
        assert {stat: value for (_, _, stat), value in run.latest().items()} == pytest.approx(
            expected
        )


def different_layers(mesh: Any) -> None:
    """Stages of a pipeline have different layers: each is told what it has, and none waits for
    another."""
    rank = mesh.get_rank()
    stage = torch.nn.ModuleDict({f"stage{rank}": layer_of(), "shared": layer_of()})
    with ottava_debug.statistics(stage, ["l1_norm", "sqnr"], tensors="activation") as run:
        for name, layer in stage.items():
            # The first rank does not run what both have.
            if name != "shared" or rank:
                layer(share(rank))
        run.step()
    found = {(layer, stat): value for (layer, _, stat), value in run.latest().items()}
    names = {f"stage{rank}", *(["shared"] if rank else [])}
    assert set(found) == {(name, stat) for name in names for stat in ("l1_norm", "sqnr")}
    for name in names:
        assert found[name, "l1_norm"] == pytest.approx(direct(share(rank))["l1_norm"])
        assert found[name, "sqnr"] == pytest.approx(lost([share(rank)])["sqnr"], rel=1e-6)


def nan_of_one_rank(mesh: Any) -> None:
    rank, layer = mesh.get_rank(), layer_of()
    for broken in range(2):
        x = share(rank)
        if rank == broken:
            x[1, 1] = float("nan")
        with ottava_debug.statistics(
            layer, ["min", "max", "cur_amax"], tensors="activation"
        ) as run:
            layer(x)
            run.step()
        found = {stat: value for (_, _, stat), value in run.latest().items()}
        assert found["min"] != found["min"]
        assert found["max"] != found["max"]
        finite = torch.cat([share(other) for other in range(2)])
        assert found["cur_amax"] <= finite.abs().max().item()


def failing_rank(mesh: Any) -> None:
    """One rank's logger fails, which switches its feature off: the others go on, and so does it."""
    rank, layer = mesh.get_rank(), layer_of()

    class Broken:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            raise OSError("disk full")

    writer = Broken() if rank else None
    run = ottava_debug.statistics(
        layer, ["max"], tensors="activation", tb_writer=writer, on_error="warn"
    )
    with run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            layer(share(rank, step))
            run.step()
    both = [max(share(other).max().item() for other in range(2))]
    alone = [share(0, step).max().item() for step in (1, 2)] if rank == 0 else []
    assert [each.value for each in run.found] == pytest.approx(both + alone)


def unfinished_step(mesh: Any) -> None:
    """At the end of the block no rank waits for another, which may have failed: what is left is a
    rank's own."""
    rank, layer = mesh.get_rank(), layer_of()
    run = ottava_debug.statistics(layer, ["max"], tensors="activation")
    layer(share(rank))
    if rank:
        with pytest.warns(UserWarning, match="of this rank alone"):
            run.close()
        assert [each.value for each in run.found] == [share(rank).max().item()]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.close()


CASES = [
    "all_ranks",
    "reduction_group",
    "from_python",
    "different_layers",
    "nan_of_one_rank",
    "failing_rank",
    "unfinished_step",
]
