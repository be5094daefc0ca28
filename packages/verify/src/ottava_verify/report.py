"""What ``ottava verify`` found, as data."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ottava_verify.search import Agreement

Status = Literal["equal", "departs", "not compared"]
#: Exit statuses of the command.
EXIT: dict[Status, int] = {"equal": 0, "departs": 1, "not compared": 2}


@dataclass(frozen=True)
class Example:
    """One element, scale or second level that departs.

    Attributes:
        kind: ``"element"``, ``"scale"`` or ``"global scale"``.
        case: the input, or empty.
        row, column: of the matrix; of a scale's block, its first element.
        value: the input there; of a scale, the amax of its block.
        expected, found: bytes or numbers, as texts.
    """

    kind: str
    case: str
    row: int
    column: int
    value: float
    expected: str
    found: str


@dataclass(frozen=True)
class Finding:
    """What was found of one function, of one input of it, or of one tensor.

    Attributes:
        name: of the function or the tensor.
        status: whether all bytes are those of the contract.
        contract: what it was compared with, in words.
        citation: of that contract; empty where it is none of a recipe.
        agreement: how much agrees with the contract; None where shapes or dtypes differ.
        causes: each explains all bytes, as clauses that hold together. Several of them cannot be
            told apart on these data.
        nearest: without causes, the clauses of what reproduces the most bytes, if that is more than
            the contract does.
        nearest_agreement: how much that reproduces.
        kinds: how many elements depart, by what their inputs are.
        examples: the first ones that depart.
        error: of decoded values, the root of the mean square relative to that of the values that
            the contract gives; None where it is not known.
        scope: which inputs the causes explain, where they do not explain all.
        errors: inputs on which the function failed, with its errors. Of those that are made of
            whole blocks each makes the function depart; others may be refused.
        note: why it cannot be compared, or what else is to be known.
    """

    name: str
    status: Status
    contract: str = ""
    citation: str = ""
    agreement: Agreement | None = None
    causes: tuple[tuple[str, ...], ...] = ()
    nearest: tuple[str, ...] = ()
    nearest_agreement: Agreement | None = None
    kinds: dict[str, int] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    error: float | None = None
    scope: str = ""
    errors: dict[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Report:
    """The findings of one comparison.

    Attributes:
        subject: what was looked at.
        against: what it was compared with.
        findings: one for each function or tensor.
    """

    subject: str
    against: str
    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        """``"departs"`` if anything does, else ``"not compared"`` if anything was not, or nothing
        was found."""
        found = {finding.status for finding in self.findings}
        if "departs" in found:
            return "departs"
        return "equal" if found == {"equal"} else "not compared"

    @property
    def exit_status(self) -> int:
        """0 equal, 1 departs, 2 cannot be compared."""
        return EXIT[self.status]

    def groups(self) -> dict[tuple[object, ...], list[Finding]]:
        """Findings that say the same of tensors with other names."""
        groups: dict[tuple[object, ...], list[Finding]] = {}
        for finding in self.findings:
            key = finding.status, finding.contract, finding.causes, finding.nearest, finding.note
            groups.setdefault(key, []).append(finding)
        return groups

    def value(self) -> dict[str, Any]:
        """The report as a JSON value."""
        return asdict(self) | {"status": self.status}
