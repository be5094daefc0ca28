"""What programs of steps are run without: what documented limits leave out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.integration.step_programs import Step, Use
from tests.integration.step_rule import Layer


class WithinLimits:
    """The events of a program without what these leave out."""

    ways: tuple[str, ...]

    def layer_of(self, number: int, use: Use) -> Layer:
        raise NotImplementedError

    def possible(self, step: Step) -> Step:
        """The step without what the documented limits leave out."""
        number, way = step.bank, self.ways[step.bank]
        whole, fail, backward = step.whole, step.fail, step.backward
        outer = step.outer if way == "block" or (way == "bound" and step.outer == "off") else ""
        if fail is not None and fail[0] != "forward":
            backward = "each"
        if whole is not None:
            fail = None if fail is not None and fail[0] != "forward" else fail
            backward = "together" if backward == "each" else backward
        # Reentrant checkpointing may see amaxes in the forward pass or in the recomputation,
        # whatever lies between.
        begins = isinstance(step.between, Step) or step.around_backward in ("same", "other")
        reentrant = fail is None and backward != "none" and not begins
        if whole and not reentrant:
            whole = False
        uses = []
        for use in step.uses:
            use = self.possible_use(number, use)
            recompute = (
                None if whole is not None or (use.recompute and not reentrant) else use.recompute
            )
            blocks, inside = use.blocks, use.inside
            if whole is not None:
                # A recomputed layer repeats the recipe that it last ran under.
                blocks = tuple(
                    b
                    for b in blocks
                    if b not in ("off", "current") and not (b == "other" and whole)
                )
            if recompute is not None and {"off", "current"} & set(blocks):
                inside = True
            if recompute and "other" in blocks:
                # No step begins inside of a reentrant checkpoint, and each such block begins one.
                recompute = False
            uses.append(replace(use, recompute=recompute, blocks=blocks, inside=inside))
        return replace(
            step,
            uses=self._consistent(number, uses),
            whole=whole,
            fail=fail,
            backward=backward,
            outer=outer,
            passes=step.passes if way != "converted" else 1,
        )

    def _consistent(self, number: int, uses: list[Use]) -> tuple[Use, ...]:
        """A layer that is recomputed runs under one recipe in a step."""
        layers = [self.layer_of(number, use) for use in uses]
        elsewhere = [
            layer
            for layer, use in zip(layers, uses, strict=True)
            if {"off", "current"} & set(use.blocks)
        ]
        return tuple(
            replace(use, recompute=None) if layer in elsewhere else use
            for layer, use in zip(layers, uses, strict=True)
        )

    def possible_use(self, number: int, use: Use) -> Use:
        same = self.ways[number] == "block" and number != 2
        blocks = tuple("none" if b == "same" and not same else b for b in use.blocks)
        if number == 2:
            blocks = tuple("none" if b == "other" else b for b in blocks)
        if "other" in blocks:
            # The layer is one of the other recipe's.
            blocks = (*(b for b in blocks if b in ("none", "off") and b != "off"), "other")
        if "same" in blocks and "current" in blocks:
            blocks = ("current",)
        return replace(use, blocks=blocks, needs=use.needs or bool(use.recompute))

    def before_recomputation(self, event: Any) -> Any:
        """Without blocks of other recipes: a recomputed layer repeats the one that it last ran
        under."""
        uses = tuple(
            replace(u, blocks=tuple(b for b in u.blocks if b not in ("off", "current")))
            for u in event.uses
        )
        return replace(event, uses=uses)
