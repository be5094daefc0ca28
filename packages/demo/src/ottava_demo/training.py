"""One training run: float32 parameters, BF16 autocast, and at most one recipe.

The recipe is bound to the linear layers of the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import ottava
from ottava.kernels.products import product_dtype
from ottava.recipes import Recipe
from ottava_demo.data import Corpus, batch
from ottava_demo.model import GPT, SIZES, Size

#: Bytes and the bytes that follow each of them, int64 ``[batch, length]``.
Batch = tuple[torch.Tensor, torch.Tensor]

_VALIDATION_BATCHES = 8
_LEARNING_RATE = 1e-3
_WARMUP = 20


@dataclass(frozen=True)
class Run:
    """The results of one run.

    Attributes:
        losses: training loss of each step.
        validation: loss on fixed batches after the last step.
        tokens_per_second: mean over all steps, optimizer included, after one step that is not
            counted.
        saved_bytes: bytes of activations that one forward keeps for its backward, parameters not
            counted.
        products: the dtype in which the products of bfloat16 operands were computed.
        peak_bytes: the most memory that was allocated on the GPU during the steps; None on a CPU.
    """

    name: str
    losses: list[float]
    validation: float
    tokens_per_second: float
    saved_bytes: int
    products: str = "bfloat16"
    peak_bytes: int | None = None


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next bytes ``y`` after the bytes ``x``, in nats."""
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def _saved_bytes(trainee: Trainee, data: Batch) -> int:
    """Bytes of memory that a forward keeps for backward, each storage once, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in trainee.model.parameters()}
    bytes_of: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            bytes_of[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trainee.loss(data)
    del loss
    return sum(bytes_of.values())


def _multiply_fast(model: torch.nn.Module) -> None:
    """Replace torch's linear layers, which are slow on some CPUs, by Ottava's without a recipe."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is torch.nn.Linear:
                setattr(parent, name, ottava.nn.Linear.from_linear(child))


class Trainee:
    """A model with the seed's weights, its optimizer and its schedule.

    Args:
        recipe: the recipe that is bound to the linear layers of the blocks, or its name; None
            binds none.
        size: the shape of the model.
        device: the device to train on.
        seed: the seed of the weights.
        dtype: the dtype of parameters and products; None means float32 parameters and BF16
            autocast.
    """

    def __init__(
        self,
        recipe: Recipe | str | None,
        *,
        size: Size,
        device: str = "cpu",
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.device = device
        self._autocast = dtype is None
        self.model = GPT(size).to(device, dtype)
        if recipe is not None:
            ottava.convert(self.model, recipe, exclude="head")
        _multiply_fast(self.model)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / _WARMUP)
        )

    def loss(self, data: Batch) -> torch.Tensor:
        """The loss on a batch, as a scalar tensor that backward can start from."""
        x, y = (t.to(self.device) for t in data)
        with torch.autocast(
            torch.device(self.device).type, dtype=torch.bfloat16, enabled=self._autocast
        ):
            return loss_of(self.model, x, y)

    def backward(self, data: Batch) -> float:
        """Compute the loss on a batch and leave its gradients in the parameters."""
        loss = self.loss(data)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return loss.item()

    def step(self, data: Batch) -> float:
        """Do one optimizer step on a batch, and return the loss from before the step."""
        loss = self.backward(data)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return loss


def train(
    recipe: Recipe | str | None,
    corpus: Corpus,
    *,
    size: str,
    steps: int,
    device: str,
    seed: int,
    progress: Callable[[float], None] = lambda loss: None,
) -> Run:
    """Train one run, with the same weights and batches as every other run with this seed.

    Args:
        recipe: a recipe or its name, or None for BF16 alone.
        corpus: the bytes to train on and to validate with.
        size: a key of :data:`ottava_demo.model.SIZES`.
        steps: number of optimizer steps.
        device: the device to train on.
        seed: seed of weights and batches.
        progress: called with the loss after each step.
    """
    shape = SIZES[size]
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.Generator().manual_seed(seed + 1)
    checks = [
        batch(corpus.validation, shape.batch, shape.length, held_out)
        for _ in range(_VALIDATION_BATCHES)
    ]
    # Another model takes a first step, so that the rate leaves out what torch and the kernels do
    # only once.
    first = Trainee(recipe, size=shape, device=device, seed=seed)
    saved_bytes = _saved_bytes(first, checks[0])
    first.step(checks[0])
    del first

    trainee = Trainee(recipe, size=shape, device=device, seed=seed)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    losses: list[float] = []
    start = time.perf_counter()
    for _ in range(steps):
        losses.append(trainee.step(batch(corpus.train, shape.batch, shape.length, generator)))
        progress(losses[-1])
    elapsed = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None

    trainee.model.eval()
    with torch.no_grad():
        validation = sum(trainee.loss(check).item() for check in checks) / len(checks)
    rate = steps * shape.batch * shape.length / elapsed
    products = str(product_dtype(torch.bfloat16, torch.device(device))).removeprefix("torch.")
    name = recipe.name if isinstance(recipe, Recipe) else recipe or "bf16"
    return Run(name, losses, validation, rate, saved_bytes, products, peak)
