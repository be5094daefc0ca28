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
#: A function that each rank runs. Its arguments are the subject, the device mesh, and the folder
#: that the launching process filled.
RankBody = Callable[["Subject", Any, Path], None]


@dataclass(frozen=True)
class Needs:
    """A condition on a recipe's :class:`ottava.RecipeSpec` under which a check applies.

    Attributes:
        field: the field of the spec that the condition reads.
        met: whether a spec meets the condition.
        otherwise: why the check does not apply to a spec that does not.
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
        name: the name that users select it by, such as ``"clone-shares-nothing"``.
        group: the subject that it belongs to, such as ``"storages"``.
        promise: the promise that a recipe keeps if it passes, in one line.
        run: the check itself; it raises :class:`~ottava_testing.CheckFailed`.
        needs: the conditions on the recipe's spec under which it applies.
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
        """The check's name as a method of :class:`~ottava_testing.RecipeConformance`."""
        return "test_" + self.name.replace("-", "_")

    def why_not(self, spec: RecipeSpec) -> str | None:
        """Why the check does not apply to a recipe with this spec; None where it does."""
        return next((needs.otherwise for needs in self.needs if not needs.met(spec)), None)


#: All checks by name.
CHECKS: dict[str, Check] = {}
#: The functions that each rank runs in the checks on several processes, by the check's name.
RANK_BODIES: dict[str, RankBody] = {}


def check(
    name: str, group: str, promise: str, *needs: Needs, slow: bool = False
) -> Callable[[Body], Body]:
    """Decorate a function that is a check, to put it into the table.

    Raises:
        ValueError: another check has that name.
    """

    def register(body: Body) -> Body:
        if name in CHECKS:
            raise ValueError(f"two checks are named {name!r}")
        CHECKS[name] = Check(name, group, promise, body, needs, slow)
        return body

    return register
