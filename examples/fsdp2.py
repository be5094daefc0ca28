"""FSDP2 with weights in FP8: ``fully_shard`` on the layers of a model that Ottava converted.

    torchrun --nproc-per-node 2 examples/fsdp2.py --recipe mxfp8 --steps 20
    python examples/fsdp2.py --weights primary

With ``--weights high-precision`` each rank keeps its rows of the weights in float32 (or bfloat16),
and quantizes them when they are gathered. With ``--weights primary`` each rank keeps its rows in
FP8. The optimizer then has master weights, from which all weights are quantized after a step, with
one all-reduce. Either way a gather moves one byte an element. Checkpoints are sharded, and a run
continues from the latest one on any number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from common import (
    Checkpoints,
    Text,
    arguments,
    digest,
    initial_values,
    leave,
    make_gpt,
    mean,
    ranks,
    say,
    seed_step,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import clip_grad_norm_

import ottava
from ottava.distributed import gather_quantized, quantize_master_weights
from ottava.tensors import QuantizedTensorStorage
from ottava_demo.training import loss_of


def make_model(options: Any, mesh: DeviceMesh) -> torch.nn.Module:
    """The sharded model, in memory but without values.

    It is made on the meta device, so that no rank ever has the whole model.
    """
    recipe = ottava.get_recipe(options.recipe, **options.options)
    dtype, policy = torch.bfloat16, MixedPrecisionPolicy()
    if options.mixed_precision:
        # Parameters are kept in float32, and become bfloat16 when they are gathered.
        dtype, policy = torch.float32, MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    primary = options.weights == "primary"
    with (
        torch.device("meta"),
        ottava.quantized_model_init(recipe) if primary else contextlib.nullcontext(),
    ):
        model = make_gpt(options, dtype)
    # The order matters: convert, gather_quantized, compile, fully_shard; then memory, the
    # optimizer and values.
    ottava.convert(model, recipe, exclude="head")
    if not primary:
        gather_quantized(model)
    for block in model.blocks:
        if options.compile:
            block.forward = torch.compile(block.forward, backend=options.compile, fullgraph=True)
        fully_shard(block, mesh=mesh, reshard_after_forward=options.reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=options.reshard, mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    return model


def is_quantized(parameter: Any) -> bool:
    """Whether this rank's rows of a parameter are FP8."""
    return isinstance(parameter.to_local(), QuantizedTensorStorage)


def rows_of(values: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Values that every rank has whole, sharded as the parameter is."""
    return distribute_tensor(
        values, parameter.device_mesh, parameter.placements, src_data_rank=None
    )


class ShardedAdamW:
    """AdamW on sharded parameters, or on float32 master weights if some of them are quantized.

    Args:
        model: the sharded model; its parameters get their initial values here.
        seed: the seed of these values.
        lr: the learning rate.
        max_norm: the norm that gradients are clipped to.
    """

    def __init__(self, model: torch.nn.Module, seed: int, lr: float, max_norm: float) -> None:
        self.parameters: list[Any] = list(model.parameters())
        self.quantized = [
            place for place, parameter in enumerate(self.parameters) if is_quantized(parameter)
        ]
        values = (rows_of(whole.to(p.device), p) for _, p, whole in initial_values(model, seed))
        if self.quantized:
            self.optimized = [torch.nn.Parameter(value) for value in values]
            self.write()
        else:
            self.optimized = self.parameters
            with torch.no_grad():
                for parameter, value in zip(self.parameters, values, strict=True):
                    parameter.copy_(value)
        self.adamw = torch.optim.AdamW(self.optimized, lr=lr, betas=(0.9, 0.95))
        self.max_norm = max_norm

    @torch.no_grad()
    def step(self) -> None:
        """Clip, step, and bring the model's parameters up to date."""
        if self.quantized:
            for parameter, master in zip(self.parameters, self.optimized, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
        clip_grad_norm_(self.optimized, self.max_norm)
        self.adamw.step()
        self.adamw.zero_grad()
        if self.quantized:
            self.write()

    @torch.no_grad()
    def write(self) -> None:
        """Round the master weights into the parameters.

        One call, with one all-reduce, writes all quantized parameters.
        """
        weights, masters = (
            [of[place] for place in self.quantized] for of in (self.parameters, self.optimized)
        )
        quantize_master_weights(weights, masters, None)
        for place, (parameter, master) in enumerate(
            zip(self.parameters, self.optimized, strict=True)
        ):
            if place not in self.quantized:
                parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state, and the master weights if there are any."""
        if not self.adamw.state:
            # AdamW makes its state in the first step; a checkpoint is loaded before that.
            for parameter in self.optimized:
                moments = {
                    name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")
                }
                self.adamw.state[parameter] = {"step": torch.tensor(0.0), **moments}
        masters = [master.detach() for master in self.optimized] if self.quantized else []
        return {"adamw": self.adamw.state_dict(), "masters": masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore AdamW's state; ``load_sharded`` has loaded the master weights in place."""
        self.adamw.load_state_dict(state["adamw"])


def train(options: Any, mesh: DeviceMesh) -> None:
    """Train, from the latest checkpoint on if there is one."""
    model = make_model(options, mesh)
    optimizer = ShardedAdamW(model, options.seed, options.lr, options.max_norm)
    text = Text(options)

    checkpoints = Checkpoints(model, optimizer, options)
    for step in range(checkpoints.resume(), options.steps):
        seed_step(options, step)
        total = torch.zeros((), device=mesh.device_type)
        # One region contains all microbatches, so that scales from past steps change once a step.
        with ottava.autocast():
            for number, (x, y) in enumerate(text.batches(step, mesh), 1):
                # Gradients are reduced in the last backward pass of a step.
                model.set_requires_gradient_sync(number == options.accumulate)
                loss = loss_of(model, x, y) / options.accumulate
                loss.backward()
                total += loss.detach()
        optimizer.step()
        say(f"step {step + 1} loss {mean(total):.6f}")
        checkpoints.save(step + 1)
    say(f"weights {digest(dict(model.named_parameters()))}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run with these arguments, or with those of the command line."""
    parser = arguments(__doc__)
    flag = argparse.BooleanOptionalAction
    parser.add_argument(
        "--weights", choices=("primary", "high-precision"), default="high-precision"
    )
    parser.add_argument(
        "--reshard", action=flag, default=True, help="give weights up after the forward pass"
    )
    parser.add_argument(
        "--mixed-precision", action=flag, default=True, help="float32 parameters, used in bfloat16"
    )
    parser.add_argument(
        "--max-norm", type=float, default=1.0, help="of the gradients, which are clipped to it"
    )
    parser.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="compile the blocks; one-dimensional MXFP8 needs --no-reshard",
    )
    options = parser.parse_args(argv)
    with ranks(options) as mesh:
        train(options, mesh)


if __name__ == "__main__":
    main()
    leave()
