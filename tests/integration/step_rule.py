"""The rule for scales and histories, as the specification has it, and the products that show which
scales were used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.recipes_delayed.slot_oracle import Slot

FORMATS = {
    "input": torch.float8_e4m3fn,
    "weight": torch.float8_e4m3fn,
    "grad_output": torch.float8_e5m2,
}
Operand = tuple[np.ndarray, np.float32, bool]


def quantized(x: torch.Tensor, scale: float, kind: str) -> Operand:
    """The elements, what multiplies them, and whether these numbers are ordinary: far from the ends
    of float32."""
    largest = torch.finfo(FORMATS[kind]).max
    elements = (x.detach() * torch.tensor(scale)).clamp(-largest, largest).to(FORMATS[kind]).float()
    ordinary = 2.0**-40 < scale < 2.0**40
    return elements.numpy(), np.float32(1) / np.float32(scale), ordinary


def same_product(found: torch.Tensor, a: Operand, b: Operand, what: str) -> None:
    if a[2] and b[2]:
        expected = (a[0] * b[0]) * (a[1] * b[1])
        assert np.array_equal(found.detach().numpy(), expected), (what, found, expected)


# -- the rule --


@dataclass(eq=False)
class Layer:
    """A layer, and what its scales and histories should be on each rank.

    Attributes:
        key: of the regions that begin a step for it.
        joined: whether a region of these knows it: as a part of a converted model, or because it
            has run in one.
        brought: whether it has what a load or a copy brought, and has not run since.
        ran: whether it has run in training since it last began a step.
        kept: the quantized weight of the first microbatch.
        pending: whether the recomputation of this step is yet to come.
    """

    module: Any
    key: Any
    ranks: list[dict[str, Slot]]
    joined: bool
    brought: bool = False
    ran: bool = False
    kept: Operand | None = None
    pending: bool = False


@dataclass
class Region:
    key: Any
    recipe: str | None
    enabled: bool
    began: bool = False
    module: bool = False


@dataclass
class Rule:
    """When scales change, as the specification says: at the entry of a region, for all of its
    slots, over all ranks."""

    reduces: bool
    layers: list[Layer] = field(default_factory=list)
    stack: list[Region] = field(default_factory=list)
    # All-reduces that there must be, and that there may be: of layers that have run since they last
    # began a step, and of all that have run at all; and one for each layer with amaxes of another
    # model's that runs in a block first.
    least: int = 0
    most: int = 0

    def begin(self, layers: list[Layer]) -> None:
        if layers and self.reduces and len(layers[0].ranks) > 1:
            self.least += any(layer.ran for layer in layers)
            self.most += 1
        for layer in layers:
            layer.ran = False
            for kind in FORMATS:
                slots = [slots[kind] for slots in layer.ranks]
                if self.reduces:
                    largest = max(slot.history[0] for slot in slots)
                    for slot in slots:
                        slot.history[0] = largest
                for slot in slots:
                    slot.update()

    def enter(self, region: Region, *, training: bool) -> None:
        region.began = any(outer.key == region.key and outer.began for outer in self.stack)
        if training and region.enabled and not region.began:
            self.begin([layer for layer in self.layers if layer.key == region.key and layer.joined])
            region.began = True
        self.stack.append(region)

    def join(self, layer: Layer) -> None:
        if layer.joined:
            return
        layer.joined = True
        if layer.brought:
            self.begin([layer])
