"""What the cases of models under FSDP2 share: a model, its training alone and sharded, and
comparing the two.

All ranks see the same batch, so that the mean of their gradients is exactly the gradient of one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ottava
from ottava.distributed import HighPrecisionWeight, gather_quantized
from ottava.tensors import QuantizedTensor
from ottava_delayed import DelayedScaling

RECIPES = ("current", "delayed", "mxfp8")
#: See `sharded`.
GROUPS = ("layers", "root")
FLAGS = (True, False)
Between = Callable[[torch.nn.Module, int], None]


def recipe_of(name: str) -> Any:
    return DelayedScaling(amax_history_len=4) if name == "delayed" else ottava.get_recipe(name)


class Net(torch.nn.Module):
    """Linears, a norm, and the last Linear in the root module's own group."""

    def __init__(self, hidden: int = 64, width: int = 64) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, hidden)
        self.norm = torch.nn.LayerNorm(hidden)
        self.second = torch.nn.Linear(hidden, width, bias=False)
        self.last = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(
            torch.nn.functional.gelu(
                self.second(torch.nn.functional.gelu(self.norm(self.first(x))))
            )
        )


def made(
    recipe: Any,
    *,
    gathered: bool,
    hidden: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    make: Any = Net,
) -> torch.nn.Module:
    torch.manual_seed(0)
    net = make(hidden)
    # Weights that all need other scales, in every recipe.
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.mul_(1.0 + 1.3 * number)
    net = ottava.convert(net.to(dtype), recipe_of(recipe) if isinstance(recipe, str) else recipe)
    return gather_quantized(net) if gathered else net


def sharded(
    net: torch.nn.Module, mesh: Any, groups: str = "layers", **options: Any
) -> torch.nn.Module:
    """``layers``: the first two Linears by themselves. ``root``: all parameters in one group."""
    if groups == "layers":
        for layer in (net.first, net.second):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def batches(
    count: int, width: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(5)
    for step in range(count):
        x, y = (torch.randn(32, width, generator=random) for _ in range(2))
        yield (x * (1 + step % 3)).to(dtype), y.to(dtype)


def train(
    net: torch.nn.Module,
    count: int = 3,
    between: Between = lambda net, step: None,
    run: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: Any = None,
) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad], lr=0.02
    )
    run, seen = net if run is None else run, []
    for step, (x, y) in enumerate(batches(count, dtype=dtype)):
        loss = torch.nn.functional.mse_loss(run(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
        between(net, step)
    return seen


def plain(value: torch.Tensor) -> torch.Tensor:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    value = value.high_precision() if hasattr(value, "high_precision") else value
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


def full_state(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: plain(value).clone() for name, value in net.state_dict().items()}


def compare(
    alone: torch.nn.Module | dict[str, torch.Tensor], shards: torch.nn.Module, what: str
) -> None:
    """All parameters, scales and histories; each rank counts what it clamped of its own part."""
    mine, theirs = alone if isinstance(alone, dict) else full_state(alone), shards.state_dict()
    assert list(mine) == list(theirs), (what, list(mine), list(theirs))
    for name, value in mine.items():
        if name.endswith("saturated"):
            continue
        other = plain(theirs[name])
        assert torch.equal(value, other), (what, name, value, other)


class Counted:
    """Counts the all-reduces of a block, and what its gathers of weights hand over."""

    def __enter__(self) -> Counted:
        self.reductions, self.handed = 0, []
        self.all_reduce, self.hooks = dist.all_reduce, {}

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            self.reductions += 1
            return self.all_reduce(*args, **kwargs)

        dist.all_reduce = all_reduce
        for cls in (HighPrecisionWeight, QuantizedTensor):
            self.hooks[cls] = cls.fsdp_pre_all_gather

            cls.fsdp_pre_all_gather = self._counting(self.hooks[cls])
        return self

    def _counting(self, hook: Any) -> Any:
        def counted(
            tensor: Any, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
        ) -> Any:
            inputs, plan = hook(tensor, mesh, size, stride, module, policy)
            self.handed.append((size.numel(), sum(i.numel() * i.element_size() for i in inputs)))
            return inputs, plan

        return counted

    def __exit__(self, *error: object) -> None:
        dist.all_reduce = self.all_reduce
        for cls, hook in self.hooks.items():
            cls.fsdp_pre_all_gather = hook


def both(
    mesh: Any,
    recipe: Any,
    what: str,
    *,
    groups: str = "layers",
    hidden: int = 64,
    change: Between = lambda net, step: None,
    prepare: Callable[[torch.nn.Module], Any] = lambda net: None,
    prepare_sharded: Callable[[torch.nn.Module], Any] = lambda net: None,
    make: Any = Net,
    count: int = 3,
    loop: Callable[..., list[float]] = train,
    **options: Any,
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Train one model alone and one sharded, and compare everything."""
    what = f"{what}: {recipe} {groups} hidden={hidden} {options}"
    alone, shards = (
        made(recipe, gathered=gathered, hidden=hidden, make=make) for gathered in (False, True)
    )
    prepare(alone)
    prepare(shards)
    expected = loop(alone, count, change)
    # As it is now: a region that the other model enters begins a step for both.
    after = full_state(alone)
    sharded(shards, mesh, groups, **options)
    prepare_sharded(shards)
    seen = loop(shards, count, change)
    assert seen == expected, (what, seen, expected)
    compare(after, shards, what)
    return alone, shards
