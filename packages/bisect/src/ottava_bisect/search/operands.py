"""The operands of products: the captured ones, and those that arrive in replays."""

import copy
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from ottava.errors import CheckpointError
from ottava.nn.call import Call
from ottava.recipes.step import update_states
from ottava.tensors import QuantizedTensorStorage
from ottava_bisect.bundle import Bundle, digest
from ottava_bisect.recorder import Recorder, Recording, values_of
from ottava_bisect.search.measure import loss_of_operand, relative_distance
from ottava_debug.measures import Measures, compare
from ottava_debug.operands import BY_COLUMN, ROLES
from ottava_debug.products import quantizer_of

_NUDGE = 2.0**-9
# The loss of an operand from which the origin of its scale is examined.
_MUCH = 0.05


class Operand(NamedTuple):
    """One operand of one of a layer's products: layer, tensor and direction."""

    layer: str
    gemm: str
    tensor: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.tensor} in {self.gemm}"


class Lossy(NamedTuple):
    """An operand that loses much: its call, its values, and the digest of its quantized values."""

    call: Call
    values: torch.Tensor
    digest: str


def loses_by_initial_state(operand: Operand, lossy: Lossy) -> bool:
    """Whether an operand loses because its state has seen no step yet.

    This is so if a state that was reset gives the same bytes, and a state that saw the same values
    in the step before loses less than half as much. Call this outside of a backward pass, because
    it begins a step.
    """
    state, values = cast(Any, lossy.call.state), lossy.values
    if not (isinstance(state, torch.nn.Module) and getattr(state, "stateful", False)):
        return False
    columnwise = operand[1:] in BY_COLUMN
    fresh: Any = copy.deepcopy(state)
    fresh.reset()

    def quantize() -> Any:
        quantizer = quantizer_of(fresh, operand.gemm, operand.tensor)
        return quantizer.quantize_impl(values, values.dtype)

    initial = quantize()
    if digest(values_of(initial, operand.gemm, operand.tensor)) != lossy.digest:
        return False
    observer = fresh.quantizer(ROLES[operand.tensor], rowwise=not columnwise, columnwise=columnwise)
    observer.quantize_impl(values, values.dtype)
    update_states([fresh], None)
    before = compare(values, initial, columnwise=columnwise)
    after = compare(values, quantize(), columnwise=columnwise)
    return loss_of_operand(after) < loss_of_operand(before) / 2


class Comparison:
    """The comparison of a replay of the whole step with the captured one.

    Attributes:
        operands: the number of high-precision operands that were compared: activations and incoming
            gradients.
        equal: the number of these that arrived as captured, bit for bit; captured operands replaced
            the others.
        difference: the largest ``‖arrived - captured‖ / ‖captured‖`` of the others.
        products: the number of quantized operands that were compared.
        other_bytes: the operands whose quantized bytes differ from the captured ones.
        statistics: operand -> its loss by quantization, in the call in which it loses most.
        gains: operand -> the ratio of its quantized values to its values in that call. This is the
            median over all values except zeros and the largest, which may be clamped; NaN if none
            remain.
        largest: operand -> the largest magnitude of its quantized values in that call.
        stateful: the operands whose scales come from earlier steps.
        lossy: the operands that lose much, in the call in which they lose most.
    """

    def __init__(self) -> None:
        self.operands = self.equal = self.products = 0
        self.difference = 0.0
        self.other_bytes: list[Operand] = []
        self.statistics: dict[Operand, Measures] = {}
        self.gains: dict[Operand, float] = {}
        self.largest: dict[Operand, float] = {}
        self.stateful: set[Operand] = set()
        self.lossy: dict[Operand, Lossy] = {}

    def note(
        self,
        call: Call,
        operand: Operand,
        values: torch.Tensor,
        quantized: Any,
        captured: str | None,
    ) -> None:
        """Record a quantized operand of a product; ``captured`` is its captured digest, or None."""
        columnwise = operand[1:] in BY_COLUMN
        measures = compare(values, quantized, columnwise=columnwise)
        worst = self.statistics.get(operand)
        own_values = values_of(quantized, operand.gemm, operand.tensor)
        if worst is None or loss_of_operand(measures) > loss_of_operand(worst):
            self.statistics[operand] = measures
            self._note_range(operand, values, own_values)
            if loss_of_operand(measures) > _MUCH:
                self.lossy[operand] = Lossy(call, values.detach().clone(), digest(own_values))
        recipe: Any = call.recipe
        if recipe.stateful or quantizer_of(call.state, operand.gemm, operand.tensor).stateful:
            self.stateful.add(operand)
        if captured is not None:
            self.products += 1
            if digest(own_values) != captured:
                self.other_bytes.append(operand)

    def _note_range(self, operand: Operand, values: torch.Tensor, quantized: torch.Tensor) -> None:
        top = quantized.abs().max() if quantized.numel() else torch.zeros(())
        ratios = (quantized / values)[quantized.abs() < top]
        self.largest[operand] = float(top)
        self.gains[operand] = float(ratios[ratios.isfinite() & (ratios != 0)].nanmedian())

    def is_initial(self, operand: Operand) -> bool:
        """Whether an operand loses by the initial scale of its state, because no step came
        before."""
        lossy = self.lossy.get(operand)
        return lossy is not None and loses_by_initial_state(operand, lossy)


class CapturedOperands:
    """The captured operands, and the operands that arrive in replays.

    Args:
        step: the captured step.
        fed: whether the captured operands replace those that arrive.
    """

    def __init__(self, step: Bundle, fed: bool) -> None:
        self.comparison = Comparison()
        self._digests: dict[tuple[str, int], dict[str, str]] = {}
        # The operands that arrived in the first replay, where they differ from the captured ones.
        self._arrived: dict[tuple[str, int, str], torch.Tensor] = {}
        # Layer and number of its call -> the captured operands, by tensor.
        self._captured: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        counts: dict[str, int] = {}
        for number, call in enumerate(step.calls if fed else ()):
            key = call.layer, counts.get(call.layer, 0)
            counts[call.layer] = key[1] + 1
            self._captured[key] = {
                tensor: step.operands[f"{number}.{tensor}"]
                for tensor in ("activation", "gradient")
                if f"{number}.{tensor}" in step.operands
            }
            self._digests[key] = call.digests

    def missing(self, recorder: Recorder) -> tuple[str, int] | None:
        """The layer and number of a captured call that the replay did not make, if there is one."""
        own_calls = {(each.name, each.number) for each in recorder.passes}
        return min((key for key in self._captured if key not in own_calls), default=None)

    def meet(self, key: tuple[str, int], tensor: str, values: torch.Tensor) -> torch.Tensor:
        """The captured operand, which replaces ``values`` in the first replay."""
        captured = self._captured.get(key, {}).get(tensor)
        if captured is None:
            return values
        if (*key, tensor) in self._arrived:
            return captured.to(values)
        if captured.shape != values.shape:
            raise CheckpointError(
                f"{tensor} of layer {key[0]!r} is {list(values.shape)}",
                expected=f"{list(captured.shape)}, as was captured",
                remedy="give the same model",
            )
        captured, comparison = captured.to(values), self.comparison
        comparison.operands += 1
        if bool(_same(captured, values).all()):
            comparison.equal += 1
            self._captured[key].pop(tensor)
            return values
        self._arrived[*key, tensor] = values.detach().clone()
        difference = relative_distance(values, captured)
        comparison.difference = max(comparison.difference, difference)
        return captured

    def moved(self, key: tuple[str, int], tensor: str, values: torch.Tensor) -> torch.Tensor:
        """The captured operand in a later replay, moved by the difference between ``values`` and
        the operand that arrived in the first replay."""
        before = self._arrived.get((*key, tensor))
        if before is None:
            return values
        captured = self._captured[key][tensor].to(values)
        moved = torch.where(_same(values, before), captured, values + (captured - before))
        return torch.where(_same(captured, before), values, moved)

    def digest(self, key: tuple[str, int], operand: Operand) -> str | None:
        """The captured digest of a quantized operand; None where none was captured."""
        return self._digests.get(key, {}).get(f"{operand.gemm}.{operand.tensor}")


class Inspecting(Recorder):
    """A recorder whose inspections come from a function."""

    def __init__(self, names: dict[int, str], inspect: Callable[..., Any]) -> None:
        super().__init__(names)
        self._inspect = inspect

    def inspection(self, name: str, layer: Any) -> Any:
        return self._inspect(self, name, layer)


#: Operand whose quantizer raises -> the error.
Broken = dict[Operand, Exception]


class First(Recording):
    """The inspection of the first replay, which quantizes everything and compares it with the
    captured step."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        layer: Any,
        *,
        operands: CapturedOperands,
        broken: Broken,
    ) -> None:
        super().__init__(recorder, name, layer)
        self._operands, self._name, self._broken = operands, name, broken

    @property
    def key(self) -> tuple[str, int]:
        """The layer, and the number of its call."""
        return self._name, self.record.number

    def quantizes(self, gemm: str, tensor: str) -> bool:
        return super().quantizes(gemm, tensor) and (self._name, gemm, tensor) not in self._broken

    def failed(self, gemm: str, tensor: str, values: torch.Tensor, error: Exception) -> None:
        try:
            quantizer_of(self.call.state, gemm, tensor).quantize_impl(values, values.dtype)
        except Exception as failure:
            # The quantizer is called again for this product alone, because the call that raised may
            # have been for both directions.
            self._broken[Operand(self._name, gemm, tensor)] = failure

    def modifies(self, gemm: str, tensor: str) -> bool:
        return tensor in ("activation", "gradient")

    def modify(self, gemm: str, tensor: str, values: torch.Tensor) -> torch.Tensor:
        return self._operands.meet(self.key, tensor, values)

    def note(
        self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None
    ) -> None:
        if quantized is not None:
            operand = Operand(self._name, gemm, tensor)
            captured = self._operands.digest(self.key, operand)
            self._operands.comparison.note(self.call, operand, values, quantized, captured)


class Switched(First):
    """The inspection of a later replay, which quantizes the chosen operands.

    Args:
        chosen: the operands that are quantized.
        nudge: a generator of random signs, which moves every operand by the size of BF16's
            rounding.
        look: records the loss that operands in high precision would have by quantization.
        shrunk: operand -> a factor for its values.
    """

    def __init__(
        self,
        *begun: Any,
        chosen: Collection[Operand],
        nudge: torch.Generator | None = None,
        look: Comparison | None = None,
        shrunk: Mapping[Operand, float] = MappingProxyType({}),
        **of_step: Any,
    ) -> None:
        super().__init__(*begun, **of_step)
        self._chosen, self._nudge, self._look, self._shrunk = chosen, nudge, look, shrunk

    def quantizes(self, gemm: str, tensor: str) -> bool:
        return super().quantizes(gemm, tensor) and (self._name, gemm, tensor) in self._chosen

    def modifies(self, gemm: str, tensor: str) -> bool:
        return super().modifies(gemm, tensor) or (self._name, gemm, tensor) in self._shrunk

    def modify(self, gemm: str, tensor: str, values: torch.Tensor) -> torch.Tensor:
        values = self._operands.moved(self.key, tensor, values)
        factor = self._shrunk.get(Operand(self._name, gemm, tensor))
        if factor is not None:
            return values * factor
        if self._nudge is None:
            return values
        signs = torch.randint(0, 2, values.shape, generator=self._nudge).to(values.device) * 2 - 1
        return (values * (1 + _NUDGE * signs)).to(values.dtype)

    def note(
        self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None
    ) -> None:
        operand = Operand(self._name, gemm, tensor)
        if self._look is None or quantized is not None:
            return
        if operand in self._operands.comparison.statistics:
            quantizer = quantizer_of(self.call.state, gemm, tensor)
            storage = quantizer.quantize_impl(values, values.dtype)
            self._look.note(self.call, operand, values, storage, None)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())
