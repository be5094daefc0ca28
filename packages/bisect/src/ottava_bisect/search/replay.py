"""Runs a captured step again, as captured or with some operands of products in high precision."""

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ottava.checkpoint.files import DTYPES
from ottava.errors import CheckpointError, UsageError, translated
from ottava.recipes import Recipe
from ottava_bisect.bundle import Bundle
from ottava_bisect.capturing import set_random_state
from ottava_bisect.recorder import Recorder
from ottava_bisect.search.loading import convert_model, fitting_state, restore
from ottava_bisect.search.measure import Outcome
from ottava_bisect.search.operands import (
    CapturedOperands,
    Comparison,
    First,
    Inspecting,
    Operand,
    Switched,
)
from ottava_bisect.trees import ends, tensors_of, unflatten
from ottava_debug.losses import LOSSES, Loss, loss_in
from ottava_debug.products import Inspection, Watch


class Replay:
    """Runs a captured step with a model.

    Each product takes the captured operands. If another machine sums in another order, the operands
    that arrive at a product differ from the captured ones. In the first replay the captured
    operands replace them. In later replays the captured operands are used, plus the difference
    between the operand that arrives now and the one that arrived in the first replay. Therefore the
    whole step has the captured quantized bytes, and a change in one layer still affects the others.

    Args:
        step: the captured step.
        model: the model; the step's state is loaded into it, now and in each replay.
        loss: the loss function. None uses the one that the step names, otherwise the loss that the
            model returns, otherwise the captured gradients of the model's outputs.
        recipe: the recipe of the replays; None uses the captured ones, or those of a model that is
            converted.
        fed: whether products take the captured operands, which they must not under another recipe
            than that of the step.
        scales: :attr:`scales` of another replay of the step; None computes them.

    Attributes:
        model: the converted model.
        layers: its captured layers, by name.
        comparison: the comparison of the first replay with the captured step.
        first: the outcome of the first replay.
        operands: the operands that were quantized in the first replay.
        broken: the operands whose quantizers raise -> the error; they are in high precision in all
            replays.
        scales: number of a call of the model -> the factor by which the captured step multiplied
            the loss of that call.
        knows_loss: whether there is a loss.
        replays: the number of replays so far.

    Raises:
        CheckpointError: the model is not the captured one.
        UsageError: the captured recipe cannot be built from data and ``recipe`` is None; or the
            model or the loss function raises an error, which is the cause of this one.
    """

    def __init__(
        self,
        step: Bundle,
        model: torch.nn.Module,
        *,
        loss: Loss | None = None,
        recipe: Recipe | None = None,
        fed: bool = True,
        scales: dict[int, float] | None = None,
    ) -> None:
        self.step = step
        self.model: Any = convert_model(model, step, recipe)
        self.layers = {name: self.model.get_submodule(name) for name in step.layers}
        for layer in self.layers.values():
            layer.__dict__["fuse_wgrad_accumulation"] = False
        self.device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self._loss = loss or LOSSES.get(step.loss_name)
        self._targets = unflatten(step.targets, step.tensors, self.device)
        self._state = fitting_state(self.model, step.state)
        self.scales, self._fed = dict(scales or {}), fed
        self.replays, self.knows_loss = 0, True
        self.broken: dict[Operand, Exception] = {}
        self._captured = CapturedOperands(step, fed)
        self.first, recorder = self._first()
        self.comparison = self._captured.comparison
        if absent := self._captured.missing(recorder):
            name, number = absent
            raise CheckpointError(
                f"call {number} of layer {name!r} was captured, and the model did not make it",
                expected="the model that was captured",
                remedy="give the same model",
            )
        self.operands = tuple(self.comparison.statistics)

    # -- replays --

    def run(
        self,
        quantized: Collection[Operand],
        *,
        backward: bool = True,
        nudged: bool = False,
        look: Comparison | None = None,
        shrunk: Mapping[Operand, float] = MappingProxyType({}),
    ) -> Outcome:
        """Run the step with these operands quantized and all others in high precision.

        Args:
            quantized: the operands that are quantized.
            backward: whether the backward pass is run, too.
            nudged: whether every operand is moved by the size of BF16's rounding, which shows the
                effect of rounding alone.
            look: records the loss that operands in high precision would have by quantization.
            shrunk: operand -> a factor for its values.

        Raises:
            UsageError: the model, the loss function or a quantizer raises an error.
        """
        generator = torch.Generator().manual_seed(0) if nudged else None
        inspect = partial(
            Switched, chosen=frozenset(quantized), nudge=generator, look=look, shrunk=shrunk
        )
        return self._run(inspect, backward)[0]

    def _first(self) -> tuple[Outcome, Recorder]:
        """Run the first replay, again and again until no further quantizer raises; operands whose
        quantizers raise stay in high precision."""
        while True:
            count = len(self.broken)
            try:
                return self._run(First, backward=True)
            except UsageError:
                if len(self.broken) == count:
                    raise
                self._captured = CapturedOperands(self.step, self._fed)

    def _run(self, inspect: Callable[..., Inspection], backward: bool) -> tuple[Outcome, Recorder]:
        self.replays += 1
        restore(self.model, self.step, self._state)
        names = {id(layer): name for name, layer in self.layers.items()}
        recorder = Inspecting(names, partial(inspect, operands=self._captured, broken=self.broken))
        with (
            Watch(recorder),
            self._surroundings(),
            translated(
                "the step cannot be replayed",
                "the captured step",
                "give the model of the step, and its loss function",
                to=UsageError,
            ),
        ):
            loss = self._events(backward)
        gradients: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if backward and parameter.requires_grad:
                gradients[name] = _gradient(parameter)
        for parameter in self.model.parameters():
            parameter.grad = None
        return Outcome(loss, gradients), recorder

    def _events(self, backward: bool) -> float:
        """Run the forward and backward passes in the captured order, and return the total loss."""
        total, passes = 0.0, list[_Pass]()
        # The numbers of the passes at which the next backward pass begins.
        starts: set[int] = set()
        events = [event.split(" ") for event in self.step.events]
        for place, (kind, text) in enumerate(events):
            number = int(text)
            if kind == "forward":
                passes.append(self._forward(number))
                total += passes[-1].loss_value
                continue
            starts.add(number)
            # One backward pass starts from all outputs at which the captured one began.
            is_last = place + 1 == len(events) or events[place + 1][0] != "backward"
            if backward and is_last:
                self._backward([each for each in passes if each.number in starts])
                passes = [each for each in passes if each.number not in starts]
        return total

    def _forward(self, number: int) -> "_Pass":
        """Call the model as in a captured call."""
        arguments = self.step.arguments[number]
        args = unflatten(arguments["args"], self.step.tensors, self.device)
        kwargs = unflatten(arguments["kwargs"], self.step.tensors, self.device)
        output = ends(self.model(*args, **kwargs))
        loss = self._loss_of(number, output)
        self.knows_loss &= loss is not None
        return _Pass(number, output, loss)

    def _loss_of(self, number: int, output: Any) -> torch.Tensor | None:
        if self._loss is None:
            return loss_in(output)
        targets = self._targets if len(self.step.arguments) == 1 else self._targets[number]
        return self._loss(output, targets)

    def _backward(self, passes: "Sequence[_Pass]") -> None:
        """Run the backward pass from the losses, scaled as in the captured step, or from the
        captured gradients."""
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []
        for each in passes:
            if each.loss is None:
                outputs, gradients = self._captured_gradients(each)
                roots += outputs
                seeds += gradients
            else:
                roots.append(each.loss)
                seeds.append(torch.full_like(each.loss, self._scale(each, each.loss)))
        if not any(root.requires_grad for root in roots):
            raise CheckpointError(
                "no output of the model needs a gradient", expected="parameters that are not frozen"
            )
        torch.autograd.backward(roots, seeds)

    def _seeds(self, number: int, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The captured gradients of the outputs of a call."""
        names = [f"seed.{number}.{place}" for place in range(len(outputs))]
        return [self.step.tensors.get(name) for name in names]

    def _captured_gradients(self, each: "_Pass") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs of a pass whose gradients were captured, and these gradients."""
        seeds = self._seeds(each.number, each.outputs)
        pairs = [
            (output, seed.to(output))
            for output, seed in zip(each.outputs, seeds, strict=True)
            if seed is not None
        ]
        if not all(bool(gradient.isfinite().all()) for _, gradient in pairs):
            raise UsageError(
                "the captured gradients of the model's outputs are not finite, and no loss "
                "function is known",
                expected="a loss function",
                remedy="give loss=, or --loss for the command",
            )
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]

    def _scale(self, each: "_Pass", loss: torch.Tensor) -> float:
        """The factor of the loss of a pass, which the first replay finds."""
        if each.number not in self.scales:
            seeds = self._seeds(each.number, each.outputs)
            self.scales[each.number] = _scale(loss, each.outputs, seeds, self._fed)
        return self.scales[each.number]

    # -- the step's surroundings --

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Set the random generators and autocast as captured, and restore both afterwards."""
        before = random.getstate()
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            set_random_state(self.step.tensors)
            if self.step.autocast:
                dtype = DTYPES[self.step.autocast]
                stack.enter_context(torch.autocast(self.device.type, dtype))
            try:
                yield
            finally:
                random.setstate(before)


@dataclass(frozen=True)
class _Pass:
    """A forward pass of the model: its number, its output, and its loss if there is one."""

    number: int
    output: Any
    loss: torch.Tensor | None

    @property
    def loss_value(self) -> float:
        """The loss as a number; NaN where there is none."""
        return math.nan if self.loss is None else float(self.loss.detach())

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The tensors of the output at which a backward pass may begin."""
        return [tensor for tensor in tensors_of(self.output) if tensor.requires_grad]


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.shape, device=parameter.device)
    return parameter.grad


def _scale(
    loss: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    captured: Sequence[torch.Tensor | None],
    fed: bool,
) -> float:
    """The factor by which the captured step multiplied the loss, such as one over the number of
    microbatches.

    It follows from the gradients of the model's outputs, and is 1 where these are not known or not
    finite.
    """
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, captured, strict=True)
        if gradient is not None and bool(gradient.isfinite().all())
    ]
    if not pairs:
        return 1.0
    if len(pairs) == 1 and pairs[0][0] is loss:
        return float(pairs[0][1])
    own = torch.autograd.grad(
        loss, [output for output, _ in pairs], retain_graph=True, allow_unused=True
    )
    own_square = own_dot_captured = captured_square = 0.0
    for gradient, (_, captured_gradient) in zip(own, pairs, strict=True):
        if gradient is not None:
            a, b = gradient.double(), captured_gradient.to(gradient).double()
            own_square += float((a * a).sum())
            own_dot_captured += float((a * b).sum())
            captured_square += float((b * b).sum())
    are_alike = own_dot_captured > 0.9 * (own_square * captured_square) ** 0.5
    if not own_square or not captured_square or not (are_alike or fed):
        return 1.0
    if not are_alike:
        raise UsageError(
            "the loss function gives other gradients of the model's outputs than were captured",
            expected="the loss of the captured step",
            remedy="give its loss function and targets",
        )
    return _usual_factor(own_dot_captured / own_square, tolerance=0.01 if fed else 0.1)


def _usual_factor(ratio: float, tolerance: float) -> float:
    """The usual factor that is close to a ratio, or the ratio itself.

    Gradient scales are powers of two, and the number of microbatches is a whole number. Under
    another recipe the ratio is less precise, because the model's outputs differ.
    """
    whole = max(1, round(max(ratio, 1 / ratio)))
    for factor in (2.0 ** round(math.log2(ratio)), float(whole) if ratio >= 1 else 1 / whole):
        if abs(ratio / factor - 1) < tolerance:
            return factor
    return ratio
