"""What the cases under FSDP2 share: a model of two layers whose weights are kept quantized, and its
training."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import ottava
from ottava.tensors import QuantizedTensor


def model(columns: int, rows: int, out: int, recipe: Any) -> torch.nn.Sequential:
    torch.manual_seed(0)
    with ottava.quantized_model_init(recipe):
        return torch.nn.Sequential(
            ottava.nn.Linear(columns, rows, dtype=torch.bfloat16, recipe=recipe),
            torch.nn.GELU(),
            ottava.nn.Linear(rows, out, dtype=torch.bfloat16, recipe=recipe),
        )


def shard(net: torch.nn.Sequential, mesh: Any, reshard: bool) -> None:
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(net, mesh=mesh, reshard_after_forward=reshard)


def losses(net: torch.nn.Module, columns: int, out: int, count: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    torch.manual_seed(5)
    seen = []
    for _ in range(count):
        x, y = torch.randn(32, columns).bfloat16(), torch.randn(32, out).bfloat16()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


class GatheredBytes:
    """What the weights of this rank hand to the all-gathers of FSDP: bytes by the number of
    elements of the whole."""

    def __init__(self) -> None:
        self.handed: list[tuple[int, int]] = []

    def __enter__(self) -> GatheredBytes:
        self.original = QuantizedTensor.fsdp_pre_all_gather

        def counted(
            tensor: QuantizedTensor,
            mesh: Any,
            size: torch.Size,
            stride: Any,
            module: Any,
            policy: Any,
        ) -> Any:
            inputs, plan = self.original(tensor, mesh, size, stride, module, policy)
            # Elements and E8M0 scales, or float32 scales.
            assert all(data.dtype in (torch.uint8, torch.float32) for data in inputs)
            self.handed.append(
                (size.numel(), sum(data.numel() * data.element_size() for data in inputs))
            )
            return inputs, plan

        QuantizedTensor.fsdp_pre_all_gather = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        QuantizedTensor.fsdp_pre_all_gather = self.original  # type: ignore[method-assign]
