"""What the installed packages offer, by name: found by their entry points, read, listed and
imported.

What is wrong with one is reported, not raised. Of several that claim a name none gets it, so that
no stranger takes a name over, with one exception: the distribution ``ottava-recipes-NAME`` owns
NAME.
"""

import contextlib
import difflib
import importlib
import itertools
import os
import pkgutil
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, distributions
from typing import Any

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

RECIPE, FACTORY = RecipeSpec.kind, FactorySpec.kind
OWNER_PREFIX = "ottava-recipes-"
# Hook -> what it gives.
_HOOKS: dict[str, type[Spec]] = {
    "ottava_recipes": RecipeSpec,
    "ottava_quantizer_factories": FactorySpec,
}


def _canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


@dataclass(eq=False)
class PluginStatus:
    """One entry point of a distribution and what became of it.

    Attributes:
        name: ``"distribution:entry"``.
        entry: the entry point itself; None where what is wrong is the distribution.
        status: ``"ok"``, ``"broken"`` or ``"disabled"``.
        error: why it is broken.
        offers: the specs of recipes and of named quantizer factories that it offers.
        refused: specs whose names are another's, or that two packages claim, each with the error
            that says so.
    """

    distribution: str
    version: str
    entry_point: str = "?"
    entry: EntryPoint | None = field(default=None, repr=False)
    status: str = "ok"
    error: str = ""
    offers: list[Spec] = field(default_factory=list)
    refused: dict[Spec, DuplicateRecipeError] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.distribution}:{self.entry_point}"


def discover(group: str = hookspecs.PROJECT) -> list[PluginStatus]:
    """All entry points of the group, by distribution and name; none of them is loaded."""
    every: dict[tuple[str, str], PluginStatus] = {}
    # Only files with our group are parsed: a malformed one of a stranger to Ottava is not Ottava's
    # business.
    heading = re.compile(rf"^\s*\[{re.escape(group)}\]\s*$", re.M)
    for dist in distributions():
        try:
            if not heading.search(dist.read_text("entry_points.txt") or ""):
                continue
            name, version = (dist.metadata[key].strip() for key in ("Name", "Version"))
            found = [
                PluginStatus(name, version, e.name, e)
                for e in dist.entry_points
                if e.group == group
            ]
        except Exception:  # which one it is differs from one Python to the next
            found = [
                PluginStatus(os.path.basename(str(getattr(dist, "_path", "a distribution"))), "?")
            ]
        for status in found:
            # The first on sys.path is the one that an import finds.
            every.setdefault((_canonical(status.distribution), status.entry_point), status)
    return [every[key] for key in sorted(every)]


def _offers(found: PluginStatus) -> Iterator[Spec]:
    """What the hooks of a plugin give. A manager of its own keeps to itself whatever it does."""
    if found.entry is None:
        raise PluginError(
            "its metadata is damaged, as an interrupted installation leaves it",
            remedy="reinstall it",
        )
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    plugin = found.entry.load()
    manager.register(plugin, found.name)
    manager.check_pending()
    marked = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    if not marked or any(hook not in marked and hasattr(plugin, hook) for hook in _HOOKS):
        what = f"{found.entry.value} has no hook, or one that is not marked"
        raise PluginError(
            what, expected=" or ".join(_HOOKS), remedy="put @ottava.hookimpl before each"
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


def _settle(statuses: list[PluginStatus]) -> None:
    """Take each name from all that claim it but its owner."""
    claims: dict[tuple[str, str], list[tuple[PluginStatus, Spec]]] = {}
    for status in statuses:
        for spec in status.offers:
            claims.setdefault((spec.kind, spec.name), []).append((status, spec))
    for (kind, name), claimed in claims.items():
        claimants = [status for status, _ in claimed]
        titled = [
            s for s in statuses if _canonical(s.distribution) == OWNER_PREFIX + _canonical(name)
        ]
        # A package that is broken keeps its name: a stranger must not serve in its place unnoticed.
        owners = (
            [s for s in claimants if s in titled]
            or [s for s in titled if s.status == "broken"]
            or claimants
        )
        what = " and by ".join(
            f"{s.distribution} {s.version} (entry point {s.entry_point})" for s in claimants
        )
        expected = f"one package for each name, or {OWNER_PREFIX}{name}, to which it belongs"
        remedy = "uninstall one, or name it in OTTAVA_DISABLE_PLUGINS"
        error = DuplicateRecipeError(f"{kind} {name!r} is offered by {what}", expected, remedy)
        for status, spec in claimed:
            if len(owners) > 1 or status is not owners[0]:
                status.offers.remove(spec)
                status.refused[spec] = error


def _load() -> list[PluginStatus]:
    strict = os.environ.get("OTTAVA_STRICT_PLUGINS", "").strip().lower() not in (
        "",
        "0",
        "false",
        "no",
        "off",
    )
    disabled = {
        _canonical(name) for name in os.environ.get("OTTAVA_DISABLE_PLUGINS", "").split(",")
    }
    statuses = discover()
    if unknown := disabled - {"", *(_canonical(found.distribution) for found in statuses)}:
        what = f"OTTAVA_DISABLE_PLUGINS names what is not installed: {', '.join(sorted(unknown))}"
        warnings.warn(what, UserWarning, stacklevel=3)
    for found in statuses:
        if _canonical(found.distribution) in disabled:
            found.status = "disabled"
            continue
        try:
            # What plugins print must not get between the lines of a listing that is read by a
            # program.
            with contextlib.redirect_stdout(sys.stderr):
                found.offers = list(_offers(found))
        except (Exception, SystemExit) as error:
            found.status, found.error = (
                "broken",
                f"{type(error).__name__}: {' '.join(text_of(error).split())}",
            )
            if strict:
                what = f"plugin {found.name} {found.version} is broken: {found.error}"
                raise PluginError(what, remedy="unset OTTAVA_STRICT_PLUGINS to go on") from error
    _settle(statuses)
    for refused in [error for status in statuses for error in status.refused.values() if strict]:
        raise refused
    return statuses


_lock = threading.RLock()
_loaded: list[PluginStatus] | None = None
_loading = False


def plugin_statuses() -> list[PluginStatus]:
    """Every plugin found, healthy or not, in a stable order; read at the first question.

    Raises:
        PluginError: a plugin is broken and ``OTTAVA_STRICT_PLUGINS`` is set, or a plugin asks while
            plugins are read.
        DuplicateRecipeError: a name is claimed twice and ``OTTAVA_STRICT_PLUGINS`` is set.
    """
    global _loaded, _loading
    # One thread reads: redirecting the output is a matter of the whole process.
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
    """Forget what was loaded; the next question looks again."""
    global _loaded
    _loaded = None


def specs(kind: str) -> list[Any]:
    """The specs of one kind that can be used, by name. Nothing that they name is imported."""
    offers = (spec for status in plugin_statuses() for spec in status.offers)
    return sorted((spec for spec in offers if spec.kind == kind), key=lambda spec: spec.name)


def list_recipes() -> list[RecipeSpec]:
    """The recipes that can be used, by name. Neither torch nor a recipe is imported."""
    return specs(RECIPE)


def list_quantizer_factories() -> list[FactorySpec]:
    """The named quantizer factories that can be used, by name. Neither torch nor a factory is
    imported."""
    return specs(FACTORY)


def import_offered(module: str) -> Any:
    """A module that a file names, if it is of a package with recipes and can be imported, else
    None. Nothing else is imported because a file says so."""
    with contextlib.suppress(Exception, SystemExit):
        if module.partition(".")[0] in {
            re.split(r"[.:]", spec.factory)[0] for spec in specs(RECIPE)
        }:
            return importlib.import_module(module)
    return None


def is_path(name: object) -> bool:
    """Whether this is the path of a recipe file and no name: it has a suffix or a folder."""
    return isinstance(name, str) and ("." in name or os.sep in name)


def reader_of(path: str) -> str:
    """The recipe that reads files like this one."""
    suffix = os.path.splitext(path)[1].lower()
    readers: list[str] = [spec.name for spec in specs(RECIPE) if suffix in spec.file_suffixes]
    if len(readers) != 1:
        what = f"the file {path!r} is read by {' and by '.join(readers) or 'no installed recipe'}"
        remedy = (
            f"install {OWNER_PREFIX}custom for .yaml, .toml; name one of several: "
            f"get_recipe(NAME, file={path!r})"
        )
        raise RecipeNotFoundError(what, "one recipe that reads its suffix", remedy)
    return readers[0]


def get_quantizer_factory(name: str) -> Callable[[Any], Any]:
    """The quantizer factory registered as ``name``: a ``qfactory(role)``, imported now; refused as
    by :func:`ottava.get_recipe`."""
    return provided(FACTORY, name)[1]


_FP8 = (
    "FP8 has several recipes: choose one by its name; `ottava recipes` describes those that "
    "are installed"
)
_HIGH_PRECISION = (
    "to compute in high precision, use ottava.autocast(enabled=False), or bind None to a layer; "
    "to have the layers of"
    " before in a converted model, ottava.revert(model)"
)
#: Names that people try, which are those of no recipe -> what they may have meant.
_NO_RECIPES = {
    **dict.fromkeys(("fp8", "float8", "e4m3", "e5m2", "hybrid"), _FP8),
    **dict.fromkeys(
        ("none", "off", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32"), _HIGH_PRECISION
    ),
    "high_precision": _HIGH_PRECISION,
}


def provided(kind: str, name: object) -> tuple[str, Callable[..., Any]]:
    """What a package provides under a name, imported, after words for errors about it."""
    statuses, asked = plugin_statuses(), (kind, name)
    for status, spec in [
        (of, spec) for of in statuses for spec in of.offers if (spec.kind, spec.name) == asked
    ]:
        what = f"{kind} {name!r} of {status.distribution} {status.version}"
        where = f"{what} cannot be imported from {spec.factory}"
        with translated(
            where, "", "reinstall the package", to=PluginError, of=(Exception, SystemExit)
        ):
            made: Any = pkgutil.resolve_name(spec.factory)
            if not callable(made):
                raise TypeError(f"an object of type {type(made).__name__} cannot be called")
        return what, made
    for error in [
        lost for of in statuses for s, lost in of.refused.items() if (s.kind, s.name) == asked
    ]:
        raise error.with_traceback(None)
    known = [spec.name for spec in specs(kind)]
    what = f"no installed package provides {kind} {name!r}"
    expected = f"one of {', '.join(known)}" if known else f"an installed {kind}"
    if kind == RECIPE and str(name).lower() in _NO_RECIPES:
        raise RecipeNotFoundError(what, expected, _NO_RECIPES[str(name).lower()])
    # The name may be misspelled: it must not become a command that installs whatever has that name.
    if near := difflib.get_close_matches(str(name).lower(), known):
        remedy = f"use {' or '.join(map(repr, near))}, or install the package that has {name!r}"
    else:
        remedy = (
            f"install its package; of Ottava's own: pip install "
            f"{OWNER_PREFIX}{name if is_name(name) else 'NAME'}"
        )
    if idle := ", ".join(
        f"{status.name} ({status.status})" for status in statuses if status.status != "ok"
    ):
        remedy += f"; it may be in one that is not used: {idle}"
    raise RecipeNotFoundError(what, expected, remedy)
