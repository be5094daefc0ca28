"""The one table of checks, which the base class, the function and the command share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ottava.recipes.spec import RecipeSpec

if TYPE_CHECKING:
    from ottava_testing.subject import Subject

Body = Callable[["Subject"], None]
#: What a rank does: the subject, the device mesh, and the folder that the launching process filled.
RankBody = Callable[["Subject", Any, Path], None]


@dataclass(frozen=True)
class Needs:
    """What a check needs of a recipe, by a field of its :class:`ottava.RecipeSpec`.

    Attributes:
        field: the field that is asked.
        met: whether a spec meets it.
        otherwise: why the check does not apply where it is not met.
    """

    field: str
    met: Callable[[RecipeSpec], bool]
    otherwise: str


QUANTIZED_WEIGHTS = Needs(
    "quantized_weights", lambda s: s.quantized_weights, "the spec says quantized_weights=False"
)
DETERMINISTIC = Needs(
    "deterministic", lambda s: s.deterministic, "the spec says deterministic=False"
)
COMPILES = Needs("compiles", lambda s: s.compiles, "the spec says compiles=False")
STATEFUL = Needs("stateful", lambda s: s.stateful, "the spec says stateful=False")
STATELESS = Needs("stateful", lambda s: not s.stateful, "the spec says stateful=True")
REDUCES = Needs(
    "needs_reduction", lambda s: s.needs_reduction, "the spec says needs_reduction=False"
)
BLOCKS = Needs("block_size", lambda s: s.block_size is not None, "the spec says block_size=None")
FAKE_QUANTIZES = Needs(
    "fake_quant_formats",
    lambda s: bool(s.fake_quant_formats),
    "the spec lists no fake_quant_formats",
)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: how it is asked for, ``"clone-shares-nothing"``.
        group: what it is about.
        promise: what a recipe that passes keeps, in one line.
        run: the check itself; it raises :class:`~ottava_testing.CheckFailed`.
        needs: what the recipe's spec has to say for it to apply.
        slow: whether it starts processes or compiles.
    """

    name: str
    group: str
    promise: str
    run: Body
    needs: tuple[Needs, ...] = ()
    slow: bool = False

    @property
    def method(self) -> str:
        """Its name as a method of :class:`~ottava_testing.RecipeConformance`."""
        return "test_" + self.name.replace("-", "_")

    def why_not(self, spec: RecipeSpec) -> str | None:
        """Why it does not apply to a recipe with this spec; None where it does."""
        return next((needs.otherwise for needs in self.needs if not needs.met(spec)), None)


#: By name.
CHECKS: dict[str, Check] = {}
#: What each rank does in a check of several processes, by the check's name.
RANK_BODIES: dict[str, RankBody] = {}


def check(
    name: str, group: str, promise: str, *needs: Needs, slow: bool = False
) -> Callable[[Body], Body]:
    """Put a function into the table."""

    def register(body: Body) -> Body:
        if name in CHECKS:
            raise ValueError(f"two checks are named {name!r}")
        CHECKS[name] = Check(name, group, promise, body, needs, slow)
        return body

    return register
