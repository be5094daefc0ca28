"""The wrong turns that quantizers take, as data.

A turn is one choice that somebody made in another way than a contract says. It edits fields of the
contract, computes quantities of an interpretation in another way, or looks at stored tensors in
another way. Whether it explains given bytes is decided by computing them.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ottava.contract.interpretation import Interpretation
from ottava.contract.steps import Steps
from ottava_verify.ways import FAMILIES, VIEWS, WAYS, View, Way

# Steps of the contract that a turn replaces as a whole.
_WHOLE = ("transform", "second_level", "candidates", "random")


@dataclass(frozen=True, eq=False)
class Turn:
    """One wrong turn.

    Attributes:
        name: a word for programs.
        step: what it changes. The turns of one explanation change different steps.
        of: the contracts that have what it changes: values that their fields may have, by path.
        says: a clause for people: how the bytes were made.
        edits: fields and steps of the contract, ``"scale.rule"``, with other values, or with
            functions of the steps that give them; and quantities of an
            :class:`~ottava.contract.Interpretation`, with other ways to compute them.
        view: how stored tensors are looked at.
        takes_stored: what it takes for right as it was stored, and so explains too much: the
            ``"level"``, the ``"scales"``, or nothing.
    """

    name: str
    step: str
    of: Mapping[str, Sequence[str]]
    says: str
    edits: Mapping[str, Any]
    view: View | None
    takes_stored: str

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The edits of the contract."""
        return {path: value for path, value in self.edits.items() if "." in path or path in _WHOLE}

    @cached_property
    def ways(self) -> dict[str, Way]:
        """The edits of quantities."""
        return {name: way for name, way in self.edits.items() if name not in self.fields}

    def edited(self, steps: Steps) -> Steps | None:
        """The steps with other fields; None where the turn does not apply, or changes nothing."""
        for path, values in self.of.items():
            step, _, name = path.partition(".")
            if getattr(getattr(steps, step), name) not in values:
                return None
        result = steps
        for path, given in self.fields.items():
            step, _, name = path.partition(".")
            value = given(steps) if callable(given) else given
            before = getattr(result, step)
            if name and before is None:
                return None
            if name:
                value = replace(before, **{name: value})
            result = result._replace(**{step: value})
        changes_nothing = self.fields and not self.ways and result == steps
        return None if changes_nothing else result


def interpreted(turns: tuple[Turn, ...]) -> type[Interpretation]:
    """The interpretation that computes quantities as some turns do."""
    result: Any = Interpretation
    for turn in turns:
        if turn.ways:
            quantities = {name: _quantity(result, name, way) for name, way in turn.ways.items()}
            result = type("Turned", (result,), quantities)
    turned: type[Interpretation] = result
    return turned


def _quantity(base: type[Interpretation], name: str, way: Way) -> "cached_property[Tensor]":
    by_contract = getattr(base, name).func
    return cached_property(lambda made: way(made, lambda: by_contract(made)))


def _turns() -> Iterator[Turn]:
    """The rows of the table, those of families once for each value."""
    for key, row in tomllib.loads((Path(__file__).parent / "turns.toml").read_text()).items():
        edits = {
            path: tuple(value) if isinstance(value, list) else value
            for path, value in row.get("edits", {}).items()
        }
        edits |= WAYS.get(key, {})
        of, takes_stored = row.get("of", {}), row.get("takes_stored", "")
        for value in row.get("values", [""]):
            text = f"{value:g}" if isinstance(value, float) else value
            name, says = key.format(text), row["says"].format(text)
            if key in FAMILIES:
                edits = {**FAMILIES[key](value)}
            yield Turn(name, row["step"], of, says, edits, VIEWS.get(key), takes_stored)


#: All known wrong turns.
TURNS: tuple[Turn, ...] = tuple(_turns())
