"""Loads the recipe packages, keeps their failures to themselves, and builds what they provide under a name.

Nothing here knows what a recipe or a quantizer is, so that :mod:`ottava.recipes.base`, which does, can ask.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import pkgutil
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from ottava.errors import (
    DuplicateRecipeError,
    OptionError,
    OttavaError,
    PluginError,
    RecipeNotFoundError,
    listed,
    text_of,
)
from ottava.recipes import hookspecs
from ottava.recipes.discovery import Found, canonical, disabled, discover, strict
from ottava.recipes.ownership import FACTORY, OWNER_PREFIX, RECIPE, PluginStatus, settle
from ottava.recipes.spec import API_VERSION, FactorySpec, RecipeSpec, is_name

# Hook -> what it gives, in the order of the fields of a status.
_HOOKS = {"ottava_recipes": RecipeSpec, "ottava_quantizer_factories": FactorySpec}
# Files and folders (pluggy's, importlib's, Ottava's own) whose lines in a traceback are not a plugin's.
_FOLDERS = (os.path.dirname(path) for path in (pluggy.__file__, importlib.__file__, os.path.dirname(__file__)))
_MACHINERY = (pkgutil.__file__, *(os.path.join(os.path.abspath(folder), "") for folder in _FOLDERS))


def describe(error: BaseException) -> str:
    """Kind and text of an error, and where in a plugin's own code it comes from."""
    text = " ".join(text_of(error).split())
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(path, line) for path, line in places if not path.startswith(("<", *_MACHINERY))]
    where = " ({}:{})".format(*own[-1]) if own else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def _collect(answers: list[Any], hook: str, kind: type[RecipeSpec | FactorySpec]) -> tuple[Any, ...]:
    """The specs that a hook gave, if they are what they should be."""
    expected = f"a list of {kind.__name__} objects"
    if not answers:  # pluggy leaves out an answer of None
        raise PluginError(f"{hook} returned None", expected=expected, remedy="return a list, an empty one for none")
    specs: dict[str, Any] = {}
    for given in answers:
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise PluginError(f"{hook} returned an object of type {type(given).__name__}", expected=expected)
        for spec in given:
            # A subclass could leave out the checks of the fields.
            if type(spec) is not kind:
                raise PluginError(f"{hook} yielded an object of type {type(spec).__name__}", expected=expected)
            if spec.api_version != API_VERSION:
                raise PluginError(
                    f"{spec.name!r} is written for version {spec.api_version} of the extension points",
                    expected=f"version {API_VERSION}",
                    remedy="install a release of the package that fits this ottava",
                )
            if spec.name in specs:
                raise DuplicateRecipeError(f"{hook} yielded {spec.name!r} twice", expected="one each")
            specs[spec.name] = spec
    return tuple(specs.values())


def _read(plugin_name: str, entry: EntryPoint) -> list[tuple[Any, ...]]:
    """What each hook of a plugin gives. A manager of its own keeps to itself whatever it does."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    plugin = entry.load()
    manager.register(plugin, plugin_name)
    manager.check_pending()
    marked = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    unmarked = [name for name in _HOOKS if name not in marked and callable(getattr(plugin, name, None))]
    if unmarked:
        raise PluginError(f"{', '.join(unmarked)} is not marked", remedy="put @ottava.hookimpl before it")
    if not marked:
        raise PluginError(
            f"{entry.value} has no hook", expected=" or ".join(_HOOKS), remedy="define one, with @ottava.hookimpl"
        )
    return [
        _collect(getattr(manager.hook, name)(), name, kind) if name in marked else () for name, kind in _HOOKS.items()
    ]


def _status(found: Found, left_out: set[str], required: bool) -> PluginStatus:
    name = f"{found.distribution}:{found.entry_point}"
    facts = (name, found.distribution, found.version, found.entry_point)
    if canonical(found.distribution) in left_out:
        return PluginStatus(*facts, "disabled")
    cause: BaseException | None = None
    text = found.error
    if found.entry is not None:
        try:
            return PluginStatus(*facts, "ok", "", *_read(name, found.entry))
        except KeyboardInterrupt:
            raise
        # A plugin may raise anything else, SystemExit and a test runner's own kinds as well.
        except BaseException as error:
            cause, text = error, describe(error)
    if required:
        raise PluginError(
            f"plugin {name} {found.version} is broken: {text}", remedy="unset OTTAVA_STRICT_PLUGINS to go on"
        ) from cause
    return PluginStatus(*facts, "broken", text)


def _load() -> tuple[PluginStatus, ...]:
    left_out, required = disabled(), strict()
    # What plugins print must not get between the lines of a listing that is read by a program.
    with contextlib.redirect_stdout(sys.stderr):
        statuses = [_status(found, left_out, required) for found in discover()]
    settled = settle(statuses)
    for status in settled:
        if status.refused and required:
            raise status.refused[0].error.with_traceback(None)
    return settled


_lock = threading.RLock()
_loaded: tuple[PluginStatus, ...] | None = None
_loading = False


def statuses() -> tuple[PluginStatus, ...]:
    """Every plugin, read once.

    Raises:
        PluginError: a plugin is broken and ``OTTAVA_STRICT_PLUGINS`` is set, or a plugin asks while plugins are read.
    """
    global _loaded, _loading
    # One thread reads: redirecting the output is a matter of the whole process.
    with _lock:
        if _loading:
            raise PluginError(
                "recipes were asked for while plugins are read",
                remedy="a plugin's module and its hooks must not ask for recipes",
            )
        if _loaded is None:
            _loading = True
            try:
                _loaded = _load()
            finally:
                _loading = False
        return _loaded


def forget() -> None:
    """The next question reads the plugins again."""
    global _loaded
    with _lock:
        _loaded = None


def specs(kind: str) -> list[Any]:
    """The specs of one kind that can be used, by name. Nothing that they name is imported."""
    return sorted((spec for status in statuses() for spec in status.specs(kind)), key=lambda spec: spec.name)


def build_recipe(name: str | os.PathLike[str], kind: type, options: dict[str, Any]) -> Any:
    """An object of class ``kind`` as registered under ``name``, or from the recipe file whose path it is.

    Raises:
        As :func:`ottava.get_recipe`.
    """
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    if is_path(name):
        path = os.path.expanduser(name)
        name, options = _reader(path), {"file": path, **options}
    provided = Provided(RECIPE, name)
    accepted, required, takes_any = provided.options()
    expected = ", ".join(accepted) or ("" if takes_any else "no options")
    unknown = [option for option in options if option not in accepted and not takes_any]
    if unknown:
        raise OptionError(f"{provided} has no option {listed(unknown)}", expected=expected)
    missing = [option for option in required if option not in options]
    if missing:
        raise OptionError(f"{provided} needs the option {', '.join(map(repr, missing))}", expected=expected)
    try:
        made = provided.resolved(**options)
    except OttavaError:
        raise  # the recipe's own word on its options
    except (Exception, SystemExit) as error:
        # A factory that takes any keyword may hand them to one that does not.
        said = text_of(error) if type(error) is TypeError else ""
        refused = re.search(r"unexpected keyword argument '(\w+)'", said)
        if refused and refused[1] in options:
            raise OptionError(f"{provided} has no option {refused[1]!r}", expected=expected) from error
        raise provided.error(f"cannot be built: {describe(error)}") from error
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
    suffixes = sorted({suffix for spec in offered for suffix in spec.file_suffixes})
    if not readers:
        raise RecipeNotFoundError(
            f"no installed recipe reads the file {path!r}",
            expected=f"a suffix out of {', '.join(suffixes)}" if suffixes else "a package that reads recipe files",
            remedy="" if suffixes else f"install one; Ottava's own is {OWNER_PREFIX}custom",
        )
    raise DuplicateRecipeError(
        f"the recipes {' and '.join(readers)} read files like {path!r}",
        expected="one reader for each suffix",
        remedy=f"build one by name: get_recipe({readers[0]!r}, file={path!r})",
    )


def get_quantizer_factory(name: str) -> Callable[[Any], Any]:
    """The quantizer factory registered as ``name``: a ``qfactory(role)``, imported now.

    Raises:
        RecipeNotFoundError: no installed package provides it; the message has the nearest names.
        DuplicateRecipeError: several packages claim the name.
        PluginError: the package that provides it cannot be imported, or offers something that cannot be called.
    """
    return Provided(FACTORY, name).resolved


class Provided:
    """What a package provides under a name, with its reference resolved."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        self.spec, self.status = _find(kind, name)
        try:
            found: object = pkgutil.resolve_name(self.spec.factory)
        except (Exception, SystemExit) as error:
            what = f"cannot be imported from {self.spec.factory}: {describe(error)}"
            raise self.error(what, remedy="reinstall the package") from error
        if not callable(found):
            raise self.error(f"is of type {type(found).__name__}, {self.spec.factory}", expected="something to call")
        self.resolved: Callable[..., Any] = found

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"

    def error(
        self, what: str, *, expected: str = "", remedy: str = "report it to the package's authors"
    ) -> PluginError:
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


def _find(kind: str, name: str) -> tuple[RecipeSpec | FactorySpec, PluginStatus]:
    for status in statuses():
        for spec in status.specs(kind):
            if spec.name == name:
                return spec, status
    for status in statuses():
        for refusal in status.refused:
            if (refusal.kind, refusal.name) == (kind, name):
                raise refusal.error.with_traceback(None)
    raise _not_found(kind, name)


def _not_found(kind: str, name: object) -> RecipeNotFoundError:
    known = [spec.name for spec in specs(kind)]
    near = difflib.get_close_matches(str(name).lower(), known, n=3)
    expected = f"one of {', '.join(known)}" if known else f"a package with a {kind} to be installed"
    if near:
        expected += f" (nearest: {', '.join(near)})"
    remedies = []
    idle = [status for status in statuses() if status.status != "ok"]
    # The name may be misspelled: it must not become a command that installs whatever has that name.
    if near:
        remedies.append(f"use {near[0]!r}, or install the package that has {name!r}")
    elif OWNER_PREFIX + canonical(str(name)) not in (canonical(status.distribution) for status in idle):
        own = f"were it one of Ottava's own: pip install {OWNER_PREFIX}{name}"
        named = own if is_name(name) else f"Ottava's own are named {OWNER_PREFIX}NAME"
        remedies.append(f"install the package that has it; {named}")
    for word, hint in (
        ("disabled", "take the one that has it out of OTTAVA_DISABLE_PLUGINS"),
        ("broken", "mend the one that has it, `ottava recipes` says what is broken"),
    ):
        plugins = [status.name for status in idle if status.status == word]
        if plugins:
            remedies.append(f"{hint}: {', '.join(plugins)}")
    return RecipeNotFoundError(
        f"no installed package provides {kind} {name!r}", expected=expected, remedy="; ".join(remedies)
    )
