"""Files of tensors from one recipe to another, or to high precision, one tensor in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ottava.checkpoint.files import METADATA
from ottava.checkpoint.header import DIGEST_KEY, METADATA_KEY
from ottava.checkpoint.plan import Kind, Plan, Target, make_plan
from ottava.checkpoint.reader import as_path, named
from ottava.checkpoint.sources import TensorSource, UnderPrefix, open_source
from ottava.checkpoint.writer import SafetensorsWriter
from ottava.errors import DTypeError, OptionError
from ottava.recipes.base import Recipe
from ottava.recipes.registry import get_recipe

#: Names for high precision in the place of a recipe.
HIGH_PRECISION_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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
        bytes_before, bytes_after: bytes of all tensors.
    """

    recipe: str
    quantized: tuple[str, ...]
    dequantized: tuple[str, ...]
    cast: tuple[str, ...]
    copied: tuple[str, ...]
    dropped: tuple[str, ...]
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
    prefix: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Write the tensors of ``source`` as one safetensors file, weights quantized by ``recipe`` or in high precision.

    Tensors are read, checked, converted and written one by one. Values pass through float32. What is quantized by the
    same recipe with the same options already keeps its bytes. For a recipe, what was quantized is quantized, and where
    nothing was, floating-point matrices named ``weight`` or ``*.weight``; everything else keeps its dtype. For high
    precision, every tensor of float32, bfloat16 or float16 gets that dtype, as of ``model.to``. Scaling state of other
    recipes (``*.recipe_state.*``) is dropped.

    Args:
        source: a safetensors file of any tool, a folder of such with ``model.safetensors.index.json``, a file of
            ``torch.save`` with a state dict, or a sharded checkpoint.
        target: the file to write; a present one is replaced in the end.
        recipe: a recipe, the name of one, or ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        options: for a recipe that is named.
        include: patterns, as of ``fnmatch``, of the tensors to convert, in the place of the choice above.
        exclude: patterns of tensors that are not to be converted. Tensors that were quantized and are not chosen are
            in high precision afterwards, in their nominal dtype.
        prefix: take only the tensors whose names begin with it, and take it off: ``"model."`` for the model in a
            checkpoint of a training.
        progress: called with the bytes that were read, and those to read in all.

    Raises:
        CheckpointError: the source is damaged, or nothing that can be read; it names the file and the tensor.
        OptionError: options or patterns that do not fit.
        RecipeNotFoundError, PluginError: the recipe cannot be had.
        UsageError: the target cannot be written, or two tensors would have one name.
    """
    chosen = _target(recipe, options)
    path = as_path(source)
    as_path(target)
    if not isinstance(prefix, str):
        raise DTypeError(f"prefix is a {type(prefix).__name__}", expected="the beginning of names")
    opened = open_source(path)
    try:
        if prefix:
            opened = UnderPrefix(opened, prefix)
        with named(path):
            plan = make_plan(opened, chosen, _patterns("include", include), _patterns("exclude", exclude))
        others = {k: v for k, v in opened.metadata.items() if k not in (METADATA_KEY, DIGEST_KEY)}
        metadata = METADATA | others | {METADATA_KEY: plan.description.encode()}
        with SafetensorsWriter(target, plan.specs, metadata) as writer:
            for name, tensor in _converted(opened, path, plan, progress):
                writer.write(name, tensor)
    finally:
        close = getattr(opened, "close", None)
        if close is not None:
            close()

    def became(kind: Kind) -> tuple[str, ...]:
        return tuple(name for name, found in plan.kinds.items() if found == kind)

    return Conversion(
        chosen.name,
        became("quantized"),
        became("dequantized"),
        became("cast"),
        became("copied"),
        plan.dropped,
        plan.bytes_before,
        sum(spec.nbytes for spec in plan.specs.values()),
    )


def _converted(
    source: TensorSource, path: Path, plan: Plan, progress: Callable[[int, int], None] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a plan makes of a source, by name; those of one quantized tensor follow each other."""
    total, done = sum(step.nbytes for step in plan.steps), 0
    for step in plan.steps:
        if progress is not None:
            progress(done, total)
        with named(path):
            made = step.run(source)
        yield from made.items()
        done += step.nbytes
    if progress is not None:
        progress(total, total)


def _target(recipe: Recipe | str, options: Mapping[str, Any] | None) -> Target:
    given = dict(options or {})
    if isinstance(recipe, str) and recipe not in HIGH_PRECISION_NAMES:
        return Target(recipe, get_recipe(recipe, **given))
    if given:
        raise OptionError(f"options {', '.join(map(repr, given))} without the name of a recipe", expected="none")
    if isinstance(recipe, str):
        return Target(recipe, HIGH_PRECISION_NAMES[recipe])
    if not isinstance(recipe, Recipe):
        raise DTypeError(
            f"the recipe is a {type(recipe).__name__}",
            expected=f"a recipe, the name of one, or {', '.join(HIGH_PRECISION_NAMES)}",
        )
    return Target(recipe.name, recipe)


def _patterns(what: str, given: Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(p, str) for p in given):
        raise DTypeError(f"{what} is {given!r}", expected="a list of patterns")
    return tuple(given)
