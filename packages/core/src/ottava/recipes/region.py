"""``autocast``: a region that overrides the recipes bound to layers."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ottava.errors import DTypeError, OptionError
from ottava.recipes.base import Recipe


@dataclass(frozen=True)
class Region:
    """What an ``autocast`` block says."""

    recipe: Recipe | None = None
    enabled: bool = True
    amax_reduction_group: Any = None
    calibrating: bool = False


class _Current(threading.local):
    region: Region | None = None


_current = _Current()


def current_region() -> Region | None:
    """The innermost region of this thread, or None."""
    return _current.region


class autocast:
    """A region in which layers run under ``recipe``.

    Args:
        recipe: replaces the recipes bound to layers; a registered name builds it with its defaults; None keeps the
            enclosing region's, or those bound.
        enabled: False computes in high precision.
        amax_reduction_group: process group over which amaxes are reduced, for recipes that do.
        calibrating: compute in high precision and let quantizers observe what they would quantize.

    The object can be entered again. Activation checkpointing that recomputes after the block has ended takes it as
    ``context_fn=lambda: (contextlib.nullcontext(), autocast(recipe))``.

    Raises:
        DTypeError: ``recipe`` is neither a recipe nor a name.
        RecipeNotFoundError: no installed package provides the name.
    """

    def __init__(
        self,
        recipe: Recipe | str | None = None,
        enabled: bool = True,
        amax_reduction_group: Any = None,
        calibrating: bool = False,
    ) -> None:
        for name, value in (("enabled", enabled), ("calibrating", calibrating)):
            if not isinstance(value, bool):
                raise OptionError(
                    f"autocast({name}={value!r})",
                    expected="True or False",
                    remedy="pass the recipe as the first argument",
                )
        self._recipe = None if recipe is None else as_recipe(recipe)
        self._enabled = enabled
        self._group = amax_reduction_group
        self._calibrating = calibrating
        self._outer: list[Region | None] = []

    def __enter__(self) -> autocast:
        outer = _current.region
        recipe, group = self._recipe, self._group
        if outer is not None:
            recipe = outer.recipe if recipe is None else recipe
            group = outer.amax_reduction_group if group is None else group
        self._outer.append(outer)
        _current.region = Region(recipe, self._enabled, group, self._calibrating)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.region = self._outer.pop()


def as_recipe(recipe: Recipe | str) -> Recipe:
    """A recipe object, built with its defaults when given by name.

    Raises:
        DTypeError: neither a recipe nor a string.
        RecipeNotFoundError: no installed package provides the name.
    """
    if isinstance(recipe, str):
        from ottava.recipes.registry import get_recipe

        return get_recipe(recipe)
    if not isinstance(recipe, Recipe):
        raise DTypeError(
            f"recipe is a {type(recipe).__name__}: {recipe!r}",
            expected="an ottava.Recipe or the name of an installed one",
            remedy="pass an instance, for example Float8CurrentScaling(), or a name that `ottava recipes` lists",
        )
    return recipe
