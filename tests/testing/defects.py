"""Deliberately broken recipes: each is a small change of the sound one in ``row_recipe.py``."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ottava import QuantizedTensorStorage, QuantizerRole, RecipeSpec
from ottava.distributed import ShardBatch, ShardRule
from ottava.errors import ShapeError
from ottava.recipes.state import RecipeState
from ottava.tensors import InnerTensor, implements
from ottava.tensors.storage import rebuild_storage
from tests.testing.row_recipe import SPEC, RowQuantizer, Rows, RowStorage, RowTensor

aten = torch.ops.aten
OWN_GENERATOR = torch.Generator()


#: What is changed: "quantizer", "storage" (and the tensor), "tensor" (alone) and "recipe", with
#: changes by the name of a method or by an op of torch; "spec", with fields; and "sound", the
#: quantizer that is changed.
Changes = dict[str, Any]


def _part(name: str) -> Callable[..., Changes]:
    def changes(by_op: dict[Any, Any] | None = None, **by_name: Any) -> Changes:
        return {name: {**(by_op or {}), **by_name}}

    return changes


quantizer, storage, tensor, recipe, spec = map(
    _part, ("quantizer", "storage", "tensor", "recipe", "spec")
)


def sound(cls: type[RowQuantizer]) -> Changes:
    return {"sound": cls}


def values(change: Callable[..., Any]) -> Changes:
    """A quantizer that quantizes something else: a function of it and of what it gets."""
    return quantizer(data_and_scale=lambda base, self, x: base(change(self, x)))


def _derived(name: str, bases: tuple[type, ...], changes: dict[Any, Any]) -> Any:
    """A class of this module with changes.

    A function gets the method of the base class, bound, and the object before its arguments. A
    function by an op of torch is called in place of that op.
    """
    cls = type(name, bases, {"__module__": __name__})
    globals()[name] = cls
    for key, change in changes.items():
        if not isinstance(key, str):
            implements(cls, key)(change)
        elif isinstance(change, types.FunctionType):
            setattr(cls, key, _override(cls, key, change))
        else:
            setattr(cls, key, change)
    return cls


def _override(cls: type, key: str, change: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return change(getattr(super(cls, self), key), self, *arguments, **options)

    return method


@dataclass(frozen=True)
class Defect:
    """A broken recipe, the check that has to find it, and the words that name the defect."""

    check: str
    message: str
    recipe: Callable[[], Rows]
    spec: RecipeSpec


def _defect(name: str, check: str, message: str, changes: Changes) -> Defect:
    base = changes.get("sound", RowQuantizer)
    of_quantizer = dict(changes.get("quantizer", {}))
    bases: tuple[Any, ...] = (base.tensor,)
    if "storage" in changes:
        of_quantizer["storage"] = _derived(f"{name}Storage", (base.storage,), changes["storage"])
        bases = (of_quantizer["storage"], base.tensor)
    if "storage" in changes or "tensor" in changes:
        of_quantizer["tensor"] = _derived(f"{name}Tensor", bases, changes.get("tensor", {}))
    made = _derived(f"{name}Quantizer", (base,), of_quantizer)
    rows = _derived(f"{name}Recipe", (Rows,), changes.get("recipe", {}))
    fields = dataclasses.replace(SPEC, **changes.get("spec", {}))
    return Defect(check, message, lambda: rows(made), fields)


# -- other sound quantizers --


class TwoWays(RowStorage):
    """Another copy of the data for the columnwise usage."""

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_data", "data", usage="rowwise", gather=True),
        InnerTensor("_columns", "columns", usage="columnwise", gather=True),
        InnerTensor("_scale_inv", "scale_inv", gather=True),
    )
    _columns: torch.Tensor | None

    def size(self, dim: int | None = None) -> Any:
        held: Any = self._data if self._data is not None else self._columns
        return held.size() if dim is None else held.size(dim)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.values(self._data if self._data is not None else self._columns, dtype)

    def values(self, data: Any, dtype: torch.dtype | None) -> torch.Tensor:
        return (data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(dtype or self.dtype)

    def gemm_operand(self, *, columnwise: bool, dtype: torch.dtype) -> Any:
        data = self._columns if columnwise and self._columns is not None else self._data
        return self.values(data, dtype).reshape(-1, self.size(-1)), None


class TwoWaysTensor(RowTensor, TwoWays):
    pass


class TwoWaysQuantizer(RowQuantizer):
    storage, tensor = TwoWays, TwoWaysTensor

    def quantize_impl(self, tensor: torch.Tensor, dtype: torch.dtype) -> QuantizedTensorStorage:
        data, scale_inv = self.data_and_scale(tensor.to(torch.float32))
        rowwise, columnwise = self.usages_to_make()
        tensors = {"data": data if rowwise else None, "scale_inv": scale_inv}
        tensors["columns"] = data.clone() if columnwise else None
        shape = {} if self.internal else {"shape": tensor.shape}
        make: Any = self.storage if self.internal else self.tensor
        made: QuantizedTensorStorage = make(**tensors, **shape, dtype=dtype, quantizer=self)
        return made

    def usages_to_make(self) -> tuple[bool, bool]:
        return self.rowwise_usage, self.columnwise_usage


# -- changes that several defects are made of --


def nothing(op: Any, tensor: Any, *rest: Any, **more: Any) -> Any:
    """An op in place that does not happen."""
    return None if op.__name__.startswith("_") else tensor


def drops(*ops: Any) -> Changes:
    return tensor(dict.fromkeys(ops, nothing))


def has(name: str, make: Callable[[], Any], **changes: Any) -> Changes:
    """A quantizer with an attribute of its own."""

    def init(base: Any, self: Any) -> None:
        base()
        setattr(self, name, make())

    return quantizer(__init__=init, **changes)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def called_from(name: str) -> bool:
    frames = traceback.extract_stack()[-12:]
    return any(name in (frame.name, frame.filename.split("/")[-2]) for frame in frames)


def codes(x: torch.Tensor, scale_inv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    data = (x / scale_inv).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return data, scale_inv.expand(*x.shape[:-1], 1).contiguous()


def one_scale(base: Any, self: Any, x: torch.Tensor) -> Any:
    """One scale for the whole tensor, repeated for each row: that of a shard is another."""
    return codes(x, x.abs().amax().clamp(min=1e-30) / 448) if x.numel() else base(x)


BUFFERS: dict[Any, torch.Tensor] = {}
LARGEST = [0.0]
COUNT = [0]
GRADIENTS: list[torch.Tensor] = []


def forget() -> None:
    """Empty what broken recipes keep in globals."""
    BUFFERS.clear()
    GRADIENTS.clear()
    LARGEST[0], COUNT[0] = 0.0, 0


def one_buffer(base: Any, self: Any, x: torch.Tensor) -> Any:
    """All tensors of a shape lie in one buffer."""
    data, scale_inv = base(x)
    return BUFFERS.setdefault(tuple(data.shape), torch.empty_like(data)).copy_(data), scale_inv


def global_scale(base: Any, self: Any, x: torch.Tensor) -> Any:
    """The scale is that of the largest value that any model ever had."""
    if not x.is_meta and x.numel():
        LARGEST[0] = max(LARGEST[0], float(x.abs().max()))
    return codes(x, torch.full((*x.shape[:-1], 1), max(LARGEST[0], 1e-3) / 448))


def aliased(base: Any, self: Any, *arguments: Any) -> Any:
    """A copy that shares its scale."""
    clone = base(*arguments)
    clone._scale_inv = self._scale_inv
    return clone


# -- quantizers --


def no_output(base: Any, self: Any, role: Any, **rest: Any) -> Any:
    return "none" if QuantizerRole.of(role).tensor_type == "output" else base(role)


def same_object(base: Any, self: Any, *usages: bool) -> Any:
    return self


def another_out(base: Any, self: Any, x: Any, out: Any = None, **rest: Any) -> Any:
    return base(x, out=out if out is not None and out.shape == x.shape else None, **rest)


def matrices_only(base: Any, self: Any, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    if tensor.dim() != 2:
        raise ShapeError(f"shape {tuple(tensor.shape)}", expected="two dimensions")
    return base(tensor, dtype)


def counts(base: Any, self: Any, src: Any, dst: Any, **rest: Any) -> Any:
    self.seen.add_(1)
    return base(src, dst, **rest)


def coarse_weights(base: Any, self: Any, role: Any, **rest: Any) -> Any:
    made = base(role)
    made.steps = 4 if role.tensor_type == "weight" else 0
    return made


def to_float(x: Any) -> Any:
    is_integer = isinstance(x, torch.Tensor) and not x.is_floating_point()
    return x.float() if is_integer else x


def inverted(base: Any, self: Any, x: torch.Tensor) -> Any:
    amax = x.abs().amax(-1, keepdim=True)
    return codes(x, 1.0 / torch.where(amax > 0, 448.0 / amax, 1.0))


def scale_on_cpu(base: Any, self: Any, x: torch.Tensor) -> Any:
    data, scale_inv = base(x)
    return data, torch.ones(scale_inv.shape)


def knows_compiler(base: Any, self: Any, dtype: torch.dtype) -> Any:
    return base(dtype) * (1.05 if torch.compiler.is_compiling() else 1.0)


def breaks_graph(base: Any, self: Any, *arguments: Any, **options: Any) -> Any:
    torch._dynamo.graph_break()
    return base(*arguments, **options)


def wrong_columns(base: Any, self: Any, *, columnwise: bool, dtype: torch.dtype) -> Any:
    values = self.dequantize(dtype).reshape(-1, self.size(-1))
    return values.t().reshape(values.shape) if columnwise else values, None


def product(change: Callable[[dict[str, Any]], None]) -> Changes:
    """A quantizer whose products have other arguments, which come in their places or by name."""

    def qgemm(base: Any, self: Any, *rest: Any, **more: Any) -> Any:
        bound = inspect.signature(base).bind(*rest, **more)
        change(bound.arguments)
        return base(*bound.args, **bound.kwargs)

    return quantizer(custom=True, qgemm=qgemm)


def transposed(base: Any, self: Any, *rest: Any, **more: Any) -> Any:
    result = base(*rest, **more)
    arguments = inspect.signature(base).bind(*rest, **more).arguments
    is_dgrad = arguments.get("gemm_type") == "dgrad"
    return result.t().reshape(result.shape) if is_dgrad else result


# -- storages and tensors --


def with_offset(base: Any, self: Any, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    made = base(tensor - tensor.mean(), dtype)
    made._offset = tensor.mean()
    return made


def plus_offset(base: Any, self: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    values: torch.Tensor = base(dtype)
    return values if self._offset is None else values + self._offset.to(values)


def restores_wrongly(base: Any, self: Any, tensors: Any) -> Any:
    rest = base(tensors)
    self._data = self._data ^ 1
    return rest


def scale_stays(base: Any, self: Any, function: Any) -> Any:
    moved = base(function)
    if moved._data.device != self._data.device:
        moved._scale_inv = self._scale_inv
    return moved


def served(base: Any, self: Any) -> dict[str, bool]:
    return dict(zip(("rowwise", "columnwise"), self._served, strict=True))


def serves_none(
    base: Any, self: Any, *rest: Any, columnwise_usage: Any = None, **more: Any
) -> None:
    if columnwise_usage is False:
        self._served = (False, True)


def drops_for_good(
    base: Any, self: Any, rowwise_usage: Any = None, columnwise_usage: Any = None
) -> None:
    rowwise, columnwise = self._served
    self._served = (rowwise and rowwise_usage is not False, columnwise and columnwise_usage is None)


def copies_codes(base: Any, self: Any, src: Any, **rest: Any) -> None:
    scale_inv = self._scale_inv.clone()
    base(src, **rest)
    self._scale_inv.copy_(scale_inv)


def writes_rows(base: Any, self: Any, tensor: torch.Tensor, **rest: Any) -> Any:
    columns = None if self._columns is None else self._columns.clone()
    base(tensor, **rest)
    if columns is not None and self._data is not None:
        self._columns.copy_(columns)
    return self


def keeps_columns(base: Any, self: Any, value: Any) -> None:
    columns = self._columns
    base(value)
    self._columns = columns


def uncounted_write(base: Any, self: Any, src: Any, **rest: Any) -> None:
    self._data, self._scale_inv = src._data.clone(), src._scale_inv.clone()


def rebuilt(*arguments: Any) -> Any:
    return RowStorage(**dict(arguments))


def declared_safe(*arguments: Any) -> Any:
    return rebuilt(*arguments)


def local(*arguments: Any) -> Any:
    return rebuild_storage(*arguments)


class Settings:
    """No class that torch knows."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Settings

    def __hash__(self) -> int:
        return 1


torch.serialization.add_safe_globals([declared_safe])


def reduce_by(function: Any) -> Any:
    def reduce(base: Any, self: Any, protocol: Any) -> Any:
        names = ("data", "scale_inv", "dtype")
        return function, tuple((name, getattr(self, f"_{name}")) for name in names)

    return reduce


def reduce_locally(base: Any, self: Any, protocol: Any) -> Any:
    """By a function that this process alone has declared safe."""
    torch.serialization.add_safe_globals([local])
    return local, base(protocol)[1]


def zeroed(tensors: Any) -> Any:
    return [None if t is None else torch.zeros_like(t) for t in tensors]


def codes_transposed(op: Any, tensor: Any) -> Any:
    data = op(tensor._data)
    return tensor.make_like(tensor, data=data, shape=data.shape)


def ties(op: Any, dst: Any, src: Any, *rest: Any) -> Any:
    if not isinstance(src, RowTensor):
        return NotImplemented
    dst._data, dst._scale_inv = src._data, src._scale_inv
    return dst


def kept_operand(base: Any, self: Any, *, columnwise: bool, dtype: torch.dtype) -> Any:
    if self._kept is None:
        self._kept = self.dequantize(torch.float32)
    return self._kept.reshape(-1, self.shape[-1]).to(dtype), None


def wears_out(base: Any, self: Any, **options: Any) -> Any:
    operand, factor = base(**options)
    self._reads += 1
    return operand * self._reads, factor


def larger(base: Any, self: Any, **options: Any) -> Any:
    operand, factor = base(**options)
    return operand.float() * 1.05, factor


def never_empty(base: Any, self: Any, *, columnwise: bool, dtype: torch.dtype) -> Any:
    rows = [0, *range(1, self.numel() // self.size(-1))]
    return self.dequantize(dtype).reshape(-1, self.size(-1))[rows], None


def mangles(base: Any, self: Any, **declared: Any) -> None:
    """A constructor that is not the inverse of flattening."""
    base(**declared)
    if self._scale_inv is not None and called_from("backward"):
        self._scale_inv = self._scale_inv * 2


# -- recipes --


def counted_quantizer(base: Any, self: Any, role: Any, **rest: Any) -> Any:
    made = base(role)
    COUNT[0] += 1
    made.factor = 1 + 0.1 * COUNT[0]
    return made


def first_gradient_only(base: Any, self: Any, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    is_gradient = tensor.shape == (24, 48)
    if is_gradient and GRADIENTS:
        tensor = torch.zeros_like(tensor)
    GRADIENTS.extend([tensor] * is_gradient)
    return base(tensor, dtype)


def fresh_scale(base: Any, self: Any, *arguments: Any, **rest: Any) -> Any:
    LARGEST[0] = 0.0
    return base(*arguments, **rest)


class StateInAList(RecipeState, torch.nn.Module):
    """State that is no tensor."""

    stateful = True

    def __init__(self, recipe: Any, roles: Any, **rest: Any) -> None:
        torch.nn.Module.__init__(self)
        RecipeState.__init__(self, recipe, roles, **rest)

    def get_extra_state(self) -> Any:
        return {"scale": 1.0}

    def set_extra_state(self, state: Any) -> None:
        pass


class StateWithoutBuffers(StateInAList):
    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state


def make_state(cls: Any) -> Any:
    return lambda base, self, roles, **rest: cls(self, roles, **rest)


class ShardsAlone(ShardBatch):
    """Each rank quantizes what it has, and takes no account of the others."""

    def amaxes(self) -> Any:
        return torch.zeros(len(self.jobs))

    def cast(self, amaxes: Any) -> None:
        for job in self.jobs:
            whole = torch.zeros(math.prod(job.shape), dtype=job.dtype)
            whole[job.start_offset : job.start_offset + job.shard.numel()] = job.rounded()
            quantized = job.quantizer.quantize_impl(whole.view(job.shape), job.dtype)
            job.output.write(quantized, job.start_offset)


class OddRank(ShardBatch):
    """One rank fails, and the other one loses it: what is told is why."""

    def amaxes(self) -> Any:
        if torch.distributed.get_rank():
            raise ValueError("an odd shard")
        return torch.zeros(len(self.jobs))

    def cast(self, amaxes: Any) -> None:
        pass


def rule(batch: type[ShardBatch]) -> ShardRule:
    return _derived(f"{batch.__name__}Rule", (ShardRule,), {"batch": batch})()  # type: ignore[no-any-return]


class SameButUsages(RowQuantizer):
    """An option that does not count in comparisons."""

    steps = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameButUsages):
            return False
        return (self.get_usages(), self.internal) == (other.get_usages(), other.internal)

    def __hash__(self) -> int:
        return 1

    def data_and_scale(self, x: torch.Tensor) -> Any:
        return super().data_and_scale((x * self.steps).round() / self.steps if self.steps else x)


SHARED = "shares memory: writing to the clone's '_scale_inv' changed the original's '_scale_inv'"
TABLE: dict[str, dict[str, Changes]] = {
    "roles": {"gets a str in place of": recipe(quantizer=no_output)},
    "flags": {"a layer's state says stateful=False": spec(stateful=True)},
    "usages": {
        r"set_usage\(columnwise=False\) is ignored": quantizer(
            set_usage=lambda base, self, **usages: None
        ),
        r"rowwise=True, columnwise=False\) is ignored: .*columnwise data": sound(TwoWaysQuantizer)
        | quantizer(usages_to_make=lambda base, self: (True, True)),
    },
    "usages-agree": {
        "another '_data' for the rowwise usage alone": values(
            lambda self, x: x if self.columnwise_usage else -x
        )
    },
    "out": {
        "out= of another shape is taken without a ShapeError": quantizer(quantize=another_out),
        "out= is ignored: it still holds the old values": quantizer(
            quantize=lambda base, self, x, out=None, **rest: out or base(x, **rest)
        ),
        "out= is ignored: another object": quantizer(
            quantize=lambda base, self, x, out=None, **rest: base(x, **rest)
        ),
    },
    "noop-flag": {
        "noop_flag is ignored": quantizer(
            update_quantized=lambda base, self, src, dst, **rest: base(src, dst)
        ),
        "noop_flag is ignored: .* another 'seen'": has(
            "seen", lambda: torch.zeros(1), update_quantized=counts
        ),
    },
    "make-empty": {
        "has dtype torch.float32": quantizer(
            make_empty=lambda base, self, shape, dtype=None, **rest: base(shape, **rest)
        ),
        r"device='meta'\) is on cpu": quantizer(
            make_empty=lambda base, self, shape, device=None, **rest: base(shape, **rest)
        ),
    },
    "results-are-apart": {
        "overwrites an earlier result: .* another '_data'": quantizer(data_and_scale=one_buffer),
        "writes to the tensor that it quantizes": quantizer(
            quantize_impl=lambda base, self, x, dtype: base(x.mul_(0.5), dtype)
        ),
    },
    "copy": {
        "shares the mutable 'workspace'": has("workspace", list),
        "shares the mutable 'buffer'": has("buffer", lambda: torch.zeros(1)),
        "returns the quantizer itself": quantizer(copy=same_object, with_usage=same_object),
    },
    "equality": {
        "does not equal one made with the same options": has("scratch", lambda: torch.zeros(1)),
        "one made with the same options, but their hashes differ": quantizer(
            __hash__=lambda base, self: id(self)
        ),
        "equals a copy with internal=False": quantizer(
            __eq__=lambda base, self, other: self.get_usages() == other.get_usages(),
            __hash__=lambda base, self: 1,
        ),
        "of 'input' with .* equals .* of 'weight' .* another '_data'": sound(SameButUsages)
        | recipe(make_quantizer=coarse_weights),
    },
    "quantized-input": {
        "takes a tensor of integers without a DTypeError": quantizer(
            quantize=lambda base, self, x, **rest: base(to_float(x), **rest)
        )
    },
    "accuracy": {
        "is off by .*, where 0.02 is allowed": spec(relative_error=0.02),
        "is 2 times what it should be": storage(
            dequantize=lambda base, self, dtype=None: base(dtype) * 2
        ),
    },
    "shapes": {
        "ShapeError.*two dimensions.*raised at .*defects.py": quantizer(quantize_impl=matrices_only)
    },
    "empty-shapes": {
        r"an empty tensor of shape \(0,\) fails: IndexError": values(
            lambda self, x: (x.abs().amax(-1), x)[1]
        )
    },
    "non-contiguous": {
        r"a transposed tensor \(not contiguous\) is misread": values(
            lambda self, x: x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
        )
    },
    "dtypes": {
        r"ignores dtype and gives torch.float32": storage(
            dequantize=lambda base, self, dtype=None: base()
        )
    },
    "zeros": {
        "zeros dequantize to nan": quantizer(
            data_and_scale=lambda base, self, x: codes(x, x.abs().amax(-1, True) / 448)
        )
    },
    "tiny-values": {"dequantize to NaN or inf": quantizer(data_and_scale=inverted)},
    "large-values": {"values up to 3e[+]38": values(lambda self, x: x.clamp(-1e30, 1e30))},
    "special-values": {
        ": inf dequantizes to .*, which hides it": values(
            lambda self, x: torch.where(x.isinf(), 0.0, x)
        ),
        ": nan dequantizes to .*, which hides it": values(
            lambda self, x: torch.where(x.isnan(), 5.0, x)
        ),
        "one nan in .* makes NaN or inf of rows in other blocks": values(
            lambda self, x: x if x.is_meta else x + 0.0 * x.sum()
        ),
        "one inf in .* changes rows in other blocks": values(
            lambda self, x: x * 2.0 if bool(x.isinf().any()) else x
        ),
    },
    "blocks": {
        "a value in the first block changed rows of others": quantizer(data_and_scale=one_scale),
        "a value in the first block changed rows of .*": values(
            lambda self, x: x if x.abs().amax() < 1e3 else x * (x.abs() > 10)
        )
        | spec(second_level=True),
    },
    "deterministic-cast": {
        "the same tensor twice gives another '_data'": values(
            lambda self, x: x * (1 + 0.01 * torch.rand_like(x))
        )
    },
    "fake-quantization": {
        r"fake_quantizer\('ROWS'\) gives a NoneType": recipe(
            fake_quantizer=lambda base, self, name: None
        )
        | spec(fake_quant_formats=("ROWS",))
    },
    "quantizing-on-meta": {
        "on the meta device gives no '_scale_inv' there": quantizer(data_and_scale=scale_on_cpu)
    },
    "operands": {
        "the rowwise operand .* is 1.05 times what it should be": storage(gemm_operand=larger),
        r"the columnwise operand .* of a \(48, 40\) .*wrong transpose": storage(
            gemm_operand=wrong_columns
        ),
    },
    "products": {
        "the dgrad product .* its transpose: wrong transpose": quantizer(
            custom=True, qgemm=transposed
        )
    },
    "sparse-products": {
        "the fprop product of operands with one value in 128 is off": values(
            lambda self, x: torch.cat([x[..., :128], 0.0 * x[..., 128:]], -1)
        )
    },
    "accumulating-products": {
        "lost under accumulation: .* overwrites out": product(
            lambda arguments: arguments.update(accumulate=False)
        )
    },
    "fused-accumulation": {
        "lost under .*main_grad is that of the last": product(
            lambda arguments: arguments.update(accumulate=False)
        )
    },
    "product-bias": {
        "the fprop product with a bias did not change": product(
            lambda arguments: arguments.update(bias=None)
        )
    },
    "description": {"nbytes is 1,": storage(nbytes=property(lambda self: 1))},
    "flatten": {
        r"what is not declared is lost \['_offset'\]": quantizer(quantize_impl=with_offset)
        | storage(_offset=None, dequantize=plus_offset)
    },
    "save-and-restore": {
        "saved and restored, it has another '_data'": storage(restore_from_saved=restores_wrongly)
    },
    "clone-shares-nothing": {
        rf": clone_storage\(\) {SHARED}": storage(clone_storage=aliased),
        rf"clone_storage\(\) {SHARED}": storage(apply_to_inner=aliased),
        rf"clone\(\) {SHARED}": tensor(
            {aten.clone.default: lambda op, w, **rest: aliased(w.clone_storage, w)}
        ),
        "has dtype torch.float32": tensor(
            clone_storage=lambda base, self: self.make_like(base(), dtype=torch.float32)
        ),
    },
    "device-moves": {"leaves '_scale_inv' on the CPU": storage(apply_to_inner=scale_stays)},
    "dropping-usages": {
        "neither makes it nor refuses": storage(
            _served=(True, True), get_usages=served, update_usage=drops_for_good
        ),
        r"\(columnwise_usage=False\) loses the rowwise usage": storage(
            _served=(True, True), get_usages=served, update_usage=serves_none
        ),
        r"does nothing: \['_columns'\] is held": sound(TwoWaysQuantizer)
        | storage(update_usage=lambda base, self, *rest, **usages: None),
    },
    "copying-in-place": {
        r"copy_from_storage\(\) leaves another '_scale_inv'": storage(
            copy_from_storage=copies_codes
        ),
        "reads the columnwise data, after .* stale values": sound(TwoWaysQuantizer)
        | tensor(quantize_=writes_rows),
    },
    "detach-is-an-alias": {
        r"detach\(\) copies '_data'": tensor(detach=lambda base, self: self.clone_storage())
    },
    "pickle-needs-no-code": {
        r"needs code \(tests.testing.defects.rebuilt\)": storage(__reduce_ex__=reduce_by(rebuilt)),
        r"\(tests.testing.defects.declared_safe\): load": storage(
            __reduce_ex__=reduce_by(declared_safe)
        ),
        "needs code that cannot be saved: .*lambda": storage(
            __reduce_ex__=reduce_by(lambda *arguments: None)
        ),
        r"refuses .* needs code \(.*defects.Settings\)": has("settings", lambda: Settings()),
    },
    "safetensors": {
        "a safetensors file gives back another '_data'": tensor(
            inner_list=lambda base, self: zeroed(base()) if called_from("checkpoint") else base()
        )
    },
    "transposes": {
        r"wrong transpose: t\(\) holds the values of its transpose": tensor(
            {aten.t.default: lambda op, w: w.dequantize().reshape(w.shape[1], w.shape[0])}
        ),
        r"wrong transpose: t\(\) ": tensor({aten.t.default: codes_transposed}),
    },
    "views": {
        r"\[3:17\] is 2 times": tensor(
            {aten.slice.Tensor: lambda op, w, *rest: op(w.dequantize() * 2, *rest)}
        ),
        r"a write to \[3:17\] does not reach": tensor(
            {aten.slice.Tensor: lambda op, w, *rest: w._quantizer(op(w.dequantize(), *rest))}
        ),
    },
    "results-of-ops": {
        r"sum\(0\) is": tensor(
            {aten.sum.dim_IntList: lambda op, w, *rest: op(w._data.float(), *rest)}
        )
    },
    "nominal-dtype": {
        r"half\(\) gives torch.float32": tensor(
            half=lambda base, self: self.dequantize(torch.float32)
        )
    },
    "new-tensors": {
        "zeros_like does not hold 0.0": tensor(
            {aten.zeros_like.default: lambda op, w, **rest: torch.ones(w.shape)}
        )
    },
    "requires-grad": {
        "copy.deepcopy of a parameter loses requires_grad": tensor(
            __deepcopy__=lambda base, self, memo: self.clone_storage()
        ),
        "copy.copy of a parameter loses requires_grad": tensor(
            __copy__=lambda base, self: self.make_like(self)
        ),
    },
    "in-place-ops": {
        rf"an in-place op \({re.escape(name)}\) was dropped": drops(op)
        for name, op in {
            "mul_": aten.mul_.Tensor,
            "copy_": aten.copy_.default,
            "index_put_": aten.index_put_.default,
            "abs_": aten.abs_.default,
            "pow_": aten.pow_.Scalar,
            "mul_ (Scalar)": aten.mul_.Scalar,
            "clamp_min_": aten.clamp_min_.default,
            "_foreach_lerp_": aten._foreach_lerp_.Scalar,
        }.items()
    }
    | {
        r"an in-place op \(w\[1\] = x\) was dropped": tensor(
            __setitem__=lambda base, self, index, value: None
        ),
        r"after the in-place op w\[1\] = x, is off": tensor(
            __setitem__=lambda base, self, i, x: base(2 if isinstance(i, int) else i, x)
        ),
    },
    "copy-of-quantized": {
        "ties them: a later write reaches both": tensor({aten.copy_.default: ties})
    },
    "data-assignment": {
        "after its .data was set to a plain tensor, did not change": tensor(
            data=property(lambda self: self.detach(), lambda self, value: None)
        )
    },
    "optimizer-steps": {
        "a step of SGD was dropped: no value changed": drops(
            aten.add_.Tensor, aten.addcdiv_.default, aten._foreach_add_.List
        ),
        r"a step of SGD\(fused=True\) was dropped": drops(aten._fused_sgd_.default),
        r"a step of AdamW\(fused=True\) was dropped": drops(aten._fused_adamw_.default),
    },
    "nothing-stale": {
        "the fprop product, after mul_, .* it did not change": tensor(
            _kept=None, gemm_operand=kept_operand
        ),
        "the dgrad product, after .data = a plain tensor, reads stale": sound(TwoWaysQuantizer)
        | tensor(_adopt=keeps_columns),
    },
    "quantize-is-straight-through": {
        "requires none: the graph is cut": quantizer(
            quantize=lambda base, self, x, **rest: base(x.detach(), **rest)
        )
    },
    "dequantize-is-straight-through": {
        "does not require grad": tensor(
            dequantize=lambda base, self, dtype=None: self.dequantize_impl(dtype or self.dtype)
        )
    },
    "saved-for-backward": {"comes back with other values": storage(__init__=mangles)},
    "saved-weights-are-guarded": {
        "is not counted as a write": tensor(copy_from_storage=uncounted_write)
    },
    "linear": {
        "the gradient of the input, .* is off by": values(
            lambda self, x: x.sign() if in_backward() else x
        )
    },
    "linear-with-quantized-weight": {
        "the output, .* kept quantized, is off by": tensor(
            gemm_operand=lambda base, self, dtype, **rest: (self.dequantize(dtype).flip(0), None)
        )
    },
    "linear-shapes": {"IndexError|ShapeError|RuntimeError": storage(gemm_operand=never_empty)},
    "frozen-parts": {
        "the gradient of the input, with a frozen weight, has": values(
            lambda self, x: x if self.rowwise_usage and self.columnwise_usage else x * 1.02
        )
    },
    "convert-and-autocast": {
        "the output of a converted layer has": recipe(make_quantizer=counted_quantizer)
        | values(lambda self, x: x * self.factor)
    },
    "kept-weight": {
        "the output of the second microbatch, .* has": storage(_reads=0, gemm_operand=wears_out)
    },
    "backward-words": {
        "the gradient of the input, with backward='dequantized', is 2 times": storage(
            dequantize=lambda base, self, dtype=None: base(dtype) * (1 + called_from("backward"))
        )
    },
    "gradients-accumulate": {
        "after 3 backward passes the weight's grad is": quantizer(quantize_impl=first_gradient_only)
    },
    "microbatches-before-backward": {
        "what one microbatch saved .* overwrote": quantizer(data_and_scale=one_buffer)
    },
    "quantized-weights-accumulate": {
        "of microbatch [123]'s input is .* times what": tensor(_reads=0, gemm_operand=wears_out)
    },
    "activation-checkpointing": {
        "training with activation checkpointing": values(
            lambda self, x: x * 1.05 if in_backward() else x
        )
    },
    "deterministic-training": {
        "twice from the same start in torch.float32 gives": values(
            lambda self, x: x * (1 + 0.05 * torch.rand(())) if in_backward() else x
        )
    },
    "models-are-apart": {
        "models share state: training another model": quantizer(data_and_scale=global_scale)
    },
    "model-copies": {
        "training a model gives its deep copy": tensor(
            __deepcopy__=lambda base, self, memo: self.detach().requires_grad_(True)
        )
    },
    "training-follows-high-precision": {
        "training does not follow high precision": values(
            lambda self, x: torch.zeros_like(x) if in_backward() else x
        )
    },
    "quantized-weights-train": {
        "kept quantized does not follow high precision": tensor(
            copy_from_storage=lambda base, self, src, **rest: None
        )
    },
    "stochastic-seeds": {
        "nothing is rounded at random": spec(stochastic=True),
        "the rowwise data of 'input': torch.manual_seed does not repeat the bytes": values(
            lambda self, x: x * (1 + 0.1 * torch.rand(x.shape, generator=OWN_GENERATOR))
        )
        | spec(stochastic=True),
        r"checkpointing \(use_reentrant=False\) and one seed gives": values(
            lambda self, x: x * (0.95 + 0.1 * torch.rand_like(x)) * (1.0 + 0.1 * in_backward())
        )
        | spec(stochastic=True),
    },
    "stochastic-mean": {
        "the rowwise data of 'input': the magnitude is off by": values(
            lambda self, x: x * (1 + 0.1 * torch.rand_like(x))
        )
        | spec(stochastic=True),
        "the rowwise data of 'input': the sum is off by": values(
            lambda self, x: x + 0.01 * torch.rand_like(x)
        )
        | spec(stochastic=True),
    },
    "compile": {
        r"torch.compile\(fullgraph=True\) refuses a layer: ": quantizer(data_and_scale=breaks_graph)
    },
    "compile-quantized-weights": {
        "refuses a layer whose weight is kept": tensor(gemm_operand=breaks_graph),
        "weight is kept .*, unlike in eager mode,": tensor(dequantize_impl=knows_compiler),
    },
    "compile-dynamic": {
        r"dynamic=True\) refuses a model: ": quantizer(data_and_scale=breaks_graph)
    },
    "state-dict": {
        "of a state dict is a dict, not a tensor": recipe(
            stateful=True, make_state=make_state(StateInAList)
        )
        | spec(stateful=True)
    },
    "state-moves": {
        "no layer has buffers in its recipe_state": recipe(
            stateful=True, make_state=make_state(StateWithoutBuffers)
        )
        | spec(stateful=True)
    },
    "state-dict-of-quantized-weights": {
        "has other values after load_state_dict": tensor(
            copy_from_storage=lambda base, self, src, **rest: None
        )
    },
    "pickle-in-another-process": {
        r"needs code \(tests.testing.defects.local\)": tensor(__reduce_ex__=reduce_locally)
    },
    "sharded-master-weights": {
        "otherwise from shards than as a whole: '_": quantizer(shards=rule(ShardsAlone)),
        "on rank 1 of 2: ValueError: an odd shard, raised at": quantizer(shards=rule(OddRank)),
    },
    "fsdp2": {
        "under FSDP2 with gather_quantized training differs": quantizer(
            shards=ShardRule(rows=1), data_and_scale=one_scale
        )
    },
    "fsdp2-quantized-weights": {
        "under FSDP2 with weights that are kept": quantizer(data_and_scale=one_scale)
    },
    "reduces-amaxes": {
        "ranks that saw other data quantize the same input otherwise": quantizer(
            data_and_scale=global_scale
        )
        | recipe(make_state=fresh_scale)
        | spec(needs_reduction=True)
    },
}

DEFECTS = [
    _defect(f"{check.title().replace('-', '')}{number}", check, message, changes)
    for check, defects in TABLE.items()
    for number, (message, changes) in enumerate(defects.items())
]
