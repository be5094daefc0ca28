"""Converts files of tensors from one recipe to another, or to high precision."""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ottava.checkpoint import read_state, save_file
from ottava.checkpoint.flatten import held_tensors, place_of
from ottava.checkpoint.published import FLOAT8, find_published
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
from ottava.recipes.of_layer import layer_state
from ottava.recipes.role import OF_LINEAR
from ottava.tensors import QuantizedTensorStorage, Quantizer

#: Names of high-precision dtypes that may be given in place of a recipe's name.
HIGH_PRECISION_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: The outcomes for a tensor, which are also attributes of :class:`Conversion`.
KINDS = ("quantized", "dequantized", "cast", "copied", "dropped")
_EMBEDDING = re.compile(r"embed|(^|\.)(emb|wte|wpe)(\.|$)", re.IGNORECASE)
_Patterns = Sequence[str] | None


def is_named_as_embedding(name: str) -> bool:
    """Whether a tensor has a name that embeddings have."""
    return _EMBEDDING.search(name) is not None


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
    _check_patterns("include", include)
    _check_patterns("exclude", exclude)
    goal = _goal(recipe, dict(options or {}))
    state, metadata = _read_source(source, prefix)
    keeps_state = _keeps_state(goal.recipe, state)
    with named(as_path(source)):
        names, skipped = _selection(state, goal.recipe, model, include, exclude)
        if goal.recipe is not None:
            _check_layers(goal.recipe, state)
        results = _convert_all(state, names, goal, columnwise, keeps_state, progress)
    save_file(results.tensors, target, metadata=metadata)
    return Conversion(
        goal.name,
        **results.names_by_kind(),
        skipped=skipped,
        bytes_before=results.bytes_before,
        bytes_after=results.bytes_after,
    )


def _check_patterns(argument: str, patterns: Any) -> None:
    """Raises DTypeError unless ``patterns`` is None or a sequence of texts."""
    if patterns is None:
        return
    is_sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not is_sequence or not all(isinstance(pattern, str) for pattern in patterns):
        raise DTypeError(f"{argument} is {patterns!r}", expected="a list of patterns")


def _read_source(source: AnyPath, prefix: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of the source whose names begin with ``prefix``, and the texts of its header."""
    if not isinstance(prefix, str):
        raise DTypeError(f"prefix is a {type(prefix).__name__}", expected="the beginning of names")
    state, metadata = read_state(source)
    foreign = find_published(state, as_path(source))
    foreign.refuse(source, [name for name in foreign.scales if name.startswith(prefix)])
    if prefix:
        state = _beginning_with(prefix, state)
    return state, metadata


def _check_layers(recipe: Recipe, state: Mapping[str, Any]) -> None:
    """Let the recipe check that its patterns of layers fit those of the matrices in ``state``."""
    weights = [name for name, value in state.items() if _is_weight(name, value)]
    recipe.check_layers([name.removesuffix("weight").removesuffix(".") for name in weights])


def _is_weight(name: str, value: Any) -> bool:
    """Whether a tensor is a matrix named ``weight`` or ``*.weight``."""
    return f".{name}".endswith(".weight") and value.dim() == 2


@dataclass(frozen=True)
class _Goal:
    """What tensors are converted to: a recipe or a high-precision dtype; the other one is None."""

    name: str
    recipe: Recipe | None
    dtype: torch.dtype | None


#: Without a recipe and a dtype, a tensor becomes one in high precision, of its own dtype.
_OWN_DTYPE = _Goal("", None, None)


def _goal(recipe: Recipe | str, options: Mapping[str, Any]) -> _Goal:
    dtype = HIGH_PRECISION_NAMES.get(recipe) if isinstance(recipe, str) else None
    if options and (dtype or not isinstance(recipe, str)):
        raise OptionError(
            f"options {', '.join(map(repr, options))} without the name of a recipe", expected="none"
        )
    if not isinstance(recipe, str):
        resolved = as_recipe(recipe)
        return _Goal(resolved.name, resolved, None)
    if dtype is not None:
        return _Goal(recipe, None, dtype)
    return _Goal(recipe, get_recipe(recipe, **options), None)


@dataclass
class _Results:
    """The converted tensors by name, and which of :data:`KINDS` each tensor of the source is."""

    tensors: dict[str, Any]
    kinds: dict[str, str]
    bytes_before: int
    bytes_after: int = 0

    def names_by_kind(self) -> dict[str, Any]:
        """The names of the tensors of each kind."""
        return {
            kind: tuple(name for name, own in self.kinds.items() if own == kind) for kind in KINDS
        }


def _convert_all(
    state: Mapping[str, Any],
    names: set[str],
    goal: _Goal,
    columnwise: bool,
    keeps_state: bool,
    progress: Callable[[int, int], None] | None,
) -> _Results:
    """Convert the tensors with ``names`` to the goal, and the others to high precision."""
    report = progress or (lambda read, total: None)
    sizes = {place_of(value): value.nbytes for value in state.values()}
    results = _Results({}, {}, bytes_before=sum(sizes.values()))
    # Names that share one tensor in the source, and are converted alike, share one in the target.
    shared: dict[Any, tuple[str, Any]] = {}
    read = 0
    for name, value in state.items():
        report(read, results.bytes_before)
        place = place_of(value)
        read += sizes.pop(place, 0)
        if OF_STATE.search(name) and not keeps_state:
            results.kinds[name] = "dropped"
            continue
        key = (place, name in names)
        if key not in shared:
            own_goal = goal if name in names else _OWN_DTYPE
            with of_any_class(name), torch.no_grad():
                shared[key] = _convert(name, value, own_goal, columnwise)
        results.kinds[name], results.tensors[name] = shared[key]
    report(results.bytes_before, results.bytes_before)
    results.bytes_after = sum(tensor.nbytes for _, tensor in shared.values())
    return results


def _convert(name: str, value: Any, goal: _Goal, columnwise: bool) -> tuple[str, Any]:
    """One of :data:`KINDS`, and the converted tensor."""
    was_quantized = isinstance(value, QuantizedTensorStorage)
    values = value.dequantize(torch.float32) if was_quantized else value
    if goal.recipe is None:
        dtype = goal.dtype or value.dtype
        same_dtype = "copied" if dtype == value.dtype else "cast"
        return ("dequantized" if was_quantized else same_dtype), values.to(dtype)
    quantizer = _quantizer(goal.recipe, name, columnwise)
    problem = f"{name!r} of shape {tuple(value.shape)} cannot be quantized"
    remedy = "exclude it, or tell its authors"
    with translated(problem, "a tensor that the recipe takes", remedy, to=UsageError):
        quantizer.initialize(values)
        result = quantizer.quantize(values, dtype=value.dtype)
        if was_quantized and _changes_nothing(value, result):
            return "copied", value
        # A recipe may keep a tensor in high precision, and then its storage has the same values.
        plain = values.to(value.dtype)
        is_plain = all(inner.dtype == plain.dtype for inner in held_tensors(result))
        if is_plain and _same(result, plain, rtol=0):
            return ("dequantized" if was_quantized else "copied"), plain
        return "quantized", result


def _quantizer(recipe: Recipe, name: str, columnwise: bool) -> Quantizer:
    """A quantizer of the recipe for the weight with a name, for tensors with rowwise data."""
    role = QuantizerRole("linear", "weight", name.removesuffix(".weight"))
    quantizer = recipe.quantizer(role).copy()
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    quantizer.internal = False
    return quantizer


def _changes_nothing(old: Any, new: Any) -> bool:
    """Whether quantizing ``old`` again gave its values, but for the rounding of a scale.

    Then the bytes of ``old`` stay, because its columnwise data, for example, was made of the values
    from before the first quantization. Usages of ``old`` that ``new`` lacks are removed.
    """
    old_spec, new_spec = (tensor.flatten_storage()[1] for tensor in (old, new))
    if (old_spec.cls, old_spec.static) != (new_spec.cls, new_spec.static):
        return False
    with suppress(UsageError):
        usages = new.get_usages()
        old.update_usage(rowwise_usage=usages["rowwise"], columnwise_usage=usages["columnwise"])
    same = _same(new, old.dequantize(torch.float32), rtol=2**-22)
    return same and bool(old.get_usages() == new.get_usages())


def _same(quantized: Any, values: torch.Tensor, rtol: float) -> bool:
    return torch.allclose(
        quantized.dequantize(torch.float32), values.float(), rtol=rtol, atol=0, equal_nan=True
    )


def _keeps_state(recipe: Recipe | None, state: Mapping[str, Any]) -> bool:
    """Whether the scaling state in a file has the same buffers as that of the recipe."""
    if recipe is None:
        return False
    roles = [QuantizerRole("linear", tensor_type) for tensor_type in OF_LINEAR]
    recipe_state: Any = layer_state(recipe, roles)
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


def _selection(
    state: dict[str, Any],
    recipe: Recipe | None,
    model: torch.nn.Module | None,
    include: _Patterns,
    exclude: _Patterns,
) -> tuple[set[str], tuple[str, ...]]:
    """The names of the tensors to convert, and of matrices that are named as embeddings.

    The latter are left alone.
    """
    candidates = _candidates(state, recipe)
    if model is not None:
        return _weights_of_model(model, recipe, candidates, include, exclude), ()
    skipped: tuple[str, ...] = ()
    if include is not None:
        names = _matches(candidates, include)
    elif recipe is None:
        names = {*candidates}
    else:
        names, skipped = _default_selection(state, candidates)
    return names - _matches(candidates, exclude or ()), skipped


def _candidates(state: Mapping[str, Any], recipe: Recipe | None) -> list[str]:
    """The names of tensors that can be converted: those of floats, without scaling state."""
    dtypes = HIGH_PRECISION if recipe is not None else (*HIGH_PRECISION, *FLOAT8)
    candidates: list[str] = []
    for name, value in state.items():
        with of_any_class(name):
            if value.dtype in dtypes and not OF_STATE.search(name):
                candidates.append(name)
    return candidates


def _weights_of_model(
    model: torch.nn.Module,
    recipe: Recipe | None,
    candidates: Sequence[str],
    include: _Patterns,
    exclude: _Patterns,
) -> set[str]:
    """The weights of the layers that :func:`ottava.convert` swaps in the model."""
    if recipe is None:
        raise OptionError(
            "a model, to convert to high precision", expected="a model for a recipe alone"
        )
    swapped = convert(model, recipe, include=include, exclude=exclude)
    layers = [
        name
        for name, module in swapped.named_modules(remove_duplicate=False)
        if isinstance(module, Linear)
        and module.recipe is recipe
        and not module.weight_is_transposed
    ]
    weights = {f"{name}.weight".lstrip(".") for name in layers}
    if absent := sorted(weights - {*candidates}):
        raise CheckpointError(
            f"the file misses {listed(absent)}", expected="every weight of the model"
        )
    return weights


def _matches(candidates: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """The candidates that a pattern fits; raises OptionError for a pattern that fits none."""
    matches = {pattern: fnmatch.filter(candidates, pattern) for pattern in patterns}
    if useless := [pattern for pattern, names in matches.items() if not names]:
        raise OptionError(
            f"pattern {useless[0]!r} fits no tensor that can be converted",
            f"one of {listed(candidates)}",
        )
    return {name for names in matches.values() for name in names}


def _default_selection(
    state: Mapping[str, Any], candidates: Sequence[str]
) -> tuple[set[str], tuple[str, ...]]:
    """The tensors that are quantized in the source. If none is: the weights, without embeddings,
    and the embeddings that are left alone."""
    quantized = {name for name in candidates if isinstance(state[name], QuantizedTensorStorage)}
    if quantized:
        return quantized, ()
    weights = [name for name in candidates if _is_weight(name, state[name])]
    embeddings = {place_of(state[name]) for name in weights if is_named_as_embedding(name)}
    skipped = tuple(name for name in weights if place_of(state[name]) in embeddings)
    return {*weights} - {*skipped}, skipped
