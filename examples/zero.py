"""A sharded optimizer (ZeRO) for FP8 weights: each rank has all weights, and shards of the rest.

    torchrun --nproc-per-node 2 examples/zero.py --recipe current --steps 20
    python examples/zero.py

Each rank computes with the whole model, whose weights are FP8 and lie end to end in one buffer.
Master weights and Adam's moments are float32. Each rank has an equal range of their elements, which
may begin and end inside a weight. A step has four stages:

1. Gradients are summed over the ranks: all of them on each rank (ZeRO stage 1), or only those of
   the rank's range (ZeRO stage 2).
2. AdamW updates the range.
3. ``MasterWeights.quantize`` reduces the amaxes of all weights in one all-reduce, and writes the
   bytes of the range.
4. One all-gather brings the bytes of the other ranges into the buffer, and so into the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Checkpoints,
    Text,
    arguments,
    digest,
    leave,
    make_gpt,
    mean,
    ranks,
    say,
    seed_step,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ottava
from ottava.distributed import MasterWeights, replace_raw_data
from ottava.errors import UsageError
from ottava.tensors import QuantizedTensorStorage
from ottava_demo.training import loss_of


class FlatParameters:
    """Parameters that lie end to end; this rank owns the elements from ``begin`` to ``end``.

    Args:
        parameters: all quantized by one recipe, or none quantized and all of one dtype.
        values: their values before rounding, which are the initial master weights.
        mesh: the ranks, in one dimension.

    Attributes:
        buffers: the memory that the parameters are views of. MX has two buffers, for rowwise and
            for columnwise data.
        master, exp_avg, exp_avg_sq: float32, ``[end - begin]``.
        gradient: the reduced gradient of the same shape, or None before it is reduced.
    """

    def __init__(
        self, parameters: Sequence[Any], values: Sequence[torch.Tensor], mesh: DeviceMesh
    ) -> None:
        self.parameters, self.mesh = list(parameters), mesh
        self.starts = list(accumulate((p.numel() for p in parameters), initial=0))
        self.numel = self.starts[-1]
        # Ranges are those into which DTensor cuts a dimension, so that checkpoints fit any number
        # of ranks. The last range may be shorter.
        self.chunk = math.ceil(self.numel / mesh.size())
        self.begin = min(mesh.get_local_rank() * self.chunk, self.numel)
        self.end = min(self.begin + self.chunk, self.numel)
        self.buffers = self._move_into_buffers()
        device = mesh.device_type
        self.master = torch.empty(self.end - self.begin, device=device)
        for value, shard in zip(values, self.shards(), strict=True):
            if shard is not None:
                self.cut(self.master, shard).copy_(value.flatten()[shard[1] : shard[1] + shard[2]])
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.gradient: torch.Tensor | None = None

    def _move_into_buffers(self) -> list[torch.Tensor]:
        """Make the parameters views of new buffers, and return these."""
        size, first = self.chunk * self.mesh.size(), self.parameters[0]
        places = list(zip(self.parameters, self.starts, strict=False))
        if not isinstance(first, QuantizedTensorStorage):
            buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
            for parameter, start in places:
                view = buffer[start : start + parameter.numel()].view(parameter.shape)
                parameter.data = view.copy_(parameter.data)
            return [buffer]
        # A byte holds two elements of four bits.
        per_byte = first.numel() // getattr(first, first.raw_inner()[0].attribute).numel()
        if self.chunk % per_byte:
            raise UsageError(
                f"{self.numel} elements of which a byte holds {per_byte}, over {self.mesh.size()} "
                "ranks",
                expected="whole bytes for each rank",
                remedy="take another number of ranks",
            )
        buffers = [
            torch.zeros(size // per_byte, dtype=torch.uint8, device=first.device)
            for _ in first.raw_inner()
        ]
        for parameter, start in places:
            place = slice(start // per_byte, (start + parameter.numel()) // per_byte)
            replace_raw_data(parameter, [buffer[place] for buffer in buffers])
        return buffers

    def shards(self) -> Iterator[tuple[int, int, int] | None]:
        """This rank's shard of each parameter, or None where it has none.

        A shard is its offset in this rank's range, its offset in the parameter, and its number of
        elements.
        """
        for parameter, start in zip(self.parameters, self.starts, strict=False):
            low, high = max(start, self.begin), min(start + parameter.numel(), self.end)
            yield (low - self.begin, low - start, high - low) if low < high else None

    @staticmethod
    def cut(owned: torch.Tensor, shard: tuple[int, int, int]) -> torch.Tensor:
        """The elements of a parameter's shard in a tensor that has those of this rank's range."""
        return owned[shard[0] : shard[0] + shard[2]]

    def reduce_gradients(self, stage: int) -> None:
        """Add the mean of the ranks' gradients to ``gradient``, and drop those of parameters."""
        flat = torch.zeros(self.chunk * self.mesh.size(), device=self.master.device)
        for parameter, start in zip(self.parameters, self.starts, strict=False):
            if parameter.grad is not None:
                flat[start : start + parameter.numel()].copy_(parameter.grad.flatten())
                parameter.grad = None
        ranges, own = list(flat.chunk(self.mesh.size())), self.mesh.get_local_rank()
        if stage == 1:
            dist.all_reduce(flat, group=self.mesh.get_group())
            mine = ranges[own]
        else:
            mine = torch.empty_like(ranges[own])
            dist.reduce_scatter(mine, ranges, group=self.mesh.get_group())
        mine = mine[: self.end - self.begin] / self.mesh.size()
        self.gradient = mine if self.gradient is None else self.gradient + mine

    def gather(self) -> None:
        """Gather the elements that the other ranks own into the buffers."""
        for buffer in self.buffers:
            ranges = list(buffer.chunk(self.mesh.size()))
            dist.all_gather(ranges, ranges[self.mesh.get_local_rank()], group=self.mesh.get_group())

    def state(self) -> dict[str, DTensor]:
        """Master weights and moments as tensors over all ranks, which share memory with these."""
        owned = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        size = torch.Size([self.numel])
        return {
            name: DTensor.from_local(
                value, self.mesh, [Shard(0)], run_check=False, shape=size, stride=(1,)
            )
            for name, value in owned.items()
        }


class ZeroOptimizer:
    """AdamW with master weights and moments that are sharded over the ranks.

    Each rank has the whole model.

    Args:
        model: the model. Its quantized parameters become views of one buffer for each of their
            directions, the others (embeddings, biases, norms) views of another buffer.
        mesh: the ranks, in one dimension.
        stage: with 1 all gradients are kept until the last backward pass of a step, with 2 only
            those of the rank's own range.
        lr, betas, eps: as in ``torch.optim.AdamW``.
        weight_decay: the weight decay of the quantized weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        mesh: DeviceMesh,
        *,
        stage: int = 1,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self.stage, self.lr, self.betas, self.eps, self.count = stage, lr, betas, eps, 0
        self.mesh = mesh
        kinds: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for parameter in model.parameters():
            kinds[isinstance(parameter, QuantizedTensorStorage)].append(parameter)
        values = [self._initial_value(parameter) for parameter in kinds[True]]
        self.weights = FlatParameters(kinds[True], values, mesh)
        self.decay = weight_decay
        self.flat = {"weights": self.weights}
        if kinds[False]:
            self.flat["others"] = FlatParameters(
                kinds[False], [p.detach() for p in kinds[False]], mesh
            )
        shards = list(self.weights.shards())
        # This looks up once what does not change from step to step.
        self.masters = MasterWeights(
            self.weights.parameters,
            [
                None if shard is None else self.weights.cut(self.weights.master, shard)
                for shard in shards
            ],
            start_offsets=[None if shard is None else shard[1] for shard in shards],
            amax_reduce_group=mesh.get_group(),
        )

    @staticmethod
    def _initial_value(parameter: Any) -> torch.Tensor:
        value: torch.Tensor = parameter.get_high_precision_init_val()
        parameter.clear_high_precision_init_val()
        return value

    def reduce_gradients(self) -> None:
        """Reduce gradients, after each backward pass of a step (stage 2) or the last (stage 1)."""
        for flat in self.flat.values():
            flat.reduce_gradients(self.stage)

    @torch.no_grad()
    def step(self) -> None:
        """Do one step with the reduced gradients."""
        self.count += 1
        for name, flat in self.flat.items():
            self._adamw(flat, self.decay if name == "weights" else 0.0)
        self.masters.quantize()
        if "others" in self.flat:
            others = self.flat["others"]
            others.buffers[0][others.begin : others.end].copy_(others.master)
        for flat in self.flat.values():
            flat.gather()

    def _adamw(self, flat: FlatParameters, decay: float) -> None:
        """Update master weights and moments as ``torch.optim.AdamW`` does."""
        first, second = self.betas
        gradient, flat.gradient = flat.gradient, None
        if gradient is None:
            raise UsageError(
                "there are no gradients", remedy="call backward() and reduce_gradients() first"
            )
        flat.exp_avg.lerp_(gradient, 1 - first)
        flat.exp_avg_sq.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        spread = (flat.exp_avg_sq.sqrt() / math.sqrt(1 - second**self.count)).add_(self.eps)
        flat.master.mul_(1 - self.lr * decay).addcdiv_(
            flat.exp_avg, spread, value=-self.lr / (1 - first**self.count)
        )

    def state_dict(self) -> dict[str, Any]:
        """The state for ``save_sharded``, and for ``load_sharded``, which loads it in place."""
        return {"count": self.count, **{name: flat.state() for name, flat in self.flat.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the count; ``load_sharded`` has loaded the tensors in place."""
        self.count = state["count"]


def train(options: Any, mesh: DeviceMesh) -> None:
    """Train, from the latest checkpoint on if there is one."""
    recipe = ottava.get_recipe(options.recipe, **options.options)
    torch.manual_seed(options.seed)
    with ottava.quantized_model_init(recipe):
        model = make_gpt(options, torch.bfloat16).to(mesh.device_type)
    ottava.convert(model, recipe, exclude="head")
    optimizer = ZeroOptimizer(model, mesh, stage=options.stage, lr=options.lr)
    text = Text(options)

    checkpoints = Checkpoints(model, optimizer, options)
    for step in range(checkpoints.resume(), options.steps):
        seed_step(options, step)
        total = torch.zeros((), device=mesh.device_type)
        # One region contains all microbatches, so that scales from past steps change once a step.
        with ottava.autocast():
            for left, (x, y) in enumerate(text.batches(step, mesh), 1 - options.accumulate):
                loss = loss_of(model, x, y) / options.accumulate
                loss.backward()
                total += loss.detach()
                if options.stage == 2 or left == 0:
                    optimizer.reduce_gradients()
        optimizer.step()
        say(f"step {step + 1} loss {mean(total):.6f}")
        checkpoints.save(step + 1)
    say(f"weights {digest(dict(model.named_parameters()))}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run with these arguments, or with those of the command line."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--stage", type=int, choices=(1, 2), default=1, help="2 shards the gradients as well"
    )
    options = parser.parse_args(argv)
    with ranks(options) as mesh:
        train(options, mesh)


if __name__ == "__main__":
    main()
    leave()
