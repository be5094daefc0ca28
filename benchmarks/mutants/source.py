"""The mutants of a source file: their names, their text, and those that cannot matter."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword

# Without these decorators code does the same, only slower or less checked.
DECORATOR = re.compile(
    r"@([\w.]+\.)?(abstractmethod|cache|final|lru_cache|overload|override|runtime_checkable|wraps)\b"
)
CONDITION = re.compile(r"\bTYPE_CHECKING\b|\b__name__ ==")
UNION = re.compile(r"\b(None|bool|bytes|float|int|str)\b|\b[A-Z]\w*[a-z]")
WARNING = re.compile(r"\s*(warnings\.)?warn\(")
PRAGMA = re.compile(r"# pragma: no (cover|mutate)")


class RemoveCall(Operator):  # type: ignore[misc]  # cosmic-ray has no types
    """Replaces a statement that only calls something, such as a check, by ``pass``."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        is_statement = node.type == "atom_expr" and node.parent.type == "simple_stmt"
        if is_statement and node.get_code().endswith(")"):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return Keyword("pass", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (Example("check(x)\n", "pass\n"),)


@dataclass(frozen=True)
class Mutant:
    """One fault, named by what surrounds it, so that edits elsewhere leave the name as it is."""

    #: Relative to the root of the repository, with slashes.
    file: str
    operator: str
    #: The classes and functions around the fault, joined by dots.
    scope: str
    #: The line of the source where the fault begins, without indentation.
    text: str
    #: How many mutants with the same operator, scope and text precede this one.
    nth: int
    #: cosmic-ray's number of the mutant, which changes with the file.
    occurrence: int
    line: int

    @property
    def identity(self) -> str:
        """A hash of everything but ``occurrence`` and ``line``."""
        return digest(self.file, self.operator, self.scope, self.text, str(self.nth))

    def apply(self, source: str) -> str | None:
        """The file's text with the fault; None where Python does not compile it."""
        mutated = str(mutate_code(source, _operator(self.operator), self.occurrence))
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(mutated, self.file, "exec")
        except SyntaxError:
            return None
        return mutated


def digest(*words: str) -> str:
    """A hash of words, 16 characters long."""
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _operator(name: str) -> Operator:
    return RemoveCall() if name == "RemoveCall" else OperatorProvider()[name]()


def mutants_of(file: str, source: str, operators: Sequence[str]) -> list[Mutant]:
    """The mutants of a file's text by these operators, without those that cannot matter."""
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    mutants = []
    for name in operators:
        operator = _operator(name)
        positions = ((node, at) for node in nodes for at, _ in operator.mutation_positions(node))
        namesakes: Counter[tuple[str, str]] = Counter()
        for occurrence, (node, (line, _)) in enumerate(positions):
            text = lines[line - 1].strip()
            if _matters(node) and not PRAGMA.search(text):
                scope = _scope(node)
                nth = namesakes[scope, text]
                namesakes[scope, text] += 1
                mutants.append(Mutant(file, name, scope, text, nth, occurrence, line))
    return mutants


def _scope(node: Any) -> str:
    names = []
    while (node := node.parent) is not None:
        if node.type in ("funcdef", "classdef"):
            names.append(node.name.value)
    return ".".join(reversed(names))


def _matters(node: Any) -> bool:
    """Whether a fault at a node changes what the code does, rather than its types or texts."""
    child = None
    while node is not None:
        if _is_unimportant(node, child):
            return False
        node, child = node.parent, node
    return True


def _is_unimportant(node: Any, child: Any) -> bool:
    """Whether a fault in the child, or in the node itself if there is none, cannot matter."""
    match node.type:
        case "if_stmt":
            return CONDITION.search(node.children[1].get_code()) is not None
        case "decorator":
            return child is not None or DECORATOR.match(node.get_code().strip()) is not None
        case "tfpdef" | "raise_stmt":
            return True
        case "annassign":
            return child is node.children[1]
        case "funcdef":
            return child is node.annotation
        case "assert_stmt":
            return child in node.children[2:]
        case "expr":
            return child is not None and UNION.search(node.get_code()) is not None
        case "expr_stmt":
            return any(name.value == "__all__" for name in node.get_defined_names())
        case "atom_expr":
            return child is not None and WARNING.match(node.get_code()) is not None
    return False
