"""What two ranks gather of quantized weights, and the losses that follow, as ``fsdp_golden.json``
has them.

Weights are sums of powers of two, so that the bytes of the first step are the same on every
machine. Losses differ in the order and the rounding of sums, and are in bfloat16. With
``OTTAVA_TESTS_RECORD=1`` the file is written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_keeping_cases import primary
from fsdp_training import FLAGS, GROUPS, RECIPES, made, sharded, train

from ottava.distributed import HighPrecisionWeight
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage

FILE = Path(__file__).with_name("fsdp_golden.json")
#: Weights in high precision that are gathered quantized, and weights that are quantized only.
KINDS = {
    "gathered": lambda recipe: made(recipe, gathered=True),
    "primary": lambda recipe: primary(recipe, 64),
}


def set_exactly(net: torch.nn.Module) -> None:
    """Multiples of 2^-9 that all need other scales, the same in every version of torch."""
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            steps = torch.arange(parameter.numel()).mul_(7919 + number).remainder_(255).sub_(127)
            parameter.copy_(
                (steps.view(parameter.shape) * 2.0 ** (number % 3 - 9)).to(parameter.dtype)
            )


def digest(tensor: torch.Tensor) -> str:
    """Of everything that a gathered weight holds."""
    made = hashlib.sha256(f"{type(tensor).__name__} {tuple(tensor.shape)} {tensor.dtype}".encode())
    held = {"": tensor}
    if isinstance(tensor, QuantizedTensorStorage):
        held = {inner.attribute: getattr(tensor, inner.attribute) for inner in tensor.inner_tensors}
        # The record has the scale of per-tensor weights under the name of its public form.
        held = {"_scale_inv" if name == "_scalar" else name: value for name, value in held.items()}
    for name, value in held.items():
        if value is not None:
            made.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            made.update(value.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The digests of all weights that are gathered inside, in their order."""
    seen: list[str] = []
    hooks: dict[Any, Any] = {
        cls: cls.fsdp_post_all_gather for cls in (HighPrecisionWeight, QuantizedTensor)
    }

    def recording(hook: Any) -> Any:
        def gathered(self: Any, *args: Any, out: Any = None, **options: Any) -> Any:
            made = hook(self, *args, out=out, **options)
            seen.append(digest(out if made is None else made[0]))
            return made

        return gathered

    for cls, hook in hooks.items():
        cls.fsdp_post_all_gather = recording(hook)
    try:
        yield seen
    finally:
        for cls, hook in hooks.items():
            cls.fsdp_post_all_gather = hook


def as_recorded(mesh: Any) -> None:
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    found: dict[str, Any] = {}
    for kind, make in KINDS.items():
        for recipe, groups, reshard in ((r, g, f) for r in RECIPES for g in GROUPS for f in FLAGS):
            net = make(recipe)
            set_exactly(net)
            sharded(net, mesh, groups, reshard_after_forward=reshard)
            with recorded() as gathers:
                first = train(net, 1)
            losses = first + train(net, 2)
            found[f"{kind} {recipe} {groups} reshard={reshard}"] = {
                "gathers": gathers,
                "losses": losses,
            }
    if os.environ.get("OTTAVA_TESTS_RECORD") and dist.get_rank() == 0:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    elif not os.environ.get("OTTAVA_TESTS_RECORD"):
        assert list(found) == list(known)
        for name, now in found.items():
            assert now["gathers"], name
            assert now["gathers"] == known[name]["gathers"], (
                name,
                now["gathers"],
                known[name]["gathers"],
            )
            assert now["losses"] == pytest.approx(known[name]["losses"], rel=3e-2), (
                name,
                now["losses"],
            )
