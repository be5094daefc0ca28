"""Files of tensors from one recipe to another, or to high precision."""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ottava.checkpoint import save_file
from ottava.checkpoint.flatten import held_tensors, place_of
from ottava.checkpoint.published import FLOAT8, find_codes
from ottava.errors import (
    CheckpointError,
    DTypeError,
    OptionError,
    UsageError,
    listed,
    named,
    of_any_class,
    translated,
)
from ottava.filesystem import AnyPath, as_path, check_file_target
from ottava.kernels import HIGH_PRECISION
from ottava.nn import Linear, convert
from ottava.nn.loading import OF_STATE
from ottava.recipes import QuantizerRole, get_recipe
from ottava.recipes.base import Recipe, as_recipe
from ottava.tensors import QuantizedTensorStorage
from ottava_integrations.reading import read_state

#: Names for high precision in the place of a recipe.
HIGH_PRECISION_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: What may become of a tensor, in the words of :class:`Conversion`.
KINDS = ("quantized", "dequantized", "cast", "copied", "dropped")
_EMBEDDING = re.compile(r"embed|(^|\.)(emb|wte|wpe)(\.|$)", re.IGNORECASE)
_Patterns = Sequence[str] | None


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert_file` did, by the names of the tensors.

    Attributes:
        recipe: the name of the recipe, or ``"bf16"``, ``"fp16"``, ``"fp32"``.
        quantized, dequantized, cast, copied: tensors that were quantized; that were before, and are
            in high precision now; that are of another high-precision dtype; and that are as they
            were.
        dropped: scaling state that the target has no use for.
        skipped: matrices that were not chosen because they are named as embeddings, or tied to one
            that is.
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
    source: AnyPath,
    target: AnyPath,
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
    """Write the tensors of ``source`` as one safetensors file, weights quantized by ``recipe`` or
    in high precision.

    Values pass through float32; what was quantized and would not change keeps its bytes. For a
    recipe, what was quantized is quantized, and where nothing was, floating-point matrices named
    ``weight`` or ``*.weight`` but for those named as embeddings, or tied to such; everything else
    keeps its dtype, and so does what the recipe keeps in high precision. For high precision, every
    tensor of float32, bfloat16 or float16 gets that dtype, as of ``model.to``, and so do elements
    of 8-bit float formats, which are values where they come without scales; with scales of another
    tool the source is refused. Scaling state (``*.recipe_state.*``) is kept for a recipe whose
    state has the same buffers, else dropped. What is written is in memory; the source need not be.

    Args:
        source: a safetensors file of any tool, a folder of such with
            ``model.safetensors.index.json``, a file of ``torch.save`` with a state dict, or a
            sharded checkpoint.
        target: the file to write; a present one is replaced in the end.
        recipe, options: a recipe, or the name of one and its options; or ``"bf16"``, ``"fp16"`` or
            ``"fp32"``.
        include: patterns, as of ``fnmatch``, of the tensors to convert, in the place of the choice
            above.
        exclude: patterns of tensors that are not converted; of these, quantized ones get their
            nominal dtype.
        model: one, on meta perhaps, for :func:`ottava.convert`: ``include`` and ``exclude`` are of
            its modules, and chosen are the weights of the layers that are swapped.
        columnwise: whether columnwise data of its own is written too, for a training that goes on.
        prefix: what the names of the tensors to take begin with, as ``"model."`` in a training's
            checkpoint. It is cut.
        progress: called with the bytes that were read, and those to read in all.

    Raises:
        CheckpointError: the source is damaged, nothing that can be read, without a weight of
            ``model``, or has weights that another tool has quantized.
        OptionError, RecipeNotFoundError, PluginError: the recipe, options or patterns that do not
            fit.
        UsageError: the target cannot be written, or two tensors would have one name.
    """
    check_file_target(target)
    for what, patterns in (("include", include), ("exclude", exclude)):
        sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if patterns is not None and not (
            sequence and all(isinstance(pattern, str) for pattern in patterns)
        ):
            raise DTypeError(f"{what} is {patterns!r}", expected="a list of patterns")
    told, by, dtype = _target(recipe, dict(options or {}))
    if not isinstance(prefix, str):
        raise DTypeError(f"prefix is a {type(prefix).__name__}", expected="the beginning of names")
    state, metadata = read_state(source)
    codes = find_codes(state, as_path(source))
    codes.refuse(source, [name for name in codes.scales if name.startswith(prefix)])
    state = _beginning_with(prefix, state) if prefix else state
    keeps, ways, made = _keeps_state(by, state), {}, {}
    tell = progress or (lambda read, total: None)
    # Those that are one tensor in the source and become the same are one.
    written: dict[Any, tuple[str, Any]] = {}
    with named(as_path(source)):
        chosen, skipped = _chosen(state, by, model, include, exclude)
        if by is not None:
            weights = [
                name
                for name, value in state.items()
                if f".{name}".endswith(".weight") and value.dim() == 2
            ]
            by.check_layers([name.removesuffix("weight").removesuffix(".") for name in weights])
        sizes = {place_of(value): value.nbytes for value in state.values()}
        total, read = sum(sizes.values()), 0
        for name, value in state.items():
            tell(read, total)
            key = (place_of(value), name in chosen)
            read += sizes.pop(key[0], 0)
            if OF_STATE.search(name) and not keeps:
                ways[name] = "dropped"
                continue
            if key not in written:
                with of_any_class(name), torch.no_grad():
                    to = (by, dtype) if name in chosen else (None, None)
                    written[key] = _converted(name, value, *to, columnwise)
            ways[name], made[name] = written[key]
        tell(total, total)
        after = sum(value.nbytes for _, value in written.values())
    save_file(made, target, metadata=metadata)
    names = {kind: tuple(name for name in ways if ways[name] == kind) for kind in KINDS}
    return Conversion(told, **names, skipped=skipped, bytes_before=total, bytes_after=after)


def _target(
    recipe: Recipe | str, options: dict[str, Any]
) -> tuple[str, Recipe | None, torch.dtype | None]:
    """The name of what tensors become, and the recipe or the dtype of high precision."""
    dtype = HIGH_PRECISION_NAMES.get(recipe) if isinstance(recipe, str) else None
    if options and (dtype or not isinstance(recipe, str)):
        raise OptionError(
            f"options {', '.join(map(repr, options))} without the name of a recipe", expected="none"
        )
    if isinstance(recipe, str):
        return recipe, None if dtype else get_recipe(recipe, **options), dtype
    made = as_recipe(recipe)
    return made.name, made, None


def _converted(
    name: str, value: Any, recipe: Recipe | None, dtype: torch.dtype | None, columnwise: bool
) -> tuple[str, Any]:
    """The word for it, and what a tensor becomes: by a recipe, or else in a dtype, which is its own
    by default."""
    quantized = isinstance(value, QuantizedTensorStorage)
    values = value.dequantize(torch.float32) if quantized else value
    if recipe is None:
        dtype = dtype or value.dtype
        return (
            "dequantized" if quantized else "copied" if dtype == value.dtype else "cast",
            values.to(dtype),
        )
    quantizer = recipe.quantizer(
        QuantizerRole("linear", "weight", name.removesuffix(".weight"))
    ).copy()
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    quantizer.internal = False
    what, remedy = (
        f"{name!r} of shape {tuple(value.shape)} cannot be quantized",
        "exclude it, or tell its authors",
    )
    with translated(what, "a tensor that the recipe takes", remedy, to=UsageError):
        quantizer.initialize(values)
        made = quantizer.quantize(values, dtype=value.dtype)
        if quantized and _changes_nothing(value, made):
            return "copied", value
        # A recipe may keep a tensor in high precision.
        plain = values.to(value.dtype)
        if all(held.dtype == plain.dtype for held in held_tensors(made)) and _same(
            made, plain, rtol=0
        ):
            return ("dequantized" if quantized else "copied"), plain
        return "quantized", made


def _changes_nothing(old: Any, new: Any) -> bool:
    """Whether quantizing a tensor again gave its values, but for the rounding of a scale; usages
    not asked for go. Then its bytes stay, because its columns, say, were made of the values before
    they were quantized."""
    specs = [tensor.flatten_storage()[1] for tensor in (old, new)]
    if (specs[0].cls, specs[0].static) != (specs[1].cls, specs[1].static):
        return False
    with suppress(UsageError):
        old.update_usage(**{f"{usage}_usage": wanted for usage, wanted in new.get_usages().items()})
    same = _same(new, old.dequantize(torch.float32), rtol=2**-22)
    return same and bool(old.get_usages() == new.get_usages())


def _same(quantized: Any, values: torch.Tensor, rtol: float) -> bool:
    return torch.allclose(
        quantized.dequantize(torch.float32), values.float(), rtol=rtol, atol=0, equal_nan=True
    )


def _keeps_state(recipe: Recipe | None, state: Mapping[str, Any]) -> bool:
    """Whether scaling state in a file has the buffers of the recipe's."""
    if recipe is None or not recipe.stateful:
        return False
    made: Any = recipe.make_state([QuantizerRole("linear", "weight")])
    found = {OF_STATE.split(name)[-1] for name in state if OF_STATE.search(name)}
    return isinstance(made, torch.nn.Module) and found == {*made.state_dict()}


def _beginning_with(prefix: str, every: dict[str, Any]) -> dict[str, Any]:
    """The tensors whose names begin with a prefix, by what follows it."""
    state = {
        name[len(prefix) :]: every[name]
        for name in every
        if name.startswith(prefix) and name != prefix
    }
    if not state:
        starts = sorted({f"{name.partition('.')[0]}." for name in every if "." in name})
        raise OptionError(
            f"no tensor's name begins with {prefix!r}",
            f"one of {listed(starts)}" if starts else "none",
        )
    return state


def _chosen(
    state: dict[str, Any],
    recipe: Recipe | None,
    model: torch.nn.Module | None,
    include: _Patterns,
    exclude: _Patterns,
) -> tuple[set[str], tuple[str, ...]]:
    """The tensors to convert, and matrices that are left alone because they are named as
    embeddings."""
    able: list[str] = []
    dtypes = HIGH_PRECISION if recipe is not None else (*HIGH_PRECISION, *FLOAT8)
    for name, value in state.items():
        with of_any_class(name):
            able += [name] if value.dtype in dtypes and not OF_STATE.search(name) else []
    if model is not None:
        if recipe is None:
            raise OptionError(
                "a model, to convert to high precision", expected="a model for a recipe alone"
            )
        modules = convert(model, recipe, include=include, exclude=exclude).named_modules(
            remove_duplicate=False
        )
        layers = [
            n
            for n, m in modules
            if isinstance(m, Linear) and m.recipe is recipe and not m.weight_is_transposed
        ]
        weights = {f"{name}.weight".lstrip(".") for name in layers}
        if missing := sorted(weights - {*able}):
            raise CheckpointError(
                f"the file misses {listed(missing)}", expected="every weight of the model"
            )
        return weights, ()

    def fitting(patterns: Sequence[str]) -> set[str]:
        found = {pattern: fnmatch.filter(able, pattern) for pattern in patterns}
        if useless := [pattern for pattern, names in found.items() if not names]:
            raise OptionError(
                f"pattern {useless[0]!r} fits no tensor that can be converted",
                f"one of {listed(able)}",
            )
        return {name for names in found.values() for name in names}

    skipped: tuple[str, ...] = ()
    quantized = {name for name in able if isinstance(state[name], QuantizedTensorStorage)}
    if include is not None:
        chosen = fitting(include)
    elif recipe is None or quantized:
        chosen = quantized if recipe else {*able}
    else:
        matrices = [
            name for name in able if state[name].dim() == 2 and f".{name}".endswith(".weight")
        ]
        tables = {place_of(state[name]) for name in matrices if _EMBEDDING.search(name)}
        skipped = tuple(name for name in matrices if place_of(state[name]) in tables)
        chosen = {*matrices} - {*skipped}
    return chosen - fitting(exclude or ()), skipped
