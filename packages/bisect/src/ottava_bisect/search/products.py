"""A search without the model: the effect of each operand on the result of its own product."""

import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch

import ottava
from ottava.checkpoint.files import DTYPES, dtype_name
from ottava.errors import CheckpointError, UsageError, translated
from ottava.recipes import Recipe
from ottava_bisect.bundle import Bundle
from ottava_bisect.recipe_data import build
from ottava_bisect.search.measure import relative_distance
from ottava_bisect.search.operands import Comparison, Operand
from ottava_debug.operands import OPERANDS, TENSORS
from ottava_debug.products import Inspection, Watch


class _Product(Inspection):
    """Records the results of the three products, with some operands quantized and
    observed."""

    def __init__(
        self, operands: Collection[tuple[str, str]], look: Callable[..., None] | None = None
    ) -> None:
        self._operands, self._look = operands, look
        self.results: dict[str, torch.Tensor] = {}

    def quantizes(self, gemm: str, tensor: str) -> bool:
        return (gemm, tensor) in self._operands

    def observe(self, gemm: str, tensor: str, values: torch.Tensor, quantized: Any) -> None:
        if tensor == TENSORS[gemm][2]:
            self.results[gemm] = values.detach()
        elif quantized is not None and self._look is not None:
            self._look(gemm, tensor, values, quantized)


class Products:
    """The products of a captured step, computed from the captured operands.

    Args:
        step: the captured step.
        recipe: another recipe that quantizes; None uses the captured ones.
        progress: called after each call of a layer, with the number of calls so far and in total.

    Attributes:
        comparison: the comparison with the captured step, as in a replay of the whole step.
        errors: operand -> ``‖z - z₀‖ / ‖z₀‖`` in the call where that is largest. ``z`` is the
            product's result with only this operand quantized, and ``z₀`` its result in high
            precision.

    Raises:
        UsageError: the captured recipe cannot be built from data, and ``recipe`` is None.
        CheckpointError: the state of a layer is missing in the step, or has another shape.
    """

    def __init__(
        self,
        step: Bundle,
        recipe: Recipe | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.comparison, self.errors = Comparison(), dict[Operand, float]()
        self._step, self._recipe = step, recipe
        recipes = [recipe or build(data) for data in step.recipes]
        for number, call in enumerate(step.calls):
            if f"{number}.activation" not in step.operands:
                continue  # a quantizer had raised
            with torch.random.fork_rng():
                self._run(number, recipes[step.layers[call.layer]])
            if progress is not None:
                progress(number + 1, len(step.calls))

    def _run(self, number: int, recipe: Recipe) -> None:
        call, comparison = self._step.calls[number], self.comparison

        def look(gemm: str, tensor: str, values: torch.Tensor, quantized: Any) -> None:
            digest = call.digests.get(f"{gemm}.{tensor}") if self._recipe is None else None
            operand = Operand(call.layer, gemm, tensor)
            comparison.note(observer.call, operand, values, quantized, digest)

        comparison.operands += sum(
            f"{number}.{tensor}" in self._step.operands for tensor in ("activation", "gradient")
        )
        comparison.equal = comparison.operands
        observer = _Product(OPERANDS, look)
        with translated(
            f"a product of layer {call.layer!r} cannot be computed",
            "a recipe whose quantizers work",
            "give the model, or recipe=",
            to=UsageError,
        ):
            self._results(number, recipe, observer)
        exact = self._results(number, recipe, _Product(()))
        for gemm, tensor in OPERANDS:
            operand = Operand(call.layer, gemm, tensor)
            if gemm in exact and operand in comparison.statistics:
                results = self._results(number, recipe, _Product({(gemm, tensor)}))
                error = relative_distance(results[gemm], exact[gemm])
                self.errors[operand] = max(self.errors.get(operand, 0.0), error)

    def _results(
        self, number: int, recipe: Recipe, inspection: _Product
    ) -> dict[str, torch.Tensor]:
        """The results of the products of one call, by product."""
        step = self._step
        activation, gradient = (
            step.operands.get(f"{number}.{tensor}") for tensor in ("activation", "gradient")
        )
        assert activation is not None  # what is read is checked
        layer = self._layer(number, recipe)
        dtype = DTYPES[step.autocast or "bfloat16"]
        with Watch(lambda other: inspection if other is layer else None):
            with torch.autocast("cpu", dtype, enabled=bool(step.autocast)):
                y = layer(activation.clone().requires_grad_())
            if gradient is not None:
                y.backward(gradient.to(y.dtype))
        return inspection.results

    def _layer(self, number: int, recipe: Recipe) -> ottava.nn.Linear:
        """The layer of a call, with its captured weight and scaling state."""
        name, weight = self._step.calls[number].layer, _weight(self._step, number)
        layer = ottava.nn.Linear(
            weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, name=name
        )
        state: dict[str, Any] = {"weight": weight}
        is_captured = self._recipe is None
        if is_captured:
            prefix = f"{name}." if name else ""
            state |= {
                key.removeprefix(prefix): value
                for key, value in self._step.state.items()
                if key.startswith(f"{prefix}recipe_state.")
            }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer.bind(recipe)
            layer.load_state_dict(state, strict=is_captured)
        return layer


def _weight(step: Bundle, number: int) -> torch.Tensor:
    """The weight of a call in high precision, ``[out, in]``."""
    name = step.calls[number].layer
    parameter = step.state.get(f"{name}.weight" if name else "weight")
    operand = step.operands.get(f"{number}.weight", parameter)
    if operand is None:
        raise CheckpointError(
            f"the weight of layer {name!r} is missing", expected="a step that capture has written"
        )
    is_plain = type(operand) is torch.Tensor
    weight: torch.Tensor = operand.detach() if is_plain else operand.dequantize()
    activation, gradient = (
        step.operands.get(f"{number}.{tensor}") for tensor in ("activation", "gradient")
    )
    sizes = [other.shape[1] for other in (gradient, activation) if other is not None]
    is_matrix = weight.is_floating_point() and weight.dim() == 2
    if not is_matrix or list(weight.shape)[-len(sizes) :] != sizes:
        raise CheckpointError(
            f"the weight of layer {name!r} is {dtype_name(weight.dtype)} {list(weight.shape)}",
            expected=f"high precision, [out, in] as of its operands, {sizes}",
        )
    return weight
