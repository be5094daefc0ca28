"""Steps of sharded training equal those of one process, to the last bit of losses, bytes and
scales.

All ranks see the same data, so that means of gradients are exact on two and four.
"""

from __future__ import annotations

import gc
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import Ranks, alone
from sampling import pairs, some
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import ottava
from ottava.distributed import HighPrecisionWeight, gather_quantized, quantize_master_weights
from ottava.tensors import QuantizedTensor, QuantizedTensorStorage

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from zero import ZeroOptimizer

STEPS = some(6, 100)
LR, BETAS, DECAY = 0.01, (0.9, 0.95), 0.1
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "current": ("current", {}),
    "delayed": ("delayed", {"amax_history_len": 4}),
    "mxfp8-1d": ("mxfp8", {}),
    "mxfp8-2d": ("mxfp8", {"with_2d_quantization": True}),
}
#: Inputs, hidden features, outputs. Ranges of elements end inside rows and blocks of the first;
#: rows of the second are whole blocks on two ranks.
ODD, EVEN = (40, 72, 33), (64, 128, 64)


def model(kind: str, sizes: tuple[int, int, int], primary: bool) -> torch.nn.Sequential:
    torch.manual_seed(3)
    name, options = RECIPES[kind]
    recipe = ottava.get_recipe(name, **options)
    inputs, hidden, outputs = sizes
    with ottava.quantized_model_init(recipe, enabled=primary):
        net = torch.nn.Sequential(
            ottava.nn.Linear(inputs, hidden, dtype=torch.bfloat16),
            torch.nn.GELU(),
            ottava.nn.Linear(hidden, outputs, dtype=torch.bfloat16),
        )
    return ottava.convert(net, recipe)


def batch(step: int, sizes: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(step)
    x = torch.randn(32, sizes[0], generator=data).bfloat16() * (1 + step % 3)
    return x, torch.randn(32, sizes[2], generator=data).bfloat16()


def backward(net: torch.nn.Module, step: int, sizes: tuple[int, int, int]) -> float:
    x, y = batch(step, sizes)
    loss = torch.nn.functional.mse_loss(net(x), y)
    loss.backward()
    return loss.item()


def inner_bytes(tensor: QuantizedTensorStorage) -> dict[str, torch.Tensor]:
    """Codes and scales by name."""
    held = {inner.argument: getattr(tensor, inner.attribute) for inner in tensor.inner_tensors}
    return {name: value.detach().clone() for name, value in held.items() if value is not None}


# -- one process --


def masters_of(net: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Whole float32 master weights."""
    values = []
    for parameter in net.parameters():
        given: Any = parameter
        quantized = isinstance(parameter, QuantizedTensorStorage)
        values.append(given.get_high_precision_init_val() if quantized else parameter.detach())
    return [torch.nn.Parameter(value.float()) for value in values]


def adamw(net: torch.nn.Module, masters: list[Any]) -> torch.optim.AdamW:
    quantized = [
        isinstance(getattr(p, "_local_tensor", p), QuantizedTensorStorage) for p in net.parameters()
    ]
    groups = [
        {
            "params": [m for m, is_weight in zip(masters, quantized, strict=True) if is_weight],
            "weight_decay": DECAY,
        },
        {
            "params": [m for m, is_weight in zip(masters, quantized, strict=True) if not is_weight],
            "weight_decay": 0.0,
        },
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS)


def train_primary_alone(kind: str, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """FP8-primary weights and whole master weights; each weight is quantized by itself."""
    net = model(kind, sizes, primary=True)
    masters = masters_of(net)
    optimizer, losses = adamw(net, masters), []
    for step in range(STEPS):
        losses.append(backward(net, step, sizes))
        for parameter, master in zip(net.parameters(), masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(net.parameters(), masters, strict=True):
                parameter.copy_(master.to(torch.bfloat16))
    weights = [inner_bytes(p) for p in net.parameters() if isinstance(p, QuantizedTensorStorage)]
    return {
        "losses": losses,
        "weights": weights,
        "masters": [master.detach() for master in masters],
    }


def train_high_precision_alone(kind: str) -> dict[str, Any]:
    net = model(kind, EVEN, primary=False)
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=LR), []
    for step in range(STEPS):
        losses.append(backward(net, step, EVEN))
        optimizer.step()
        optimizer.zero_grad()
    quantizers = [(layer, layer._binding.gather_quantizer(layer)) for layer in (net[0], net[2])]
    weights = [
        inner_bytes(quantizer.quantize(layer.weight.detach())) for layer, quantizer in quantizers
    ]
    return {
        "losses": losses,
        "weights": weights,
        "parameters": [p.detach() for p in net.parameters()],
    }


def save_references(folder: Path, *, zero: bool) -> None:
    for kind in RECIPES:
        if zero:
            torch.save(train_primary_alone(kind, ODD), folder / f"zero-{kind}")
        else:
            torch.save(train_primary_alone(kind, EVEN), folder / f"primary-{kind}")
            torch.save(train_high_precision_alone(kind), folder / f"high-precision-{kind}")


# -- ranks --


def same_tensors(seen: Any, expected: Any, case: str) -> None:
    assert len(seen) == len(expected), case
    for mine, theirs in zip(seen, expected, strict=True):
        assert torch.equal(mine, theirs), case


def zero(folder: Path, mesh: Any) -> None:
    """The optimizer of ``examples/zero.py``, whose ranges end inside rows and blocks."""
    cases = (
        [*itertools.product(RECIPES, (1,)), ("delayed", 2)]
        if mesh.size() == 2
        else [("mxfp8-1d", 2)]
    )
    for kind, stage in cases:
        case, expected = f"zero {kind} stage {stage}", torch.load(folder / f"zero-{kind}")
        net = model(kind, ODD, primary=True)
        optimizer = ZeroOptimizer(net, mesh, stage=stage, lr=LR, betas=BETAS, weight_decay=DECAY)
        losses = []
        for step in range(STEPS):
            losses.append(backward(net, step, ODD))
            optimizer.reduce_gradients()
            optimizer.step()
        assert losses == expected["losses"], (case, losses, expected["losses"])
        weights = [p for p in net.parameters() if isinstance(p, QuantizedTensorStorage)]
        for weight, whole in zip(weights, expected["weights"], strict=True):
            held = inner_bytes(weight)
            assert held.keys() == whole.keys(), case
            same_tensors(held.values(), whole.values(), case)
        quantized = [isinstance(p, QuantizedTensorStorage) for p in net.parameters()]
        for name, is_weight in (("weights", True), ("others", False)):
            flat = optimizer.flat[name]
            pairs = zip(expected["masters"], quantized, strict=True)
            whole = torch.cat([master.flatten() for master, is_own in pairs if is_own == is_weight])
            assert torch.equal(flat.master, whole[flat.begin : flat.end]), (case, name)
        if mesh.size() == 4:
            # Most ranks have nothing of the second weight.
            assert sum(shard is None for shard in optimizer.weights.shards()) == (
                0 if dist.get_rank() == 2 else 1
            ), case
        gc.collect()


class GatheredBytes:
    """What the weights of this rank hand to the all-gathers of FSDP: elements of the whole, and
    bytes of the shard."""

    def __init__(self) -> None:
        self.handed: list[tuple[int, int]] = []
        self.originals: dict[Any, Any] = {}

    def __enter__(self) -> GatheredBytes:
        for cls in (QuantizedTensor, HighPrecisionWeight):
            self.originals[cls] = cls.fsdp_pre_all_gather
            cls.fsdp_pre_all_gather = self._counted(cls.fsdp_pre_all_gather)
        return self

    def _counted(self, original: Any) -> Any:
        def counted(
            tensor: Any, mesh: Any, size: torch.Size, stride: Any, module: Any, policy: Any
        ) -> Any:
            inputs, plan = original(tensor, mesh, size, stride, module, policy)
            self.handed.append(
                (size.numel(), sum(data.numel() * data.element_size() for data in inputs))
            )
            return inputs, plan

        return counted

    def __exit__(self, *error: object) -> None:
        for cls, original in self.originals.items():
            cls.fsdp_pre_all_gather = original

    def ratio(self, world: int) -> float:
        """Against two bytes an element in each gather, which is what plain bfloat16 weights
        move."""
        return (
            world
            * sum(handed for _, handed in self.handed)
            / (2 * sum(whole for whole, _ in self.handed))
        )


def fsdp(folder: Path, mesh: Any) -> None:
    for kind, way, reshard in pairs(list(RECIPES), ("primary", "high-precision"), (True, False)):
        case, expected = (
            f"fsdp {kind} {way} reshard={reshard}",
            torch.load(folder / f"{way}-{kind}"),
        )
        net = model(kind, EVEN, primary=way == "primary")
        masters = masters_of(net) if way == "primary" else []
        if way == "high-precision":
            gather_quantized(net)
        for part in (net[0], net[2], net):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        with GatheredBytes() as gathered:
            losses = train_primary(net, masters) if way == "primary" else train_high_precision(net)
        assert losses == expected["losses"], (case, losses, expected["losses"])
        # Two weights, gathered once or twice a step.
        assert len(gathered.handed) == STEPS * 2 * (2 if reshard else 1), (
            case,
            len(gathered.handed),
        )
        ratio = gathered.ratio(mesh.size())
        if kind == "mxfp8-1d" and not reshard:
            # Rows and columns have data of their own, and both are needed at once.
            assert ratio == 1.03125, (case, ratio)
        else:
            assert ratio == (0.515625 if kind.startswith("mxfp8") else 0.5), (case, ratio)
            assert ratio <= 0.55
        if way == "high-precision":
            same_tensors([p.full_tensor() for p in net.parameters()], expected["parameters"], case)
        # Not the gather of another step.
        net.eval()
        for layer, whole in zip((net[0], net[2]), expected["weights"], strict=True):
            layer.unshard()
            held = inner_bytes(layer.weight)
            assert len(held) in (2, 4), (case, held.keys())
            same_tensors(held.values(), [whole[name] for name in held], case)
            layer.reshard()
        gc.collect()


def train_primary(net: torch.nn.Module, whole: list[torch.nn.Parameter]) -> list[float]:
    parameters: list[Any] = list(net.parameters())
    masters: list[Any] = [
        torch.nn.Parameter(
            distribute_tensor(m.detach(), p.device_mesh, p.placements, src_data_rank=None)
        )
        for m, p in zip(whole, parameters, strict=True)
    ]
    weights = [
        place
        for place, p in enumerate(parameters)
        if isinstance(p._local_tensor, QuantizedTensorStorage)
    ]
    optimizer, losses = adamw(net, masters), []
    for step in range(STEPS):
        losses.append(backward(net, step, EVEN))
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            quantize_master_weights(
                [parameters[i] for i in weights], [masters[i] for i in weights], None
            )
            for place, (parameter, master) in enumerate(zip(parameters, masters, strict=True)):
                if place not in weights:
                    parameter.copy_(master)
    return losses


def train_high_precision(net: torch.nn.Module) -> list[float]:
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=LR), []
    for step in range(STEPS):
        losses.append(backward(net, step, EVEN))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def zero_on_two_and_four_ranks(folder: Path) -> None:
    alone(lambda: save_references(folder, zero=True), folder)
    for world in (2, 4):
        Ranks(lambda mesh: zero(folder, mesh), world, folder).succeed(300)


def fsdp_on_two_ranks(folder: Path) -> None:
    alone(lambda: save_references(folder, zero=False), folder)
    Ranks(lambda mesh: fsdp(folder, mesh), 2, folder).succeed(300)
