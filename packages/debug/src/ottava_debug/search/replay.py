"""A captured step, run again: as it was, or with some operands of products in high precision."""

import random
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

import ottava
from ottava.nn.loading import OF_STATE
from ottava.errors import CheckpointError, UsageError, text_of
from ottava.recipes import Recipe
from ottava.recipes.role import OF_LINEAR
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.bundle import Bundle, digest
from ottava_debug.capture import set_random_state
from ottava_debug.losses import LOSSES, Loss, loss_in
from ottava_debug.measures import Measures, compare
from ottava_debug.products import Inspection, Watch
from ottava_debug.recipe_data import build
from ottava_debug.recorder import BY_COLUMN, Recorder, Recording, taken
from ottava_debug.search.measure import Outcome, loss_of_operand
from ottava_debug.trees import tensors_of, unflatten

_NUDGE = 2.0**-9


class Operand(NamedTuple):
    """One operand of one of a layer's products: layer, tensor and direction."""

    layer: str
    gemm: str
    tensor: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.tensor} in {self.gemm}"


class Comparison:
    """How near the replay of the whole step came to the captured one.

    Attributes:
        operands: how many high-precision operands were compared: activations and incoming gradients.
        equal: how many of them arrived as they were captured, bit for bit; the others were replaced by these.
        difference: the largest ``‖found - captured‖ / ‖captured‖`` of the others.
        products: how many quantized operands were compared.
        other_bytes: those whose quantized bytes are not the captured ones.
        statistics: what each quantized operand loses, of the call in which it loses most.
    """

    def __init__(self) -> None:
        self.operands = self.equal = self.products = 0
        self.difference = 0.0
        self.other_bytes: list[Operand] = []
        self.statistics: dict[Operand, Measures] = {}


class Replay:
    """Runs a captured step with a model.

    Each product takes the operands that were captured. Where another machine sums in another order, what arrives at a
    product differs from them: in the first replay the captured ones take its place, and in later ones the difference
    between what arrives then and what arrived first is added to them. So the quantized bytes of the whole step are those
    of the captured one, and what a change in one layer does to others is not lost.

    Args:
        step: the captured step.
        model: the model; it is loaded with the step's state, now and in each replay.
        loss: the loss function; None takes the one that the step names, then the loss that the model gives, then the
            gradients of the model's outputs as they were captured.
        recipe: to replay under another recipe; None: the captured ones, or those of a model that is converted.

    Raises:
        CheckpointError: the model is not the captured one.
        UsageError: the captured recipe is not known from data, and none is given.
    """

    def __init__(
        self, step: Bundle, model: torch.nn.Module, *, loss: Loss | None = None, recipe: Recipe | None = None
    ) -> None:
        self.step = step
        self.model: Any = self._converted(model, recipe)
        self.layers = {name: self.model.get_submodule(name) for name in step.layers}
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._loss = loss or LOSSES.get(step.loss_name)
        self._targets = unflatten(step.targets, step.tensors, self.device)
        for layer in self.layers.values():
            layer.__dict__["fuse_wgrad_accumulation"] = False
        self._state = _fitting_state(self.model, step.state)
        self._restore()
        self._scales: dict[int, float] = {}
        # What arrived at products in the first replay, where that was not what had been captured.
        self._arrived: dict[tuple[str, int, str], torch.Tensor] = {}
        self._digests: dict[tuple[str, int], dict[str, str]] = {}
        # Under another recipe the step is another one, too.
        self._captured = {} if recipe is not None else self._captured_operands()
        self.comparison = Comparison()
        self.replays = 0
        self.first = self._first()
        self.operands = tuple(self.comparison.statistics)

    # -- replays --

    def run(self, quantized: Collection[Operand], *, backward: bool = True, nudged: bool = False) -> Outcome:
        """Run the step with these operands quantized and all others in high precision.

        Args:
            backward: whether the backward pass is run, too.
            nudged: every operand is moved by as much as BF16 rounds, which tells what rounding alone does.
        """
        chosen = quantized if isinstance(quantized, (set, frozenset)) else frozenset(quantized)
        generator = torch.Generator().manual_seed(0) if nudged else None
        return self._run(lambda *of: _Switched(*of, self, chosen, generator), backward)

    def _first(self) -> Outcome:
        recorders: list[Recorder] = []
        outcome = self._run(lambda *of: _First(*of, self), True, recorders)
        found = {(p.name, p.number) for p in recorders[0].passes}
        if missing := {key for key in self._captured if key not in found}:
            name, number = min(missing)
            what = f"call {number} of layer {name!r} was captured, and the model did not make it"
            raise CheckpointError(what, expected="the model that was captured", remedy="give the same model")
        return outcome

    def _run(self, inspect: Callable[..., Inspection], backward: bool, keep: list[Recorder] | None = None) -> Outcome:
        self.replays += 1
        self._restore()
        recorder = _Inspecting({id(layer): name for name, layer in self.layers.items()}, inspect)
        if keep is not None:
            keep.append(recorder)
        with Watch(recorder), self._surroundings():
            loss = self._events(backward, first=keep is not None)
        named = self.model.named_parameters()
        gradients = {name: _gradient(p) for name, p in named if p.requires_grad} if backward else {}
        for p in self.model.parameters():
            p.grad = None
        return Outcome(loss, gradients)

    def _events(self, backward: bool, first: bool) -> float:
        """Forward and backward passes in the order in which they were."""
        total, waiting, events = 0.0, [], self.step.events
        for place, event in enumerate(events):
            kind, number = event.split(" ")
            if kind == "forward":
                said = self.step.arguments[int(number)]
                args, kwargs = (unflatten(said[key], self.step.tensors, self.device) for key in ("args", "kwargs"))
                output = self.model(*args, **kwargs)
                found = self._losses(int(number), output)
                total += float("nan") if found is None else float(found.detach())
                waiting.append((int(number), output, found))
            elif backward and not (place + 1 < len(events) and events[place + 1].startswith("backward")):
                # All outputs that the backward pass began at, together.
                began = {int(e.split(" ")[1]) for e in events[: place + 1] if e.startswith("backward")}
                self._backward([entry for entry in waiting if entry[0] in began], first)
                waiting = [entry for entry in waiting if entry[0] not in began]
        return total

    def _losses(self, number: int, output: Any) -> torch.Tensor | None:
        if self._loss is None:
            return loss_in(output)
        targets = self._targets if len(self.step.arguments) == 1 else self._targets[number]
        return self._loss(output, targets)

    def _backward(self, of: list[tuple[int, Any, torch.Tensor | None]], first: bool) -> None:
        """The backward pass from the losses, scaled as the captured step scaled them, or from captured gradients."""
        roots, seeds = [], []
        for number, output, loss in of:
            outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
            captured = [self.step.tensors.get(f"seed.{number}.{place}") for place in range(len(outputs))]
            if loss is None:
                pairs = [(o, c.to(o)) for o, c in zip(outputs, captured, strict=True) if c is not None]
                if not all(bool(c.isfinite().all()) for _, c in pairs):
                    what = "the captured gradients of the model's outputs are not finite, and no loss function is known"
                    raise UsageError(what, expected="a loss function", remedy="give loss=, or --loss for the command")
                roots += [o for o, _ in pairs]
                seeds += [c for _, c in pairs]
            else:
                if first:
                    self._scales[number] = _scale(loss, outputs, captured)
                roots.append(loss)
                seeds.append(torch.full_like(loss, self._scales[number]))
        torch.autograd.backward(roots, seeds)

    # -- the step's surroundings --

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Random generators and autocast as they were; afterwards the generators as before."""
        before = random.getstate()
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            set_random_state(self.step.tensors)
            if self.step.autocast:
                dtype = getattr(torch, self.step.autocast)
                stack.enter_context(torch.autocast(self.device.type, dtype))
            try:
                yield
            finally:
                random.setstate(before)

    def _restore(self) -> None:
        """Weights, buffers, scaling state and modes of before the step."""
        model, step = self.model, self.step
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.load_state_dict(self._state)
        except RuntimeError as error:
            what = f"the model does not fit the step: {text_of(error)}"
            raise CheckpointError(what, expected="the model that was captured", remedy="give the same model") from error
        buffers = dict(model.named_buffers())
        for name, value in step.buffers.items():
            if name in buffers and buffers[name].shape == value.shape:
                buffers[name].copy_(value)
        training, frozen = set(step.training), set(step.frozen)
        for name, module in model.named_modules():
            module.training = name in training
        for name, p in model.named_parameters():
            p.requires_grad_(name not in frozen)
            p.grad = None

    def _converted(self, model: torch.nn.Module, recipe: Recipe | None) -> torch.nn.Module:
        """The model, its captured layers under the recipe, or under the captured ones unless they have any."""
        modules = dict(model.named_modules())
        if missing := [name for name in self.step.layers if name not in modules]:
            what = f"the model has no module {missing[0]!r}"
            raise CheckpointError(what, expected="the model that was captured", remedy="give the same model")
        bound = [getattr(modules[name], "recipe", None) for name in self.step.layers]
        if recipe is None and all(isinstance(found, Recipe) for found in bound):
            return model
        for number, said in enumerate(self.step.recipes):
            names = {name for name, of in self.step.layers.items() if of == number}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = ottava.convert(model, recipe or build(said), include=lambda name, module: name in names)  # noqa: B023
        return model

    def _captured_operands(self) -> dict[tuple[str, int], dict[str, torch.Tensor]]:
        """``(layer, number of its call)`` -> the operands that were captured of it, by tensor."""
        found: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        counts: dict[str, int] = {}
        for number, call in enumerate(self.step.calls):
            key = call.layer, counts.get(call.layer, 0)
            counts[call.layer] = key[1] + 1
            held = {tensor: self.step.operands.get(f"{number}.{tensor}") for tensor in ("activation", "gradient")}
            found[key] = {tensor: values for tensor, values in held.items() if values is not None}
            self._digests[key] = call.digests
        return found

    # -- operands --

    def meet(self, key: tuple[str, int], tensor: str, values: torch.Tensor) -> torch.Tensor:
        """In the first replay: what was captured, in the place of what arrives at a product."""
        captured = self._captured.get(key, {}).get(tensor)
        if captured is None or (*key, tensor) in self._arrived:
            return values if captured is None else captured.to(values)
        if captured.shape != values.shape:
            what = f"{tensor} of layer {key[0]!r} is {list(values.shape)}"
            raise CheckpointError(what, expected=f"{list(captured.shape)}, as was captured", remedy="give the same model")
        wanted, found = captured.to(values), self.comparison
        found.operands += 1
        if bool(_same(wanted, values).all()):
            found.equal += 1
            self._captured[key].pop(tensor)
            return values
        self._arrived[*key, tensor] = values.detach().clone()
        size = float(wanted.double().norm())
        difference = float((values.double() - wanted.double()).norm()) / size if size else float("inf")
        found.difference = max(found.difference, difference) if difference == difference else float("inf")
        return wanted

    def moved(self, key: tuple[str, int], tensor: str, values: torch.Tensor) -> torch.Tensor:
        """In a later replay: what was captured, moved as far as what arrives has moved since the first one."""
        before = self._arrived.get((*key, tensor))
        if before is None:
            return values
        captured = self._captured[key][tensor].to(values)
        moved = torch.where(_same(values, before), captured, values + (captured - before))
        return torch.where(_same(captured, before), values, moved)

    def note(self, key: tuple[str, int], operand: Operand, values: torch.Tensor, quantized: Any) -> None:
        """In the first replay: what a product takes of a quantized operand."""
        found = self.comparison
        columnwise = (operand.gemm, operand.tensor) in BY_COLUMN
        made = compare(values, quantized, columnwise=columnwise)
        worst = found.statistics.get(operand)
        found.statistics[operand] = made if worst is None else max(worst, made, key=loss_of_operand)
        expected = self._digests.get(key, {}).get(f"{operand.gemm}.{operand.tensor}")
        if expected is not None:
            found.products += 1
            if digest(taken(quantized, operand.gemm, operand.tensor)) != expected:
                found.other_bytes.append(operand)


class _Inspecting(Recorder):
    """Gives inspections of a kind."""

    def __init__(self, names: dict[int, str], inspect: Callable[..., Any]) -> None:
        super().__init__(names)
        self._inspect = inspect

    def inspection(self, name: str, layer: Any) -> Any:
        return self._inspect(self, name, layer)


class _First(Recording):
    """Of the first replay: everything is quantized, and compared with what was captured."""

    def __init__(self, recorder: Recorder, name: str, layer: Any, replay: Replay) -> None:
        super().__init__(recorder, name, layer)
        self._replay, self._name = replay, name

    @property
    def key(self) -> tuple[str, int]:
        """Layer, and number of its call."""
        return self._name, self.record.number

    def modifies(self, gemm: str, tensor: str) -> bool:
        return tensor in ("activation", "gradient")

    def modify(self, gemm: str, tensor: str, values: torch.Tensor) -> torch.Tensor:
        return self._replay.meet(self.key, tensor, values)

    def note(self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None) -> None:
        if quantized is not None:
            self._replay.note(self.key, Operand(self._name, gemm, tensor), values, quantized)


class _Switched(_First):
    """Of a later replay: the chosen operands are quantized."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        layer: Any,
        replay: Replay,
        chosen: Collection[Operand],
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(recorder, name, layer, replay)
        self._chosen, self._generator = chosen, generator

    def quantizes(self, gemm: str, tensor: str) -> bool:
        return (self._name, gemm, tensor) in self._chosen

    def modify(self, gemm: str, tensor: str, values: torch.Tensor) -> torch.Tensor:
        values = self._replay.moved(self.key, tensor, values)
        if self._generator is None:
            return values
        signs = torch.randint(0, 2, values.shape, generator=self._generator).to(values.device) * 2 - 1
        return (values * (1 + _NUDGE * signs)).to(values.dtype)

    def note(self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None) -> None:
        pass


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros(parameter.shape, device=parameter.device) if parameter.grad is None else parameter.grad


def _scale(loss: torch.Tensor, outputs: list[torch.Tensor], captured: list[torch.Tensor | None]) -> float:
    """What the captured step multiplied the loss with, one over the number of microbatches for example, as the
    gradients of the model's outputs tell; 1 where these are not known, or not finite."""
    known = [(o, c) for o, c in zip(outputs, captured, strict=True) if c is not None and bool(c.isfinite().all())]
    if not known or (len(known) == 1 and known[0][0] is loss):
        return float(known[0][1]) if known else 1.0
    found = torch.autograd.grad(loss, [o for o, _ in known], retain_graph=True, allow_unused=True)
    pairs = [(f.double(), c.to(f).double()) for f, (_, c) in zip(found, known, strict=True) if f is not None]
    ours, both = sum(float((f * f).sum()) for f, _ in pairs), sum(float((f * c).sum()) for f, c in pairs)
    theirs = sum(float((c * c).sum()) for _, c in pairs)
    if not ours or not theirs:
        return 1.0
    if both <= 0.9 * (ours * theirs) ** 0.5:
        what = "the loss function gives other gradients of the model's outputs than were captured"
        raise UsageError(what, expected="the loss of the captured step", remedy="give its loss function and targets")
    ratio = both / ours
    # Numbers that people use, exactly.
    whole = max(1, round(max(ratio, 1 / ratio)))
    exact = float(whole) if ratio >= 1 else 1 / whole
    return exact if abs(ratio / exact - 1) < 0.01 else ratio


def _fitting_state(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The captured state as the model has it: of scaling state that another recipe keeps, the same slots."""
    own = model.state_dict()
    made = {name: value for name, value in state.items() if name in own or not OF_STATE.search(name)}
    for name, value in own.items():
        held = made.get(name)
        if OF_STATE.search(name) and (held is None or held.shape != value.shape):
            made[name] = _carried(model, name, value, state)
    return made


def _carried(model: torch.nn.Module, name: str, value: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """A buffer of a state that serves some roles of a layer, from that of one that served all: their slots, which are
    its last dimension. Another state starts afresh."""
    layer, _, rest = name.partition(".recipe_state.")
    part, _, buffer = f"recipe_state.{rest}".rpartition(".")
    slots = getattr(model.get_submodule(f"{layer}.{part}"), "slots", None)
    held = state.get(f"{layer}.recipe_state.{buffer}")
    if not isinstance(slots, dict) or held is None or held.shape[-1] != len(OF_LINEAR):
        return value.clone()
    return held[..., [OF_LINEAR.index(role) for role in slots]].to(value)
