"""What a conversion does with each tensor, settled from names, dtypes and shapes before anything is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from ottava.checkpoint.description import Described, Description
from ottava.checkpoint.header import METADATA_KEY, TensorSpec
from ottava.checkpoint.inner import flatten_tensor, unflatten_tensor
from ottava.checkpoint.provenance import origin_of_quantizer
from ottava.checkpoint.sources import TensorSource
from ottava.errors import CheckpointError, OptionError, OttavaError, UsageError
from ottava.kernels import HIGH_PRECISION
from ottava.recipes.base import Recipe
from ottava.recipes.role import QuantizerRole
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage

Kind = Literal["quantized", "dequantized", "cast", "copied"]
_STATE = "recipe_state"


@dataclass(frozen=True)
class Target:
    """What to convert to: a recipe, or a dtype of high precision."""

    name: str
    to: Recipe | torch.dtype


@dataclass(frozen=True)
class Logical:
    """A tensor of the source as a model has it: plain, or quantized with its parts.

    Attributes:
        name: its name.
        reads: the name of each part in the source, by what it adds to the name: ``""`` for a plain tensor.
        specs: the same for what the parts are.
        entry: the description of a quantized tensor.
        dtype, shape: of the values; the nominal dtype of a quantized tensor.
    """

    name: str
    reads: Mapping[str, str]
    specs: Mapping[str, TensorSpec]
    entry: Described | None
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def convertible(self) -> bool:
        """Whether it has values that can be quantized."""
        return self.dtype in HIGH_PRECISION

    def load(self, source: TensorSource) -> dict[str, torch.Tensor]:
        """Read its parts."""
        return {suffix: source.read(name) for suffix, name in self.reads.items()}


@dataclass(frozen=True)
class Step:
    """What becomes of one tensor: ``specs`` by what the parts add to its name, made by ``quantizer`` or ``dtype``."""

    tensor: Logical
    kind: Kind
    specs: Mapping[str, TensorSpec]
    described: Described | None = None
    quantizer: Quantizer | None = None
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(spec.nbytes for spec in self.tensor.specs.values())

    def run(self, source: TensorSource) -> dict[str, torch.Tensor]:
        """Read the tensor and make what becomes of it, by name.

        Raises:
            CheckpointError: it is damaged.
            UsageError: the quantizer makes something else than it announced.
        """
        name, parts = self.tensor.name, self.tensor.load(source)
        if self.kind != "copied":
            parts = self._converted(name, parts)
        return {name + suffix: tensor for suffix, tensor in parts.items()}

    def _converted(self, name: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            entry = self.tensor.entry
            with _of_any_class(name):
                values = parts[""] if entry is None else _restored(name, entry, parts).dequantize(torch.float32)
            if self.quantizer is None:
                return {"": values.to(self.dtype)}
            self.quantizer.initialize(values)
            made, described = flatten_tensor(name, self.quantizer.quantize(values, dtype=self.tensor.dtype))
        found = {f".{argument}": TensorSpec(t.dtype, tuple(t.shape)) for argument, t in made.items()}
        if self.described is None or found != self.specs or described.static != self.described.static:
            raise UsageError(
                f"{name!r} is quantized to {found}",
                expected=f"{dict(self.specs)}, as of the quantizer's make_empty",
                remedy="report it to the authors of the recipe",
            )
        return {f".{argument}": tensor for argument, tensor in made.items()}


@dataclass
class Plan:
    """All steps of a conversion, what is written in all, and its description."""

    steps: list[Step] = field(default_factory=list)
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    quantized: dict[str, Described] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    bytes_before: int = 0

    @property
    def description(self) -> Description:
        """That of what is written."""
        return Description(self.quantized, self.aliases)

    def add(self, step: Step, same: Step | None) -> None:
        """Take a step in; or, where the ``same`` was taken in under another name, nothing but the name."""
        name = step.tensor.name
        self.kinds[name] = step.kind
        if step.described is not None:
            self.quantized[name] = step.described
        for suffix, spec in step.specs.items():
            if name + suffix in self.specs or name + suffix in self.aliases:
                raise UsageError(f"two tensors would have the name {name + suffix!r}", remedy="rename one of them")
            if same is None:
                self.specs[name + suffix] = spec
            else:
                self.aliases[name + suffix] = same.tensor.name + suffix
        if same is None:
            self.steps.append(step)


def make_plan(
    source: TensorSource, target: Target, include: tuple[str, ...] | None, exclude: tuple[str, ...] | None
) -> Plan:
    """What a conversion does with each tensor.

    Raises:
        CheckpointError: the source does not have what it says that it has.
        OptionError: a pattern fits no tensor that can be converted.
        UsageError: two tensors would have one name.
    """
    description = Description.decode(source.metadata.get(METADATA_KEY))
    tensors = _logical(source, description)
    plan = Plan(bytes_before=sum(TensorSpec(*source.spec(name)).nbytes for name in source.names()))
    states = [t.name for t in tensors if _STATE in t.name.split(".")]
    keeps = _keeps_state(target.to, description, states)
    plan.dropped = tuple(states) if not keeps else ()
    scaling = set(states)
    chosen = _chosen([t for t in tensors if t.name not in scaling], target, include, exclude)
    done: dict[Any, Step] = {}
    for tensor in tensors:
        if keeps or tensor.name not in scaling:
            step = _step(tensor, target, tensor.name in chosen)
            same = done.setdefault((*tensor.reads.items(), step.kind, step.dtype, tensor.name in chosen), step)
            plan.add(step, None if same is step else same)
    return plan


def _logical(source: TensorSource, description: Description) -> list[Logical]:
    specs = {name: TensorSpec(*source.spec(name)) for name in source.names()}
    where = {name: name for name in specs}
    # The same checks as for tensors that are read.
    where |= description.with_aliases(where)  # type: ignore[arg-type]
    found: list[Logical] = []
    parts: set[str] = set()
    for name, entry in description.quantized.items():
        keys = {f".{argument}": f"{name}.{argument}" for argument in entry.tensors}
        missing = [key for key in keys.values() if key not in where]
        if missing:
            raise CheckpointError(f"tensor {missing[0]!r} is missing", expected=f"every inner tensor of {name!r}")
        own = {suffix: specs[where[key]] for suffix, key in keys.items()}
        with _of_any_class(name):
            empty = _restored(name, entry, {suffix: _on_meta(spec) for suffix, spec in own.items()})
            dtype, shape = empty.dtype, tuple(empty.size())
        reads = {suffix: where[key] for suffix, key in keys.items()}
        found.append(Logical(name, reads, own, entry, dtype, shape))
        parts.update(keys.values())
    for name, stored in where.items():
        if name not in parts:
            spec = specs[stored]
            found.append(Logical(name, {"": stored}, {"": spec}, None, spec.dtype, spec.shape))
    return found


@contextmanager
def _of_any_class(name: str) -> Iterator[None]:
    """A class that checks nothing meets values that a file made up."""
    try:
        yield
    except OttavaError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{name!r} has no values: {type(error).__name__}: {error}", expected="a tensor that can be dequantized"
        ) from error


def _on_meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def _restored(name: str, entry: Described, parts: Mapping[str, torch.Tensor]) -> QuantizedTensorStorage:
    return unflatten_tensor(name, entry, {suffix.removeprefix("."): tensor for suffix, tensor in parts.items()})


def _chosen(
    tensors: list[Logical], target: Target, include: tuple[str, ...] | None, exclude: tuple[str, ...] | None
) -> set[str]:
    """The names of the tensors to convert."""
    able = {tensor.name: tensor for tensor in tensors if tensor.convertible}
    for pattern in (*(include or ()), *(exclude or ())):
        if not any(fnmatchcase(name, pattern) for name in able):
            raise OptionError(
                f"pattern {pattern!r} fits no tensor that can be converted",
                expected="the name of a tensor of values, or a pattern of such",
                remedy=f"names are like {next(iter(able))!r}" if able else "",
            )
    if include is not None:
        chosen = {name for name in able if any(fnmatchcase(name, pattern) for pattern in include)}
    elif isinstance(target.to, torch.dtype):
        chosen = set(able)
    elif any(tensor.entry is not None for tensor in able.values()):
        chosen = {name for name, tensor in able.items() if tensor.entry is not None}
    else:
        chosen = {name for name, t in able.items() if len(t.shape) == 2 and f".{name}".endswith(".weight")}
    return {name for name in chosen if not any(fnmatchcase(name, pattern) for pattern in exclude or ())}


def _step(tensor: Logical, target: Target, chosen: bool) -> Step:
    if isinstance(target.to, Recipe) and chosen:
        return _quantized(tensor, target.to)
    dtype = target.to if chosen and isinstance(target.to, torch.dtype) else tensor.dtype
    if tensor.entry is None and dtype == tensor.dtype:
        return Step(tensor, "copied", tensor.specs)
    kind: Kind = "cast" if tensor.entry is None else "dequantized"
    return Step(tensor, kind, {"": TensorSpec(dtype, tensor.shape)}, dtype=dtype)


def _quantized(tensor: Logical, recipe: Recipe) -> Step:
    quantizer = recipe.quantizer(QuantizerRole("linear", "weight", tensor.name.removesuffix(".weight"))).copy()
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.internal = False
    try:
        made = quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device="meta")
        parts, described = flatten_tensor(tensor.name, made)
    except OttavaError:
        raise
    except Exception as error:
        raise UsageError(
            f"{tensor.name!r}, {tensor.dtype} of shape {tensor.shape}, cannot be quantized: {error}",
            remedy="exclude it, or report it to the authors of the recipe",
        ) from error
    origin = origin_of_quantizer(quantizer, recipe)
    old = tensor.entry
    new = replace(described, origin=origin)
    if old is not None and _alike(old, new):
        return Step(tensor, "copied", tensor.specs, old)
    specs = {f".{argument}": TensorSpec(t.dtype, tuple(t.shape)) for argument, t in parts.items()}
    return Step(tensor, "quantized", specs, new, quantizer)


def _alike(old: Described, new: Described) -> bool:
    """Whether one recipe with the same options has made both; which usages are held is another matter."""
    mine, theirs = old.origin, new.origin
    return (old.cls, old.static, mine.recipe, mine.options) == (new.cls, new.static, theirs.recipe, theirs.options)


def _keeps_state(target: Recipe | torch.dtype, description: Description, names: list[str]) -> bool:
    """Whether the scaling state of a file is that of the recipe that it is converted to."""
    if not isinstance(target, Recipe) or not target.stateful:
        return False
    if {entry.origin.recipe for entry in description.quantized.values()} - {target.name, ""}:
        return False
    state: Any = target.make_state([QuantizerRole("linear", "weight")])
    if not isinstance(state, torch.nn.Module):
        return False
    layers: dict[str, set[str]] = {}
    for name in names:
        layer, _, buffer = f".{name}".rpartition(f".{_STATE}.")
        layers.setdefault(layer, set()).add(buffer)
    return all(found == set(state.state_dict()) for found in layers.values())
