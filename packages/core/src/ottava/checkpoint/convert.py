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

from ottava.checkpoint.files import listed, named, of_any_class
from ottava.checkpoint.flatten import flatten_tensor, origin_of_quantizer
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
    check_file_target(as_path(target))
    for what, patterns in (("include", include), ("exclude", exclude)):
        sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if patterns is not None and not (sequence and all(isinstance(pattern, str) for pattern in patterns)):
            raise DTypeError(f"{what} is {patterns!r}", expected="a list of patterns")
    if not isinstance(prefix, str):
        raise DTypeError(f"prefix is a {type(prefix).__name__}", expected="the beginning of names")
    name, to = _target(recipe, dict(options or {}))
    weights: set[str] | None = None
    if model is not None:
        if not isinstance(to, Recipe):
            raise OptionError(f"a model, to convert to {name}", expected="a model for a recipe alone")
        layers = convert(model, to, include=include, exclude=exclude).named_modules(remove_duplicate=False)
        weights = {f"{layer}.weight".lstrip(".") for layer, m in layers if isinstance(m, Linear) and m.recipe is to}
        include = exclude = None
    every, metadata = read_state(as_path(source))
    state = {
        n.removeprefix(prefix): v for n, v in every.items() if n.startswith(prefix) and (n != prefix or not prefix)
    }
    if prefix and not state:
        starts = sorted({f"{each.partition('.')[0]}." for each in every if "." in each})[:8]
        what, expected = f"no tensor has a name that begins with {prefix!r}", f"one of {', '.join(map(repr, starts))}"
        raise OptionError(what, expected=expected if starts else "no prefix")
    with named(as_path(source)):
        chosen, skipped = _chosen(state, to, include, weights)
        for pattern in exclude or ():
            chosen -= _fitting(state, pattern)
        kept = _keeps_state(state, to)
        ways: dict[str, str] = {}
        made: dict[str, Any] = {}
        read: dict[Any, int] = {}
        written: dict[Any, tuple[str, Any]] = {}
        total = sum({_place(value): value.nbytes for value in state.values()}.values())
        for each, value in state.items():
            if progress is not None:
                progress(sum(read.values()), total)
            # Those that are one tensor in the source and become the same are one.
            place = (_place(value), each in chosen)
            read[place[0]] = value.nbytes
            if _STATE in each.split(".") and not kept:
                ways[each] = "dropped"
                continue
            if place not in written:
                with of_any_class(each), torch.no_grad():
                    written[place] = _converted(each, value, to if each in chosen else None, columnwise)
            ways[each], made[each] = written[place]
        if progress is not None:
            progress(total, total)
    save_file(made, target, metadata=metadata)
    after = sum(value.nbytes for _, value in written.values())
    kinds = ("quantized", "dequantized", "cast", "copied", "dropped")
    quantized, dequantized, cast, copied, dropped = (tuple(n for n in ways if ways[n] == kind) for kind in kinds)
    return Conversion(name, quantized, dequantized, cast, copied, dropped, skipped, total, after)


def _target(recipe: Recipe | str, options: dict[str, Any]) -> tuple[str, Recipe | torch.dtype]:
    if isinstance(recipe, str) and recipe not in HIGH_PRECISION_NAMES:
        return recipe, get_recipe(recipe, **options)
    if options:
        raise OptionError(f"options {', '.join(map(repr, options))} without the name of a recipe", expected="none")
    if isinstance(recipe, Recipe):
        return recipe.name, recipe
    if not isinstance(recipe, str):
        expected = f"a recipe, the name of one, or {', '.join(HIGH_PRECISION_NAMES)}"
        raise DTypeError(f"the recipe is a {type(recipe).__name__}", expected=expected)
    return recipe, HIGH_PRECISION_NAMES[recipe]


def _place(value: Any) -> Any:
    """What two names of one tensor have in common."""
    inner = value.inner_list() if isinstance(value, QuantizedTensorStorage) else [value]
    return tuple(t if t is None else (t.data_ptr() or id(t), t.dtype, tuple(t.shape), t.stride()) for t in inner)


def _able(state: dict[str, Any]) -> list[str]:
    """The tensors of values, which can be converted."""
    able = []
    for name, value in state.items():
        with of_any_class(name):
            able += [name] if value.dtype in HIGH_PRECISION and _STATE not in name.split(".") else []
    return able


def _fitting(state: dict[str, Any], pattern: str) -> set[str]:
    able = _able(state)
    found = {name for name in able if fnmatchcase(name, pattern)}
    if not found:
        what, remedy = f"pattern {pattern!r} fits no tensor that can be converted", f"names are like {able[:1]}"
        raise OptionError(what, expected="the name of a tensor of values, or a pattern of such", remedy=remedy)
    return found


def _chosen(
    state: dict[str, Any], to: Recipe | torch.dtype, include: Sequence[str] | None, weights: set[str] | None
) -> tuple[set[str], tuple[str, ...]]:
    """The tensors to convert, and those that are left alone for their names."""
    able = set(_able(state))
    quantized = {name for name in able if isinstance(state[name], QuantizedTensorStorage)}
    if weights is not None:
        if missing := sorted(weights - able):
            raise CheckpointError(f"the file misses {listed(missing)}", expected="every weight of the model")
        return weights, ()
    if include is not None:
        return {name for pattern in include for name in _fitting(state, pattern)}, ()
    if isinstance(to, torch.dtype) or quantized:
        return able if isinstance(to, torch.dtype) else quantized, ()
    matrices = [n for n, value in state.items() if n in able and value.dim() == 2 and f".{n}".endswith(".weight")]
    tables = {_place(state[name]) for name in matrices if _EMBEDDING.search(name)}
    skipped = tuple(name for name in matrices if _place(state[name]) in tables)
    return set(matrices) - set(skipped), skipped


def _converted(name: str, value: Any, to: Recipe | torch.dtype | None, columnwise: bool) -> tuple[str, Any]:
    quantized = isinstance(value, QuantizedTensorStorage)
    if not isinstance(to, Recipe):
        dtype = to or value.dtype
        way = "dequantized" if quantized else "copied" if dtype == value.dtype else "cast"
        return way, value.dequantize(torch.float32).to(dtype) if quantized else value.to(dtype)
    quantizer = to.quantizer(QuantizerRole("linear", "weight", name.removesuffix(".weight"))).copy()
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    quantizer.internal = False
    try:
        if quantized and _alike(name, value, quantizer):
            return "copied", value
        values = value.dequantize(torch.float32) if quantized else value
        quantizer.initialize(values)
        return "quantized", quantizer.quantize(values, dtype=value.dtype)
    except OttavaError:
        raise
    except Exception as error:
        what = f"{name!r} of shape {tuple(value.shape)} cannot be quantized: {error}"
        raise UsageError(what, remedy="exclude it, or report it to the authors of the recipe") from error


def _alike(name: str, value: Any, quantizer: Any) -> bool:
    """Whether that quantizer with the same options has made a value, which gets the usages that are asked for."""
    new = flatten_tensor(name, quantizer.make_empty(tuple(value.size()), dtype=value.dtype, device="meta"))[1]
    old, origin = flatten_tensor(name, value)[1], origin_of_quantizer(quantizer)
    same = _of_one_class(old.origin, origin) and old.origin.get("options", {}) == origin.get("options", {})
    if not same or (old.cls, old.static) != (new.cls, new.static):
        return False
    with suppress(UsageError):
        value.update_usage(rowwise_usage=True, columnwise_usage=quantizer.columnwise_usage)
    return bool(value.get_usages()["rowwise"]) and set(new.tensors) <= set(flatten_tensor(name, value)[0])


def _keeps_state(state: dict[str, Any], to: Recipe | torch.dtype) -> bool:
    """Whether the scaling state of a file is that of the recipe that it is converted to."""
    if not isinstance(to, Recipe) or not to.stateful:
        return False
    role = QuantizerRole("linear", "weight")
    made: Any = to.make_state([role])
    known = set(made.state_dict()) if isinstance(made, torch.nn.Module) else set()
    layers: dict[str, set[str]] = {}
    for layer, found, buffer in (f".{name}".rpartition(f".{_STATE}.") for name in state):
        layers.setdefault(layer, set()).update([buffer] if found else [])
    origin = origin_of_quantizer(to.quantizer(role))
    olds = [flatten_tensor(n, v)[1].origin for n, v in state.items() if isinstance(v, QuantizedTensorStorage)]
    return all(found in (known, set()) for found in layers.values()) and all(_of_one_class(old, origin) for old in olds)


def _of_one_class(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether quantizers of one class made both; of that, the first version named the package alone."""
    key = "quantizer" if "quantizer" in old else "package"
    return bool(old.get(key, "") == new.get(key))
