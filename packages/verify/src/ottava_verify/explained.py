"""The bytes of a recipe as a page in Markdown, made of its contracts."""

import math
import typing
from collections.abc import Iterator, Mapping

from ottava.contract import RULES, Contract, Direction
from ottava_verify import scalar
from ottava_verify.numbers import format_of, rounded
from ottava_verify.steps import Steps, Usage, steps_of

_USAGES: tuple[Usage, ...] = ("rowwise", "columnwise")
_SEED, _SCALE = 1, 2.0
#: Special numbers, each in a block of its own beside a 1.
_SPECIAL = {
    "NaN": math.nan,
    "infinity": math.inf,
    "-0": -0.0,
    "the largest float32": rounded(3.4028234663852886e38),
    "the smallest float32": 2.0**-149,
}
_SOURCES = {
    **dict.fromkeys(("E4M3", "E5M2"), "OCP 8-bit Floating Point Specification 1.0"),
    **dict.fromkeys(
        ("E8M0", "E2M1", "E2M3", "E3M2", "MXINT8"), "OCP Microscaling Formats Specification 1.0"
    ),
    "philox4x32-10": "Salmon and others, Parallel random numbers: as easy as 1, 2, 3, 2011",
}


def page(name: str, contracts: Mapping[str, Contract]) -> str:
    """The page of a recipe, from the contracts of its roles.

    Args:
        name: of the recipe.
        contracts: by role.
    """
    lines = [f"# The bytes of `{name}`", ""]
    lines += [
        f"Made of the contracts by `ottava contract {name} --markdown`. All steps are computed in "
        "float32, correctly rounded, in the order of the formulas.",
        "",
    ]
    for steps, users in _directions(contracts).items():
        lines += [f"## {'; '.join(users)}", "", *_steps(steps), ""]
        role, usage = users[0].split(", ")
        by_rows = usage == "rowwise"
        lines += [*_example(contracts[role], steps, "rowwise" if by_rows else "columnwise"), ""]
    citations = ", ".join(f"{role} `{each.citation(name)}`" for role, each in contracts.items())
    lines += [f"Cite the contracts as: {citations}."]
    return "\n".join(lines) + "\n"


def _directions(contracts: Mapping[str, Contract]) -> dict[Steps, list[str]]:
    """The steps of all stated usages, each once, with the roles and usages that have them."""
    found: dict[Steps, list[str]] = {}
    for role, contract in contracts.items():
        for usage in _USAGES:
            if isinstance(getattr(contract, usage), Direction):
                found.setdefault(steps_of(contract, usage), []).append(f"{role}, {usage}")
    return found


def _steps(steps: Steps) -> Iterator[str]:
    """A table of the steps in order: each field, its value, and what it says."""
    yield "| step | field | value | what it says |"
    yield "|---|---|---|---|"
    for step, choices in steps._asdict().items():
        if choices is None:
            continue
        # The docstrings number the steps, and some have a formula.
        says = " ".join((type(choices).__doc__ or "").split()).replace("``", "`")
        yield f"| {step} | | | {says} |"
        hints = typing.get_type_hints(type(choices), include_extras=True)
        for field, value in vars(choices).items():
            says = hints[field].__metadata__[0]
            if (step, field) == ("scale", "rule"):
                says = RULES[value]
            yield f"| {step} | {field} | `{value}` | {says.replace('|', chr(92) + '|')} |"
    sources = {_SOURCES[word] for word in _words(steps) if word in _SOURCES}
    yield ""
    yield f"Sources: {'; '.join(sorted(sources))}."


def _words(steps: Steps) -> Iterator[str]:
    yield from (steps.element.format, steps.scale.format)
    if steps.random is not None:
        yield steps.random.generator


def _example(contract: Contract, steps: Steps, usage: Usage) -> Iterator[str]:
    """One block by hand, and what becomes of special numbers."""
    values = [rounded(number) for number in (1.0, -2.5, 0.3, 5.75)]
    stored = _quantized(contract, usage, values)
    yield (
        "One block by hand:"
        if steps.transform is None
        else ("One block by hand. The elements are those of the transformed values:")
    )
    yield ""
    yield "| value | element | stands for |"
    yield "|---|---|---|"
    codes = _codes(steps, stored)
    decoded = scalar.decode(contract, usage, stored)
    flat = [number for row in decoded for number in row]
    for value, code, number in zip(values, codes, flat, strict=False):
        yield f"| {value:g} | `0x{code:02x}` | {number:.6g} |"
    yield ""
    yield f"Its stored scale is `{_scale(steps, stored.scales[0][0])}`{_level(stored)}."
    yield ""
    yield "| in a block with 1 | element | stored scale |"
    yield "|---|---|---|"
    for name, number in _SPECIAL.items():
        stored = _quantized(contract, usage, [number, 1.0])
        code = _codes(steps, stored)[0]
        yield f"| {name} | `0x{code:02x}` | `{_scale(steps, stored.scales[0][0])}` |"


def _codes(steps: Steps, stored: scalar.Bytes) -> list[int]:
    """The codes of the held matrix, row by row."""
    rows = [scalar.unpacked(steps.storage, steps.element.bits, row) for row in stored.data]
    return [code for row in rows for code in row[: stored.shape[1]]]


def _quantized(contract: Contract, usage: Usage, values: list[float]) -> scalar.Bytes:
    """One block, which lies along the summed dimension."""
    rows = [values] if usage == "rowwise" else [[value] for value in values]
    return scalar.quantize(contract, usage, rows, dtype="float32", seed=_SEED, scale=_SCALE)


def _scale(steps: Steps, stored: float) -> str:
    if steps.scale.format == "float32":
        return f"{stored:.9g}"
    says = f"2^{int(stored) - 127}"
    if steps.scale.format != "E8M0":
        says = f"{format_of(steps.scale.format).number(int(stored)):g}"
    return f"0x{int(stored):02x} ({says})"


def _level(stored: scalar.Bytes) -> str:
    if stored.amax is None:
        return ""
    return f", and the amax of the second level is `{stored.amax[0][0]:.9g}`"
