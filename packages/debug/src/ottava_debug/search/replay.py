"""Runs a captured step again, as captured or with some operands of products in high precision."""

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ottava.checkpoint.files import DTYPES
from ottava.errors import CheckpointError, UsageError, translated
from ottava.recipes import Recipe
from ottava_debug.bundle import Bundle
from ottava_debug.capturing import set_random_state
from ottava_debug.losses import LOSSES, Loss, loss_in
from ottava_debug.products import Inspection, Watch
from ottava_debug.recorder import Recorder
from ottava_debug.search.loading import converted, fitting_state, restore
from ottava_debug.search.measure import Outcome
from ottava_debug.search.operands import (
    CapturedOperands,
    Comparison,
    First,
    Inspecting,
    Operand,
    Switched,
)
from ottava_debug.trees import ends, tensors_of, unflatten


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
        self.model: Any = converted(model, step, recipe)
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
        if missing := self._captured.missing(recorder):
            what = (
                f"call {missing[1]} of layer {missing[0]!r} was captured, and the model did "
                f"not make it"
            )
            raise CheckpointError(
                what, expected="the model that was captured", remedy="give the same model"
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
        chosen = quantized if isinstance(quantized, (set, frozenset)) else frozenset(quantized)
        generator = torch.Generator().manual_seed(0) if nudged else None
        inspect = partial(Switched, chosen=chosen, nudge=generator, look=look, shrunk=shrunk)
        return self._run(inspect, backward)[0]

    def _first(self) -> tuple[Outcome, Recorder]:
        """Run the first replay, again and again until no further quantizer raises; operands whose
        quantizers raise stay in high precision."""
        while True:
            known = len(self.broken)
            try:
                return self._run(First, backward=True)
            except UsageError:
                if len(self.broken) == known:
                    raise
                self._captured = CapturedOperands(self.step, self._fed)

    def _run(self, inspect: Callable[..., Inspection], backward: bool) -> tuple[Outcome, Recorder]:
        self.replays += 1
        restore(self.model, self.step, self._state)
        begun = {"operands": self._captured, "broken": self.broken}
        names = {id(layer): name for name, layer in self.layers.items()}
        recorder = Inspecting(names, partial(inspect, **begun))
        what, remedy = (
            "the step cannot be replayed",
            "give the model of the step, and its loss function",
        )
        with (
            Watch(recorder),
            self._surroundings(),
            translated(what, "the captured step", remedy, to=UsageError),
        ):
            loss = self._events(backward)
        named = self.model.named_parameters()
        gradients = {name: _gradient(p) for name, p in named if p.requires_grad} if backward else {}
        for p in self.model.parameters():
            p.grad = None
        return Outcome(loss, gradients), recorder

    def _events(self, backward: bool) -> float:
        """Run the forward and backward passes in the captured order, and return the total loss."""
        total, waiting, events = 0.0, [], self.step.events
        for place, event in enumerate(events):
            kind, number = event.split(" ")
            if kind == "forward":
                said = self.step.arguments[int(number)]
                args, kwargs = (
                    unflatten(said[key], self.step.tensors, self.device)
                    for key in ("args", "kwargs")
                )
                output = ends(self.model(*args, **kwargs))
                found = self._losses(int(number), output)
                self.knows_loss &= found is not None
                total += float("nan") if found is None else float(found.detach())
                waiting.append((int(number), output, found))
            elif backward and not (
                place + 1 < len(events) and events[place + 1].startswith("backward")
            ):
                # One backward pass starts from all outputs at which the captured one began.
                began = {
                    int(e.split(" ")[1]) for e in events[: place + 1] if e.startswith("backward")
                }
                self._backward([entry for entry in waiting if entry[0] in began])
                waiting = [entry for entry in waiting if entry[0] not in began]
        return total

    def _losses(self, number: int, output: Any) -> torch.Tensor | None:
        if self._loss is None:
            return loss_in(output)
        targets = self._targets if len(self.step.arguments) == 1 else self._targets[number]
        return self._loss(output, targets)

    def _backward(self, of: list[tuple[int, Any, torch.Tensor | None]]) -> None:
        """Run the backward pass from the losses, scaled as in the captured step, or from the
        captured gradients."""
        roots, seeds = [], []
        for number, output, loss in of:
            outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
            captured = [
                self.step.tensors.get(f"seed.{number}.{place}") for place in range(len(outputs))
            ]
            if loss is None:
                pairs = [
                    (o, c.to(o)) for o, c in zip(outputs, captured, strict=True) if c is not None
                ]
                if not all(bool(c.isfinite().all()) for _, c in pairs):
                    what = (
                        "the captured gradients of the model's outputs are not finite, and no "
                        "loss function is known"
                    )
                    raise UsageError(
                        what,
                        expected="a loss function",
                        remedy="give loss=, or --loss for the command",
                    )
                roots += [o for o, _ in pairs]
                seeds += [c for _, c in pairs]
            else:
                if number not in self.scales:
                    self.scales[number] = _scale(loss, outputs, captured, self._fed)
                roots.append(loss)
                seeds.append(torch.full_like(loss, self.scales[number]))
        if not any(root.requires_grad for root in roots):
            raise CheckpointError(
                "no output of the model needs a gradient", expected="parameters that are not frozen"
            )
        torch.autograd.backward(roots, seeds)

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


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return (
        torch.zeros(parameter.shape, device=parameter.device)
        if parameter.grad is None
        else parameter.grad
    )


def _scale(
    loss: torch.Tensor, outputs: list[torch.Tensor], captured: list[torch.Tensor | None], fed: bool
) -> float:
    """The factor by which the captured step multiplied the loss, such as one over the number of
    microbatches.

    It follows from the gradients of the model's outputs, and is 1 where these are not known or not
    finite.
    """
    known = [
        (o, c)
        for o, c in zip(outputs, captured, strict=True)
        if c is not None and bool(c.isfinite().all())
    ]
    if not known or (len(known) == 1 and known[0][0] is loss):
        return float(known[0][1]) if known else 1.0
    found = torch.autograd.grad(loss, [o for o, _ in known], retain_graph=True, allow_unused=True)
    pairs = [
        (f.double(), c.to(f).double())
        for f, (_, c) in zip(found, known, strict=True)
        if f is not None
    ]
    ours, both = (
        sum(float((f * f).sum()) for f, _ in pairs),
        sum(float((f * c).sum()) for f, c in pairs),
    )
    theirs = sum(float((c * c).sum()) for _, c in pairs)
    alike = both > 0.9 * (ours * theirs) ** 0.5
    if not ours or not theirs or not (alike or fed):
        return 1.0
    if not alike:
        what = "the loss function gives other gradients of the model's outputs than were captured"
        raise UsageError(
            what,
            expected="the loss of the captured step",
            remedy="give its loss function and targets",
        )
    ratio = both / ours
    # A ratio close to a usual factor becomes that exact factor: gradient scales are powers of two,
    # and the number of microbatches is a whole number. Under another recipe the ratio is less
    # precise, because the model's outputs differ.
    whole, within = max(1, round(max(ratio, 1 / ratio))), 0.01 if fed else 0.1
    for exact in (2.0 ** round(math.log2(ratio)), float(whole) if ratio >= 1 else 1 / whole):
        if abs(ratio / exact - 1) < within:
            return exact
    return ratio
