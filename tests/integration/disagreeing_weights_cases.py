"""Ranks that gather other weights under FSDP2: all are told so, with one text, before the first of
them is gathered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ottava
from ottava.distributed import gather_quantized
from ottava.errors import UsageError
from ottava_blockwise import Float8BlockScaling
from ottava_current import Float8CurrentScaling
from ottava_mxfp8 import MXFP8BlockScaling

Make = Callable[[], torch.nn.Module]
E5M2 = ottava.Format.E5M2


def plain() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)).bfloat16()


def gathered(recipe: Any, *, recomputes: bool = False, **options: Any) -> torch.nn.Module:
    return gather_quantized(ottava.convert(plain(), recipe, **options), recomputes=recomputes)


def primary(recipe: Any) -> torch.nn.Module:
    return ottava.convert(plain(), recipe, primary=True)


def unbound() -> torch.nn.Module:
    net: Any = gathered("current")
    net[0].bind(None)
    return net


#: What rank 0 makes, what the others make, and words of the error.
TABLE: dict[str, tuple[Make, Make, str]] = {
    "no_recipe": (partial(gathered, "current"), unbound, "for None"),
    "fewer_layers": (
        partial(gathered, "current"),
        partial(gathered, "current", exclude="1"),
        "gathered as it is",
    ),
    "recomputes": (
        partial(gathered, "mxfp8"),
        partial(gathered, "mxfp8", recomputes=True),
        "recomputes=True",
    ),
    "primary_and_gathered": (
        partial(primary, "current"),
        partial(gathered, "current"),
        "Float8Tensor",
    ),
    "primary_on_one": (partial(primary, "mxfp8"), partial(gathered, "current"), "MXFP8Tensor"),
}
PAIRS: dict[str, tuple[Any, Any, str]] = {
    "elements": ("current", Float8CurrentScaling(fp8_format=E5M2), "float8_e5m2"),
    "elements_of_blocks": ("mxfp8", MXFP8BlockScaling(fp8_format=E5M2), "float8_e5m2"),
    "current_and_delayed": ("current", "delayed", "DelayedScaling"),
    "delayed_and_mxfp8": ("delayed", "mxfp8", "MXFP8"),
    "mxfp8_and_blockwise": ("mxfp8", "blockwise", "Float8BlockQuantizer"),
    "blockwise_and_rowwise": ("blockwise", "rowwise", "Float8RowwiseQuantizer"),
    "dimensions": (
        "mxfp8",
        MXFP8BlockScaling(with_2d_quantization=True),
        "with_2d_quantization=True",
    ),
    "dimensions_of_blockwise": (
        "blockwise",
        Float8BlockScaling(w_block_scaling_dim=1),
        "w_block_scaling_dim=1",
    ),
    # As many bytes, in the same places.
    "rounding": ("mxfp8", MXFP8BlockScaling(scale_rounding="floor"), "scale_rounding='floor'"),
    "powers_of_two": (
        "blockwise",
        Float8BlockScaling(force_pow_2_scales=False),
        "force_pow_2_scales=False",
    ),
    "epsilon": ("current", Float8CurrentScaling(amax_epsilon=1.0), "amax_epsilon=1.0"),
}
for _name, (_one, _other, _word) in PAIRS.items():
    for _make in (gathered, primary):
        TABLE[f"{_name}_{_make.__name__}"] = partial(_make, _one), partial(_make, _other), _word


def shard(net: Any, mesh: Any, groups: str, **options: Any) -> Any:
    for layer in net if groups == "layers" else ():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def train(net: torch.nn.Module) -> None:
    net(torch.ones(32, 128, dtype=torch.bfloat16)).sum().backward()


def held(net: torch.nn.Module) -> list[torch.Tensor]:
    values = [
        value.to_local() if hasattr(value, "to_local") else value
        for value in net.state_dict().values()
    ]
    return [
        value.dequantize() if hasattr(value, "dequantize") else value.clone() for value in values
    ]


def refused(one: Make, other: Make, word: str, groups: str, mesh: Any) -> None:
    """Twice, because nothing is changed; the group then serves a model on which the ranks agree."""
    net = shard((other if mesh.get_rank() else one)(), mesh, groups)
    before, told = held(net), []
    for _ in range(2):
        try:
            train(net)
        except UsageError as error:
            told.append(str(error))
    assert len(told) == 2, told
    for part in (word, "rank 0 has", "rank 1"):
        assert part in told[0], (part, told)
    assert all(map(torch.equal, before, held(net)))
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, told)
    assert texts == [told] * len(texts), texts
    train(shard(gathered("current"), mesh, groups))


for _place, (_name, _row) in enumerate(TABLE.items()):
    # By turns gathered layer by layer and all at once.
    globals()[_name] = partial(refused, *_row, ("root", "layers", "layers", "root")[_place % 4])


def other_dtypes(mesh: Any) -> None:
    """Of a policy for mixed precision."""
    dtype = torch.float16 if mesh.get_rank() else torch.float32
    net = shard(
        gathered("current"), mesh, "layers", mp_policy=MixedPrecisionPolicy(param_dtype=dtype)
    )
    with pytest.raises(UsageError, match=r"torch\.float16"):
        train(net)


def compared_once(mesh: Any) -> None:
    """One all-gather of 32 bytes for all weights of a model, and none after the first gather."""
    original, seen = dist.all_gather_into_tensor, []

    def counted(output: torch.Tensor, sent: torch.Tensor, **options: Any) -> Any:
        seen.append(sent.numel())
        return original(output, sent, **options)

    for make in (gathered, primary):
        for groups in ("layers", "root"):
            net = shard(make("current"), mesh, groups)
            dist.all_gather_into_tensor = counted
            try:
                train(net)
                assert seen.count(32) == 1, seen
                seen.clear()
                train(net)
                assert 32 not in seen, seen
            finally:
                dist.all_gather_into_tensor = original
                seen.clear()
