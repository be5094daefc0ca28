"""Models that train under FSDP2 and in one process.

All ranks see the same batch, so that the mean of their gradients is exactly the gradient of one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.distributed import gather_quantized
from ottava.tensors import QuantizedTensor
from tests.comparing import assert_same

#: How weights are kept: in high precision and quantized by the layer, in high precision and
#: gathered quantized, quantized.
KEPT = ("high precision", "gathered quantized", "quantized")
#: The first two layers by themselves, or all parameters in one group.
GROUPS = ("layers", "root")
Loop = Callable[[torch.nn.Module, int], list[float]]


class Net(torch.nn.Module):
    """Linear layers, a norm, and the last layer in the root module's own group."""

    #: ``use_reentrant`` of a checkpoint around each layer; None for none.
    reentrant: bool | None = None

    def __init__(self, rows: int = 64, width: int = 64) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, rows)
        self.norm = torch.nn.LayerNorm(rows)
        self.second = torch.nn.Linear(rows, width, bias=False)
        self.last = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(layer: Any, value: torch.Tensor) -> Any:
            if self.reentrant is None:
                return layer(value)
            return checkpoint(layer, value, use_reentrant=self.reentrant)

        x = x.requires_grad_(self.reentrant is not None)
        hidden = torch.nn.functional.gelu(self.norm(run(self.first, x)))
        return run(self.last, torch.nn.functional.gelu(run(self.second, hidden)))


def make(
    recipe: Any,
    kept: str,
    rows: int = 64,
    *,
    width: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    kind: Any = Net,
    reentrant: bool | None = None,
    recomputes: bool = False,
) -> Any:
    """A converted model, the same in each call, whose weights and rows all need other scales."""
    torch.manual_seed(0)
    net = kind(rows, width).to(dtype)
    net.reentrant = reentrant
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            slope = torch.linspace(0.3, 3.0, len(parameter)) * (1.0 + 1.3 * number)
            parameter.mul_(slope.view(-1, *[1] * (parameter.dim() - 1)))
    net = ottava.convert(net, recipe, primary=kept == "quantized")
    if kept == "gathered quantized":
        gather_quantized(net, recomputes=recomputes)
    return net


def shard(net: Any, mesh: DeviceMesh, groups: str = "layers", **options: Any) -> Any:
    for layer in (net.first, net.second) if groups == "layers" else ():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def batches(
    count: int, width: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(5)
    for step in range(count):
        x, y = (torch.randn(32, width, generator=random).bfloat16() for _ in range(2))
        yield (x * (1 + step % 3)).to(dtype), y.to(dtype)


def loss_of(net: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(net(batch[0]).float(), batch[1].float())


def optimizer_of(net: torch.nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    options = options or {"lr": 0.02, "foreach": True}
    return kind([p for p in net.parameters() if p.requires_grad], **options)


def train(net: Any, count: int = 3, *, optimizer: Any = None, run: Any = None) -> list[float]:
    """The losses of some steps."""
    optimizer, losses = optimizer or optimizer_of(net), []
    width = net.last.out_features
    dtype = net.norm.weight.dtype if hasattr(net, "norm") else torch.bfloat16
    for batch in batches(count, width, dtype):
        loss = loss_of(net if run is None else run, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values_of(value: Any) -> torch.Tensor:
    """The values of a parameter or a buffer, whole and in high precision."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    value = value.high_precision() if hasattr(value, "high_precision") else value
    return value.dequantize() if isinstance(value, QuantizedTensor) else value.detach()


def state_of(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, scales and histories; each rank counts what it clamped of its own part."""
    state = net.state_dict().items()
    return {n: values_of(v).clone() for n, v in state if not n.endswith("saturated")}


def assert_states_equal(found: dict[str, Any], expected: dict[str, Any], note: object) -> None:
    assert list(found) == list(expected), note
    for name, value in expected.items():
        assert_same(found[name], value, note=f"{note} {name}")


def assert_trains_alike(
    mesh: DeviceMesh,
    recipe: Any,
    kept: str,
    note: object = "",
    *,
    groups: str = "layers",
    loop: Loop = train,
    # The scales of the second step follow from amaxes of the first.
    count: int = 2,
    prepare: Callable[[Any], Any] = lambda net: None,
    prepare_sharded: Callable[[Any], Any] = lambda net: None,
    fully_shard_options: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Train a model alone and one that is sharded: losses, parameters and scales are equal."""
    note = f"{note} {kept}, {groups}, {options} {fully_shard_options}"
    alone = make(recipe, "quantized" if kept == "quantized" else "high precision", **options)
    prepare(alone)
    expected, state = loop(alone, count), state_of(alone)
    net = make(recipe, kept, **options)
    prepare(net)
    shard(net, mesh, groups, **(fully_shard_options or {}))
    prepare_sharded(net)
    found = loop(net, count)
    assert found == expected, f"{note}: losses {found}, expected {expected}"
    assert_states_equal(state_of(net), state, note)
    return alone, net
