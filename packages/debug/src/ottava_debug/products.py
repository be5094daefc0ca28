"""The three products of a layer, one by one: what looks at their tensors, and may change them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ottava import debug, prepare_for_saving, restore_from_saved
from ottava.gemm import as_matrix, gemm
from ottava.tensors import QuantizedTensorStorage

#: GEMM -> its operands and its result. They are called as in the configurations of nvdlfw-inspect.
TENSORS = {
    "fprop": ("activation", "weight", "output"),
    "dgrad": ("gradient", "weight", "dgrad"),
    "wgrad": ("gradient", "activation", "wgrad"),
}
#: What recipes call the operands.
ROLES = {"activation": "input", "weight": "weight", "gradient": "grad_output"}


class Inspection:
    """Looks at one layer during one forward pass and its backward pass. Each method may be overridden; what is called
    again when activations are recomputed gets the same tensors."""

    def quantizes(self, gemm: str, tensor: str) -> bool:
        """Whether a product takes an operand quantized where the recipe says so; otherwise in high precision."""
        return True

    def modify(self, gemm: str, tensor: str, values: torch.Tensor) -> torch.Tensor:
        """The values that a product takes, or gives, instead: ``values``, or others of their shape and dtype."""
        return values

    def observe(self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None) -> None:
        """Called with each operand and result of a product, after :meth:`modify`; not when it is recomputed.

        Args:
            values: a matrix in high precision: ``[*, K]`` of operands, ``[out, in]`` of a weight and its gradient.
            quantized: what the product takes of it; None in high precision, and of a result.
        """


#: ``watcher(layer)`` gives an inspection of the layer for the forward pass that begins, or None.
Watcher = Callable[[Any], Inspection | None]
_watchers: list[Watcher] = []


class Watch:
    """Layers are watched from here on, until :meth:`close` or the end of a ``with`` block."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        _watchers.append(watcher)
        debug.set_inspector(_inspector)

    def close(self) -> None:
        """Stop watching."""
        if self._watcher in _watchers:
            _watchers.remove(self._watcher)
        if not _watchers:
            debug.set_inspector(None)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _inspector(layer: Any) -> Callable[..., torch.Tensor] | None:
    found = [inspection for watcher in _watchers if (inspection := watcher(layer)) is not None]
    return partial(_inspected_linear, found) if found else None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _inspected_linear(
    inspections: list[Inspection],
    x: Any,
    weight: Any,
    bias: torch.Tensor | None,
    call: Any,
    dtype: torch.dtype,
    kept: Any,
    main_grad: torch.Tensor | None,
    observed: bool,
) -> torch.Tensor:
    products = _Products(inspections, call, dtype, main_grad)
    if isinstance(x, QuantizedTensorStorage):
        x = x.dequantize()
    return _InspectedLinear.apply(x, weight, bias, products, kept, torch.is_grad_enabled())  # type: ignore[no-any-return, no-untyped-call]


class _Products:
    """How the products of one pass are computed."""

    def __init__(
        self, inspections: Sequence[Inspection], call: Any, dtype: torch.dtype, main_grad: torch.Tensor | None
    ) -> None:
        self.inspections, self.call, self.state = inspections, call, call.state
        self.dtype, self.main_grad = dtype, main_grad

    def quantizes(self, gemm: str, tensor: str) -> bool:
        """Whether a product takes an operand quantized."""
        if self.state is None or (gemm == "wgrad" and ROLES[tensor] in self.state.wgrad_unquantized):
            return False
        return all(inspection.quantizes(gemm, tensor) for inspection in self.inspections)

    def quantized(self, tensor: str, values: Any, rowwise: bool, columnwise: bool) -> Any:
        """The operand as the recipe quantizes it for the usages; None for none."""
        if isinstance(values, QuantizedTensorStorage) or not (rowwise or columnwise):
            return values if rowwise or columnwise else None
        options: dict[str, Any] = {} if tensor == "gradient" else {"recording": self.call.recording}
        quantizer = self.state.quantizer(ROLES[tensor], rowwise=rowwise, columnwise=columnwise, **options)
        return quantizer.quantize_impl(values, self.dtype)

    def operand(self, gemm: str, tensor: str, values: Any, quantized: Any, observed: bool = True) -> Any:
        """What a product takes: quantized, or a matrix in high precision."""
        plain = values.dequantize() if isinstance(values, QuantizedTensorStorage) else values
        changed = self._modified(gemm, tensor, plain)
        takes_quantized = self.quantizes(gemm, tensor)
        if takes_quantized and changed is not plain:
            by_column = gemm == "wgrad" or (gemm == "dgrad" and tensor == "weight")
            quantizer = self.state.quantizer(
                ROLES[tensor], rowwise=not by_column, columnwise=by_column, recording=False
            )
            quantized = quantizer.quantize_impl(changed, self.dtype)
        if observed:
            self._observe(gemm, tensor, changed, quantized if takes_quantized else None)
        return quantized if takes_quantized else changed.to(self.dtype)

    def multiply(self, name: str, left: Any, right: Any, observed: bool = True, **options: Any) -> torch.Tensor:
        """A product of operands, as the inspections leave it."""
        made = gemm(left, right, name, out_dtype=self.dtype, **options)  # type: ignore[arg-type]
        result = TENSORS[name][2]
        made = self._modified(name, result, made)
        if observed:
            self._observe(name, result, made, None)
        return made

    def _modified(self, gemm: str, tensor: str, values: torch.Tensor) -> torch.Tensor:
        for inspection in self.inspections:
            values = inspection.modify(gemm, tensor, values)
        return values

    def _observe(self, gemm: str, tensor: str, values: torch.Tensor, quantized: Any) -> None:
        for inspection in self.inspections:
            inspection.observe(gemm, tensor, values, quantized)


class _InspectedLinear(torch.autograd.Function):
    """``y = x · wᵀ + b``, ``dx = dy · w`` and ``dw = dyᵀ · x``, each of the operands that the inspections leave."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: torch.Tensor | None, products: _Products, kept: Any, grad_enabled: bool
    ) -> torch.Tensor:
        x_needs, w_needs, b_needs = (needed and grad_enabled for needed in ctx.needs_input_grad[:3])
        observed = not products.call.recomputed
        matrix, plain_weight = as_matrix(x.detach()), weight.detach()
        rows, columns = products.quantizes("fprop", "activation"), products.quantizes("wgrad", "activation")
        qx = products.quantized("activation", matrix, rows, columns and w_needs)
        rows, columns = products.quantizes("fprop", "weight"), products.quantizes("dgrad", "weight")
        qw = kept if kept is not None else products.quantized("weight", plain_weight, rows, columns and x_needs)
        left = products.operand("fprop", "activation", matrix, qx, observed)
        right = products.operand("fprop", "weight", plain_weight, qw, observed)
        added = None if bias is None else bias.detach()
        y = products.multiply("fprop", left, right, observed, bias=added, use_split_accumulator=False)
        saved = [x if w_needs else None, qx if w_needs else None, weight if x_needs else None]
        saved.append(qw if x_needs and qw is not plain_weight else None)
        tensors, ctx.specs = prepare_for_saving(*saved)
        ctx.save_for_backward(*tensors)
        bias_dtype = bias.dtype if bias is not None and b_needs else None
        ctx.rest = products, (x.shape, x.dtype, weight.dtype, bias_dtype), weight
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        products, (x_shape, x_dtype, w_dtype, bias_dtype), parameter = ctx.rest
        state, dy = products.state, as_matrix(grads[0])
        if state is not None and state.stateful:
            state.note_backward()
        x, qx, weight, qw = restore_from_saved(ctx.saved_tensors, ctx.specs)
        rows = weight is not None and products.quantizes("dgrad", "gradient")
        columns = x is not None and products.quantizes("wgrad", "gradient")
        qdy = products.quantized("gradient", dy, rows, columns)
        dx = dw = db = None
        if weight is not None:
            left = products.operand("dgrad", "gradient", dy, qdy)
            right = products.operand("dgrad", "weight", weight, weight if qw is None else qw)
            dx = products.multiply("dgrad", left, right).to(x_dtype).view(x_shape)
        if x is not None:
            left = products.operand("wgrad", "gradient", dy, qdy)
            right = products.operand("wgrad", "activation", as_matrix(x), qx)
            dw = products.multiply("wgrad", left, right)
            if products.main_grad is not None:
                products.main_grad.add_(dw)
                for owner in (parameter, parameter._base):
                    if hasattr(owner, "grad_added_to_main_grad"):
                        owner.grad_added_to_main_grad = True
                dw = None
            else:
                dw = dw.to(w_dtype)
        if bias_dtype is not None:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None, None
