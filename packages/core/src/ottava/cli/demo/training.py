"""One training run: float32 parameters, BF16 autocast, and a recipe bound to the blocks' linear layers or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import ottava
from ottava.cli.demo.data import Corpus, batch
from ottava.cli.demo.model import GPT, SIZES, VOCABULARY

_VALIDATION_BATCHES = 8
_LEARNING_RATE = 1e-3
_WARMUP = 20


@dataclass(frozen=True)
class Run:
    """What one run gives.

    Attributes:
        losses: training loss of each step.
        validation: loss on fixed batches after the last step.
        tokens_per_second: over all steps, optimizer included.
        saved_bytes: bytes of activations that one forward keeps for its backward, parameters not counted.
    """

    name: str
    losses: list[float]
    validation: float
    tokens_per_second: float
    saved_bytes: int


def _loss(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor], device: str) -> torch.Tensor:
    x, y = (t.to(device) for t in data)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(x)
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), y.reshape(-1))


def _saved_bytes(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor], device: str) -> int:
    """Distinct memory held for backward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _loss(model, data, device)
    del loss
    return sum(held.values())


def train(
    recipe: str | None,
    corpus: Corpus,
    *,
    size: str,
    steps: int,
    device: str,
    seed: int,
    progress: Callable[[float], None] = lambda loss: None,
) -> Run:
    """Train from the same weights on the same batches as every other run with this seed."""
    shape = SIZES[size]
    torch.manual_seed(seed)
    model = GPT(shape).to(device)
    if recipe is not None:
        ottava.convert(model, recipe, exclude="head")
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARMUP))
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.Generator().manual_seed(seed + 1)
    checks = [batch(corpus.validation, shape.batch, shape.length, held_out) for _ in range(_VALIDATION_BATCHES)]
    saved = _saved_bytes(model, checks[0], device)

    losses: list[float] = []
    start = time.perf_counter()
    for _ in range(steps):
        loss = _loss(model, batch(corpus.train, shape.batch, shape.length, generator), device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        progress(losses[-1])
    elapsed = time.perf_counter() - start

    model.eval()
    with torch.no_grad():
        validation = sum(_loss(model, check, device).item() for check in checks) / len(checks)
    rate = steps * shape.batch * shape.length / elapsed
    return Run(recipe or "bf16", losses, validation, rate, saved)
