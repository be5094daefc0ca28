"""Files of tensors from one recipe to another, or to high precision."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from ottava.checkpoint.description import flatten_tensor, origin_of_quantizer
from ottava.checkpoint.files import listed, named, of_any_class
from ottava.checkpoint.model import save_file
from ottava.checkpoint.paths import as_path, check_file_target
from ottava.checkpoint.sources import read_state
from ottava.errors import CheckpointError, DTypeError, OptionError, OttavaError, UsageError
from ottava.kernels import HIGH_PRECISION
from ottava.nn.conversion import convert
from ottava.nn.linear import Linear
from ottava.recipes.base import Recipe
from ottava.recipes.registry import get_recipe
from ottava.recipes.role import QuantizerRole
from ottava.tensors.storage import QuantizedTensorStorage

#: Names for high precision in the place of a recipe.
HIGH_PRECISION_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_EMBEDDING = re.compile(r"embed|(^|\.)(emb|wte|wpe)(\.|$)", re.IGNORECASE)
_STATE = "recipe_state"


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert_file` did, by the names of the tensors.

    Attributes:
        recipe: the name of the recipe, or ``"bf16"``, ``"fp16"``, ``"fp32"``.
        quantized: tensors that were quantized.
        dequantized: quantized tensors that are in high precision now.
        cast: tensors that are of another high-precision dtype now.
        copied: tensors whose bytes are as they were.
        dropped: scaling state that the target has no use for.
        skipped: matrices that were not chosen because they are named as embeddings, or tied to one that is.
        bytes_before, bytes_after: bytes of all tensors, each stored once.
    """

    recipe: str
    quantized: tuple[str, ...]
    dequantized: tuple[str, ...]
    cast: tuple[str, ...]
    copied: tuple[str, ...]
    dropped: tuple[str, ...]
    skipped: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def convert_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    recipe: Recipe | str,
    *,
    options: Mapping[str, Any] | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    model: torch.nn.Module | None = None,
    columnwise: bool = False,
    prefix: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Write the tensors of ``source`` as one safetensors file, weights quantized by ``recipe`` or in high precision.

    Values pass through float32. What the same quantizer with the same options made keeps its bytes. For a recipe, what
    was quantized is quantized, and where nothing was, floating-point matrices named ``weight`` or ``*.weight`` but for
    those named as embeddings, or tied to such; everything else keeps its dtype. For high precision, every tensor of
    float32, bfloat16 or float16 gets that dtype, as of ``model.to``. Scaling state of other recipes
    (``*.recipe_state.*``) is dropped. The source is mapped where it can be; what is written is in memory as a whole.

    Args:
        source: a safetensors file of any tool, a folder of such with ``model.safetensors.index.json``, a file of
            ``torch.save`` with a state dict, or a sharded checkpoint.
        target: the file to write; a present one is replaced in the end.
        recipe: a recipe, the name of one, or ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        options: for a recipe that is named.
        include: patterns, as of ``fnmatch``, of the tensors to convert, in the place of the choice above.
        exclude: patterns of tensors that are not to be converted. Tensors that were quantized and are not chosen are
            in high precision afterwards, in their nominal dtype.
        model: chosen are the weights of the layers that :func:`ottava.convert` swaps in it, which it does; ``include``
            and ``exclude`` are then of modules, as of that. It may be on meta.
        columnwise: whether data for the columnwise usage is written too, where that is data of its own: for a model
            that goes on with its training. Serving needs rows alone.
        prefix: take only the tensors whose names begin with it, and take it off: ``"model."`` for the model in a
            checkpoint of a training.
        progress: called with the bytes that were read, and those to read in all.

    Raises:
        CheckpointError: the source is damaged, nothing that can be read, or without a weight of ``model``.
        OptionError: options or patterns that do not fit.
        RecipeNotFoundError, PluginError: the recipe cannot be had.
        UsageError: the target cannot be written, or two tensors would have one name.
    """
    given, path = dict(options or {}), as_path(source)
    check_file_target(as_path(target))
    for what, patterns in (("include", include), ("exclude", exclude)):
        sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if patterns is not None and not (sequence and all(isinstance(pattern, str) for pattern in patterns)):
            raise DTypeError(f"{what} is {patterns!r}", expected="a list of patterns")
    if not isinstance(prefix, str):
        raise DTypeError(f"prefix is a {type(prefix).__name__}", expected="the beginning of names")
    to: Recipe | torch.dtype
    if isinstance(recipe, str) and recipe not in HIGH_PRECISION_NAMES:
        name, to = recipe, get_recipe(recipe, **given)
    elif given:
        raise OptionError(f"options {', '.join(map(repr, given))} without the name of a recipe", expected="none")
    elif isinstance(recipe, str):
        name, to = recipe, HIGH_PRECISION_NAMES[recipe]
    elif isinstance(recipe, Recipe):
        name, to = recipe.name, recipe
    else:
        expected = f"a recipe, the name of one, or {', '.join(HIGH_PRECISION_NAMES)}"
        raise DTypeError(f"the recipe is a {type(recipe).__name__}", expected=expected)
    weights: set[str] | None = None
    if model is not None:
        if not isinstance(to, Recipe):
            raise OptionError(f"a model, to convert to {name}", expected="a model for a recipe alone")
        layers = convert(model, to, include=include, exclude=exclude).named_modules(remove_duplicate=False)
        weights = {f"{layer}.weight".lstrip(".") for layer, m in layers if isinstance(m, Linear) and m.recipe is to}
        include = exclude = None
    state, metadata = read_state(path)
    with named(path):
        job = _Job(_under(state, prefix), to, columnwise)
        job.choose(include, exclude, weights)
        job.run(progress or (lambda done, total: None))
    save_file(job.made, target, metadata=metadata)
    ways = ("quantized", "dequantized", "cast", "copied", "dropped")
    became = {wanted: tuple(each for each, way in job.ways.items() if way == wanted) for wanted in ways}
    sizes = {"bytes_before": job.read, "bytes_after": job.written}
    return Conversion(recipe=name, skipped=tuple(job.skipped), **became, **sizes)  # type: ignore[arg-type]


def _under(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    found = {
        n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix) and (n != prefix or not prefix)
    }
    if prefix and not found:
        starts = sorted({f"{name.partition('.')[0]}." for name in state if "." in name})[:8]
        expected = f"one of {', '.join(map(repr, starts))}" if starts else "no prefix"
        raise OptionError(f"no tensor has a name that begins with {prefix!r}", expected=expected)
    return found


def _place(value: Any) -> Any:
    """What two names of one tensor have in common."""
    inner = value.inner_list() if isinstance(value, QuantizedTensorStorage) else [value]
    return tuple(t if t is None else (t.data_ptr() or id(t), t.dtype, tuple(t.shape), t.stride()) for t in inner)


class _Job:
    """A conversion of ``state``: what is ``made`` of it by name in the end, and the way that each tensor went."""

    def __init__(self, state: dict[str, Any], to: Recipe | torch.dtype, columnwise: bool) -> None:
        self.state, self.to, self.columnwise = state, to, columnwise
        self.chosen: set[str] = set()
        self.skipped: list[str] = []
        self.ways: dict[str, str] = {}
        self.made: dict[str, Any] = {}
        self.read = self.written = 0

    def choose(self, include: Sequence[str] | None, exclude: Sequence[str] | None, weights: set[str] | None) -> None:
        """Settle which tensors are converted."""
        able: set[str] = set()
        for name, value in self.state.items():
            with of_any_class(name):
                if value.dtype in HIGH_PRECISION and _STATE not in name.split("."):
                    able.add(name)
        for pattern in (*(include or ()), *(exclude or ())):
            if not any(fnmatchcase(name, pattern) for name in able):
                what, remedy = (
                    f"pattern {pattern!r} fits no tensor that can be converted",
                    f"names are like {[*able][:1]}",
                )
                raise OptionError(what, expected="the name of a tensor of values, or a pattern of such", remedy=remedy)
        quantized = {name for name in able if isinstance(self.state[name], QuantizedTensorStorage)}
        if weights is not None:
            if missing := sorted(weights - able):
                raise CheckpointError(f"the file misses {listed(missing)}", expected="every weight of the model")
            self.chosen = weights
        elif include is not None:
            self.chosen = {name for name in able if any(fnmatchcase(name, pattern) for pattern in include)}
        elif isinstance(self.to, torch.dtype) or quantized:
            self.chosen = able if isinstance(self.to, torch.dtype) else quantized
        else:
            matrices = [n for n, v in self.state.items() if n in able and v.dim() == 2 and f".{n}".endswith(".weight")]
            tables = {_place(self.state[name]) for name in matrices if _EMBEDDING.search(name)}
            self.skipped = [name for name in matrices if _place(self.state[name]) in tables]
            self.chosen = set(matrices) - set(self.skipped)
        self.chosen = {n for n in self.chosen if not any(fnmatchcase(n, pattern) for pattern in exclude or ())}

    def run(self, progress: Callable[[int, int], None]) -> None:
        """Convert all tensors; those that are one tensor in the source and become the same are one."""
        places = {name: _place(value) for name, value in self.state.items()}
        total = sum({places[name]: value.nbytes for name, value in self.state.items()}.values())
        keeps = self._keeps_state()
        made: dict[Any, tuple[str, Any]] = {}
        seen: set[Any] = set()
        for name, value in self.state.items():
            progress(self.read, total)
            size, place = 0 if places[name] in seen else value.nbytes, (places[name], name in self.chosen)
            seen.add(places[name])
            self.read += size
            if _STATE in name.split(".") and not keeps:
                self.ways[name] = "dropped"
                continue
            if place not in made:
                with of_any_class(name), torch.no_grad():
                    made[place] = self._converted(name, value)
                self.written += made[place][1].nbytes
            self.ways[name], self.made[name] = made[place]
        progress(total, total)

    def _converted(self, name: str, value: Any) -> tuple[str, Any]:
        quantized = isinstance(value, QuantizedTensorStorage)
        if name not in self.chosen or isinstance(self.to, torch.dtype):
            dtype = self.to if name in self.chosen and isinstance(self.to, torch.dtype) else value.dtype
            way = "dequantized" if quantized else "copied" if dtype == value.dtype else "cast"
            return way, value.dequantize(torch.float32).to(dtype) if quantized else value.to(dtype)
        quantizer = self.to.quantizer(QuantizerRole("linear", "weight", name.removesuffix(".weight"))).copy()
        quantizer.set_usage(rowwise=True, columnwise=self.columnwise)
        quantizer.internal = False
        try:
            if quantized and self._alike(name, value, quantizer):
                return "copied", value
            values = value.dequantize(torch.float32) if quantized else value
            quantizer.initialize(values)
            return "quantized", quantizer.quantize(values, dtype=value.dtype)
        except OttavaError:
            raise
        except Exception as error:
            what = f"{name!r} of shape {tuple(value.shape)} cannot be quantized: {error}"
            raise UsageError(what, remedy="exclude it, or report it to the authors of the recipe") from error

    def _alike(self, name: str, value: Any, quantizer: Any) -> bool:
        """Whether that quantizer with the same options has made a value, which gets the usages that are asked for."""
        new = flatten_tensor(name, quantizer.make_empty(tuple(value.size()), dtype=value.dtype, device="meta"))[1]
        old, origin = flatten_tensor(name, value)[1], origin_of_quantizer(quantizer)
        same = _of_one_class(old.origin, origin) and old.origin.get("options", {}) == origin.get("options", {})
        if not same or (old.cls, old.static) != (new.cls, new.static):
            return False
        with suppress(UsageError):
            value.update_usage(rowwise_usage=True, columnwise_usage=self.columnwise)
        return bool(value.get_usages()["rowwise"]) and set(new.tensors) <= set(flatten_tensor(name, value)[0])

    def _keeps_state(self) -> bool:
        """Whether the scaling state of a file is that of the recipe that it is converted to."""
        if not isinstance(self.to, Recipe) or not self.to.stateful:
            return False
        role = QuantizerRole("linear", "weight")
        state: Any = self.to.make_state([role])
        layers: dict[str, set[str]] = {}
        for name in (name for name in self.state if _STATE in name.split(".")):
            layer, _, buffer = f".{name}".rpartition(f".{_STATE}.")
            layers.setdefault(layer, set()).add(buffer)
        known = set(state.state_dict()) if isinstance(state, torch.nn.Module) else set()
        quantized = {name: value for name, value in self.state.items() if isinstance(value, QuantizedTensorStorage)}
        origins = [flatten_tensor(name, value)[1].origin for name, value in quantized.items()]
        origin = origin_of_quantizer(self.to.quantizer(role))
        return all(found == known for found in layers.values()) and all(_of_one_class(old, origin) for old in origins)


def _of_one_class(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether quantizers of one class made both; of that, the first version named the package alone."""
    key = "quantizer" if "quantizer" in old else "package"
    return bool(old.get(key, "") == new.get(key))
