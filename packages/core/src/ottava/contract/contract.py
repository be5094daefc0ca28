"""``Contract``: the choices of both usages."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from ottava.contract import as_json
from ottava.contract.choices import OWN, UNSTATED, VERSION, Choices
from ottava.contract.of_layout import choices_of
from ottava.errors import OptionError
from ottava.layout import Layout


@dataclass(frozen=True)
class Contract:
    """Every choice between values and the bytes of one quantizer.

    Attributes:
        rowwise, columnwise: the choices of the two usages.
        version: of the fields and their words.
    """

    rowwise: Annotated[Choices, "data that products which sum over columns read"]
    columnwise: Annotated[Choices, "data that products which sum over rows read"]
    version: Annotated[Literal[1], "of the fields and their words"] = VERSION

    @staticmethod
    def of_layout(layout: Layout, *, ranks: Literal["this", "group"] = "this") -> "Contract":
        """The contract of a quantizer that is this layout.

        Args:
            layout: any.
            ranks: whose amaxes decide scales that span rows.
        """
        return Contract(choices_of(layout, False, ranks), choices_of(layout, True, ranks))

    def with_rule(self, rule: str) -> "Contract":
        """This contract with another rule for scales, one of :data:`RULES`."""

        def changed(choices: Choices) -> Choices:
            if isinstance(choices, str) or isinstance(choices.scale, str):
                return choices
            return replace(choices, scale=replace(choices.scale, rule=rule))

        return replace(self, rowwise=changed(self.rowwise), columnwise=changed(self.columnwise))

    @staticmethod
    def of_json(text: str) -> "Contract":
        """The contract whose :meth:`to_json` this is.

        Raises:
            OptionError: it is none, or of a later version.
        """
        try:
            value = json.loads(text)
        except ValueError as error:
            raise OptionError(f"the contract is no JSON: {error}", "what to_json gives") from error
        return Contract.of_value(value)

    @staticmethod
    def of_value(value: object) -> "Contract":
        """The contract that this JSON value is.

        Raises:
            OptionError: it is none, or of a later version.
        """
        if not isinstance(value, Mapping):
            raise OptionError(f"the contract is a {type(value).__name__}", "a JSON object")
        if value.get("version") != VERSION:
            raise OptionError(
                f"the contract has version {value.get('version')!r:.80}",
                expected=f"version {VERSION}",
                remedy="a later Ottava may read it",
            )
        contract = as_json.read(Contract, value, "contract")
        assert isinstance(contract, Contract)
        return contract

    def value(self) -> dict[str, Any]:
        """The contract as a JSON value."""
        written: dict[str, Any] = as_json.written(self)
        return written

    def to_json(self, *, indent: int | None = 2) -> str:
        """The contract as JSON. ``indent=None`` gives one line."""
        return json.dumps(self.value(), indent=indent)

    @property
    def hash(self) -> str:
        """16 hexadecimal digits: the beginning of the SHA-256 of the JSON in one line, with sorted
        names and without spaces."""
        text = json.dumps(self.value(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def citation(self, name: str) -> str:
        """``"ottava:NAME/HASH"``, for papers and reports. The name is for readers alone."""
        return f"ottava:{name}/{self.hash}"

    def differences(self, other: "Contract") -> dict[str, tuple[object, object]]:
        """The fields that differ, ``"rowwise.scale.rule"`` for example, with both values."""
        return dict(as_json.differences("", self.value(), other.value()))

    @property
    def is_stated(self) -> bool:
        """Whether every choice of both usages is stated, so that bytes follow from it."""
        words = [leaf for leaf in as_json.leaves(self) if isinstance(leaf, str)]
        return not any(word == UNSTATED or word.startswith(OWN) for word in words)

    def __str__(self) -> str:
        return self.to_json()


#: The contract of a quantizer that says nothing.
NOTHING_STATED = Contract(UNSTATED, UNSTATED)


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of contracts, with what each field says."""
    return as_json.schema_of(Contract)
