"""A search without the model: the effect of each operand on the result of its own product."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

import ottava
from ottava.checkpoint.files import DTYPES, dtype_name
from ottava.errors import CheckpointError, UsageError, translated
from ottava.recipes import Recipe
from ottava_debug.bundle import Bundle
from ottava_debug.products import OPERANDS, TENSORS, Inspection, Watch
from ottava_debug.recipe_data import build
from ottava_debug.search.operands import Comparison, Operand


class _Product(Inspection):
    """Records the results of the three products, with the chosen operands quantized and
    observed."""

    def __init__(self, chosen: Any, look: Callable[..., None] | None = None) -> None:
        self._chosen, self._look = chosen, look
        self.results: dict[str, torch.Tensor] = {}

    def quantizes(self, gemm: str, tensor: str) -> bool:
        return (gemm, tensor) in self._chosen

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
        recipes = [recipe or build(said) for said in step.recipes]
        for number, call in enumerate(step.calls):
            if f"{number}.activation" not in step.operands:
                continue  # a quantizer had raised
            with torch.random.fork_rng():
                self._run(number, recipes[step.layers[call.layer]])
            if progress is not None:
                progress(number + 1, len(step.calls))

    def _run(self, number: int, recipe: Recipe) -> None:
        call, found = self._step.calls[number], self.comparison

        def look(gemm: str, tensor: str, values: torch.Tensor, quantized: Any) -> None:
            expected = call.digests.get(f"{gemm}.{tensor}") if self._recipe is None else None
            found.note(looking.call, Operand(call.layer, gemm, tensor), values, quantized, expected)

        held = [
            self._step.operands.get(f"{number}.{tensor}") for tensor in ("activation", "gradient")
        ]
        found.operands += sum(values is not None for values in held)
        found.equal = found.operands
        looking = _Product(OPERANDS, look)
        what = f"a product of layer {call.layer!r} cannot be computed"
        with translated(
            what, "a recipe whose quantizers work", "give the model, or recipe=", to=UsageError
        ):
            self._results(number, recipe, looking)
        exact = self._results(number, recipe, _Product(()))
        for gemm, tensor in OPERANDS:
            operand = Operand(call.layer, gemm, tensor)
            if gemm in exact and operand in found.statistics:
                results = self._results(number, recipe, _Product({(gemm, tensor)}))
                self.errors[operand] = max(
                    self.errors.get(operand, 0.0), _error(results[gemm], exact[gemm])
                )

    def _results(
        self, number: int, recipe: Recipe, inspection: _Product
    ) -> dict[str, torch.Tensor]:
        """The results of the products of one call, by product."""
        step, name = self._step, self._step.calls[number].layer
        activation, gradient = (
            step.operands.get(f"{number}.{tensor}") for tensor in ("activation", "gradient")
        )
        weight = _weight(step, number)
        assert activation is not None  # what is read is checked
        layer = ottava.nn.Linear(
            weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, name=name
        )
        prefix = f"{name}.recipe_state." if name else "recipe_state."
        kept = {k.removeprefix(prefix): v for k, v in step.state.items() if k.startswith(prefix)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer.bind(recipe)
            state = {f"recipe_state.{k}": v for k, v in kept.items() if self._recipe is None}
            layer.load_state_dict({"weight": weight, **state}, strict=self._recipe is None)
        dtype = DTYPES[step.autocast or "bfloat16"]
        with Watch(lambda watched: inspection if watched is layer else None):
            with torch.autocast("cpu", dtype, enabled=bool(step.autocast)):
                y = layer(activation.clone().requires_grad_())
            if gradient is not None:
                y.backward(gradient.to(y.dtype))
        return inspection.results


def _weight(step: Bundle, number: int) -> torch.Tensor:
    """The weight of a call in high precision, ``[out, in]``."""
    name = step.calls[number].layer
    found = step.operands.get(
        f"{number}.weight", step.state.get(f"{name}.weight" if name else "weight")
    )
    if found is None:
        raise CheckpointError(
            f"the weight of layer {name!r} is missing", expected="a step that capture has written"
        )
    weight: torch.Tensor = found.detach() if type(found) is torch.Tensor else found.dequantize()
    activation, gradient = (
        step.operands.get(f"{number}.{tensor}") for tensor in ("activation", "gradient")
    )
    ends = [held.shape[1] for held in (gradient, activation) if held is not None]
    if (
        not weight.is_floating_point()
        or list(weight.shape)[-len(ends) :] != ends
        or weight.dim() != 2
    ):
        what = f"the weight of layer {name!r} is {dtype_name(weight.dtype)} {list(weight.shape)}"
        raise CheckpointError(
            what, expected=f"high precision, [out, in] as of its operands, {ends}"
        )
    return weight


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """``‖result - exact‖ / ‖exact‖``."""
    size = float(exact.double().norm())
    error = float((result.double() - exact.double()).norm())
    if not math.isfinite(error):
        return math.inf
    if size:
        return error / size
    return math.inf if error else 0.0
