"""The registry: loads recipe packages through their entry points and keeps failures to themselves."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import TYPE_CHECKING, Any

import pluggy

from ottava.errors import DuplicateRecipeError, OptionError, PluginError, RecipeNotFoundError
from ottava.recipes import hookspecs
from ottava.recipes.spec import API_VERSION, RecipeSpec

if TYPE_CHECKING:
    from ottava.recipes.base import Recipe


@dataclass(frozen=True)
class PluginStatus:
    """One entry point of the group ``ottava`` and what became of it.

    Attributes:
        name: ``"distribution:entry"``.
        status: ``"ok"``, ``"broken"`` or ``"disabled"``.
        error: why it is broken.
        recipes: the specs that it offers.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    status: str
    error: str = ""
    recipes: tuple[RecipeSpec, ...] = ()


def _entry_points() -> list[tuple[Distribution, EntryPoint]]:
    found: dict[tuple[str, str], tuple[Distribution, EntryPoint]] = {}
    for dist in distributions():
        for entry in dist.entry_points:
            if entry.group == hookspecs.ENTRY_POINT_GROUP:
                # The first on sys.path is the one that an import finds.
                found.setdefault((dist.metadata["Name"], entry.name), (dist, entry))
    return [found[key] for key in sorted(found)]


def _disabled() -> set[str]:
    names = os.environ.get("OTTAVA_DISABLE_PLUGINS", "").split(",")
    return {name.strip().lower().replace("_", "-") for name in names if name.strip()}


def _read(plugin_name: str, entry: EntryPoint) -> tuple[RecipeSpec, ...]:
    """Load one plugin in a manager of its own, so that whatever it does stays with it."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(entry.load(), plugin_name)
    manager.check_pending()
    specs: list[RecipeSpec] = []
    for given in manager.hook.ottava_recipes():
        for spec in given:
            if not isinstance(spec, RecipeSpec):
                raise PluginError(f"ottava_recipes yielded a {type(spec).__name__}", expected="RecipeSpec objects")
            if spec.api_version != API_VERSION:
                raise PluginError(
                    f"recipe {spec.name!r} is written for version {spec.api_version} of the extension points",
                    expected=f"version {API_VERSION}",
                    remedy="install a release of the package that fits this ottava",
                )
            if spec.name in (other.name for other in specs):
                raise DuplicateRecipeError(f"the plugin offers recipe {spec.name!r} twice", expected="one each")
            specs.append(spec)
    return tuple(specs)


@cache
def _load() -> tuple[PluginStatus, ...]:
    disabled, statuses = _disabled(), []
    owners: dict[str, PluginStatus] = {}
    for dist, entry in _entry_points():
        name, version = dist.metadata["Name"], dist.version
        facts = (f"{name}:{entry.name}", name, version, entry.name)
        if name.lower().replace("_", "-") in disabled:
            statuses.append(PluginStatus(*facts, "disabled"))
            continue
        try:
            specs = _read(facts[0], entry)
            for spec in specs:
                if spec.name in owners:
                    owner = owners[spec.name]
                    raise DuplicateRecipeError(
                        f"recipe {spec.name!r} is offered by {owner.distribution} {owner.version} "
                        f"and by {name} {version}",
                        expected="one package for each recipe name",
                        remedy=f"uninstall one, or set OTTAVA_DISABLE_PLUGINS to {owner.distribution} or {name}",
                    )
        except (Exception, SystemExit) as error:
            if os.environ.get("OTTAVA_STRICT_PLUGINS") == "1":
                raise PluginError(
                    f"plugin {facts[0]} {version} is broken: {error}",
                    remedy="unset OTTAVA_STRICT_PLUGINS to go on",
                ) from error
            statuses.append(PluginStatus(*facts, "broken", f"{type(error).__name__}: {error}"))
            continue
        statuses.append(PluginStatus(*facts, "ok", "", specs))
        owners.update((spec.name, statuses[-1]) for spec in specs)
    return tuple(statuses)


def plugin_statuses() -> list[PluginStatus]:
    """Every plugin found, healthy or not, in a stable order.

    Raises:
        PluginError: a plugin is broken and ``OTTAVA_STRICT_PLUGINS=1``.
    """
    return list(_load())


def list_recipes() -> list[RecipeSpec]:
    """The recipes that can be used, by name. Neither torch nor a recipe is imported."""
    return sorted((spec for status in _load() for spec in status.recipes), key=lambda spec: spec.name)


def reload() -> None:
    """Forget what was loaded; the next question looks again."""
    _load.cache_clear()


def get_recipe(name: str, **options: Any) -> Recipe:
    """Build the recipe registered as ``name``.

    Raises:
        RecipeNotFoundError: no installed package provides it; the message has the nearest names.
        OptionError: an option that the recipe does not take, or a value that it refuses.
        PluginError: the package that provides it cannot be imported.
    """
    spec = next((s for s in list_recipes() if s.name == name), None)
    if spec is None:
        raise _not_found(name)
    module, _, attribute = spec.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise PluginError(
            f"recipe {name!r} cannot be imported from {spec.factory}: {type(error).__name__}: {error}",
            remedy="reinstall the package that provides it",
        ) from error
    parameters = inspect.signature(factory).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [option for option in options if option not in parameters and not takes_any]
    if unknown:
        raise OptionError(
            f"recipe {name!r} has no option {', '.join(map(repr, unknown))}",
            expected=", ".join(parameters) or "no options",
        )
    recipe: Recipe = factory(**options)
    return recipe


def _not_found(name: object) -> RecipeNotFoundError:
    known = [spec.name for spec in list_recipes()]
    near = difflib.get_close_matches(str(name), known, n=3)
    broken = [status.name for status in _load() if status.status == "broken"]
    expected = f"one of {', '.join(known)}" if known else "a recipe package to be installed"
    if near:
        expected += f" (nearest: {', '.join(near)})"
    remedy = f"pip install ottava-recipes-{name}, or the package that provides it"
    if broken:
        remedy += f"; broken plugins, see `ottava recipes`: {', '.join(broken)}"
    return RecipeNotFoundError(f"no installed package provides recipe {name!r}", expected=expected, remedy=remedy)
