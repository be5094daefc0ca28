"""What became of each plugin, and who owns a name that several claim.

Of several plugins that claim a name none gets it, so that no stranger takes a name over, with one exception: the
distribution ``ottava-recipes-NAME`` owns NAME.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint

from ottava.errors import DuplicateRecipeError
from ottava.recipes.spec import FactorySpec, RecipeSpec

RECIPE, FACTORY = RecipeSpec.kind, FactorySpec.kind
OWNER_PREFIX = "ottava-recipes-"


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
        recipes: the specs that it offers.
        quantizer_factories: the named quantizer factories that it offers.
        refused: what it offers under names that are another's, or that two packages claim.
    """

    distribution: str
    version: str
    entry_point: str = "?"
    entry: EntryPoint | None = field(default=None, repr=False)
    status: str = "ok"
    error: str = ""
    recipes: tuple[RecipeSpec, ...] = ()
    quantizer_factories: tuple[FactorySpec, ...] = ()
    refused: tuple[Refusal, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.distribution}:{self.entry_point}"

    @property
    def problems(self) -> list[str]:
        """What is wrong with it, one text each."""
        return [*([self.error] if self.error else []), *(str(refusal.error) for refusal in self.refused)]

    @property
    def offers(self) -> tuple[RecipeSpec | FactorySpec, ...]:
        """All that it offers."""
        return (*self.recipes, *self.quantizer_factories)

    def specs(self, kind: str) -> tuple[RecipeSpec | FactorySpec, ...]:
        """What it offers of one kind."""
        return self.recipes if kind == RECIPE else self.quantizer_factories


def _conflict(kind: str, name: str, claimants: list[PluginStatus], owner: PluginStatus | None) -> DuplicateRecipeError:
    offers = " and by ".join(f"{s.distribution} {s.version} (entry point {s.entry_point})" for s in claimants)
    what = f"{kind} {name!r} is offered by {offers}"
    others = " or ".join(dict.fromkeys(s.distribution for s in claimants if s is not owner))
    remedy = f"uninstall one, or set OTTAVA_DISABLE_PLUGINS to {others}"
    if owner is not None:
        what += f"; the name belongs to {owner.distribution} {owner.version}"
        if owner.status == "broken":
            what += ", which is broken"
            remedy = f"mend or uninstall {owner.distribution}"
    return DuplicateRecipeError(what, expected="one package for each name", remedy=remedy)


def _owner(name: str, claimants: list[PluginStatus], statuses: list[PluginStatus]) -> PluginStatus | None:
    title = OWNER_PREFIX + canonical(name)
    titled = [s for s in claimants if canonical(s.distribution) == title]
    # A package that is broken keeps its name: a stranger must not serve in its place unnoticed.
    broken = [s for s in statuses if s.status == "broken" and canonical(s.distribution) == title]
    return titled[0] if len(titled) == 1 else broken[0] if broken and not titled else None


def settle(statuses: list[PluginStatus]) -> list[PluginStatus]:
    """The same plugins, without what they do not get."""
    claims: dict[tuple[str, str], list[PluginStatus]] = {}
    for status in statuses:
        for spec in status.offers:
            claims.setdefault((spec.kind, spec.name), []).append(status)
    taken: dict[tuple[str, str], tuple[PluginStatus | None, Refusal]] = {}
    for (kind, name), claimants in claims.items():
        owner = _owner(name, claimants, statuses)
        if len(claimants) > 1 or owner not in (None, claimants[0]):
            taken[kind, name] = owner, Refusal(kind, name, _conflict(kind, name, claimants, owner))
    settled = []
    for status in statuses:
        lost = {key: refusal for key, (owner, refusal) in taken.items() if owner is not status}
        refused = tuple(lost[spec.kind, spec.name] for spec in status.offers if (spec.kind, spec.name) in lost)
        recipes = tuple(spec for spec in status.recipes if (RECIPE, spec.name) not in lost)
        factories = tuple(spec for spec in status.quantizer_factories if (FACTORY, spec.name) not in lost)
        settled.append(replace(status, refused=refused, recipes=recipes, quantizer_factories=factories))
    return settled
