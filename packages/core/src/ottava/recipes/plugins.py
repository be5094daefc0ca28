"""The installed plugins: found by their entry points, read, and given the names that are theirs.

What is wrong with one is reported, not raised. Of several plugins that claim a name none gets it, so that no stranger
takes a name over, with one exception: the distribution ``ottava-recipes-NAME`` owns NAME.
"""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

import pluggy

from ottava.errors import DuplicateRecipeError, OptionError, PluginError, text_of
from ottava.recipes import hookspecs
from ottava.recipes.spec import API_VERSION, FactorySpec, RecipeSpec, Spec

RECIPE, FACTORY = RecipeSpec.kind, FactorySpec.kind
OWNER_PREFIX = "ottava-recipes-"
# Hook -> what it gives.
_HOOKS: dict[str, type[Spec]] = {"ottava_recipes": RecipeSpec, "ottava_quantizer_factories": FactorySpec}
_WORDS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("", "0", "false", "no", "off"), False)
# Packages whose lines in a traceback are not a plugin's.
_MACHINERY = ("_frozen_importlib", "_frozen_importlib_external", "importlib", "ottava", "pkgutil", "pluggy")


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


@dataclass(frozen=True)
class Refusal:
    """A name that a plugin offers and does not get: ``kind`` is "recipe" or "quantizer factory"."""

    kind: str
    name: str
    error: DuplicateRecipeError


@dataclass(frozen=True)
class PluginStatus:
    """One entry point of a distribution and what became of it.

    Attributes:
        name: ``"distribution:entry"``.
        entry: the entry point itself; None where what is wrong is the distribution.
        status: ``"ok"``, ``"broken"`` or ``"disabled"``.
        error: why it is broken.
        offers: the specs of recipes and of named quantizer factories that it offers.
        refused: what it offers under names that are another's, or that two packages claim.
    """

    distribution: str
    version: str
    entry_point: str = "?"
    entry: EntryPoint | None = field(default=None, repr=False)
    status: str = "ok"
    error: str = ""
    offers: tuple[RecipeSpec | FactorySpec, ...] = ()
    refused: tuple[Refusal, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.distribution}:{self.entry_point}"

    @property
    def problems(self) -> list[str]:
        """What is wrong with it, one text each."""
        return [*([self.error] if self.error else []), *(str(refusal.error) for refusal in self.refused)]


def _refusal(status: PluginStatus, spec: Spec, statuses: list[PluginStatus]) -> Refusal | None:
    """Why a plugin does not get a name that it offers, or None."""
    asked = spec.kind, spec.name
    claimants = [s for s in statuses if asked in ((offer.kind, offer.name) for offer in s.offers)]
    titled = [s for s in statuses if canonical(s.distribution) == OWNER_PREFIX + canonical(spec.name)]
    # A package that is broken keeps its name: a stranger must not serve in its place unnoticed.
    owners = [s for s in titled if s in claimants] or [s for s in titled if s.status == "broken"][:1]
    owner = owners[0] if len(owners) == 1 else None
    if status is owner or (owner is None and len(claimants) == 1):
        return None
    offers = " and by ".join(f"{s.distribution} {s.version} (entry point {s.entry_point})" for s in claimants)
    what = f"{spec.kind} {spec.name!r} is offered by {offers}"
    others = " or ".join(dict.fromkeys(s.distribution for s in claimants if s is not owner))
    remedy = f"uninstall one, or set OTTAVA_DISABLE_PLUGINS to {others}"
    if owner is not None:
        what += f"; the name belongs to {owner.distribution} {owner.version}"
        if owner.status == "broken":
            what, remedy = f"{what}, which is broken", f"mend or uninstall {owner.distribution}"
    return Refusal(*asked, DuplicateRecipeError(what, expected="one package for each name", remedy=remedy))


def _settled(status: PluginStatus, statuses: list[PluginStatus]) -> PluginStatus:
    """A plugin without what it does not get."""
    refused = [(spec, _refusal(status, spec, statuses)) for spec in status.offers]
    offers = tuple(spec for spec, refusal in refused if refusal is None)
    return replace(status, offers=offers, refused=tuple(refusal for _, refusal in refused if refusal is not None))


def disabled() -> set[str]:
    """The distributions that ``OTTAVA_DISABLE_PLUGINS`` names."""
    return {canonical(name) for name in os.environ.get("OTTAVA_DISABLE_PLUGINS", "").split(",") if name.strip()}


def discover(group: str = hookspecs.ENTRY_POINT_GROUP) -> list[PluginStatus]:
    """All entry points of the group, by distribution and name; none of them is loaded."""
    every: dict[tuple[str, str], PluginStatus] = {}
    for dist in distributions():
        for found in _examine(dist, group):
            # The first on sys.path is the one that an import finds.
            every.setdefault((canonical(found.distribution), found.entry_point), found)
    return [every[key] for key in sorted(every)]


def _examine(dist: Distribution, group: str) -> list[PluginStatus]:
    text = name = version = ""
    with contextlib.suppress(Exception):
        text = dist.read_text("entry_points.txt") or ""
    # Only files with our group are parsed: a malformed one of a stranger to Ottava is not Ottava's business.
    if not re.search(rf"^\s*\[{re.escape(group)}\]\s*$", text, re.M):
        return []
    with contextlib.suppress(Exception):  # no METADATA at all: which error it is differs from one Python to the next
        name, version = (str(dist.metadata[key] or "") for key in ("Name", "Version"))
    if not name or not version:
        name = name or getattr(getattr(dist, "_path", None), "name", "") or "a distribution without a name"
        wrong = "its metadata has no name or no version, as an interrupted installation leaves it: reinstall or delete"
        return [PluginStatus(name, version or "?", error=wrong)]
    try:
        return [PluginStatus(name, version, entry.name, entry) for entry in dist.entry_points if entry.group == group]
    except Exception as error:
        return [PluginStatus(name, version, error=f"its entry_points.txt cannot be read: {error}")]


def describe(error: BaseException) -> str:
    """Kind and text of an error, and where in a plugin's own code it comes from."""
    text = " ".join(text_of(error).split())
    frames = traceback.walk_tb(error.__traceback__)
    named = [(str(f.f_globals.get("__name__")).split(".")[0], f.f_code.co_filename, line) for f, line in frames]
    own = [place for package, *place in named if package not in _MACHINERY]
    return type(error).__name__ + (f": {text}" if text else "") + (" ({}:{})".format(*own[-1]) if own else "")


def _collect(answers: list[Any], hook: str) -> list[Any]:
    """The specs that a hook gave, if they are what they should be."""
    kind = _HOOKS[hook]
    expected = f"a list of {kind.__name__} objects"
    given = answers[0] if answers else None  # pluggy leaves out an answer of None
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        found = "None" if given is None else f"an object of type {type(given).__name__}"
        raise PluginError(f"{hook} returned {found}", expected=expected, remedy="return a list, an empty one for none")
    specs: dict[str, Any] = {}
    for spec in given:
        # A subclass could leave out the checks of the fields.
        if type(spec) is not kind:
            raise PluginError(f"{hook} yielded an object of type {type(spec).__name__}", expected=expected)
        if spec.api_version != API_VERSION:
            what = f"{spec.name!r} is written for version {spec.api_version} of the extension points"
            remedy = "install a release of the package that fits this ottava"
            raise PluginError(what, expected=f"version {API_VERSION}", remedy=remedy)
        if spec.name in specs:
            raise DuplicateRecipeError(f"{hook} yielded {spec.name!r} twice", expected="one each")
        specs[spec.name] = spec
    return list(specs.values())


def _read(name: str, entry: EntryPoint) -> tuple[Any, ...]:
    """What the hooks of a plugin give. A manager of its own keeps to itself whatever it does."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    plugin = entry.load()
    manager.register(plugin, name)
    manager.check_pending()
    marked = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    if unmarked := [hook for hook in _HOOKS if hook not in marked and callable(getattr(plugin, hook, None))]:
        raise PluginError(f"{', '.join(unmarked)} is not marked", remedy="put @ottava.hookimpl before it")
    if not marked:
        remedy = "define one, with @ottava.hookimpl"
        raise PluginError(f"{entry.value} has no hook", expected=" or ".join(_HOOKS), remedy=remedy)
    return tuple(spec for hook in _HOOKS if hook in marked for spec in _collect(getattr(manager.hook, hook)(), hook))


def _loaded(found: PluginStatus, strict: bool) -> PluginStatus:
    if canonical(found.distribution) in disabled():
        return replace(found, status="disabled", error="")
    cause: BaseException | None = None
    text = found.error
    try:
        if found.entry is not None:
            return replace(found, offers=_read(found.name, found.entry))
    except KeyboardInterrupt:
        raise
    # A plugin may raise anything else, SystemExit and a test runner's own kinds as well.
    except BaseException as error:
        cause, text = error, describe(error)
    if strict:
        what, remedy = f"plugin {found.name} {found.version} is broken: {text}", "unset OTTAVA_STRICT_PLUGINS to go on"
        raise PluginError(what, remedy=remedy) from cause
    return replace(found, status="broken", error=text)


def load() -> list[PluginStatus]:
    """Every plugin, read now; raises as :func:`ottava.recipes.plugin_statuses`."""
    value = os.environ.get("OTTAVA_STRICT_PLUGINS", "").strip().lower()
    if value not in _WORDS:
        raise OptionError(f"OTTAVA_STRICT_PLUGINS={value}", expected="1 or 0, true or false, yes or no, on or off")
    # What plugins print must not get between the lines of a listing that is read by a program.
    with contextlib.redirect_stdout(sys.stderr):
        statuses = [_loaded(found, strict=_WORDS[value]) for found in discover()]
    settled = [_settled(status, statuses) for status in statuses]
    for refusal in [refusal for status in settled for refusal in status.refused if _WORDS[value]]:
        raise refusal.error.with_traceback(None)
    return settled
