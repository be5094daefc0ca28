"""The registry: the recipes and quantizer factories that installed packages offer, by name.

Packages are found through their entry points. A broken package is reported and does not affect the
others. A name that two packages offer belongs to neither: asking for it is an error that names both
distributions.
"""

import difflib
import importlib
import itertools
import os
import pkgutil
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from ottava.errors import (
    DuplicateRecipeError,
    PluginError,
    RecipeNotFoundError,
    text_of,
    translated,
)
from ottava.recipes import hookspecs
from ottava.recipes.spec import FactorySpec, RecipeSpec, Spec, is_name

if TYPE_CHECKING:
    from ottava.recipes.role import QuantizerRole

SpecT = TypeVar("SpecT", bound=Spec)
RECIPE, FACTORY = RecipeSpec.kind, FactorySpec.kind
#: How distributions with Ottava's own recipes begin; the recipe's name follows.
DISTRIBUTION_PREFIX = "ottava-recipes-"
# Name of a hook -> the class of the specs that it yields.
_HOOKS: dict[str, type[Spec]] = {
    "ottava_recipes": RecipeSpec,
    "ottava_quantizer_factories": FactorySpec,
}
_FALSE = ("", "0", "false", "no", "off")


def _canonical(name: str) -> str:
    """The name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


@dataclass(eq=False)
class PluginStatus:
    """The state of one entry point of a distribution.

    Attributes:
        name: ``"distribution:entry"``.
        entry: the entry point.
        status: ``"ok"``, ``"broken"`` or ``"disabled"``.
        error: why it is broken.
        offers: the specs of the recipes and quantizer factories that it offers.
        refused: the specs whose names are offered twice, each with the error that names all
            packages that offer it.
    """

    distribution: str
    version: str
    entry: EntryPoint = field(repr=False)
    status: str = "ok"
    error: str = ""
    offers: list[Spec] = field(default_factory=list)
    refused: dict[Spec, DuplicateRecipeError] = field(default_factory=dict)

    @property
    def entry_point(self) -> str:
        return self.entry.name

    @property
    def name(self) -> str:
        return f"{self.distribution}:{self.entry_point}"


def discover(group: str = hookspecs.PROJECT) -> list[PluginStatus]:
    """All entry points of the group, by distribution and name; none of them is loaded."""
    statuses = [_status_of(entry) for entry in entry_points(group=group)]
    return sorted(
        statuses, key=lambda status: (_canonical(status.distribution), status.entry_point)
    )


def _status_of(entry: EntryPoint) -> PluginStatus:
    # Entry points that importlib.metadata finds always have their distribution.
    distribution: Distribution = entry.dist  # type: ignore[assignment]
    return PluginStatus(distribution.name, distribution.version, entry)


def _offers(status: PluginStatus) -> Iterator[Spec]:
    """The specs that the hooks of a plugin yield.

    Each plugin has a manager of its own, so that a broken one does not affect the others.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    plugin = status.entry.load()
    manager.register(plugin, status.name)
    manager.check_pending()
    marked = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    if not marked or any(hook not in marked and hasattr(plugin, hook) for hook in _HOOKS):
        raise PluginError(
            f"{status.entry.value} has no hook, or one that is not marked",
            expected=" or ".join(_HOOKS),
            remedy="put @ottava.hookimpl before each",
        )
    for hook, kind in _HOOKS.items():
        for spec in itertools.chain(*getattr(manager.hook, hook)()):
            # A subclass could leave out the checks of the fields.
            if type(spec) is not kind:
                raise PluginError(
                    f"{hook} yielded an object of type {type(spec).__name__}",
                    f"{kind.__name__} objects",
                )
            yield spec


def _refuse_duplicates(statuses: list[PluginStatus]) -> None:
    """Move each spec whose name is offered twice from ``offers`` to ``refused``."""
    claims: dict[tuple[str, str], list[tuple[PluginStatus, Spec]]] = {}
    for status in statuses:
        for spec in status.offers:
            claims.setdefault((spec.kind, spec.name), []).append((status, spec))
    for (kind, name), claimants in claims.items():
        if len(claimants) == 1:
            continue
        packages = " and by ".join(
            f"{status.distribution} {status.version} (entry point {status.entry_point})"
            for status, _ in claimants
        )
        error = DuplicateRecipeError(
            f"{kind} {name!r} is offered by {packages}",
            "one package for each name",
            "uninstall one, or name it in OTTAVA_DISABLE_PLUGINS",
        )
        for status, spec in claimants:
            status.offers.remove(spec)
            status.refused[spec] = error


def _disabled_distributions(statuses: list[PluginStatus]) -> set[str]:
    """The canonical names in ``OTTAVA_DISABLE_PLUGINS``; warns of those that are not installed."""
    names = os.environ.get("OTTAVA_DISABLE_PLUGINS", "").split(",")
    disabled = {_canonical(name) for name in names} - {""}
    unknown = disabled - {_canonical(status.distribution) for status in statuses}
    if unknown:
        warnings.warn(
            "OTTAVA_DISABLE_PLUGINS names distributions that are not installed: "
            f"{', '.join(sorted(unknown))}",
            UserWarning,
            stacklevel=4,
        )
    return disabled


def _load() -> list[PluginStatus]:
    """Ask every plugin that is not disabled for its specs."""
    strict = os.environ.get("OTTAVA_STRICT_PLUGINS", "").strip().lower() not in _FALSE
    statuses = discover()
    disabled = _disabled_distributions(statuses)
    for status in statuses:
        if _canonical(status.distribution) in disabled:
            status.status = "disabled"
            continue
        try:
            status.offers = list(_offers(status))
        except (Exception, SystemExit) as error:
            status.status = "broken"
            status.error = f"{type(error).__name__}: {' '.join(text_of(error).split())}"
            if strict:
                raise PluginError(
                    f"plugin {status.name} {status.version} is broken: {status.error}",
                    remedy="unset OTTAVA_STRICT_PLUGINS to go on",
                ) from error
    _refuse_duplicates(statuses)
    refusals = [error for status in statuses for error in status.refused.values()]
    if strict and refusals:
        raise refusals[0]
    return statuses


_lock = threading.RLock()
_loaded: list[PluginStatus] | None = None
_loading = False


def plugin_statuses() -> list[PluginStatus]:
    """All plugins, healthy or not, in a stable order; they are read at the first call.

    Raises:
        PluginError: a plugin is broken and ``OTTAVA_STRICT_PLUGINS`` is set, or a plugin calls this
            while plugins are read.
        DuplicateRecipeError: a name is offered twice and ``OTTAVA_STRICT_PLUGINS`` is set.
    """
    global _loaded, _loading
    # Other threads wait here; the lock is reentrant, so that a plugin that asks gets the error.
    with _lock:
        if _loading:
            remedy = "a plugin's module and its hooks must not ask for recipes"
            raise PluginError("recipes were asked for while plugins are read", remedy=remedy)
        if _loaded is None:
            _loading = True
            try:
                _loaded = _load()
            finally:
                _loading = False
        return list(_loaded)


def reload() -> None:
    """Forget the plugins; the next question reads them again."""
    global _loaded
    _loaded = None


def specs(kind: type[SpecT]) -> list[SpecT]:
    """The usable specs of one kind, sorted by name. The recipes themselves are not imported."""
    offers = (spec for status in plugin_statuses() for spec in status.offers)
    of_kind = [spec for spec in offers if isinstance(spec, kind)]
    return sorted(of_kind, key=lambda spec: spec.name)


def list_recipes() -> list[RecipeSpec]:
    """The usable recipes, sorted by name. Neither torch nor a recipe is imported."""
    return specs(RecipeSpec)


def list_quantizer_factories() -> list[FactorySpec]:
    """The usable named quantizer factories, sorted by name. Neither torch nor a factory is
    imported."""
    return specs(FactorySpec)


def import_offered(module: str) -> ModuleType | None:
    """Import a module that a file names; None if it cannot be imported or its package offers no
    recipe.

    Modules of other packages are never imported because a file names them.
    """
    packages = {re.split(r"[.:]", spec.factory)[0] for spec in specs(RecipeSpec)}
    if module.partition(".")[0] not in packages:
        return None
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit):
        return None


def is_path(name: object) -> bool:
    """Whether ``name`` is the path of a recipe file: a name has no suffix and no folder."""
    return isinstance(name, str) and ("." in name or os.sep in name)


def reader_of(path: str) -> str:
    """The name of the recipe that reads files with this suffix.

    Raises:
        RecipeNotFoundError: no installed recipe reads them, or several do.
    """
    suffix = os.path.splitext(path)[1].lower()
    readers = [spec.name for spec in specs(RecipeSpec) if suffix in spec.file_suffixes]
    if len(readers) != 1:
        raise RecipeNotFoundError(
            f"the file {path!r} is read by {' and by '.join(readers) or 'no installed recipe'}",
            expected="one recipe that reads its suffix",
            remedy=f"install {DISTRIBUTION_PREFIX}custom for .yaml, .toml; name one of several: "
            f"get_recipe(NAME, file={path!r})",
        )
    return readers[0]


# Any, because a recipe checks what its factory answers.
def get_quantizer_factory(name: str) -> "Callable[[QuantizerRole], Any]":
    """Import the quantizer factory registered as ``name``, a ``qfactory(role)``.

    Raises:
        PluginError: it cannot be imported.
        DuplicateRecipeError: two packages offer the name.
        RecipeNotFoundError: no installed package offers it.
    """
    return import_by_name(FACTORY, name)[1]


_FP8 = (
    "FP8 has several recipes: choose one by its name; `ottava recipes` describes those that are "
    "installed"
)
_HIGH_PRECISION = (
    "to compute in high precision, use ottava.autocast(enabled=False), or bind None to a layer; "
    "to undo a conversion, use ottava.revert(model)"
)
# Names that people try although no recipe has them -> the remedy.
_NO_RECIPES = {
    **dict.fromkeys(("fp8", "float8", "e4m3", "e5m2", "hybrid"), _FP8),
    **dict.fromkeys(
        ("none", "off", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32"), _HIGH_PRECISION
    ),
    "high_precision": _HIGH_PRECISION,
}


def import_by_name(kind: str, name: object) -> tuple[str, Callable[..., object]]:
    """Import the recipe or factory that a package offers under a name.

    Returns:
        A description for error messages, and the callable.

    Raises:
        PluginError: it cannot be imported.
        DuplicateRecipeError: two packages offer the name.
        RecipeNotFoundError: no installed package offers it.
    """
    for status in plugin_statuses():
        for spec in status.offers:
            if (spec.kind, spec.name) == (kind, name):
                return _import_offer(status, spec)
        for spec, error in status.refused.items():
            if (spec.kind, spec.name) == (kind, name):
                raise error.with_traceback(None)
    raise _not_found(kind, name)


def _import_offer(status: PluginStatus, spec: Spec) -> tuple[str, Callable[..., object]]:
    description = f"{spec.kind} {spec.name!r} of {status.distribution} {status.version}"
    with translated(
        f"{description} cannot be imported from {spec.factory}",
        "",
        "reinstall the package",
        to=PluginError,
        of=(Exception, SystemExit),
    ):
        factory: object = pkgutil.resolve_name(spec.factory)
        if not callable(factory):
            raise TypeError(f"an object of type {type(factory).__name__} cannot be called")
    return description, factory


def _with_format(word: str, offers: Sequence[Spec]) -> list[str]:
    """The recipes with a format that begins with a word, as "mxfp4" begins MXFP4 of ``mx``."""
    specs = [spec for spec in offers if isinstance(spec, RecipeSpec)]
    return [
        spec.name
        for spec in specs
        if any(len(word) > 3 and f.lower().startswith(word) for f in spec.fake_quant_formats)
    ]


def _not_found(kind: str, name: object) -> RecipeNotFoundError:
    """The error for a name that no installed package offers, with the most likely remedy."""
    message = f"no installed package provides {kind} {name!r}"
    offers = [spec for status in plugin_statuses() for spec in status.offers]
    names = sorted(spec.name for spec in offers if spec.kind == kind)
    expected = f"an installed {kind}"
    if names:
        expected = f"one of {', '.join(names)}"
    word = str(name).lower()
    if kind == RECIPE and word in _NO_RECIPES:
        return RecipeNotFoundError(message, expected, _NO_RECIPES[word])
    # A misspelled name must not become a command that installs whatever has that name.
    if kind == RECIPE and (with_format := _with_format(word, offers)):
        remedy = f"use {' or '.join(map(repr, with_format))}, which has a format of that name"
    elif near := difflib.get_close_matches(word, names):
        remedy = f"use {' or '.join(map(repr, near))}, or install the package that has {name!r}"
    else:
        recipe = name if is_name(name) else "NAME"
        remedy = f"install its package; of Ottava's own: pip install {DISTRIBUTION_PREFIX}{recipe}"
    unused = [f"{s.name} ({s.status})" for s in plugin_statuses() if s.status != "ok"]
    if unused:
        remedy += f"; it may be in one that is not used: {', '.join(unused)}"
    return RecipeNotFoundError(message, expected, remedy)
