"""Reads the recipe packages and keeps their failures to themselves."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
import threading
import traceback
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from ottava.errors import DuplicateRecipeError, PluginError, text_of
from ottava.recipes import hookspecs
from ottava.recipes.discovery import Found, canonical, disabled, discover, strict
from ottava.recipes.ownership import PluginStatus, settle
from ottava.recipes.spec import API_VERSION, FactorySpec, RecipeSpec

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
