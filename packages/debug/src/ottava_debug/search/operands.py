"""Operands of products as they were captured, and as they arrive in replays."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from ottava.errors import CheckpointError
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.bundle import Bundle, digest
from ottava_debug.measures import Measures, compare
from ottava_debug.recorder import BY_COLUMN, Recorder, Recording, taken
from ottava_debug.search.measure import loss_of_operand

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


class CapturedOperands:
    """The operands that were captured, and what arrives in their places.

    Args:
        step: the captured step.
        fed: whether the captured ones take the place of what arrives.
    """

    def __init__(self, step: Bundle, fed: bool) -> None:
        self.comparison = Comparison()
        self._digests: dict[tuple[str, int], dict[str, str]] = {}
        # What arrived at products in the first replay, where that was not what had been captured.
        self._arrived: dict[tuple[str, int, str], torch.Tensor] = {}
        # Layer and number of its call -> the operands that were captured of it, by tensor.
        self._captured: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        counts: dict[str, int] = {}
        for number, call in enumerate(step.calls if fed else ()):
            key = call.layer, counts.get(call.layer, 0)
            counts[call.layer] = key[1] + 1
            held = {tensor: step.operands.get(f"{number}.{tensor}") for tensor in ("activation", "gradient")}
            self._captured[key] = {tensor: values for tensor, values in held.items() if values is not None}
            self._digests[key] = call.digests

    def missing(self, recorder: Recorder) -> tuple[str, int] | None:
        """Layer and number of a call that was captured and not made, if there is one."""
        made = {(p.name, p.number) for p in recorder.passes}
        return min((key for key in self._captured if key not in made), default=None)

    def meet(self, key: tuple[str, int], tensor: str, values: torch.Tensor) -> torch.Tensor:
        """In the first replay: what was captured, in the place of what arrives at a product."""
        captured = self._captured.get(key, {}).get(tensor)
        if captured is None or (*key, tensor) in self._arrived:
            return values if captured is None else captured.to(values)
        if captured.shape != values.shape:
            what = f"{tensor} of layer {key[0]!r} is {list(values.shape)}"
            raise CheckpointError(
                what, expected=f"{list(captured.shape)}, as was captured", remedy="give the same model"
            )
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


class Inspecting(Recorder):
    """Gives inspections of a kind."""

    def __init__(self, names: dict[int, str], inspect: Callable[..., Any]) -> None:
        super().__init__(names)
        self._inspect = inspect

    def inspection(self, name: str, layer: Any) -> Any:
        return self._inspect(self, name, layer)


class First(Recording):
    """Of the first replay: everything is quantized, and compared with what was captured."""

    def __init__(self, recorder: Recorder, name: str, layer: Any, operands: CapturedOperands) -> None:
        super().__init__(recorder, name, layer)
        self._operands, self._name = operands, name

    @property
    def key(self) -> tuple[str, int]:
        """Layer, and number of its call."""
        return self._name, self.record.number

    def modifies(self, gemm: str, tensor: str) -> bool:
        return tensor in ("activation", "gradient")

    def modify(self, gemm: str, tensor: str, values: torch.Tensor) -> torch.Tensor:
        return self._operands.meet(self.key, tensor, values)

    def note(self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None) -> None:
        if quantized is not None:
            self._operands.note(self.key, Operand(self._name, gemm, tensor), values, quantized)


class Switched(First):
    """Of a later replay: the chosen operands are quantized."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        layer: Any,
        operands: CapturedOperands,
        chosen: Collection[Operand],
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(recorder, name, layer, operands)
        self._chosen, self._generator = chosen, generator

    def quantizes(self, gemm: str, tensor: str) -> bool:
        return (self._name, gemm, tensor) in self._chosen

    def modify(self, gemm: str, tensor: str, values: torch.Tensor) -> torch.Tensor:
        values = self._operands.moved(self.key, tensor, values)
        if self._generator is None:
            return values
        signs = torch.randint(0, 2, values.shape, generator=self._generator).to(values.device) * 2 - 1
        return (values * (1 + _NUDGE * signs)).to(values.dtype)

    def note(self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None) -> None:
        pass


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())
