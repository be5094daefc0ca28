"""The bytes of a recipe as a page in Markdown, made of its contracts."""

import math
import typing
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ottava.contract.choices import RULES, Direction
from ottava.contract.contract import Contract
from ottava.contract.interpretation import Interpretation
from ottava.contract.numbers import numbers_of_codes, numbers_of_scales
from ottava.contract.steps import USAGES, Steps, Usage, steps_of

_SEED, _SCALE = 1, 2.0
#: The values of a block, whose largest number of digits float32 has.
_VALUES = (1.0, -2.5, 0.3, 5.75)
#: Special numbers, each in a block of its own beside a 1.
_SPECIAL = {
    "NaN": math.nan,
    "infinity": math.inf,
    "-0": -0.0,
    "the largest float32": torch.finfo(torch.float32).max,
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
    users_of: dict[Steps, list[tuple[str, Usage]]] = {}
    for role, contract in contracts.items():
        for usage in USAGES:
            if isinstance(getattr(contract, usage), Direction):
                users_of.setdefault(steps_of(contract, usage), []).append((role, usage))
    for steps, users in users_of.items():
        role, usage = users[0]
        lines += [f"## {'; '.join(', '.join(user) for user in users)}", "", *_steps(steps), ""]
        lines += [*_example(contracts[role], steps, usage), ""]
    citations = ", ".join(f"{role} `{each.citation(name)}`" for role, each in contracts.items())
    lines += [f"Cite the contracts as: {citations}."]
    return "\n".join(lines) + "\n"


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
    words: list[str] = [steps.element.format, steps.scale.format]
    if steps.random is not None:
        words.append(steps.random.generator)
    yield ""
    yield f"Sources: {'; '.join(sorted({_SOURCES[word] for word in words if word in _SOURCES}))}."


def _example(contract: Contract, steps: Steps, usage: Usage) -> Iterator[str]:
    """One block by hand, and what becomes of special numbers."""
    made = _quantized(contract, usage, _VALUES)
    codes = made.chosen.codes.flatten().tolist()
    is_transformed = steps.transform is not None
    more = " The elements are those of the transformed values:" if is_transformed else ""
    yield f"One block by hand.{more}" if more else "One block by hand:"
    yield ""
    yield "| value | element | stands for |"
    yield "|---|---|---|"
    for value, code, number in zip(_VALUES, codes, _decoded(made).tolist(), strict=False):
        yield f"| {value:g} | `0x{code:02x}` | {number:.6g} |"
    yield ""
    level = ""
    if steps.second_level is not None:
        level = f", and the amax of the second level is `{made.level_amax.item():.9g}`"
    yield f"Its stored scale is `{_scale(made)}`{level}."
    yield ""
    yield "| in a block with 1 | element | stored scale |"
    yield "|---|---|---|"
    for name, number in _SPECIAL.items():
        made = _quantized(contract, usage, (number, 1.0))
        code = int(made.chosen.codes.flatten()[0])
        yield f"| {name} | `0x{code:02x}` | `{_scale(made)}` |"


def _quantized(contract: Contract, usage: Usage, values: tuple[float, ...]) -> Interpretation:
    """One block, which lies along the summed dimension."""
    x = torch.tensor([values])
    x = x if usage == "rowwise" else x.t()
    return Interpretation(contract, usage, x, seed=_SEED, scale=_SCALE)


def _decoded(made: Interpretation) -> Tensor:
    """What the elements of one block stand for."""
    numbers = numbers_of_codes(made.steps.element.format)[made.chosen.codes.flatten()]
    numbers = numbers * numbers_of_scales(_stored(made), made.steps.scale.format)
    if made.steps.second_level is None:
        return numbers
    return numbers * (made.level_amax / made.top).reshape(())


def _stored(made: Interpretation) -> Tensor:
    """The stored scale of one block."""
    return made.parts["scales"].reshape(-1)[0]


def _scale(made: Interpretation) -> str:
    stored, name = _stored(made), made.steps.scale.format
    if name == "float32":
        return f"{stored.item():.9g}"
    says = f"{numbers_of_scales(stored, name).item():g}"
    if name == "E8M0":
        says = f"2^{int(stored) - 127}"
    return f"0x{int(stored):02x} ({says})"
