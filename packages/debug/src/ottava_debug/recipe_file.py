"""Recipe files that keep some layers, tensors or directions in high precision, with the reasons."""

import contextlib
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import yaml

from ottava.cli.files import check_suffix, write_text
from ottava.errors import OptionError, OttavaError
from ottava.recipes import QuantizerRole, Recipe, get_recipe
from ottava.recipes.registry import is_path
from ottava.recipes.role import OF_LINEAR
from ottava_custom import CustomRecipe, HybridQuantizer, IdentityQuantizer
from ottava_custom.files import FileFactory
from ottava_custom.hybrid import side_of
from ottava_custom.hybrid_tensors import SIDES
from ottava_debug.operands import BY_COLUMN, OPERANDS, ROLES

_WIDTH = 110
# Text that YAML reads as text without quotes. YAML's words for null and booleans are excluded.
_PLAIN = re.compile(r"(?!(?i:null|true|false)\Z)[A-Za-z_][\w.-]*", re.A)


@dataclass(frozen=True)
class Keep:
    """A layer, tensor or direction that stays in high precision, and the reason.

    Attributes:
        layer: the layer's exact qualified name. As in every recipe file, the rule also covers the
            modules inside that layer.
        reason: any text, for readers of the file.
        role: ``"input"``, ``"weight"`` or ``"grad_output"``; None for all of them.
        direction: the direction of the role, ``"rowwise"`` or ``"columnwise"``; None for both.

    Raises:
        OptionError: the role or direction is another one, or there is a direction without a role.
    """

    layer: str
    reason: str
    role: str | None = None
    direction: str | None = None

    def __post_init__(self) -> None:
        _check_one_of("role", self.role, OF_LINEAR)
        _check_one_of("direction", self.direction, SIDES)
        if self.direction is not None and self.role is None:
            raise OptionError(f"direction {self.direction!r} of no role", expected="a role with it")

    @classmethod
    def of_operand(cls, layer: str, reason: str, gemm: str, tensor: str) -> Self:
        """Keep one operand of one GEMM, of :data:`ottava_debug.operands.OPERANDS`."""
        if (gemm, tensor) not in OPERANDS:
            pairs = ", ".join(" ".join(pair) for pair in OPERANDS)
            raise OptionError(f"the operand {tensor!r} of {gemm!r}", expected=f"one of {pairs}")
        direction = "columnwise" if (gemm, tensor) in BY_COLUMN else "rowwise"
        return cls(layer, reason, ROLES[tensor], direction)


def _check_one_of(name: str, value: str | None, words: Sequence[str]) -> None:
    if value is not None and value not in words:
        raise OptionError(f"{name} is {value!r}", expected=f"one of {', '.join(words)}, or None")


def write_recipe_file(
    path: str | os.PathLike[str],
    keeps: Iterable[Keep],
    default: str = "current",
    options: Mapping[str, Any] | None = None,
    *,
    about: str = "",
) -> CustomRecipe:
    """Write :func:`recipe_text` to a file, and return the recipe that the file describes.

    Raises:
        OptionError: the path does not end in ``.yaml`` or ``.yml``, or cannot be written to; or see
            :func:`recipe_text`.
        RecipeNotFoundError, PluginError: see :func:`ottava.get_recipe`.
    """
    check_suffix(path)
    write_text(path, recipe_text(keeps, default, options, about=about))
    return CustomRecipe.from_file(path)


def recipe_text(
    keeps: Iterable[Keep],
    default: str = "current",
    options: Mapping[str, Any] | None = None,
    *,
    about: str = "",
) -> str:
    """The YAML of a recipe file that applies ``default`` to everything except ``keeps``.

    The reasons become comments. A recipe with state, and a recipe with different quantizers for the
    two directions, cannot serve one direction alone. With such a recipe the whole role stays in
    high precision, and a comment says so.

    Args:
        keeps: the exceptions. One rule is written for each layer, in the order of first appearance,
            but a rule for the modules inside a layer precedes the rule of that layer.
        default: the name of a recipe, or the path of a recipe file.
        options: the options of the recipe: text, numbers, booleans, and members of an ``Enum`` by
            their names.
        about: a comment at the beginning of the file.

    Raises:
        OptionError: the recipe does not take an option, or the text is larger than a recipe file
            may be.
        RecipeNotFoundError, PluginError: see :func:`ottava.get_recipe`.
    """
    recipe = get_recipe(default, **options or {})
    expression = _expression(default, options or {})
    layers: dict[str, list[Keep]] = {}
    for keep in keeps:
        layers.setdefault(keep.layer, []).append(keep)
    # A rule for a module also matches the modules inside it, and the first matching rule applies.
    # Therefore rules are sorted by the number of other rules inside their module.
    inside = Counter(name[: dot.start()] for name in layers for dot in re.finditer(r"\.", name))
    # The empty name is the model itself, which contains all others.
    inside[""] = len(layers)
    lines = [*_comment(about), f"default: {expression}"]
    for name in sorted(layers, key=lambda name: inside[name]):
        lines.append("")
        if "layers:" not in lines:
            lines.append("layers:")
        lines += _rule(name, layers[name], recipe, expression)
    text = "\n".join(lines) + "\n"
    # Reading the text raises its errors before anything is written.
    FileFactory("the recipe file.yaml", text)
    return text


def _expression(default: str, options: Mapping[str, Any]) -> str:
    """The expression for the default recipe in the file."""
    if is_path(default):
        default, options = "custom", {"file": os.fspath(default), **options}
    if not options:
        return _text(default)
    values = {key: getattr(value, "name", value) for key, value in options.items()}
    entries = [
        f"{_text(key)}: {_text(value)}" for key, value in {"recipe": default, **values}.items()
    ]
    return "{" + ", ".join(entries) + "}"


def _text(value: Any) -> str:
    """A value as YAML that every YAML reader reads as the same value."""
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    style = '"' if isinstance(value, str) else None
    return yaml.safe_dump(
        value, default_style=style, width=float("inf"), default_flow_style=True
    ).split("\n")[0]


def _comment(text: str, indent: str = "") -> list[str]:
    """Comment lines for any text."""
    lines: list[str] = []
    for line in text.splitlines():
        printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        lines += textwrap.wrap(printable, _WIDTH - len(indent))
    return [f"{indent}# {line}" for line in lines]


def _rule(name: str, keeps: list[Keep], recipe: Recipe, expression: str) -> list[str]:
    """The lines of the rule for a layer; ``expression`` is that of the default recipe."""
    pattern = re.sub(r"([*?[])", r"[\1]", name) or "*"
    match = f"  - match: {_text(pattern)}"
    if any(keep.role is None for keep in keeps):
        comments = [line for keep in keeps for line in _comment(keep.reason, "  ")]
        return [*comments, match, "    all: identity"]
    lines = [match]
    for role in OF_LINEAR:
        of_role = [keep for keep in keeps if keep.role == role]
        if of_role:
            lines += _rule_of_role(QuantizerRole("linear", role, name), of_role, recipe, expression)
    return lines


def _rule_of_role(
    role: QuantizerRole, keeps: list[Keep], recipe: Recipe, expression: str
) -> list[str]:
    """The lines of a rule for one role of a layer, which ``keeps`` are about."""
    reasons = [keep.reason for keep in keeps]
    directions = {keep.direction for keep in keeps}
    sides = [side for side in SIDES if None in directions or side in directions]
    if len(sides) == 1 and not _serves_one_side(recipe, role):
        reasons.append(
            f"Only {sides[0]} data need it, but the recipe cannot serve the other direction alone."
        )
        sides = list(SIDES)
    value = "identity"
    if len(sides) < len(SIDES):
        entries = [f"{side}: {'identity' if side in sides else expression}" for side in SIDES]
        value = "{" + ", ".join(entries) + "}"
    comments = [line for reason in reasons for line in _comment(reason, "    ")]
    return [*comments, f"    {role.tensor_type}: {value}"]


def _serves_one_side(recipe: Recipe, role: QuantizerRole) -> bool:
    with contextlib.suppress(OttavaError):
        for side in SIDES:
            HybridQuantizer(side_of(recipe, role, side), IdentityQuantizer())
        return True
    return False
