"""The one table of checks, which the base class, the function and the command share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ottava.kernels import fixed_seed
from ottava.recipes.spec import RecipeSpec
from ottava_testing.compare import about

if TYPE_CHECKING:
    from ottava_testing.subject import Subject

Body = Callable[..., None]
#: Yields a title for messages, and what a check is about.
Over = Callable[["Subject"], Iterator[tuple[Any, ...]]]
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


def _flag(field: str, value: bool = True) -> Needs:
    return Needs(field, lambda s: getattr(s, field) is value, f"the spec says {field}={not value}")


QUANTIZED_WEIGHTS = _flag("quantized_weights")
DETERMINISTIC = _flag("deterministic")
STOCHASTIC = _flag("stochastic")
COMPILES = _flag("compiles")
STATEFUL = _flag("stateful")
STATELESS = _flag("stateful", False)
REDUCES = _flag("needs_reduction")
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
    run: Callable[[Subject], None]
    needs: tuple[Needs, ...] = ()
    slow: bool = False

    @property
    def method(self) -> str:
        """The check's name as a method of :class:`~ottava_testing.RecipeConformance`."""
        return "test_" + self.name.replace("-", "_")

    def why_not(self, spec: RecipeSpec) -> str | None:
        """Why the check does not apply to a recipe with this spec; None where it does."""
        return next((needs.otherwise for needs in self.needs if not needs.met(spec)), None)

    def seeds(self, spec: RecipeSpec) -> AbstractContextManager[None]:
        """The block in which the check runs.

        A stochastic recipe has one seed there, so that bytes can be compared, except in the checks
        of its random numbers.
        """
        if spec.stochastic and STOCHASTIC not in self.needs:
            return fixed_seed()
        return nullcontext()


#: All checks by name.
CHECKS: dict[str, Check] = {}
#: The functions that each rank runs in the checks on several processes, by the check's name.
RANK_BODIES: dict[str, RankBody] = {}


def check(
    group: str, *needs: Needs, over: Over | None = None, slow: bool = False
) -> Callable[[Body], Body]:
    """Decorate a function that is a check, to put it into the table.

    The function's name is that of the check, with dashes, and the first paragraph of its docstring
    is the promise. Its arguments are the subject, and each of what ``over`` yields; messages then
    begin with the title.

    Raises:
        ValueError: another check has that name.
    """

    def register(body: Body) -> Body:
        name = body.__name__.strip("_").replace("_", "-")
        if name in CHECKS:
            raise ValueError(f"two checks are named {name!r}")
        text = inspect.getdoc(body) or ""
        promise = " ".join(text.partition("\n\n")[0].split()).rstrip(".")

        def run(subject: Subject) -> None:
            if over is None:
                return body(subject)
            for title, *things in over(subject):
                with about(title):
                    body(subject, *things)

        CHECKS[name] = Check(name, group, promise, run, needs, slow)
        return body

    return register
