"""The broken recipes of ``defects.txt``, and what its lines call."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from ottava import GridQuantizer, Layout, QuantizedTensorStorage, RecipeSpec
from ottava.distributed import ShardBatch, ShardRule
from ottava.errors import ShapeError
from ottava.recipes.state import RecipeState
from ottava.tensors import GridTensor, GridTensorStorage, InnerTensor, implements
from ottava.tensors.storage import rebuild_storage
from tests.testing.row_recipe import SPEC, RowQuantizer, Rows, RowStorage, RowTensor

TABLE = Path(__file__).with_suffix(".txt")

# -- another sound quantizer --


class TwoWays(RowStorage):
    """Another copy of the data for the columnwise usage."""

    inner_tensors: ClassVar[tuple[InnerTensor, ...]] = (
        InnerTensor("_data", "data", usage="rowwise", gather=True),
        InnerTensor("_columns", "columns", usage="columnwise", gather=True),
        InnerTensor("_scale_inv", "scale_inv", gather=True),
    )
    _columns: torch.Tensor | None

    def size(self, dim: int | None = None) -> Any:
        data: Any = self._data if self._data is not None else self._columns
        return data.size() if dim is None else data.size(dim)

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
        storage: QuantizedTensorStorage = make(**tensors, **shape, dtype=dtype, quantizer=self)
        return storage

    def usages_to_make(self) -> tuple[bool, bool]:
        return self.rowwise_usage, self.columnwise_usage


class LayoutQuantizer(GridQuantizer):
    """A scale for each row by a layout, which states every choice."""

    storage, tensor = GridTensorStorage, GridTensor

    def __init__(self, rounding: str = "nearest") -> None:
        super().__init__(Layout("E4M3", (1, None), rounding=rounding))


# -- what the lines call --

OTHER_CONTRACT = LayoutQuantizer("floor").contract

NUMBERS = itertools.count(1)
OWN_GENERATOR = torch.Generator()
ROWWISE = {"rowwise": True, "columnwise": False}
COLUMNWISE = {"rowwise": False, "columnwise": True}


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def having(thing: Any, **attributes: Any) -> Any:
    """The object, with other values of attributes."""
    for name, value in attributes.items():
        setattr(thing, name, value)
    return thing


def has(init: Callable[[], None], thing: Any, **attributes: Any) -> None:
    init()
    having(thing, **attributes)


def keeping(name: str, write: Callable[..., Any], tensor: Any, *rest: Any, **more: Any) -> Any:
    """A write that does not reach one of the inner tensors."""
    values = getattr(tensor, name)
    before = None if values is None else values.clone()
    result = write(*rest, **more)
    if before is not None:
        setattr(tensor, name, before)
    return result


def codes(x: torch.Tensor, scale_inv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    data = (x / scale_inv).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return data, scale_inv.expand(*x.shape[:-1], 1).contiguous()


def one_scale(x: torch.Tensor) -> Any:
    """One scale for the whole tensor, repeated for each row: that of a shard is another."""
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    return codes(x, amax.clamp(min=1e-30) / 448)


def global_scale(quantizer: Any, x: torch.Tensor) -> Any:
    """The scale is that of the largest value that any model ever had."""
    cls = type(quantizer)
    if not x.is_meta and x.numel():
        cls.largest = max(getattr(cls, "largest", 1e-3), float(x.abs().max()))
    return codes(x, torch.full((*x.shape[:-1], 1), getattr(cls, "largest", 1e-3) / 448))


def in_one_buffer(quantizer: Any, data: torch.Tensor, scale_inv: torch.Tensor) -> Any:
    """The data of all tensors of a shape lie in one buffer."""
    cls = type(quantizer)
    cls.buffers = getattr(cls, "buffers", {})
    return cls.buffers.setdefault(data.shape, torch.empty_like(data)).copy_(data), scale_inv


def other_shape(x: torch.Tensor, out: Any) -> bool:
    return out is not None and out.shape != x.shape


def checked_matrix(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2:
        raise ShapeError(f"shape {tuple(x.shape)}", expected="two dimensions")
    return x


def times(number: float, matrix: torch.Tensor, factor: Any) -> Any:
    return matrix.float() * number, factor


def wrong_operand(storage: Any, columnwise: bool, dtype: torch.dtype) -> Any:
    values = storage.dequantize(dtype).reshape(-1, storage.size(-1))
    return values.t().reshape(values.shape) if columnwise else values, None


def rows_of(storage: Any, dtype: torch.dtype) -> Any:
    """There is always a first row."""
    rows = [0, *range(1, storage.numel() // storage.size(-1))]
    return storage.dequantize(dtype).reshape(-1, storage.size(-1))[rows], None


def with_options(product: Any, operands: Any, options: Any, **others: Any) -> torch.Tensor:
    """A product with other options, wherever they come."""
    bound = inspect.signature(product).bind(*operands, **options)
    bound.arguments.update(others)
    result: torch.Tensor = product(*bound.args, **bound.kwargs)
    return result


def wrong_dgrad(product: Any, *operands: Any, **options: Any) -> torch.Tensor:
    result: torch.Tensor = product(*operands, **options)
    is_dgrad = inspect.signature(product).bind(*operands, **options).arguments["gemm_type"]
    return result.t().reshape(result.shape) if is_dgrad == "dgrad" else result


def tied(dst: Any, src: Any) -> Any:
    is_quantized = isinstance(src, RowTensor)
    return (
        having(dst, _data=src._data, _scale_inv=src._scale_inv) if is_quantized else NotImplemented
    )


def reads(operand: Any) -> int:
    """How often an operand was read."""
    operand.reads = getattr(operand, "reads", 0) + 1
    return int(operand.reads)


def mangled(init: Callable[..., None], storage: Any, **declared: Any) -> None:
    """What is made again for a backward pass is not what was saved."""
    init(**declared)
    if in_backward() and storage._scale_inv is not None:
        storage._scale_inv = storage._scale_inv * 2


def zeros_for_files(tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    frames = traceback.extract_stack()[-12:]
    if all("checkpoint" not in frame.filename for frame in frames):
        return tensors
    return [None if tensor is None else torch.zeros_like(tensor) for tensor in tensors]


def settings(quantizer: Any) -> Any:
    return quantizer.get_usages(), quantizer.internal


def sign_of(role: Any) -> int:
    return -1 if role.tensor_type == "weight" else 1


def with_fraction(x: Any) -> Any:
    is_integer = isinstance(x, torch.Tensor) and not x.is_floating_point()
    return x.float() if is_integer else x


class Settings:
    """No class that torch knows."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Settings

    def __hash__(self) -> int:
        return 1


def rebuilt(*arguments: Any) -> Any:
    return RowStorage(**dict(arguments))


def declared_safe(*arguments: Any) -> Any:
    return rebuilt(*arguments)


def reduced_by(function: Any, storage: Any) -> Any:
    return function, tuple((n, getattr(storage, f"_{n}")) for n in ("data", "scale_inv", "dtype"))


def local(*arguments: Any) -> Any:
    return rebuild_storage(*arguments)


torch.serialization.add_safe_globals([declared_safe])


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


class ShardsAloneRule(ShardRule):
    batch = ShardsAlone


class OddRank(ShardBatch):
    """One rank fails, and the other one loses it: what is told is why."""

    def amaxes(self) -> Any:
        if torch.distributed.get_rank():
            raise ValueError("an odd shard")
        return torch.zeros(len(self.jobs))

    def cast(self, amaxes: Any) -> None:
        pass


class OddRankRule(ShardRule):
    batch = OddRank


# -- the table --


@dataclass(frozen=True)
class Defect:
    """A broken recipe, the check that has to find it, and the words that name the defect."""

    check: str
    message: str
    recipe: Callable[[], Rows]
    spec: RecipeSpec


def _defects() -> Iterator[Defect]:
    lines = [line for line in TABLE.read_text().splitlines() if line and line[0] != "#"]
    starts = [number for number, line in enumerate(lines) if line[0] != " "]
    for start, stop in itertools.pairwise([*starts, len(lines)]):
        check, _, message = lines[start].partition(": ")
        changes: dict[str, dict[str, Any]] = {}
        for line in lines[start + 1 : stop]:
            part, _, change = line.strip().partition(".")
            name, value = _change(change)
            changes.setdefault(part, {})[name] = value
        yield _defect(f"Broken{start}", check, message, changes)


def _change(text: str) -> tuple[str, Any]:
    """The name of an attribute or of an op, and its value."""
    attribute = re.match(r"(\w+) = (.*)", text)
    if attribute is not None:
        return attribute[1], eval(attribute[2], globals())
    method = re.match(r"([\w.]+)\((.*?)\): (.*)", text)
    assert method is not None, text
    name, arguments, body = method.groups()
    first = "op" if name.startswith("aten.") else "base, self"
    return name, eval(f"lambda {first}, {arguments}: {body}", globals())


def _defect(name: str, check: str, message: str, changes: dict[str, dict[str, Any]]) -> Defect:
    base = changes.get("sound", {}).get("quantizer", RowQuantizer)
    storage = _derived(f"{name}Storage", (base.storage,), changes.get("storage", {}))
    tensor = _derived(f"{name}Tensor", (storage, base.tensor), changes.get("tensor", {}))
    classes = {"storage": storage, "tensor": tensor}
    quantizer = _derived(f"{name}Quantizer", (base,), classes | changes.get("quantizer", {}))
    recipe = _derived(f"{name}Recipe", (Rows,), changes.get("recipe", {}))
    spec = dataclasses.replace(SPEC, **changes.get("spec", {}))
    return Defect(check, message, lambda: recipe(quantizer), spec)


def _derived(name: str, bases: tuple[type, ...], changes: dict[str, Any]) -> Any:
    """A class of this module, where pickles find it, with changes."""
    cls = type(name, bases, {"__module__": __name__})
    globals()[name] = cls
    for key, value in changes.items():
        if key.startswith("aten."):
            implements(cls, eval(f"torch.ops.{key}"))(value)
        elif callable(value) and not isinstance(value, type):
            setattr(cls, key, _method(cls, key, value))
        else:
            setattr(cls, key, value)
    return cls


def _method(cls: type, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *rest: Any, **more: Any) -> Any:
        return change(getattr(super(cls, self), name), self, *rest, **more)

    return method


DEFECTS = list(_defects())
