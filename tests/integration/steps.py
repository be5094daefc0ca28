"""A state machine of steps of delayed scaling: layers run in regions, in converted models and
alone; they are recomputed, evaluated, saved, loaded and copied. Beside them runs the rule for when
scales change, with scalars.

A layer has one weight and a batch one number. So an amax is the magnitude of a number, and each
output and gradient is one product, which shows the scales that were used.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle
import warnings
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch.utils.checkpoint import checkpoint

import ottava
from ottava_delayed import DelayedScaling, scaling_statistics
from tests import oracle
from tests.slot_oracle import Slot

ELEMENTS = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}
VALUES = [oracle.float32(v) for v in (1.0, -0.37, 12.5, 700.0, 3e-4, 0.0, -(2.0**90), math.inf)]
WEIGHTS = VALUES[:6]
BATCHES, OUTLIERS = st.integers(0, 5), st.integers(0, 7)


class Operand(NamedTuple):
    """A quantized number: its element, and what multiplies it."""

    element: float
    scale_inv: float


def quantized(value: float, scale: float, tensor_type: str) -> Operand:
    element = ELEMENTS[tensor_type]
    code = oracle.encode(oracle.float32(value * scale), element)
    return Operand(oracle.decode(code, element), oracle.float32(1 / scale))


def assert_plain_product(found: torch.Tensor, a: float, b: float, what: str) -> None:
    expected = float(np.float32(a) * np.float32(b))
    if math.isfinite(expected):
        assert found.item() == expected, f"{what} in high precision: {found.item()}"


def assert_product(found: torch.Tensor, a: Operand, b: Operand, what: str) -> None:
    factor = np.float32(a.scale_inv) * np.float32(b.scale_inv)
    # Beyond, products are rounded as float32 is, in an order that is not defined.
    if 2.0**-80 < factor < 2.0**80:
        expected = np.float32(a.element * b.element) * factor
        assert found.item() == expected, f"{what}: {found.item()}, expected {expected}"


# -- the rule --


@dataclass(eq=False)
class State:
    """What a layer's state should hold.

    Attributes:
        recipe: the name of its recipe.
        ranks: on each rank, tensor type -> slot.
        step: the step that begins it next; None for its own.
        pending: whether it may have amaxes that have not gone into its scales.
        lacks_recipe: whether it was loaded into a layer that has not run under its recipe yet.
    """

    recipe: str
    ranks: list[dict[str, Slot]]
    step: Hashable = None
    pending: bool = False
    lacks_recipe: bool = False


@dataclass(eq=False)
class Layer:
    """A layer.

    Attributes:
        bound: the recipe that is bound to it.
        model: the step of the converted model that it is a part of.
        kept: the weight of microbatches, and the state (or the recipe) that quantized it.
        recomputed: the recipe of the calls that are yet to be recomputed, if there are any. Such a
            layer runs under no other recipe in the meantime.
    """

    module: Any
    bound: str | None
    model: Hashable
    state: State | None = None
    kept: tuple[Any, Operand | None] | None = None
    recomputed: tuple[str | None] | None = None


@dataclass(eq=False)
class Region:
    key: Hashable
    recipe: str | None
    enabled: bool = True
    calibrating: bool = False
    began: bool = False


@dataclass
class Rule:
    """When scales change: for all slots together, at the entry of the next region in training."""

    reduces: bool
    layers: list[Layer] = field(default_factory=list)
    stack: list[Region] = field(default_factory=list)

    def update(self, state: State) -> None:
        for tensor_type in ELEMENTS:
            slots = [slots[tensor_type] for slots in state.ranks]
            if self.reduces:
                largest = max(slot.amax for slot in slots)
                for slot in slots:
                    slot.observe(largest)
            for slot in slots:
                slot.update()

    def begin(self, key: Hashable, *, calibrated: bool = False) -> None:
        for layer in self.layers:
            state = layer.state
            if state is None:
                continue
            if layer.model == key or (state.pending and state.step == key):
                self.update(state)
                state.pending = calibrated

    def begin_in(self, region: Region) -> None:
        if not region.began:
            self.begin(region.key)
            region.began = True

    def enter(self, region: Region, *, training: bool) -> None:
        region.began = any(outer.began and outer.key == region.key for outer in self.stack)
        if training and region.enabled and not region.calibrating:
            self.begin_in(region)
        self.stack.append(region)

    def leave(self, *, failed: bool = False) -> None:
        region = self.stack.pop()
        if region.calibrating and not failed:
            self.begin(region.key, calibrated=True)

    def recipe_of(self, layer: Layer) -> str | None:
        if not self.stack:
            return layer.bound
        region = self.stack[-1]
        if not region.enabled:
            return None
        return region.recipe or layer.bound

    def join(self, state: State, *, training: bool) -> None:
        """A layer runs in the innermost region, or alone."""
        region = self.stack[-1] if self.stack else None
        if region is None and training:
            self.update(state)
            state.step, state.pending = None, True
        if region is None:
            return
        if training and not region.calibrating:
            self.begin_in(region)
        if training or region.calibrating:
            if state.pending and state.step != region.key and not region.calibrating:
                self.update(state)
            state.step, state.pending = region.key, True
        elif not state.pending:
            state.step = region.key


# -- what runs --

_numbers = itertools.count()


@dataclass(frozen=True)
class Nothing:
    """A quantizer factory that leaves each role to the recipe, which equals no other recipe then,
    whose layers may still be alive."""

    number: int

    def __call__(self, role: Any) -> None:
        return None


class Use(NamedTuple):
    """A call of a layer.

    Attributes:
        layer: its number, modulo the number of layers.
        x, dy: which values it is given, forward and backward.
        blocks: around the call, the outermost first.
        recompute: ``use_reentrant`` of the checkpoint around these; None for none.
        first: ``is_first_microbatch``.
        needs: whether the input needs a gradient.
    """

    layer: int
    x: int
    dy: int
    blocks: tuple[str, ...] = ()
    recompute: bool | None = None
    first: bool | None = None
    needs: bool = True


@dataclass(eq=False)
class Run:
    """A call in training, whose backward pass may follow; without operands if none records it.

    ``plain`` says that it computes in high precision; ``together`` are the layers that a backward
    pass recomputes with it.
    """

    use: Use
    layer: Layer
    x: torch.Tensor
    recompute: bool | None = None
    state: State | None = None
    plain: bool = False
    y: Any = None
    quantized_x: Operand | None = None
    quantized_w: Operand | None = None
    together: list[Layer] = field(default_factory=list)


class Bank(torch.nn.Module):
    """Layers; ``call`` says which are used."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(ottava.nn.Linear(1, 1, bias=False) for _ in range(count))

    def forward(self, call: Any, *inputs: torch.Tensor) -> Any:
        return tuple(call(place, x) for place, x in enumerate(inputs))


#: The length of the history, the algorithm and the margin.
Options = tuple[int, str, int]
_options = st.tuples(st.integers(1, 3), st.sampled_from(("max", "most_recent")), st.integers(-1, 1))
#: Blocks: (recipe, options).
BLOCKS: dict[str, tuple[str | None, dict[str, bool]]] = {
    "A": ("A", {}),
    "B": ("B", {}),
    "current": ("current", {}),
    "none": (None, {}),
    "off": (None, {"enabled": False}),
    "calibrating": (None, {"calibrating": True}),
    "calibrating A": ("A", {"calibrating": True}),
}
_block = st.sampled_from(list(BLOCKS))
_use = st.builds(
    Use,
    layer=st.integers(0, 3),
    x=st.one_of(BATCHES, OUTLIERS),
    dy=st.one_of(BATCHES, OUTLIERS),
    blocks=st.one_of(st.just(()), st.lists(_block, min_size=1, max_size=2).map(tuple)),
    recompute=st.sampled_from((None, None, False, True)),
    first=st.sampled_from((None, None, True, False)),
    needs=st.booleans(),
)
MODES = {"no_grad": torch.no_grad, "eval": torch.no_grad, "inference": torch.inference_mode}


class Steps(RuleBasedStateMachine):
    """A converted model of recipe A, a model that is not converted, and regions around them."""

    rank: ClassVar[int] = 0
    ranks: ClassVar[int] = 1

    @initialize(options=st.fixed_dictionaries(dict.fromkeys("AB", _options)), reduces=st.booleans())
    def start(self, options: dict[str, Options], reduces: bool) -> None:
        self.prepare(options, reduces)

    def prepare(self, options: dict[str, Options], reduces: bool) -> None:
        self.caught = warnings.catch_warnings()
        self.caught.__enter__()
        warnings.simplefilter("ignore")
        self.rule = Rule(reduces)
        self.chosen = options
        self.recipes: dict[str, Any] = {"current": "current"}
        for name, (length, algorithm, margin) in options.items():
            self.recipes[name] = DelayedScaling(
                margin,
                amax_history_len=length,
                amax_compute_algo=algorithm,
                reduce_amax=reduces,
            )
            self.recipes[name].set_quantizer_factory(Nothing(next(_numbers)))
        self.blocks: list[Any] = []
        self.runs: list[Run] = []
        self.replaying = False
        self.saved: dict[int, tuple[dict[str, torch.Tensor], list[State | None]]] = {}
        self.banks = [Bank(2), Bank(2)]
        self.of_bank: list[list[Layer]] = [[], []]
        for number in (0, 1):
            self.convert(number, self.banks[number], [None, None])

    def teardown(self) -> None:
        for block in reversed(getattr(self, "blocks", [])):
            block.__exit__(None, None, None)
        if hasattr(self, "caught"):
            self.caught.__exit__(None, None, None)

    def convert(self, number: int, bank: Bank, states: list[State | None]) -> None:
        """Convert a model, if it is the first, and put it in its place."""
        self.take(number, bank, states)
        if number == 0:
            ottava.convert(bank, self.recipes["A"])
            for layer in self.of_bank[0]:
                self.state_of(layer, "A")

    def take(self, number: int, bank: Bank, states: list[State | None]) -> None:
        """Put a model in its place, whose layers have such states."""
        self.rule.layers = [x for x in self.rule.layers if x not in self.of_bank[number]]
        bound, model = ("A", ("model", 0)) if number == 0 else (None, "no model")
        layers = [
            Layer(module, bound, model, state)
            for module, state in zip(bank.layers, states, strict=True)
        ]
        self.banks[number], self.of_bank[number] = bank, layers
        self.rule.layers += layers

    def fresh(self, recipe: str) -> State:
        return State(recipe, [self.slots(*self.chosen[recipe]) for _ in range(self.ranks)])

    def slots(self, length: int, algorithm: str, margin: int) -> dict[str, Slot]:
        slots = {
            kind: Slot(length, oracle.MAX[element], margin) for kind, element in ELEMENTS.items()
        }
        if algorithm == "most_recent":
            for slot in slots.values():
                slot.amax_of = lambda history: history[0]
        return slots

    # -- regions --

    @rule(name=_block, grad=st.sampled_from((True, True, False)))
    def enter(self, name: str, grad: bool) -> None:
        if len(self.blocks) < 3:
            with torch.set_grad_enabled(grad):
                self.blocks.append(self.autocast(name))
                self.blocks[-1].__enter__()
                self.rule.enter(self.region(name), training=grad)

    @rule(failed=st.booleans())
    def leave(self, failed: bool) -> None:
        if self.blocks:
            error = (ValueError, ValueError(), None) if failed else (None, None, None)
            self.blocks.pop().__exit__(*error)
            self.rule.leave(failed=failed)

    def autocast(self, name: str) -> Any:
        recipe, options = BLOCKS[name]
        return ottava.autocast(None if recipe is None else self.recipes[recipe], **options)

    def region(self, name: str) -> Region:
        recipe, options = BLOCKS[name]
        outer = self.rule.stack[-1] if self.rule.stack else None
        if recipe is None and outer is not None:
            return Region(outer.key, outer.recipe, **options)
        return Region(recipe or "none", recipe, **options)

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        if self.replaying:
            with self.autocast(name):
                yield
            return
        depth = len(self.rule.stack)
        with self.autocast(name):
            self.rule.enter(self.region(name), training=torch.is_grad_enabled())
            yield
        self.rule.leave()
        assert len(self.rule.stack) == depth

    # -- forward passes --

    @rule(
        number=st.sampled_from((0, 0, 1)),
        uses=st.lists(_use, min_size=1, max_size=3),
        alone=st.booleans(),
        mode=st.sampled_from(("train", "train", "train", *MODES)),
        whole=st.sampled_from((None, None, False, True)),
    )
    def run(self, number: int, uses: list[Use], alone: bool, mode: str, whole: bool | None) -> None:
        """Layers run, as parts of their model or ``alone``; ``whole`` is ``use_reentrant`` of a
        checkpoint around all."""
        training = mode == "train"
        reentrant = training and (whole is True or any(use.recompute for use in uses))
        if whole is not None or not training:
            uses = [use._replace(recompute=None) for use in uses]
        if mode == "inference":
            # A weight that is kept then could not be used in training.
            uses = [use._replace(first=None) for use in uses]
        bank, made = self.banks[number], len(self.runs)
        if mode == "eval":
            bank.eval()
        inputs = [
            self.batch(use.x).requires_grad_(training and (use.needs or reentrant)) for use in uses
        ]
        skipped: dict[int, bool] = {}

        def call(place: int, x: torch.Tensor) -> torch.Tensor:
            layer = self.layer(number, uses[place])
            if not self.replaying:
                skipped[place] = not self.may_run(layer, uses[place], whole)
            return x * 1 if skipped[place] else self.call(layer, uses[place], x, whole)

        def forward(*inputs: torch.Tensor) -> Any:
            if alone:
                return Bank.forward(bank, call, *inputs)
            with self.region_of_model(number, inputs):
                return bank(call, *inputs)

        with contextlib.nullcontext() if training else MODES[mode]():
            if whole is None or not training:
                outputs = forward(*inputs)
            else:
                outputs = checkpoint(forward, *inputs, use_reentrant=whole)
        ran = [place for place in range(len(uses)) if not skipped[place]]
        for run, place in zip(self.runs[made:], ran, strict=False):
            run.x, run.y = inputs[place], outputs[place]
            if whole is not None:
                run.together = [other.layer for other in self.runs[made:]]
        bank.train()
        if reentrant:
            # Such a checkpoint has records in its recomputation, so that comes now.
            self.backward_of(self.runs[made:])

    @rule(number=st.sampled_from((0, 1)), use=_use)
    def train(self, number: int, use: Use) -> None:
        """One layer runs in training."""
        self.run(number, [use._replace(blocks=())], number == 1, "train", None)

    def batch(self, value: int, rank: int | None = None) -> torch.Tensor:
        return torch.tensor([[self.value(value, rank)]])

    def value(self, value: int, rank: int | None = None) -> float:
        return VALUES[(value + 3 * (self.rank if rank is None else rank)) % len(VALUES)]

    def layer(self, number: int, use: Use) -> Layer:
        return self.of_bank[number][use.layer % len(self.of_bank[number])]

    @contextlib.contextmanager
    def region_of_model(self, number: int, inputs: tuple[torch.Tensor, ...]) -> Iterator[None]:
        if number or self.replaying or self.rule.stack:
            yield
            return
        needs = self.banks[number].training and any(x.requires_grad for x in inputs)
        training = torch.is_grad_enabled() or needs
        self.rule.enter(Region(("model", number), None), training=training)
        self.rule.stack[-1].began = training
        yield
        self.rule.leave()

    def may_run(self, layer: Layer, use: Use, whole: bool | None) -> bool:
        """A layer that will be recomputed runs under one recipe until then, and one whose state was
        loaded runs under that of the state."""
        depth = len(self.rule.stack)
        for name in use.blocks:
            self.rule.stack.append(self.region(name))
        region = self.rule.stack[-1] if self.rule.stack else None
        recipe = self.rule.recipe_of(layer)
        del self.rule.stack[depth:]
        state = layer.state
        if state is not None and state.lacks_recipe and recipe not in (state.recipe, None):
            return False
        if region is not None and region.calibrating:
            recipe = None
        if layer.recomputed is not None and layer.recomputed != (recipe,):
            return False
        if whole is not None or use.recompute is not None:
            layer.recomputed = (recipe,)
        return True

    def call(self, layer: Layer, use: Use, x: torch.Tensor, whole: bool | None) -> torch.Tensor:
        def in_blocks(x: torch.Tensor) -> torch.Tensor:
            with contextlib.ExitStack() as stack:
                for name in use.blocks:
                    stack.enter_context(self.block(name))
                if self.replaying:
                    return layer.module(x, use.first)
                recompute = whole if use.recompute is None else use.recompute
                run = self.observe(layer, use, x, recompute)
                y = layer.module(x, use.first)
                if run.quantized_x is not None and run.quantized_w is not None:
                    assert_product(y, run.quantized_x, run.quantized_w, "output")
                if run.plain:
                    assert_plain_product(y, x.item(), layer.module.weight.item(), "output")
                return y

        if use.recompute is None:
            return in_blocks(x)
        return checkpoint(in_blocks, x, use_reentrant=use.recompute)

    def observe(self, layer: Layer, use: Use, x: torch.Tensor, recompute: bool | None) -> Run:
        """What the rule makes of a forward pass."""
        region = self.rule.stack[-1] if self.rule.stack else None
        calibrates = region is not None and region.calibrating
        recipe, grad = self.rule.recipe_of(layer), torch.is_grad_enabled()
        run = Run(use, layer, x, recompute, plain=calibrates or recipe is None)
        needs = x.requires_grad or (region is not None and region.began)
        training = grad or (layer.module.training and needs)
        if grad or x.requires_grad:
            self.runs.append(run)
        if recipe in ("A", "B"):
            state = self.state_of(layer, recipe)
            self.rule.join(state, training=training)
            if calibrates:
                for rank, slots in enumerate(state.ranks):
                    slots["input"].calibrate(abs(self.value(use.x, rank)))
                    slots["weight"].calibrate(abs(layer.module.weight.item()))
                return run
            run.state = state
            run.quantized_x = self.quantize(state, "input", use.x, records=grad)
            # A weight that is kept is recorded now, also in a reentrant checkpoint.
            records = grad if use.first is None else training
            run.quantized_w = self.weight(layer, use.first, records=records, again=False)
        elif recipe == "current" and use.first is not None and not calibrates:
            keeps = use.first or layer.kept is None or layer.kept[0] != "current"
            layer.kept = ("current", None) if keeps else layer.kept
        return run

    def state_of(self, layer: Layer, recipe: str) -> State:
        """The state of a layer that runs under a recipe; that of another one is discarded."""
        if layer.state is None or layer.state.recipe != recipe:
            layer.state = self.fresh(recipe)
        layer.state.lacks_recipe = False
        return layer.state

    def quantize(self, state: State, tensor_type: str, value: int, *, records: bool) -> Operand:
        for rank, slots in enumerate(state.ranks):
            if records:
                self.record(slots[tensor_type], self.value(value, rank))
        scale = state.ranks[self.rank][tensor_type].scale
        return quantized(self.value(value), scale, tensor_type)

    def record(self, slot: Slot, value: float) -> None:
        slot.observe(abs(value))
        slot.saturated += abs(oracle.float32(value * slot.scale)) > slot.fp8_max

    def weight(self, layer: Layer, first: bool | None, *, records: bool, again: bool) -> Operand:
        """The quantized weight of a call, which ``again`` recomputes."""
        state = layer.state
        assert state is not None
        kept = first is not None and layer.kept is not None and layer.kept[0] is state
        if kept and (again or not first):
            return layer.kept[1]  # type: ignore[index,return-value]
        value = layer.module.weight.item()
        for slots in state.ranks:
            if records:
                self.record(slots["weight"], value)
        operand = quantized(value, state.ranks[self.rank]["weight"].scale, "weight")
        if first is not None:
            layer.kept = (state, operand)
        return operand

    # -- backward passes --

    @rule(place=st.integers(0, 5))
    def backward(self, place: int) -> None:
        """The backward pass of one call, whose gradients can be told from others'."""
        if self.runs:
            self.backward_of([self.runs[place % len(self.runs)]])

    @rule(around=st.lists(_block, max_size=1))
    def backward_of_all(self, around: list[str]) -> None:
        with contextlib.ExitStack() as stack:
            for name in around:
                stack.enter_context(self.block(name))
            self.backward_of(list(self.runs))

    def backward_of(self, runs: list[Run]) -> None:
        for run in runs:
            run.layer.module.weight.grad = None
        self.replaying = True
        if runs:
            gradients = [self.batch(run.use.dy) for run in runs]
            torch.autograd.backward([run.y for run in runs], gradients)
        self.replaying = False
        self.runs = [run for run in self.runs if run not in runs]
        for run in runs:
            self.observe_backward(run, alone=len(runs) == 1)
        for run in runs:
            self.settle(run)

    @rule()
    def forget(self) -> None:
        """Outputs go without a backward pass."""
        runs = list(self.runs)
        self.runs.clear()
        for run in runs:
            self.settle(run)

    def settle(self, run: Run) -> None:
        waiting = [
            layer
            for other in self.runs
            for layer in (other.layer, *other.together)
            if other.recompute is not None
        ]
        for layer in (run.layer, *run.together):
            if not any(layer is other for other in waiting):
                layer.recomputed = None

    def observe_backward(self, run: Run, *, alone: bool) -> None:
        state, use = run.state, run.use
        if run.plain and alone:
            gradient = run.layer.module.weight.grad
            assert_plain_product(gradient, self.value(use.dy), self.value(use.x), "gradient")
        if state is None:
            return
        x, w = run.quantized_x, run.quantized_w
        if run.recompute is not None:
            # Of a reentrant checkpoint, which ran without gradients, it is the first record.
            records = run.recompute
            x = self.quantize(state, "input", use.x, records=records)
            records = records and use.first is None
            w = self.weight(run.layer, use.first, records=records, again=True)
        dy = self.quantize(state, "grad_output", use.dy, records=True)
        state.pending = True
        if not alone:
            return
        assert x is not None
        assert w is not None
        assert_product(run.layer.module.weight.grad, dy, x, "gradient of the weight")
        if run.x.requires_grad:
            assert run.x.grad is not None
            assert_product(run.x.grad, dy, w, "gradient of the input")

    # -- models that change --

    @rule(
        how=st.sampled_from(("change_weight", "add_layer", "remove_layer", "save", "load", "copy")),
        number=st.integers(0, 1),
        place=st.integers(0, 9),
    )
    def change(self, how: str, number: int, place: int) -> None:
        getattr(self, how)(number, place)

    def change_weight(self, number: int, place: int) -> None:
        self.forget()
        module = self.of_bank[number][place % len(self.of_bank[number])].module
        with torch.no_grad():
            module.weight.fill_(WEIGHTS[place % len(WEIGHTS)])

    def add_layer(self, number: int, place: int) -> None:
        self.forget()
        bank, layers = self.banks[number], self.of_bank[number]
        bank.layers.append(ottava.nn.Linear(1, 1, bias=False))
        states, kept = [layer.state for layer in layers], [layer.kept for layer in layers]
        self.convert(number, bank, [*states, None])
        for layer, weight in zip(self.of_bank[number], kept, strict=False):
            # Converting binds the recipe again.
            layer.kept = weight if number else None

    def remove_layer(self, number: int, place: int) -> None:
        self.forget()
        layers = self.of_bank[number]
        if len(layers) > 1:
            place %= len(layers)
            del self.banks[number].layers[place]
            self.rule.layers.remove(layers.pop(place))

    def save(self, number: int, place: int) -> None:
        states = [copy.deepcopy(layer.state) for layer in self.of_bank[number]]
        if number == 0 and any(state is not None and state.recipe != "A" for state in states):
            return
        state_dict = {k: v.clone() for k, v in self.banks[number].state_dict().items()}
        self.saved[number] = state_dict, states

    def load(self, number: int, place: int) -> None:
        if number not in self.saved:
            self.save(number, place)
        if number not in self.saved:
            return
        self.forget()
        how = ("into it", "into a new one", "before its conversion")[place % 3]
        state_dict, states = copy.deepcopy(self.saved[number])
        for state in states:
            if state is not None:
                state.step, state.pending = None, True
                state.lacks_recipe = number == 1
        if how == "into it":
            self.load_into(number, state_dict, states)
            return
        bank = Bank(len(states))
        if how == "before its conversion":
            bank.load_state_dict(state_dict)
            self.convert(number, bank, states)
        else:
            self.convert(number, bank, [None] * len(states))
            bank.load_state_dict(state_dict)
            for layer, state in zip(self.of_bank[number], states, strict=True):
                layer.state = state

    def load_into(self, number: int, state_dict: Any, states: list[State | None]) -> None:
        layers = self.of_bank[number]
        alike = [(layer.state and layer.state.recipe) for layer in layers]
        if alike != [(state and state.recipe) for state in states]:
            return
        self.banks[number].load_state_dict(state_dict)
        for layer, state in zip(layers, states, strict=True):
            layer.kept = None
            if state is not None and layer.state is not None:
                state.step, state.lacks_recipe = layer.state.step, layer.state.lacks_recipe
            layer.state = state

    def copy(self, number: int, place: int) -> None:
        self.forget()
        bank = self.banks[number]
        states = [copy.deepcopy(layer.state) for layer in self.of_bank[number]]
        for state in states:
            if state is not None:
                state.step = None
        made = pickle.loads(pickle.dumps(bank)) if place % 2 else copy.deepcopy(bank)
        self.take(number, made, states)

    @invariant()
    def states_are_those_of_the_rule(self) -> None:
        if not hasattr(self, "of_bank"):
            return
        for number, layers in enumerate(self.of_bank):
            statistics = scaling_statistics(self.banks[number])
            for place, layer in enumerate(layers):
                found = getattr(layer.module, "recipe_state", None)
                if found is None or layer.state is None:
                    # A state that was loaded is made when a region brings its recipe.
                    assert found is None, f"layer {place} of model {number} has a state"
                    continue
                for at, (tensor_type, slot) in enumerate(layer.state.ranks[self.rank].items()):
                    what = f"{tensor_type} of layer {place} of model {number}"
                    assert found.amax_history[:, at].tolist() == slot.history, what
                    told = statistics[f"layers.{place}"][tensor_type]
                    assert (told.scale, told.saturated) == (slot.scale, slot.saturated), what
                    amaxes = slot.history[-1], max(slot.history)
                    assert (told.amax, told.largest_amax) == amaxes, what
