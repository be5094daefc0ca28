"""What the installed packages offer, by name: listed, found and built. Nothing here knows what a recipe or a quantizer
is, so that :mod:`ottava.recipes.base`, which does, can ask."""

import contextlib
import difflib
import importlib
import inspect
import os
import pkgutil
import re
import threading
from collections.abc import Callable
from typing import Any

from ottava.errors import DuplicateRecipeError, OptionError, OttavaError, PluginError, RecipeNotFoundError, listed
from ottava.recipes.plugins import FACTORY, OWNER_PREFIX, RECIPE, PluginStatus, canonical, describe, disabled, load
from ottava.recipes.spec import FactorySpec, RecipeSpec, is_name

# Recipes that were built with their defaults, for code that names a recipe again and again (a region in a loop), each
# with what tells its file from one that was written since.
defaults: dict[str, tuple[Any, Any]] = {}

_lock = threading.RLock()
_loaded: list[PluginStatus] | None = None
_loading = False


def plugin_statuses() -> list[PluginStatus]:
    """Every plugin found, healthy or not, in a stable order; read at the first question.

    Raises:
        PluginError: a plugin is broken and ``OTTAVA_STRICT_PLUGINS`` is set, or a plugin asks while plugins are read.
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
                _loaded = load()
            finally:
                _loading = False
        return list(_loaded)


def reload() -> None:
    """Forget what was loaded; the next question looks again."""
    global _loaded
    with _lock:
        _loaded = None
    defaults.clear()


def specs(kind: str) -> list[Any]:
    """The specs of one kind that can be used, by name. Nothing that they name is imported."""
    offers = (spec for status in plugin_statuses() for spec in status.offers)
    return sorted((spec for spec in offers if spec.kind == kind), key=lambda spec: spec.name)


def list_recipes() -> list[RecipeSpec]:
    """The recipes that can be used, by name. Neither torch nor a recipe is imported."""
    return specs(RECIPE)


def list_quantizer_factories() -> list[FactorySpec]:
    """The named quantizer factories that can be used, by name. Neither torch nor a factory is imported."""
    return specs(FACTORY)


def unknown_disabled() -> list[str]:
    """The names in ``OTTAVA_DISABLE_PLUGINS`` that no installed plugin has: most often misspelled."""
    return sorted(disabled() - {canonical(status.distribution) for status in plugin_statuses()})


def import_offered(module: str) -> Any:
    """A module that a file names, if it is of a package with recipes and can be imported, else None. Nothing else is
    imported because a file says so."""
    with contextlib.suppress(Exception, SystemExit):
        if module.partition(".")[0] in {re.split(r"[.:]", spec.factory)[0] for spec in specs(RECIPE)}:
            return importlib.import_module(module)
    return None


def build_recipe(name: str | os.PathLike[str], kind: type, options: dict[str, Any]) -> Any:
    """As :func:`ottava.get_recipe`; ``kind`` is the class of recipes."""
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    if is_path(name):
        path = os.path.expanduser(name)
        name, options = _reader(path), {"file": path, **options}
    provided = Provided(RECIPE, name)
    accepted, required, takes_any = provided.options()
    expected = ", ".join(accepted) or ("" if takes_any else "no options")
    unknown = [option for option in options if option not in accepted and not takes_any]
    missing = [option for option in required if option not in options]
    for word, wrong in (("has no option", unknown), ("needs the option", missing)):
        if wrong:
            raise OptionError(f"{provided} {word} {listed(wrong)}", expected=expected)
    try:
        made = provided.resolved(**options)
    except OttavaError:
        raise  # the recipe's own word on its options
    except (Exception, SystemExit) as error:
        said = describe(error)
        # A factory that takes any keyword may hand them to one that does not.
        refused = re.match(r"TypeError: .*unexpected keyword argument '(\w+)'", said)
        if refused and refused[1] in options:
            raise OptionError(f"{provided} has no option {refused[1]!r}", expected=expected) from error
        raise provided.error(f"cannot be built: {said}") from error
    if not isinstance(made, kind):
        raise provided.error(f"gives an object of type {type(made).__name__}", expected="an ottava.Recipe")
    return made


def is_path(name: object) -> bool:
    """Whether this is the path of a recipe file and no name: it has a suffix or a folder."""
    return isinstance(name, str) and not is_name(name) and ("." in name or os.sep in name)


def _reader(path: str) -> str:
    """The recipe that reads files like this one."""
    suffix = os.path.splitext(path)[1].lower()
    offered = specs(RECIPE)
    readers: list[str] = [spec.name for spec in offered if suffix in spec.file_suffixes]
    if len(readers) == 1:
        return readers[0]
    if readers:
        what = f"the recipes {' and '.join(readers)} read files like {path!r}"
        remedy = f"build one by name: get_recipe({readers[0]!r}, file={path!r})"
        raise DuplicateRecipeError(what, expected="one reader for each suffix", remedy=remedy)
    suffixes = ", ".join(sorted({suffix for spec in offered for suffix in spec.file_suffixes}))
    expected = f"a suffix out of {suffixes}" if suffixes else "a package that reads recipe files"
    remedy = "" if suffixes else f"install one; Ottava's own is {OWNER_PREFIX}custom"
    raise RecipeNotFoundError(f"no installed recipe reads the file {path!r}", expected=expected, remedy=remedy)


def get_quantizer_factory(name: str) -> Callable[[Any], Any]:
    """The quantizer factory registered as ``name``: a ``qfactory(role)``, imported now; refused as by
    :func:`ottava.get_recipe`."""
    return Provided(FACTORY, name).resolved


class Provided:
    """What a package provides under a name, with its reference resolved."""

    def __init__(self, kind: str, name: str) -> None:
        statuses, asked = plugin_statuses(), (kind, name)
        found = [(spec, of) for of in statuses for spec in of.offers if (spec.kind, spec.name) == asked]
        if not found:
            refused = [lost.error for of in statuses for lost in of.refused if (lost.kind, lost.name) == asked]
            raise refused[0].with_traceback(None) if refused else _not_found(kind, name)
        self.spec, self.status = found[0]
        try:
            made: Any = pkgutil.resolve_name(self.spec.factory)
        except (Exception, SystemExit) as error:
            what = f"cannot be imported from {self.spec.factory}: {describe(error)}"
            raise self.error(what, remedy="reinstall the package") from error
        if not callable(made):
            raise self.error(f"is of type {type(made).__name__}, {self.spec.factory}", expected="something to call")
        self.resolved: Callable[..., Any] = made

    def __str__(self) -> str:
        return f"{self.spec.kind} {self.spec.name!r}"

    def error(self, what: str, expected: str = "", remedy: str = "report it to the package's authors") -> PluginError:
        """An error that names the package."""
        package = f"{self.status.distribution} {self.status.version}"
        return PluginError(f"{self} of {package} {what}", expected=expected, remedy=remedy)

    def options(self) -> tuple[list[str], list[str], bool]:
        """The names of the options, of those without a default, and whether any other is taken as well."""
        try:
            parameters = inspect.signature(self.resolved).parameters.values()
        except (TypeError, ValueError):  # some builtins have none
            return [], [], True
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = [p.name for p in named if p.default is p.empty]
        return [p.name for p in named], required, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _not_found(kind: str, name: object) -> RecipeNotFoundError:
    known = [spec.name for spec in specs(kind)]
    near = difflib.get_close_matches(str(name).lower(), known, n=3)
    expected = f"one of {', '.join(known)}" if known else f"a package with a {kind} to be installed"
    idle = [status for status in plugin_statuses() if status.status != "ok"]
    remedies = []
    # The name may be misspelled: it must not become a command that installs whatever has that name.
    if near:
        expected += f" (nearest: {', '.join(near)})"
        remedies.append(f"use {near[0]!r}, or install the package that has {name!r}")
    elif OWNER_PREFIX + canonical(str(name)) not in (canonical(status.distribution) for status in idle):
        own = f"were it one of Ottava's own: pip install {OWNER_PREFIX}{name}"
        named = own if is_name(name) else f"Ottava's own are named {OWNER_PREFIX}NAME"
        remedies.append(f"install the package that has it; {named}")
    for word, hint in (
        ("disabled", "take the one that has it out of OTTAVA_DISABLE_PLUGINS"),
        ("broken", "mend the one that has it, `ottava recipes` says what is broken"),
    ):
        if plugins := [status.name for status in idle if status.status == word]:
            remedies.append(f"{hint}: {', '.join(plugins)}")
    what = f"no installed package provides {kind} {name!r}"
    return RecipeNotFoundError(what, expected=expected, remedy="; ".join(remedies))
