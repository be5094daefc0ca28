"""A sharded optimizer (ZeRO) over weights in FP8: every rank has all weights, and a part of
everything else.

    torchrun --nproc-per-node 2 examples/zero.py --recipe current --steps 20
    python examples/zero.py

Each rank computes with the whole model, whose weights are FP8 and lie end to end in one buffer.
Master weights and Adam's moments are float32; of these a rank has an even range of the elements,
wherever that begins and ends. A step:

1. gradients are summed over the ranks: all of them on each rank (stage 1), or only its range (stage
   2);
2. AdamW on the range;
3. ``MasterWeights.quantize``: one all-reduce for the amaxes of all weights, and the bytes of the
   range are written;
4. one all-gather brings the bytes of the other ranges into the buffer, and with that into the
   weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from common import Checkpoints, Text, arguments, digest, leave, make_gpt, mean, ranks, say
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ottava
from ottava.distributed import MasterWeights, replace_raw_data
from ottava.errors import UsageError
from ottava.tensors import QuantizedTensorStorage
from ottava_demo.training import loss_of


class FlatParameters:
    """Parameters end to end, of which this rank owns the elements from ``begin`` to ``end``.

    Args:
        parameters: all quantized by one recipe, or none quantized and all of one dtype.
        values: what they are before rounding, the initial master weights.
        mesh: the ranks, in one dimension.

    Attributes:
        buffers: what the parameters are views of. MX has data for rows and data for columns: two of
            them.
        master, exp_avg, exp_avg_sq: float32, ``[end - begin]``.
        gradient: the same, once it is reduced.
    """

    def __init__(
        self, parameters: Sequence[Any], values: Sequence[torch.Tensor], mesh: DeviceMesh
    ) -> None:
        self.parameters, self.mesh = list(parameters), mesh
        self.starts = list(accumulate((p.numel() for p in parameters), initial=0))
        self.numel = self.starts[-1]
        # As DTensor cuts a dimension, so that checkpoints fit any number of ranks: the last range
        # may be shorter.
        self.chunk = math.ceil(self.numel / mesh.size())
        self.begin = min(mesh.get_local_rank() * self.chunk, self.numel)
        self.end = min(self.begin + self.chunk, self.numel)
        self.buffers = self._move_into_buffers()
        device = mesh.device_type
        self.master = torch.empty(self.end - self.begin, device=device)
        for value, part in zip(values, self.parts(), strict=True):
            if part is not None:
                self.cut(self.master, part).copy_(value.flatten()[part[1] : part[1] + part[2]])
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.gradient: torch.Tensor | None = None

    def _move_into_buffers(self) -> list[torch.Tensor]:
        size, first = self.chunk * self.mesh.size(), self.parameters[0]
        places = list(zip(self.parameters, self.starts, strict=False))
        if not isinstance(first, QuantizedTensorStorage):
            buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
            for parameter, start in places:
                view = buffer[start : start + parameter.numel()].view(parameter.shape)
                parameter.data = view.copy_(parameter.data)
            return [buffer]
        buffers = [
            torch.zeros(size, dtype=torch.uint8, device=first.device) for _ in first.raw_inner()
        ]
        for parameter, start in places:
            replace_raw_data(
                parameter, [buffer[start : start + parameter.numel()] for buffer in buffers]
            )
        return buffers

    def parts(self) -> Iterator[tuple[int, int, int] | None]:
        """Of each parameter what this rank owns: where in its range, where in the parameter, and
        how many; or None."""
        for parameter, start in zip(self.parameters, self.starts, strict=False):
            low, high = max(start, self.begin), min(start + parameter.numel(), self.end)
            yield (low - self.begin, low - start, high - low) if low < high else None

    @staticmethod
    def cut(owned: torch.Tensor, part: tuple[int, int, int]) -> torch.Tensor:
        """A parameter's part of something that has the elements of this rank's range."""
        return owned[part[0] : part[0] + part[2]]

    def reduce_gradients(self, stage: int) -> None:
        """Add the mean of the ranks' gradients to ``gradient``, and drop the parameters' own."""
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
        """Bring what the other ranks own into the buffers."""
        for buffer in self.buffers:
            ranges = list(buffer.chunk(self.mesh.size()))
            dist.all_gather(ranges, ranges[self.mesh.get_local_rank()], group=self.mesh.get_group())

    def state(self) -> dict[str, DTensor]:
        """Master weights and moments as tensors of all ranks, sharing memory with those here."""
        owned = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        size = torch.Size([self.numel])
        return {
            name: DTensor.from_local(
                value, self.mesh, [Shard(0)], run_check=False, shape=size, stride=(1,)
            )
            for name, value in owned.items()
        }


class ZeroOptimizer:
    """AdamW whose master weights and moments are sharded over the ranks, for a model of which each
    rank has the whole.

    Args:
        model: its quantized parameters become views of one buffer for each of their directions, the
            others (embeddings, biases, norms) of another.
        mesh: the ranks, in one dimension.
        stage: 1 keeps gradients as they are until the last backward pass of a step, 2 those of the
            rank's own range.
        lr, betas, eps: as in ``torch.optim.AdamW``.
        weight_decay: of the quantized weights.
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
        kept = [self._initial_value(parameter) for parameter in kinds[True]]
        self.weights, self.decay = FlatParameters(kinds[True], kept, mesh), weight_decay
        self.flat = {"weights": self.weights}
        if kinds[False]:
            self.flat["others"] = FlatParameters(
                kinds[False], [p.detach() for p in kinds[False]], mesh
            )
        owned = list(self.weights.parts())
        # What does not change from step to step is looked up here, once.
        self.masters = MasterWeights(
            self.weights.parameters,
            [
                None if part is None else self.weights.cut(self.weights.master, part)
                for part in owned
            ],
            start_offsets=[None if part is None else part[1] for part in owned],
            amax_reduce_group=mesh.get_group(),
        )

    @staticmethod
    def _initial_value(parameter: Any) -> torch.Tensor:
        value: torch.Tensor = parameter.get_high_precision_init_val()
        parameter.clear_high_precision_init_val()
        return value

    def reduce_gradients(self) -> None:
        """To be called after each backward pass of a step (stage 2), or after the last one (stage
        1)."""
        for flat in self.flat.values():
            flat.reduce_gradients(self.stage)

    @torch.no_grad()
    def step(self) -> None:
        """One step, from the gradients that were reduced."""
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
        """As ``torch.optim.AdamW`` computes it, element by element."""
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
        """For ``save_sharded`` and, in place, ``load_sharded``."""
        return {"count": self.count, **{name: flat.state() for name, flat in self.flat.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``load_sharded`` gave: the tensors are loaded already."""
        self.count = state["count"]


def train(options: Any, mesh: DeviceMesh) -> None:
    """The training loop, from the latest checkpoint on if there is one."""
    recipe = ottava.get_recipe(options.recipe, **options.options)
    torch.manual_seed(options.seed)
    with ottava.quantized_model_init(recipe):
        model = make_gpt(options, torch.bfloat16).to(mesh.device_type)
    ottava.convert(model, recipe, exclude="head")
    optimizer = ZeroOptimizer(model, mesh, stage=options.stage, lr=options.lr)
    text = Text(options)

    checkpoints = Checkpoints(model, optimizer, options)
    for step in range(checkpoints.resume(), options.steps):
        total = torch.zeros((), device=mesh.device_type)
        # One region for all microbatches: scales that come of past steps change once in a step.
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


def main(given: Sequence[str] | None = None) -> None:
    """Run with these arguments, or those of the command line."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--stage", type=int, choices=(1, 2), default=1, help="2 shards the gradients as well"
    )
    options = parser.parse_args(given)
    with ranks(options) as mesh:
        train(options, mesh)


if __name__ == "__main__":
    main()
    leave()
