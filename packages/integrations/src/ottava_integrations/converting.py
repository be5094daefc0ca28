"""Converts files of tensors from one recipe to another, or to high precision."""

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

#: Names of high-precision dtypes that may be given in place of a recipe's name.
HIGH_PRECISION_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: The outcomes for a tensor, which are also attributes of :class:`Conversion`.
KINDS = ("quantized", "dequantized", "cast", "copied", "dropped")
_EMBEDDING = re.compile(r"embed|(^|\.)(emb|wte|wpe)(\.|$)", re.IGNORECASE)
_Patterns = Sequence[str] | None


@dataclass(frozen=True)
class Conversion:
    """The outcome of :func:`convert_file`, as names of tensors.

    Attributes:
        recipe: the name of the recipe, or ``"bf16"``, ``"fp16"``, ``"fp32"``.
        quantized: tensors that were quantized.
        dequantized: tensors that were quantized in the source and are in high precision now.
        cast: tensors that were cast to another high-precision dtype.
        copied: tensors that are unchanged.
        dropped: scaling state that the target has no use for.
        skipped: matrices that were not converted because they are named as embeddings, or tied to
            one that is.
        bytes_before, bytes_after: bytes of all tensors, where a tensor with several names counts
            once.
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
    """Write the tensors of ``source`` as one safetensors file, quantized or in high precision.

    Values pass through float32. A tensor that was quantized and would not change keeps its bytes.

    With a recipe, the tensors that were quantized in the source are quantized. If none was, the
    floating-point matrices named ``weight`` or ``*.weight`` are, except those that are named as
    embeddings or tied to one that is. All others keep their dtype, and so do tensors that the
    recipe keeps in high precision.

    With a high-precision dtype, every tensor of float32, bfloat16 or float16 gets that dtype, as
    with ``model.to``. So do tensors of 8-bit float formats, whose elements are values because they
    come without scales.

    A source with weights and scales of another tool is refused. Scaling state
    (``*.recipe_state.*``) is kept for a recipe whose state has the same buffers, and dropped
    otherwise. All that is written is held in memory; the source need not fit into it.

    Args:
        source: a safetensors file of any tool, a folder of such files with
            ``model.safetensors.index.json``, a file of ``torch.save`` with a state dict, or a
            sharded checkpoint.
        target: the file to write. An existing file is replaced at the end.
        recipe: a recipe or the name of one; or ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        options: options of the recipe that is named.
        include: ``fnmatch`` patterns of the tensors to convert, in place of the choice above.
        exclude: patterns of tensors not to convert; quantized ones among them get their nominal
            dtype.
        model: a model, possibly on the meta device, for :func:`ottava.convert`. The weights of the
            layers that are swapped are converted, and ``include`` and ``exclude`` are patterns of
            its modules.
        columnwise: whether separate columnwise data is written too, so that training can go on.
        prefix: only tensors whose names begin with this are converted, such as ``"model."`` in the
            checkpoint of a training. Their new names lack it.
        progress: called with the number of bytes read so far, and of bytes to read in all.

    Raises:
        CheckpointError: the source is damaged, cannot be read, lacks a weight of ``model``, or has
            weights that another tool has quantized.
        OptionError, RecipeNotFoundError, PluginError: the recipe, its options or the patterns do
            not fit.
        UsageError: the target cannot be written, or two tensors would have one name.
    """
    check_file_target(target)
    for argument, patterns in (("include", include), ("exclude", exclude)):
        sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if patterns is not None and not (
            sequence and all(isinstance(pattern, str) for pattern in patterns)
        ):
            raise DTypeError(f"{argument} is {patterns!r}", expected="a list of patterns")
    target_name, resolved, dtype = _target(recipe, dict(options or {}))
    if not isinstance(prefix, str):
        raise DTypeError(f"prefix is a {type(prefix).__name__}", expected="the beginning of names")
    state, metadata = read_state(source)
    foreign = find_codes(state, as_path(source))
    foreign.refuse(source, [name for name in foreign.scales if name.startswith(prefix)])
    state = _beginning_with(prefix, state) if prefix else state
    keeps_state = _keeps_state(resolved, state)
    kinds: dict[str, str] = {}
    tensors: dict[str, Any] = {}
    report = progress or (lambda read, total: None)
    # Names that share one tensor in the source, and are converted alike, share one in the target.
    written: dict[Any, tuple[str, Any]] = {}
    with named(as_path(source)):
        chosen, skipped = _chosen(state, resolved, model, include, exclude)
        if resolved is not None:
            weights = [
                name
                for name, value in state.items()
                if f".{name}".endswith(".weight") and value.dim() == 2
            ]
            layers = [name.removesuffix("weight").removesuffix(".") for name in weights]
            resolved.check_layers(layers)
        sizes = {place_of(value): value.nbytes for value in state.values()}
        total = sum(sizes.values())
        read = 0
        for name, value in state.items():
            report(read, total)
            key = (place_of(value), name in chosen)
            read += sizes.pop(key[0], 0)
            if OF_STATE.search(name) and not keeps_state:
                kinds[name] = "dropped"
                continue
            if key not in written:
                with of_any_class(name), torch.no_grad():
                    to = (resolved, dtype) if name in chosen else (None, None)
                    written[key] = _converted(name, value, *to, columnwise)
            kinds[name], tensors[name] = written[key]
        report(total, total)
        after = sum(value.nbytes for _, value in written.values())
    save_file(tensors, target, metadata=metadata)
    names = {kind: tuple(name for name in kinds if kinds[name] == kind) for kind in KINDS}
    return Conversion(target_name, **names, skipped=skipped, bytes_before=total, bytes_after=after)


def _target(
    recipe: Recipe | str, options: dict[str, Any]
) -> tuple[str, Recipe | None, torch.dtype | None]:
    """The target's name, and its recipe or its high-precision dtype; the other of them is None."""
    dtype = HIGH_PRECISION_NAMES.get(recipe) if isinstance(recipe, str) else None
    if options and (dtype or not isinstance(recipe, str)):
        raise OptionError(
            f"options {', '.join(map(repr, options))} without the name of a recipe", expected="none"
        )
    if isinstance(recipe, str):
        return recipe, None if dtype else get_recipe(recipe, **options), dtype
    resolved = as_recipe(recipe)
    return resolved.name, resolved, None


def _converted(
    name: str, value: Any, recipe: Recipe | None, dtype: torch.dtype | None, columnwise: bool
) -> tuple[str, Any]:
    """One of :data:`KINDS`, and the converted tensor.

    Without a recipe the tensor is cast to ``dtype``, which is its own by default.
    """
    quantized = isinstance(value, QuantizedTensorStorage)
    values = value.dequantize(torch.float32) if quantized else value
    if recipe is None:
        dtype = dtype or value.dtype
        kind = "copied" if dtype == value.dtype else "cast"
        return ("dequantized" if quantized else kind), values.to(dtype)
    quantizer = recipe.quantizer(
        QuantizerRole("linear", "weight", name.removesuffix(".weight"))
    ).copy()
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    quantizer.internal = False
    problem = f"{name!r} of shape {tuple(value.shape)} cannot be quantized"
    remedy = "exclude it, or tell its authors"
    with translated(problem, "a tensor that the recipe takes", remedy, to=UsageError):
        quantizer.initialize(values)
        result = quantizer.quantize(values, dtype=value.dtype)
        if quantized and _changes_nothing(value, result):
            return "copied", value
        # A recipe may keep a tensor in high precision, and then its storage has the same values.
        plain = values.to(value.dtype)
        kept_plain = all(inner.dtype == plain.dtype for inner in held_tensors(result))
        if kept_plain and _same(result, plain, rtol=0):
            return ("dequantized" if quantized else "copied"), plain
        return "quantized", result


def _changes_nothing(old: Any, new: Any) -> bool:
    """Whether quantizing ``old`` again gave its values, but for the rounding of a scale.

    Then the bytes of ``old`` stay, because its columnwise data, for example, was made of the values
    from before the first quantization. Usages of ``old`` that ``new`` lacks are removed.
    """
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
    """Whether the scaling state in a file has the same buffers as that of the recipe."""
    if recipe is None or not recipe.stateful:
        return False
    recipe_state: Any = recipe.make_state([QuantizerRole("linear", "weight")])
    buffers = {OF_STATE.split(name)[-1] for name in state if OF_STATE.search(name)}
    return isinstance(recipe_state, torch.nn.Module) and buffers == {*recipe_state.state_dict()}


def _beginning_with(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    """The tensors whose names begin with a prefix, under names without it."""
    selected = {
        name[len(prefix) :]: value
        for name, value in state.items()
        if name.startswith(prefix) and name != prefix
    }
    if not selected:
        starts = sorted({f"{name.partition('.')[0]}." for name in state if "." in name})
        raise OptionError(
            f"no tensor's name begins with {prefix!r}",
            f"one of {listed(starts)}" if starts else "none",
        )
    return selected


def _chosen(
    state: dict[str, Any],
    recipe: Recipe | None,
    model: torch.nn.Module | None,
    include: _Patterns,
    exclude: _Patterns,
) -> tuple[set[str], tuple[str, ...]]:
    """The names of the tensors to convert, and of matrices that are named as embeddings.

    The latter are left alone.
    """
    candidates: list[str] = []
    dtypes = HIGH_PRECISION if recipe is not None else (*HIGH_PRECISION, *FLOAT8)
    for name, value in state.items():
        with of_any_class(name):
            if value.dtype in dtypes and not OF_STATE.search(name):
                candidates.append(name)
    if model is not None:
        if recipe is None:
            raise OptionError(
                "a model, to convert to high precision", expected="a model for a recipe alone"
            )
        modules = convert(model, recipe, include=include, exclude=exclude).named_modules(
            remove_duplicate=False
        )
        layers = [
            name
            for name, module in modules
            if isinstance(module, Linear)
            and module.recipe is recipe
            and not module.weight_is_transposed
        ]
        weights = {f"{name}.weight".lstrip(".") for name in layers}
        if missing := sorted(weights - {*candidates}):
            raise CheckpointError(
                f"the file misses {listed(missing)}", expected="every weight of the model"
            )
        return weights, ()

    def fitting(patterns: Sequence[str]) -> set[str]:
        matches = {pattern: fnmatch.filter(candidates, pattern) for pattern in patterns}
        if useless := [pattern for pattern, names in matches.items() if not names]:
            raise OptionError(
                f"pattern {useless[0]!r} fits no tensor that can be converted",
                f"one of {listed(candidates)}",
            )
        return {name for names in matches.values() for name in names}

    skipped: tuple[str, ...] = ()
    quantized = {name for name in candidates if isinstance(state[name], QuantizedTensorStorage)}
    if include is not None:
        chosen = fitting(include)
    elif recipe is None:
        chosen = {*candidates}
    elif quantized:
        chosen = quantized
    else:
        matrices = [
            name for name in candidates if state[name].dim() == 2 and f".{name}".endswith(".weight")
        ]
        embeddings = {place_of(state[name]) for name in matrices if _EMBEDDING.search(name)}
        skipped = tuple(name for name in matrices if place_of(state[name]) in embeddings)
        chosen = {*matrices} - {*skipped}
    return chosen - fitting(exclude or ()), skipped
