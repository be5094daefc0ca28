"""The three products of a layer, computed one by one, so that inspections can observe and modify
their tensors.

A watched layer gives the same results as other layers, bit for bit, unless an inspection changes
something.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ottava import debug, prepare_for_saving, restore_from_saved
from ottava.gemm import as_matrix, gemm
from ottava.kernels.products import without_autocast
from ottava.layout import Layout
from ottava.nn.call import Call
from ottava.nn.checks import autocast_dtype
from ottava.nn.function import IntoMainGrad, quantized_linear
from ottava.nn.high_precision import high_precision_linear
from ottava.nn.plan import Plan, plan_for
from ottava.recipes.backward import DEQUANTIZED, HIGH_PRECISION, QUANTIZED
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.operands import BY_COLUMN, OPERANDS, ROLES, TENSORS


class Inspection:
    """Observes one layer during one forward pass and its backward pass.

    Each method may be overridden. Methods that are called again when activations are recomputed get
    the same tensors.
    """

    #: The call of the pass, with its recipe, and whether activations are recomputed; set before the
    #: first product.
    call: Call = Call()
    #: The operands that products of the pass take quantized if nothing is modified; set with
    #: ``call``.
    quantized: frozenset[tuple[str, str]] = frozenset()

    def quantizes(self, gemm: str, tensor: str) -> bool:
        """Whether a product takes an operand quantized where the recipe does; otherwise the operand
        stays in high precision.

        Called once, before the forward pass.
        """
        return True

    def modifies(self, gemm: str, tensor: str) -> bool:
        """Whether :meth:`modify` may change this tensor.

        A layer with no quantized and no modified tensor is computed as a high-precision layer.
        Called once, before the forward pass.
        """
        return type(self).modify is not Inspection.modify

    def modify(
        self, gemm: str, tensor: str, values: torch.Tensor
    ) -> torch.Tensor | QuantizedTensorStorage:
        """The values that replace an operand or result of a product: ``values`` themselves, or
        others of the same shape and dtype.

        An operand may be replaced by a quantized tensor, with data for the product's usage.
        ``values`` must not be changed in place, because they may be the parameter.
        """
        return values

    def failed(self, gemm: str, tensor: str, values: torch.Tensor, error: Exception) -> None:
        """Called when the quantizer of an operand raises, once for each product that would take the
        operand; the error is raised afterwards."""

    def observe(
        self,
        gemm: str,
        tensor: str,
        values: torch.Tensor,
        quantized: QuantizedTensorStorage | None,
    ) -> None:
        """Called with each operand and result of a product, after :meth:`modify`, but not when the
        product is recomputed.

        Args:
            gemm: the product, a key of :data:`ottava_debug.operands.TENSORS`.
            tensor: the operand or result.
            values: a matrix in high precision: ``[*, K]`` for operands, ``[out, in]`` for a weight
                and its gradient.
            quantized: the quantized operand that the product takes; None for an operand in high
                precision, and for a result.
        """


#: ``watcher(layer)`` returns an inspection for the layer's forward pass that begins, or None.
Watcher = Callable[[Any], Inspection | None]
#: Whether the watcher may ever inspect layers with a name; compiled code of other layers stays in
#: one graph.
Selects = Callable[[str], bool]
_watches: "list[Watch]" = []
# Compiled code reads this, so torch compiles again when other layers are watched.
_generation = "0"


class Watch:
    """Watches layers from its creation until :meth:`close` or the end of a ``with`` block.

    Args:
        watcher: returns an inspection for a layer, or None.
        selects: whether layers with a name may ever be inspected; by default all may.
    """

    def __init__(self, watcher: Watcher, selects: Selects = lambda name: True) -> None:
        self.watcher = watcher
        self.selects = selects
        _watches.append(self)
        _changed()

    def close(self) -> None:
        """Stop watching; further calls do nothing."""
        _watches[:] = [watch for watch in _watches if watch is not self]
        _changed()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _changed() -> None:
    global _generation
    _generation = str(int(_generation) + 1)
    debug.set_inspector(_inspector if _watches else None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _may_be_inspected(name: str, generation: str) -> bool:
    return any(watch.selects(name) for watch in _watches)


def _inspector(layer: Any) -> Callable[..., torch.Tensor] | None:
    if torch.compiler.is_compiling():
        # A watcher's answer may change in the next step, so the watcher is called when the compiled
        # code runs.
        if _may_be_inspected(layer.name, _generation):
            return partial(_inspected_when_run, layer)
        return None
    inspections = _inspections(layer)
    return partial(_inspected_linear, layer, inspections) if inspections else None


def _inspections(layer: Any) -> list[Inspection]:
    inspections = []
    # This is a plain loop, because every layer comes here in each of its forward passes, watched or
    # not.
    for watch in _watches:
        inspection = watch.watcher(layer)
        if inspection is not None:
            inspections.append(inspection)
    return inspections


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _inspected_when_run(layer: Any, *arguments: Any) -> torch.Tensor:
    return _inspected_linear(layer, _inspections(layer), *arguments)


def _inspected_linear(
    layer: Any,
    inspections: list[Inspection],
    x: Any,
    weight: Any,
    bias: torch.Tensor | None,
    call: Any,
    dtype: torch.dtype,
    microbatch_weight: Any,
    main_grad: torch.Tensor | None,
    observed: bool,
) -> torch.Tensor:
    products = _Products(inspections, call, dtype)
    if not products.quantized and not any(products.modifying.values()):
        return _in_high_precision(products, x, weight, bias, main_grad)
    if not inspections:
        plan = plan_for(layer, call, x, weight, bias, compiling=False)
        return quantized_linear(x, weight, bias, plan, microbatch_weight, main_grad, observed)
    x = dense(x)
    plan = products.plan(x, weight, microbatch_weight)
    with without_autocast(x.device.type):
        return quantized_linear(x, weight, bias, plan, None, main_grad, observed)


def dense(values: Any) -> Any:
    """``values``, dequantized if they are quantized."""
    return values.dequantize() if isinstance(values, QuantizedTensorStorage) else values


def quantizer_of(state: Any, gemm_type: str, tensor: str) -> Any:
    """The quantizer of an operand for one product alone; it reads the state of the recipe and does
    not change it."""
    by_column = (gemm_type, tensor) in BY_COLUMN
    return state.quantizer(
        ROLES[tensor], rowwise=not by_column, columnwise=by_column, recording=False
    )


def _rotated_back(operand: Any, columnwise: bool, dtype: torch.dtype) -> Any:
    """The values of an operand that is rotated along the summed dimension, because the other one,
    in high precision, is not; any other operand as it is."""
    layout: Layout | None = getattr(operand, "grid_layout", None)
    if layout is None or layout.rotation is None or not layout.rotation.turns(columnwise):
        return operand
    return operand.dequantize(dtype)


class _Operand(NamedTuple):
    """The values of an operand, and what is quantized of them for the products that take it."""

    values: torch.Tensor
    quantized: QuantizedTensorStorage | None

    def flatten_columnwise(
        self,
    ) -> tuple[Sequence[torch.Tensor | None], "_OperandSpec"]:
        """The tensors to save for the backward pass, and the spec that rebuilds the operand."""
        tensors, specs = prepare_for_saving(self.values, self.quantized)
        return tensors, _OperandSpec(specs)


class _OperandSpec(NamedTuple):
    """Rebuilds an operand from its saved tensors."""

    specs: Sequence[Any]

    @property
    def tensor_count(self) -> int:
        return sum(1 if spec is None else spec.tensor_count for spec in self.specs)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> _Operand:
        return _Operand(*restore_from_saved(tensors, self.specs))


# The state of a plan without a recipe.
_STATELESS: Any = SimpleNamespace(stateful=False)


class _Products:
    """Computes the products of one pass, with the inspections."""

    def __init__(self, inspections: Sequence[Inspection], call: Any, dtype: torch.dtype) -> None:
        self.inspections = inspections
        self.call = call
        self.state = call.state
        self.dtype = dtype
        for inspection in inspections:
            inspection.call = call
        # This is decided once, because the tensors saved for the backward pass depend on it.
        self.quantized = frozenset(pair for pair in OPERANDS if self._quantizes(*pair))
        for inspection in inspections:
            inspection.quantized = self.quantized
        # The inspections that modify an operand or result.
        self.modifying = {
            (gemm_type, tensor): [each for each in inspections if each.modifies(gemm_type, tensor)]
            for gemm_type, tensors in TENSORS.items()
            for tensor in tensors
        }

    def _quantizes(self, gemm_type: str, tensor: str) -> bool:
        if self.state is None or self._word(gemm_type, tensor) != QUANTIZED:
            return False
        return all(inspection.quantizes(gemm_type, tensor) for inspection in self.inspections)

    def _word(self, gemm_type: str, tensor: str) -> str:
        """The recipe's word for what a product reads of an operand."""
        word: str = self.state.backward_reads.get((gemm_type, ROLES[tensor]), QUANTIZED)
        return word

    def plan(self, x: torch.Tensor, weight: Any, microbatch_weight: Any) -> Plan:
        """The plan of the pass, whose operands are of :class:`_Operand`, and whose products inspect
        their operands and results."""
        grad_enabled = torch.is_grad_enabled()
        x_needs_grad = grad_enabled and x.requires_grad
        w_needs_grad = grad_enabled and weight.requires_grad
        # The products of the backward pass that are computed.
        dgrad = "dgrad" if x_needs_grad else ""
        wgrad = "wgrad" if w_needs_grad else ""

        # An :class:`_Operand` is saved by its own method, a weight that lives in FP8 as itself.
        saved_weight = QUANTIZED
        if isinstance(weight, QuantizedTensorStorage):
            saved_weight = HIGH_PRECISION

        def quantize_weight(values: torch.Tensor) -> Any:
            if microbatch_weight is not None:
                return _Operand(values.detach(), microbatch_weight)
            return self._quantize("weight", values, "fprop", dgrad)

        return Plan(
            quantize_input=lambda x: self._quantize("activation", x, "fprop", wgrad),
            quantize_weight=quantize_weight,
            quantize_grad_output=lambda dy: self._quantize("gradient", dy, dgrad, wgrad),
            fprop=partial(self._multiply, "fprop"),
            dgrad=partial(self._multiply, "dgrad"),
            wgrad=partial(self._multiply, "wgrad"),
            state=_STATELESS if self.state is None else self.state,
            may_count_clamps=False,
            dtype=self.dtype,
            amp_dtype=None,
            x_needs_grad=x_needs_grad,
            w_needs_grad=w_needs_grad,
            saved_input=QUANTIZED if w_needs_grad else None,
            saved_weight=saved_weight if x_needs_grad else None,
            wgrad_reads_quantized_dy=True,
            x_shape=x.shape,
            x_dtype=x.dtype,
            w_dtype=weight.dtype,
        )

    def _quantize(self, tensor: str, values: torch.Tensor, rows_of: str, columns_of: str) -> Any:
        """The operand, quantized by rows for one product and by columns for another one, where they
        take it quantized; their names are empty where they do not take it."""
        values = values.detach()
        rowwise = (rows_of, tensor) in self.quantized
        columnwise = (columns_of, tensor) in self.quantized
        if not (rowwise or columnwise):
            return _Operand(values, None)
        options: dict[str, Any] = {} if tensor == "gradient" else {"recording": self.call.records}
        quantizer = self.state.quantizer(
            ROLES[tensor], rowwise=rowwise, columnwise=columnwise, **options
        )
        try:
            return _Operand(values, quantizer.quantize_impl(values, self.dtype))
        except Exception as error:
            for inspection in self.inspections:
                for gemm_type in [rows_of] * rowwise + [columns_of] * columnwise:
                    inspection.failed(gemm_type, tensor, values, error)
            raise

    def _multiply(
        self,
        gemm_type: Any,
        a: Any,
        b: Any,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product of two operands, after modification; added to ``out`` where that is given."""
        left, right, result = TENSORS[gemm_type]
        observed = gemm_type != "fprop" or not self.call.recomputed
        operands = (
            self._operand(gemm_type, left, a, observed),
            self._operand(gemm_type, right, b, observed),
        )
        if not all(isinstance(operand, QuantizedTensorStorage) for operand in operands):
            operands = (
                _rotated_back(operands[0], (gemm_type, left) in BY_COLUMN, self.dtype),
                _rotated_back(operands[1], (gemm_type, right) in BY_COLUMN, self.dtype),
            )
        options: dict[str, Any] = {}
        if gemm_type == "fprop":
            options = {"bias": bias, "use_split_accumulator": False}
        product: torch.Tensor = gemm(*operands, gemm_type, out_dtype=self.dtype, **options)
        product = self._modified(gemm_type, result, product)
        if observed:
            self.observe(gemm_type, result, product)
        if out is not None and self.modifying[gemm_type, result]:
            return out.add_(product)
        if out is not None:
            # The sum is rounded only once.
            gemm(*operands, gemm_type, out_dtype=self.dtype, out=out, accumulate=True)
        return product

    def _operand(self, gemm_type: str, tensor: str, operand: Any, observed: bool) -> Any:
        """The matrix that a product takes, after modification."""
        if isinstance(operand, QuantizedTensorStorage):
            operand = _Operand(dense(operand), operand)
        plain, quantized = operand
        if quantized is not None and self._reads_rows(gemm_type, tensor):
            plain = quantized.dequantize(self.dtype)
        values = self._modified(gemm_type, tensor, plain)
        if (gemm_type, tensor) not in self.quantized:
            quantized = None
            values = dense(values)
        elif isinstance(values, QuantizedTensorStorage):
            quantized = values
            values = plain
        elif values is not plain:
            quantizer = quantizer_of(self.state, gemm_type, tensor)
            quantized = quantizer.quantize_impl(values, self.dtype)
        if observed:
            self.observe(gemm_type, tensor, values, quantized)
        return values.to(self.dtype) if quantized is None else quantized

    def _reads_rows(self, gemm_type: str, tensor: str) -> bool:
        """Whether a product takes the values that fprop read of an operand."""
        return self.state is not None and self._word(gemm_type, tensor) == DEQUANTIZED

    def _modified(self, gemm_type: str, tensor: str, values: torch.Tensor) -> Any:
        current: Any = values
        for inspection in self.modifying[gemm_type, tensor]:
            plain = dense(current)
            changed = inspection.modify(gemm_type, tensor, plain)
            if changed is not plain:
                current = changed
        return current

    def observe(
        self, gemm_type: str, tensor: str, values: torch.Tensor, quantized: Any = None
    ) -> None:
        """Have the inspections observe an operand or a result."""
        for inspection in self.inspections:
            inspection.observe(gemm_type, tensor, values, quantized)


def _in_high_precision(
    products: _Products,
    x: Any,
    weight: Any,
    bias: torch.Tensor | None,
    main_grad: torch.Tensor | None,
) -> torch.Tensor:
    """The output of a layer with no quantized and no modified tensor, by core's own functions."""
    amp_dtype = autocast_dtype(weight, False)
    region: AbstractContextManager[object] = nullcontext()
    if products.state is not None and {x.dtype, weight.dtype} != {products.dtype}:
        # torch.autocast was switched off for a product of quantized operands.
        amp_dtype = products.dtype
        region = torch.autocast(weight.device.type, dtype=products.dtype)
    if main_grad is not None:
        weight = IntoMainGrad.apply(weight, (main_grad,))  # type: ignore[no-untyped-call]
    else:
        weight = dense(weight)
    x = dense(x)

    def observe(gemm_type: str, tensor: str, values: torch.Tensor) -> None:
        products.observe(gemm_type, tensor, as_matrix(values.detach()).to(products.dtype))

    def tapped(gemm_type: str, result: str, values: torch.Tensor) -> Any:
        if not values.requires_grad:
            return values
        observe_gradient = partial(observe, gemm_type, result)
        return _Tap.apply(values, observe_gradient)  # type: ignore[no-untyped-call]

    def take_gradient(dy: torch.Tensor) -> None:
        for gemm_type, operand, needed in (
            ("dgrad", weight, x.requires_grad),
            ("wgrad", x, weight.requires_grad),
        ):
            if needed:
                observe(gemm_type, "gradient", dy)
                observe(gemm_type, TENSORS[gemm_type][1], operand)

    with region:
        y = high_precision_linear(
            tapped("dgrad", "dgrad", x),
            tapped("wgrad", "wgrad", weight),
            bias,
            amp_dtype,
        )
    if not products.call.recomputed:
        for tensor, values in zip(TENSORS["fprop"], (x, weight, y), strict=True):
            observe("fprop", tensor, values)
    if y.requires_grad and products.inspections:
        y.register_hook(take_gradient)
    return y


class _Tap(torch.autograd.Function):
    """Returns values unchanged, and calls a function with their gradient."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, observe: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.observe = observe
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.observe(grads[0])
        return grads[0], None
