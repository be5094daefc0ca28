"""Mixed recipes, hybrids and a third party's tensors train under FSDP2 as in one process, bit for
bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import pairs
from torch.distributed.fsdp import fully_shard

import ottava
from ottava.distributed import gather_quantized
from ottava.errors import UsageError
from ottava.tensors import QuantizedTensor
from ottava_custom import (
    CustomRecipe,
    by_direction,
    by_tensor,
    current_scaling_ref_quantizer_factory,
    mirror,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from rows import OneScaleQuantizer, Rows

E4M3, E5M2 = ottava.Format.E4M3, ottava.Format.E5M2
RECIPES: dict[str, Any] = {
    "reference": CustomRecipe(current_scaling_ref_quantizer_factory),
    "a third party's": Rows(),
    "MX forward": CustomRecipe(by_direction("mxfp8", "current")),
    "MX backward": CustomRecipe(by_direction("current", "mxfp8")),
    "formats": CustomRecipe(
        by_direction(mirror("current", fp8_format=E4M3), mirror("current", fp8_format=E5M2))
    ),
    "delayed and a hybrid": CustomRecipe(
        by_tensor("delayed", weight=by_direction("current", "mxfp8"))
    ),
}


def model(recipe: Any, *, primary: bool) -> torch.nn.Sequential:
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe, enabled=primary):
        made = torch.nn.Sequential(
            ottava.nn.Linear(64, 128, dtype=torch.bfloat16),
            torch.nn.GELU(),
            ottava.nn.Linear(128, 64, dtype=torch.bfloat16),
        )
    return ottava.convert(made, recipe)


def losses(net: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    torch.manual_seed(5)
    seen = []
    for _ in range(3):
        x, y = torch.randn(32, 64).bfloat16(), torch.randn(32, 64).bfloat16()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def mixed_recipes(mesh: Any) -> None:
    # What is gathered for each pass is another matter where the weight is not kept between them.
    ways = (("quantized", True), ("gathered quantized", True), ("quantized", False))
    for name, (kept, reshard) in pairs(list(RECIPES), ways):
        recipe = RECIPES[name]
        expected = losses(model(recipe, primary=kept == "quantized"))
        net = model(recipe, primary=kept == "quantized")
        if kept == "gathered quantized":
            gather_quantized(net)
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(net, mesh=mesh, reshard_after_forward=reshard)
        weight: Any = net[0].weight
        assert losses(net) == expected, (name, kept, reshard)
        quantized = isinstance(weight._local_tensor, QuantizedTensor)
        assert quantized is (kept == "quantized"), (name, kept, type(weight._local_tensor))


def scales_that_nobody_keeps_equal(mesh: Any) -> None:
    """One scale for all rows, and a quantizer that says nothing of shards: an error, and no
    training that is wrong."""
    weight = OneScaleQuantizer()(torch.randn(64, 32))
    layer = torch.nn.Linear(32, 64, bias=False)
    layer.weight = torch.nn.Parameter(weight)
    fully_shard(layer, mesh=mesh)
    with pytest.raises(UsageError, match="for_shards"):
        layer(torch.randn(4, 32))
