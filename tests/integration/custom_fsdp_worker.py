"""One rank of test_custom_fsdp.py: trains mixed recipes under FSDP2 and compares with one process, bit for bit.

Usage: custom_fsdp_worker.py RANK WORLD STORE. The ranks run on gloo and the CPU.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ottava
from ottava.distributed import gather_quantized
from ottava.errors import UsageError
from ottava.tensors import QuantizedTensor
from ottava_custom import CustomRecipe, by_direction, by_tensor, current_scaling_ref_quantizer_factory, mirror

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from rows import OneScaleQuantizer, Rows

E4M3, E5M2 = ottava.Format.E4M3, ottava.Format.E5M2
RECIPES: dict[str, Any] = {
    "reference": CustomRecipe(current_scaling_ref_quantizer_factory),
    "a third party's": Rows(),
    "MX forward": CustomRecipe(by_direction("mxfp8", "current")),
    "MX backward": CustomRecipe(by_direction("current", "mxfp8")),
    "formats": CustomRecipe(by_direction(mirror("current", fp8_format=E4M3), mirror("current", fp8_format=E5M2))),
    "delayed and a hybrid": CustomRecipe(by_tensor("delayed", weight=by_direction("current", "mxfp8"))),
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


def main() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, recipe in RECIPES.items():
        for kept in ("quantized", "gathered quantized"):
            # What is gathered for each pass is another matter where the weight is not kept between them.
            for reshard in (True, False) if kept == "quantized" else (True,):
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


def scales_that_nobody_keeps_equal() -> None:
    """One scale for all rows, and a quantizer that says nothing of shards: an error, and no training that is wrong."""
    weight = OneScaleQuantizer()(torch.randn(64, 32))
    layer = torch.nn.Linear(32, 64, bias=False)
    layer.weight = torch.nn.Parameter(weight)
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(UsageError, match="for_shards"):
        layer(torch.randn(4, 32))


if __name__ == "__main__":
    code = 1
    try:
        rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        main()
        scales_that_nobody_keeps_equal()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's finalization, which gloo's threads can abort.
    os._exit(code)
