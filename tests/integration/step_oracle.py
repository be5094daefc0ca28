"""Runs a program of steps, and beside it the rule for scales and histories, which are compared
after each event.

The layers are independent of each other: what goes into one, and the gradient of what comes out, is
chosen, so that no product has to be known to know an amax. A batch has one row and a weight is
diagonal, so that each element of a product is one product, rounded once: outputs and gradients say
which scales were used.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import ottava
from ottava_delayed import DelayedScaling
from tests.integration.golden_recorder import wait_for_the_end_of
from tests.integration.step_limits import WithinLimits
from tests.integration.step_models import SIZE, Bank, Run, amax, diagonal, values
from tests.integration.step_programs import Add, Evaluate, Program, Remove, Replace, Step, Use
from tests.integration.step_rule import (
    FORMATS,
    Layer,
    Operand,
    Region,
    Rule,
    quantized,
    same_product,
)
from tests.ranks import Counted
from tests.recipes_delayed.slot_oracle import Slot

#: The recipe of each model.
RECIPES = ("A", "A", "B")


class Stopped(Exception):
    """What a program raises."""


class World(WithinLimits):
    """The models of a program on one rank, and the rule for all ranks."""

    def __init__(self, program: Program, rank: int = 0, ranks: int = 1) -> None:
        self.program, self.rank, self.ranks = program, rank, ranks
        self.rule = Rule(program.reduce)
        self.counted = Counted()
        self.training, self.replaying = True, False
        self.recipes = {}
        for name, (length, algorithm, margin) in zip("AB", program.options, strict=True):
            # Never the same.
            self.recipes[name] = DelayedScaling(
                amax_history_len=length,
                amax_compute_algo=algorithm,
                margin=margin + 4 * (name == "B"),
                reduce_amax=program.reduce,
            )
            # Equal to none of another program, whose layers may still be there.
            self.recipes[name].set_quantizer_factory(lambda role: None)
        self.ways = (*program.ways, "block")
        self.banks: list[Bank] = []
        self.of_bank: list[list[Layer]] = []
        self.watched: list[Any] = []
        for number in range(3):
            self.banks.append(Bank(2))
            self.of_bank.append([])
            self._take(number, self._prepared(number, self.banks[number]))

    def _prepared(self, number: int, bank: Bank) -> Bank:
        return (
            bank
            if self.ways[number] == "block"
            else ottava.convert(bank, self.recipes[RECIPES[number]])
        )

    def _slots(self, number: int) -> dict[str, Slot]:
        recipe = self.recipes[RECIPES[number]]
        of = (
            {"amax_of": lambda history: history[0]}
            if recipe.amax_compute_algo == "most_recent"
            else {}
        )
        fp8_max = {kind: torch.finfo(dtype).max for kind, dtype in FORMATS.items()}
        return {
            kind: Slot(recipe.amax_history_len, fp8_max[kind], recipe.margin, **of)
            for kind in FORMATS
        }

    def _take(self, number: int, bank: Bank, before: list[Layer] | None = None) -> None:
        """Put a model in its place, whose layers have what those of ``before`` had."""
        way = self.ways[number]
        key = {"converted": ("module", number), "block": RECIPES[number], "bound": "none"}[way]
        made = []
        for place, module in enumerate(bank.layers):
            old = before[place] if before else None
            slots = (
                copy.deepcopy(old.ranks)
                if old
                else [self._slots(number) for _ in range(self.ranks)]
            )
            made.append(
                Layer(module, key, slots, joined=way == "converted", brought=old is not None)
            )
            self.watched.append(weakref.ref(module))
        self._forget(number)
        self.banks[number], self.of_bank[number] = bank, made
        self.rule.layers += made

    def _forget(self, number: int) -> None:
        self.rule.layers = [
            layer for layer in self.rule.layers if layer not in self.of_bank[number]
        ]
        self.of_bank[number] = []

    # -- regions --

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        """A block, for the rule and in truth."""
        if not name:
            yield
            return
        named = {"A": "A", "B": "B", "same": "A", "other": "B", "current": "current"}.get(name)
        if self.replaying:
            with self._autocast(named, name != "off"):
                yield
            return
        outer = self.rule.stack[-1] if self.rule.stack else None
        recipe = named or (outer.recipe if outer else None)
        key = recipe or next((r.key for r in self.rule.stack if r.module), "none")
        depth = len(self.rule.stack)
        self.rule.enter(Region(key, recipe, name != "off"), training=self.training)
        try:
            with self._autocast(named, name != "off"):
                yield
        finally:
            del self.rule.stack[depth:]

    def _autocast(self, named: str | None, enabled: bool) -> Any:
        recipe: Any = self.recipes.get(named, named) if named else None
        return ottava.autocast(recipe, enabled=enabled)

    @contextlib.contextmanager
    def module_region(self, number: int) -> Iterator[None]:
        if self.ways[number] != "converted":
            yield
            return
        self.rule.enter(Region(("module", number), None, True, module=True), training=self.training)
        try:
            yield
        finally:
            self.rule.stack.pop()

    def top(self, number: int) -> Any:
        return self.block(
            {"converted": "", "block": RECIPES[number], "bound": "none"}[self.ways[number]]
        )

    # -- a call of a layer --

    def layer_of(self, number: int, use: Use) -> Layer:
        layers = self.of_bank[2 if "other" in use.blocks else number]
        return layers[use.layer % len(layers)]

    def call(self, number: int, use: Use, x: torch.Tensor, runs: list[Run]) -> torch.Tensor:
        layer = self.layer_of(number, use)

        def plain(x: torch.Tensor) -> torch.Tensor:
            run = None if self.replaying else self.observe(layer, use, x, runs)
            y = layer.module(x, use.first)
            if run is not None and run.quantized_x is not None and run.quantized_w is not None:
                same_product(y, run.quantized_x, run.quantized_w, "output")
            return y

        def in_blocks(x: torch.Tensor) -> torch.Tensor:
            with contextlib.ExitStack() as stack:
                for name in use.blocks:
                    stack.enter_context(self.block(name))
                return plain(x)

        if use.recompute is None:
            return in_blocks(x)
        if use.inside:
            return checkpoint(in_blocks, x, use_reentrant=use.recompute)
        with contextlib.ExitStack() as stack:
            for name in use.blocks:
                stack.enter_context(self.block(name))
            return checkpoint(plain, x, use_reentrant=use.recompute)

    def observe(self, layer: Layer, use: Use, x: torch.Tensor, runs: list[Run]) -> Run:
        """What the rule makes of a call."""
        run = Run(use, layer, x)
        runs.append(run)
        region = self.rule.stack[-1]
        if not region.enabled:
            return run
        if region.recipe == "current":
            layer.kept = None
            return run
        if self.training:
            self.rule.join(layer)
            layer.brought, layer.ran = False, True
            for rank, slots in enumerate(layer.ranks):
                slots["input"].observe(amax(values(use.x, rank)))
                if use.first is not False:
                    slots["weight"].observe(amax(layer.module.weight.detach()))
        mine = layer.ranks[self.rank]
        run.quantized_x = quantized(x, mine["input"].scale, "input")
        run.quantized_w = self.weight(layer, use)
        if use.first:
            layer.kept = run.quantized_w
        return run

    def weight(self, layer: Layer, use: Use) -> Operand:
        if use.first is False:
            assert layer.kept is not None
            return layer.kept
        scale = layer.ranks[self.rank]["weight"].scale
        return quantized(layer.module.weight.diagonal().view(1, SIZE), scale, "weight")

    # -- events --

    def run(self) -> None:
        with self.counted, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for event in self.program.events:
                if self.ranks > 1 and isinstance(event, (Remove, Replace)):
                    self.begin_all()
                self.do(event)
                self.check(event)
            self.begin_all()
            self.check("the end")
        self.banks.clear()
        self.of_bank.clear()
        self.rule.layers.clear()
        wait_for_the_end_of(self.watched)

    def begin_all(self) -> None:
        """Nothing is left for the next step to reduce: ranks need not lose a layer at the same
        moment."""
        for name in ("A", "B", "none"):
            with self.block(name):
                pass

    def do(self, event: Any, *, between: bool = False) -> None:
        if isinstance(event, Step):
            with contextlib.suppress(Stopped):
                self.step(self.possible(event), new_weights=not between)
        elif isinstance(event, Evaluate):
            self.evaluate(event)
        elif isinstance(event, Replace):
            self.replace(event)
        elif isinstance(event, Add):
            self.add(event.bank)
        elif isinstance(event, Remove) and len(self.of_bank[event.bank]) > 1:
            self.remove(event.bank, event.layer % len(self.of_bank[event.bank]))

    def check(self, event: Any) -> None:
        """Scales and histories are those of the rule; one all-reduce for each step that began."""
        assert not self.rule.stack
        for number, layers in enumerate(self.of_bank):
            state = self.banks[number].state_dict()
            for place, layer in enumerate(layers):
                prefix = f"layers.{place}.recipe_state."
                scale, history = state.get(f"{prefix}scale"), state.get(f"{prefix}amax_history")
                if not layer.joined and (layer.brought or scale is None):
                    # What was brought is updated at the next step that it takes part in, or when it
                    # first runs.
                    continue
                assert scale is not None, (number, place)
                slots = [layer.ranks[self.rank][kind] for kind in FORMATS]
                where = f"model {number}, layer {place}, after {event}"
                assert scale.tolist() == [slot.scale for slot in slots], where
                rows = history.t().tolist()
                expected = [slot.history for slot in slots]
                if layer.pending:
                    rows, expected = ([row[1:] for row in table] for table in (rows, expected))
                assert rows == expected, where
        least, most = self.rule.least, self.rule.most
        assert least <= self.counted.count <= most, (
            f"{self.counted.count} all-reduces, not {least} to {most}, after {event}"
        )

    def inputs(self, uses: tuple[Use, ...], whole: bool | None = None) -> list[torch.Tensor]:
        needs = [self.training and (use.needs or bool(whole)) for use in uses]
        return [
            values(use.x, self.rank).requires_grad_(need)
            for use, need in zip(uses, needs, strict=True)
        ]

    def with_first(self, number: int, use: Use) -> Use:
        """``is_first_microbatch=False`` only where a weight was kept, and where the recipe is one
        with state."""
        high = {"off", "current"} & set(use.blocks)
        lacking = use.first is False and self.layer_of(number, use).kept is None
        return replace(use, first=None) if high or lacking else use

    def step(self, step: Step, *, new_weights: bool) -> None:
        for place, use in enumerate(step.uses if new_weights else ()):
            layer = self.layer_of(step.bank, use)
            with torch.no_grad():
                layer.module.weight.copy_(torch.diag(values((step.weights + place) % 4)[0]))
        runs: list[Run] = []
        try:
            self.passes(step, runs)
        finally:
            # Whatever a graph that had no backward pass holds would hold itself by them.
            runs.clear()

    def passes(self, step: Step, runs: list[Run]) -> None:
        with self.block(step.outer), self.top(step.bank):
            for _ in range(step.passes):
                self.forward(step, runs)
        if step.backward != "none" and any(run.use.recompute or step.whole for run in runs):
            for run in runs:
                run.layer.pending = True
        if step.between is not None:
            recomputes = step.whole is not None or any(
                use.recompute is not None for use in step.uses
            )
            self.do(
                self.before_recomputation(step.between) if recomputes else step.between,
                between=True,
            )
        self.check(step)
        if step.backward != "none":
            with self.block(step.around_backward):
                self.backward(step, runs)
        for run in runs:
            run.layer.pending = False

    def forward(self, step: Step, runs: list[Run]) -> None:
        number, start = step.bank, len(runs)
        inputs = self.inputs(step.uses, step.whole)

        def run(place: int, x: torch.Tensor) -> torch.Tensor:
            if not self.replaying and step.fail is not None and step.fail == ("forward", place):
                raise Stopped
            if self.replaying:
                return self.call(number, chosen[place], x, runs)
            chosen.append(self.with_first(number, step.uses[place]))
            return self.call(number, chosen[place], x, runs)

        chosen: list[Use] = []
        with self.module_region(number):
            if step.whole is None:
                outputs = self.banks[number](run, *inputs)
            else:
                outputs = checkpoint(self.banks[number], run, *inputs, use_reentrant=step.whole)
        for made, x, y in zip(runs[start:], inputs, outputs, strict=True):
            made.x, made.y = x, y

    def backward(self, step: Step, runs: list[Run]) -> None:
        self.replaying = True
        try:
            if step.backward == "together":
                torch.autograd.backward(
                    [run.y for run in runs], [values(run.use.dy, self.rank) for run in runs]
                )
                for run in runs:
                    self.observe_gradient(run, step)
                return
            for place, run in reversed(list(enumerate(runs))):
                self.backward_of(
                    run, step, None if step.fail is None or step.fail[1] != place else step.fail[0]
                )
        finally:
            self.replaying = False

    def backward_of(self, run: Run, step: Step, fail: str | None) -> None:
        def stop(_: torch.Tensor) -> None:
            raise Stopped

        weight = run.layer.module.weight
        weight.grad = None
        if fail is not None:
            (run.x if fail == "after" and run.x.requires_grad else run.y).register_hook(stop)
            stopped = False
            try:
                run.y.backward(values(run.use.dy, self.rank))
            except Stopped:
                stopped = True
            assert stopped
            if fail == "after" and run.x.requires_grad:
                self.observe_gradient(run, step, computed=False)
            raise Stopped
        run.y.backward(values(run.use.dy, self.rank))
        self.observe_gradient(run, step)
        x = run.quantized_x
        if x is not None:
            if run.use.recompute is not None:
                x = quantized(run.x, run.layer.ranks[self.rank]["input"].scale, "input")
            dy = self.gradient(run)
            same_product(
                weight.grad, (dy[0].reshape(SIZE, 1), *dy[1:]), x, "gradient of the weight"
            )

    def gradient(self, run: Run) -> Operand:
        dy = values(run.use.dy, self.rank)
        return quantized(dy, run.layer.ranks[self.rank]["grad_output"].scale, "grad_output")

    def observe_gradient(self, run: Run, step: Step, *, computed: bool = True) -> None:
        if run.quantized_w is None:
            return
        for rank, slots in enumerate(run.layer.ranks):
            slots["grad_output"].observe(amax(values(run.use.dy, rank)))
        if computed and run.x.requires_grad:
            weight = run.quantized_w
            if (run.use.recompute is not None or step.whole is not None) and run.use.first is None:
                weight = self.weight(run.layer, run.use)
            if run.use.first is None or run.use.recompute is step.whole is None:
                assert run.x.grad is not None
                same_product(run.x.grad, self.gradient(run), weight, "gradient of the input")

    def evaluate(self, event: Evaluate) -> None:
        number, alone = event.bank, event.rank is not None and self.ranks > 1
        if alone and event.rank != self.rank:
            return
        uses = tuple(replace(self.possible_use(number, use), recompute=None) for use in event.uses)
        if alone:
            # The ranks go on alike.
            uses = tuple(
                replace(u, blocks=tuple(b for b in u.blocks if b != "current")) for u in uses
            )
            used = [self.layer_of(number, use) for use in uses]
            replaces = any(isinstance(event, Replace) for event in self.program.events)
            if replaces and not all(layer.joined or layer.brought for layer in used):
                # The layer has a state on one rank only then, and so have files and what they are
                # loaded into.
                return
        uses = tuple(replace(u, first=False if u.first is False else None) for u in uses)
        for bank in self.banks:
            bank.train(event.mode != "eval")
        self.training = False
        try:
            with (
                torch.inference_mode() if event.mode == "inference" else torch.no_grad(),
                self.top(number),
            ):
                runs: list[Run] = []
                with self.module_region(number):

                    def run(place: Any, x: Any) -> Any:
                        return self.call(number, self.with_first(number, uses[place]), x, runs)

                    self.banks[number](run, *self.inputs(uses))
        finally:
            self.training = True
            for bank in self.banks:
                bank.train()

    def replace(self, event: Replace) -> None:
        number, before = event.bank, self.of_bank[event.bank]
        old = self.banks[number]
        if event.how == "copied":
            self._take(number, copy.deepcopy(old), before)
            return
        made = Bank(len(before))
        if event.how == "loaded":
            made = self._prepared(number, made)
        if event.how != "fresh":
            # A checkpoint in a file shares nothing with the model.
            state = {name: value.clone() for name, value in old.state_dict().items()}
            made.load_state_dict(state, strict=event.how == "bound" or self.ways[number] != "block")
        if event.how != "loaded":
            made = self._prepared(number, made)
        self._take(number, made, None if event.how == "fresh" else before)

    def add(self, number: int) -> None:
        bank, layers = self.banks[number], self.of_bank[number]
        bank.layers.append(diagonal())
        self._prepared(number, bank)
        for layer in layers if self.ways[number] != "block" else ():
            layer.kept = None
        joined = self.ways[number] == "converted"
        key = layers[0].key
        made = Layer(bank.layers[-1], key, [self._slots(number) for _ in range(self.ranks)], joined)
        layers.append(made)
        self.rule.layers.append(made)
        self.watched.append(weakref.ref(made.module))

    def remove(self, number: int, place: int) -> None:
        del self.banks[number].layers[place]
        self.rule.layers.remove(self.of_bank[number].pop(place))
