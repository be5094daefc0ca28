"""The wrong turns that quantizers take, as data.

A turn is one choice that somebody made in another way than a contract says. It edits fields of the
contract, computes quantities of an interpretation in another way, or looks at stored tensors in
another way. Whether it explains given bytes is decided by computing them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ottava.contract import Transform
from ottava.formats import IntegerFormat
from ottava_verify.formats import (
    FLT_MAX,
    below,
    format_of,
    magnitudes,
    mantissa_bits,
    middles,
    nearest,
)
from ottava_verify.interpretation import Interpretation
from ottava_verify.steps import Sides, Steps
from ottava_verify.views import VIEWS, View

#: Another way to compute a quantity, of an interpretation and of the way that the contract has.
Usual = Callable[[], Tensor]
Way = Callable[[Interpretation, Usual], Tensor]

# Steps that a turn changes as a whole.
_WHOLE = ("transform", "second_level", "candidates", "random")


@dataclass(frozen=True, eq=False)
class Turn:
    """One wrong turn.

    Attributes:
        name: a word for programs.
        step: what it changes. The turns of one explanation change different steps.
        says: a clause for people: how the bytes were made.
        of: the contracts that have what it changes, by a word of :func:`words_of`; empty for all.
        edits: fields and steps of the contract, ``"scale.rule"``, with other values, or with
            functions of the steps that give them; and quantities of an
            :class:`~ottava_verify.Interpretation`, with other ways to compute them.
        view: how stored tensors are looked at.
        takes_stored: whether it takes what was stored for right, and so explains too much.
    """

    name: str
    step: str
    says: str
    of: str = ""
    edits: Mapping[str, Any] = field(default_factory=dict)
    view: View | None = None
    takes_stored: bool = False

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
        if self.of and self.of not in words_of(steps):
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


def words_of(steps: Steps) -> set[str]:
    """What turns may need of a contract, in words."""
    element, scale = steps.element.format, steps.scale
    words = {element, scale.format, scale.rule.partition("-")[0]}
    words.add("integer" if isinstance(format_of(element), IntegerFormat) else "float")
    words.add("random" if steps.random is not None else "nearest even")
    words.add("transform" if steps.transform is not None else f"untransformed {element}")
    if scale.rule != "rounded":
        words.add("unrounded")
    if element in ("E4M3", "E5M2"):
        words.add("FP8")
    if steps.second_level is not None:
        words.add("second level")
    if None not in steps.amax.block:
        words.add("blocks")
    if element in ("E2M1", "E2M3", "E3M2", "E5M2"):
        words.add("short of E4M3")
    if element in ("E2M1", "E4M3"):
        words.add("short of E5M2")
    return words


# Other values of fields.

_RHT = Transform(
    16, "0x5bd0", "sylvester", "butterfly 1 2 4", "float32(1/sqrt(size))", "source", "zeros"
)


def _square(steps: Steps) -> Sides:
    size = max(side or 1 for side in steps.amax.block)
    return size, size


def _long(size: int) -> Callable[[Steps], Sides]:
    """Blocks of another length along the summed dimension."""

    def block(steps: Steps) -> Sides:
        rows, columns = steps.amax.block
        return (rows, size) if columns != 1 and rows is not None else (size, columns)

    return block


def _block(block: object) -> dict[str, Any]:
    return {"amax.block": block, "amax.area": None}


# Other ways to compute quantities.


def _fixed(formula: Callable[[Any], Tensor]) -> Way:
    """A formula that replaces that of the contract."""
    return lambda made, usual: formula(made)


def _in(dtype: torch.dtype) -> Way:
    """The quantity, rounded to a dtype of 16 bits."""
    return lambda made, usual: usual().to(dtype).float()


def _finite(multiplier: Tensor) -> Tensor:
    return multiplier.clamp(max=FLT_MAX)


def _usable(formula: Callable[[Any], Tensor]) -> Way:
    """A stored scale, where an amax has one."""

    def way(made: Interpretation, usual: Usual) -> Tensor:
        amax = made.raised
        return torch.where(amax.isfinite() & (amax != 0), formula(made), usual())

    return way


def _power_up(made: Interpretation, usual: Usual) -> Tensor:
    """The next power of two that is not smaller."""
    mantissa, exponent = torch.frexp(usual().double())
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int()).float()


def _multiplier_stored(made: Interpretation, usual: Usual) -> Tensor:
    if made.steps.scale.format == "E8M0":
        return (254 - made.code).clamp(min=0)
    return made.multiplier


def _even_of_e2m1(made: Interpretation, usual: Usual) -> Tensor:
    largest = torch.frexp(made.maximum).exponent - 1
    return ((made.raised.view(torch.int32) + (1 << 21)) >> 23) - largest


def _byte_above(made: Interpretation, usual: Usual) -> Tensor:
    name = made.steps.scale.format
    places = below(made.limited, name)
    return places + (magnitudes(name)[places] < made.limited)


def _via(name: str) -> Way:
    """Scaled values rounded to another format."""

    def way(made: Interpretation, usual: Usual) -> Tensor:
        scaled = usual()
        numbers = magnitudes(name)[nearest(scaled.abs().nan_to_num(0.0), name)]
        return torch.where(scaled.isnan(), scaled, numbers.copysign(scaled))

    return way


def _ties(away: bool) -> Way:
    """Ties away from zero, or towards it."""

    def way(made: Interpretation, usual: Usual) -> Tensor:
        halfway = middles(made.steps.element.format)
        return torch.bucketize(made.saturated.abs().contiguous(), halfway, right=away)

    return way


def _flushed(made: Interpretation, usual: Usual) -> Tensor:
    places = usual()
    return torch.where(places < 1 << mantissa_bits(made.steps.element.format), 0, places)


def _overflow(code: int) -> Way:
    """A code, with a sign, for what would be rounded beyond the largest element."""

    def way(made: Interpretation, usual: Usual) -> Tensor:
        numbers = magnitudes(made.steps.element.format)
        limit = numbers[-1] + (numbers[-1] - numbers[-2]) / 2
        # A tie goes to the even code, which is that of the largest element or the next one.
        size = made.scaled.abs()
        beyond = size > limit if len(numbers) % 2 else size >= limit
        return torch.where(beyond, made.scaled.signbit().long() << 7 | code, usual())

    return way


def _nan_signed(made: Interpretation, usual: Usual) -> Tensor:
    signed = made.scaled.signbit().long() << 7 | 0x7F
    return torch.where(made.scaled.isnan(), signed, usual())


# The table. In formulas, `q` is the interpretation whose quantities are read.

_DIVIDED = {"product": _fixed(lambda q: q.values / q.areas.spread(q.multiplier))}
_INVERSE_PRODUCT = _usable(lambda q: q.raised * (q.one / q.maximum))
_INVERSE_QUOTIENT = _usable(lambda q: q.raised / q.maximum)
_MAXIMUM_240 = {"scale.maximum": 240.0, "element.maximum": 240.0, "element.least": -240.0}

# Rows are `name, says, of, edits`.
_Row = tuple[str, str, str, Mapping[str, Any]]
# fmt: off
_ROWS: dict[str, list[_Row]] = {
    "scale": [
        ("scale-up", "scales agree with `up`: the exponent of amax / maximum, rounded up",
         "E8M0", {"scale.rule": "up"}),
        ("scale-floor", "scales agree with `floor`: the exponent of amax less that of the largest "
         "element", "E8M0", {"scale.rule": "floor"}),
        ("scale-even", "scales agree with `even`: as floor, of a rounded amax",
         "E8M0", {"scale.rule": "even"}),
        ("scale-nearest", "scales agree with `nearest`: the nearest power of two",
         "E8M0", {"scale.rule": "nearest"}),
        ("scale-even-e2m1", "scales agree with `even` of E2M1: a quarter is added to the mantissa "
         "of amax", "E8M0", {"exponent": _even_of_e2m1}),
        ("reciprocal", "scale = maximum * (1 / amax), with a rounded reciprocal",
         "quotient", {"quotient": _fixed(lambda q: q.maximum * (q.one / q.raised))}),
        ("inverse-product", "scale_inv = amax * (1 / maximum), and scale = 1 / scale_inv",
         "quotient", {"quotient": _fixed(lambda q: q.one / (q.raised * (q.one / q.maximum))),
         "inverse": _INVERSE_PRODUCT}),
        ("inverse-quotient", "scale_inv = amax / maximum, and scale = 1 / scale_inv",
         "quotient", {"quotient": _fixed(lambda q: q.one / (q.raised / q.maximum)),
         "inverse": _INVERSE_QUOTIENT}),
        ("two-quotients", "scale_inv = amax / maximum, and scale = maximum / amax",
         "quotient", {"inverse": _INVERSE_QUOTIENT}),
        ("quotient-product", "scale_inv = amax * (1 / maximum), and scale = maximum / amax",
         "quotient", {"inverse": _INVERSE_PRODUCT}),
        ("block-divided", "block scales are (amax / maximum) * S, not amax * (S * (1 / maximum))",
         "rounded", {"exact": _fixed(lambda q: q.finite / q.maximum * q.S * q.factor)}),
        ("block-divided-inverse", "block scales are (amax / maximum) / S_inv, not amax * (S * (1 / "
         "maximum))",
         "rounded", {"exact": _fixed(lambda q: q.finite / q.maximum / q.S_inv * q.factor)}),
        ("block-divided-last", "block scales are (amax * S) / maximum, not amax * (S * (1 / "
         "maximum))",
         "rounded", {"exact": _fixed(lambda q: q.finite * q.S / q.maximum * q.factor)}),
        ("global-inverted", "block scales are divided by the global scale, not multiplied",
         "second level", {"S": _fixed(lambda q: q.S_inv)}),
    ],
    "power": [
        ("power-of-two", "scales are rounded down to powers of two",
         "quotient", {"scale.rule": "quotient-floor"}),
        ("no-power-of-two", "scales are not rounded to powers of two",
         "quotient", {"scale.rule": "quotient"}),
        ("power-of-two-up", "scales are rounded up to powers of two",
         "quotient", {"scale.rule": "quotient", "scale": _power_up}),
        ("power-of-two-nearest", "scales are rounded to the nearest powers of two",
         "quotient", {"scale.rule": "quotient",
         "scale": lambda q, scale: torch.exp2(torch.log2(scale()).round())}),
    ],
    "infinite": [
        ("infinite-source", "an infinite scale becomes the largest number of the input's dtype",
         "quotient", {"scale.infinite": "source"}),
        ("infinite-float32", "an infinite scale becomes the largest float32",
         "quotient", {"scale.infinite": "float32"}),
    ],
    "stored": [
        ("bias-128", "codes of E8M0 have a bias of 128, not of 127",
         "E8M0", {"stored": lambda q, codes: (codes() + 1).clamp(0, 255)}),
        ("bias-126", "codes of E8M0 have a bias of 126, not of 127",
         "E8M0", {"stored": lambda q, codes: (codes() - 1).clamp(0, 255)}),
        ("multiplier-stored", "stored scales multiply when quantizing, and are not inverted",
         "unrounded", {"stored": _multiplier_stored}),
        ("amax-stored", "amaxes are stored, not scales",
         "quotient", {"inverse": _fixed(lambda q: q.raised)}),
    ],
    "byte": [
        ("block-truncated", "block scales are truncated to a byte",
         "rounded", {"byte": _fixed(lambda q: below(q.limited, q.steps.scale.format))}),
        ("block-up", "block scales are rounded up to a byte", "rounded", {"byte": _byte_above}),
        ("block-not-zero", "a block scale of 0 becomes the next one",
         "rounded", {"byte": lambda q, codes: codes().clamp(min=1)}),
    ],
    "maximum": [
        ("maximum-240", "the largest E4M3 is 240, as with infinities, not 448",
         "E4M3", _MAXIMUM_240),
        ("scale-240", "scales are made with 240, not with 448", "E4M3", {"scale.maximum": 240.0}),
        ("scale-e5m2", "scales are made with 57344, the largest E5M2",
         "E4M3", {"scale.maximum": 57344.0}),
        ("scale-e4m3", "scales are made with 448, the largest E4M3",
         "E5M2", {"scale.maximum": 448.0}),
        ("scale-4", "scales are made with 4, not with 6, the largest E2M1",
         "E2M1", {"scale.maximum": 4.0}),
    ],
    "overflow": [
        ("integer-least", "the least integer is used, too",
         "integer", {"element.least": lambda steps: -(steps.element.maximum + 1)}),
        ("overflow-nan", "what is beyond the largest element becomes NaN",
         "FP8", {"codes": _overflow(0x7F)}),
        ("overflow-inf", "what is beyond the largest element becomes infinite",
         "E5M2", {"codes": _overflow(0x7C)}),
    ],
    "product": [
        ("divided", "values are divided by scale_inv, not multiplied by scale",
         "float32", {"product": _fixed(lambda q: q.values / q.areas.spread(q.number))}),
    ],
    "undone": [
        ("block-unrounded", "elements are made with block scales that are not rounded to a byte",
         "rounded", {"multiplier": _fixed(lambda q: _finite(q.one / (q.limited * q.S_inv)))}),
        ("global-left-out", "elements are made without the global scale",
         "second level", {"multiplier": _fixed(lambda q: _finite(q.one / q.number))}),
        ("global-twice", "elements are multiplied by the global scale, not divided",
         "second level", {"multiplier": _fixed(lambda q: _finite(q.one / (q.number * q.S)))}),
        ("divided-by-both", "values are divided by scale * S_inv, not multiplied by the inverse",
         "rounded", {"multiplier": _fixed(lambda q: q.number * q.S_inv), **_DIVIDED}),
        ("divided-by-quotient", "values are divided by scale / S, not multiplied by its inverse",
         "rounded", {"multiplier": _fixed(lambda q: q.number / q.S), **_DIVIDED}),
        ("multiplied-by-quotient", "values are multiplied by S / scale, not by 1 / (scale * S_inv)",
         "rounded", {"multiplier": _fixed(lambda q: _finite(q.S / q.number))}),
    ],
    "rounding": [
        ("not-random", "elements are rounded to nearest, not at random",
         "random", {"random": None, "element.rounding": "nearest even"}),
        ("truncated", "elements are truncated, not rounded", "nearest even",
         {"places": _fixed(lambda q: below(q.saturated.abs(), q.steps.element.format))}),
        ("ties-away", "ties go away from zero, not to the even element",
         "nearest even", {"places": _ties(True)}),
        ("ties-to-zero", "ties go towards zero, not to the even element",
         "nearest even", {"places": _ties(False)}),
    ],
    "twice": [
        ("via-e4m3", "scaled values are rounded to E4M3 first: two roundings",
         "short of E4M3", {"scaled": _via("E4M3")}),
        ("via-e5m2", "scaled values are rounded to E5M2 first: two roundings",
         "short of E5M2", {"scaled": _via("E5M2")}),
    ],
    "subnormals": [
        ("flushed", "subnormal elements become zero", "float", {"places": _flushed}),
    ],
    "nan code": [
        ("nan-zero", "NaN becomes 0", "", {"element.nan": 0}),
        ("nan-largest", "NaN becomes the largest element", "E4M3", {"element.nan": 0x7E}),
        ("nan-quiet", "NaN has the code 0x7E", "E5M2", {"element.nan": 0x7E}),
        ("nan-signed", "NaN keeps its sign", "FP8", {"codes": _nan_signed}),
    ],
    "zero": [
        ("zero-unsigned", "zero has no sign", "float", {"element.zero": "unsigned"}),
    ],
    "level": [
        ("global-256", "the global scale is made with 256, not with 448",
         "", {"second_level.bound": 256.0}),
        ("global-448", "the global scale is made with 448, not with 256",
         "", {"second_level.bound": 448.0}),
        ("global-none", "there is no global scale", "", {"second_level": None}),
        ("global-rows", "each row has a global scale", "", {"second_level.over": (1, None)}),
        ("global-tensor", "the tensor has one global scale, not each row",
         "", {"second_level.over": (None, None)}),
        ("global-inverse", "S_inv = amax / (bound * maximum), and S = 1 / S_inv", "second level",
         {"level_scale": _fixed(lambda q: q.one / (q.level_amax / q.top)),
         "level_inverse": _fixed(lambda q: q.level_amax / q.top)}),
        ("global-reciprocal", "S = bound * maximum * (1 / amax), with a rounded reciprocal",
         "second level",
         {"level_scale": _fixed(lambda q: _finite(q.one / q.level_amax * q.top))}),
    ],
    "candidates": [
        ("candidates-mse", "candidates are compared by squares, not by magnitudes",
         "", {"candidates.error": "MSE"}),
        ("candidates-mae", "candidates are compared by magnitudes, not by squares",
         "", {"candidates.error": "MAE"}),
        ("candidates-none", "there is no choice among scales", "", {"candidates": None}),
    ],
    "equal candidates": [
        ("candidates-last", "the last one of equal candidates is taken: <= for <",
         "", {"candidates.ties": "last"}),
    ],
    "nan": [
        ("amax-nan", "a NaN becomes the amax of its block", "", {"amax.nan": "propagates"}),
    ],
    "amax": [
        ("amax-signed", "an amax is the largest value, not the largest magnitude",
         "", {"magnitudes": _fixed(lambda q: q.values.clamp(min=0))}),
    ],
    "area": [
        ("area-none", "each block has an amax of its own, not that of a square",
         "", {"amax.area": None}),
        ("area-square", "the blocks of a square share an amax", "blocks", {"amax.area": _square}),
    ],
    "block": [
        ("block-other-dimension", "blocks lie along the other dimension",
         "", _block(lambda steps: steps.amax.block[::-1])),
        ("block-tensor", "the tensor has one scale", "", _block((None, None))),
        ("block-row", "each row has one scale", "", _block((1, None))),
        ("block-column", "each column has one scale", "", _block((None, 1))),
        ("block-tile", "each tile of 128 x 128 has one scale", "", _block((128, 128))),
    ],
    "transform": [
        ("transform-unsigned", "the Hadamard transform has no signs",
         "", {"transform.signs": "0x0"}),
        ("transform-none", "there is no Hadamard transform", "", {"transform": None}),
        ("transform-added", "groups of 16 go through a Hadamard transform",
         "untransformed E2M1", {"transform": _RHT}),
        ("transform-unscaled", "the Hadamard transform is not divided by the root of its size",
         "transform", {"transform_factor": _fixed(lambda q: q.one)}),
    ],
    "nibbles": [
        ("nibbles", "the halves of bytes are exchanged", "", {"storage.first":
         lambda steps: "low" if steps.storage.first == "high" else "high"}),
        ("one-in-a-byte", "each element has a byte of its own", "", {"storage.per_byte": 1}),
    ],
    "held": [
        ("held-other", "data and scales are those of the transpose, or not of it",
         "", {"storage.held":
         lambda steps: "tensor" if steps.storage.held == "transpose" else "transpose"}),
    ],
}
# fmt: on
_EPSILONS = (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
_16_BITS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _crossed() -> Iterator[Turn]:
    """Turns with a number or a dtype."""
    for size in (16, 32, 64, 128):
        says = f"blocks have {size} elements along the summed dimension"
        yield Turn(f"block-{size}", "block", says, edits=_block(_long(size)))
    for epsilon in _EPSILONS:
        says = f"an amax below {epsilon:g} is replaced by it"
        edits = {"scale.epsilon": epsilon}
        yield Turn(f"epsilon-{epsilon:g}", "epsilon", says, edits=edits)
        says = f"{epsilon:g} is added to each amax"
        yield Turn(f"added-{epsilon:g}", "epsilon", says, edits={"raised": _added(epsilon)})
    for name in _16_BITS:
        yield from _rounded(name, _in(_16_BITS[name]))


def _added(epsilon: float) -> Way:
    return lambda made, usual: usual() + torch.tensor(epsilon)


def _rounded(dtype: str, way: Way) -> Iterator[Turn]:
    """Turns that round a quantity to a dtype of 16 bits."""

    def rounded(formula: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        return lambda made: way(made, lambda: formula(made))

    inverse = rounded(lambda q: q.one / q.level_amax)
    reciprocal = _fixed(rounded(lambda q: inverse(q) * q.top))
    quotient = rounded(lambda q: q.finite / q.maximum)
    divided = _fixed(lambda q: quotient(q) * q.S * q.factor)
    both = _fixed(rounded(lambda q: q.number * q.S_inv))
    inverted = _fixed(lambda q: q.one / q.inverse)
    # fmt: off
    rows: list[tuple[str, str, str, str, Mapping[str, Any]]] = [
        ("source", "source", "values are rounded to {} first", "", {"source.rounded_to": dtype}),
        ("amax", "amax", "amaxes are rounded to {}", "", {"amax": way}),
        ("product", "twice", "scaled values are rounded to {} first: two roundings",
         "", {"scaled": way}),
        ("global", "level", "the global scale is rounded to {}",
         "second level", {"level_scale": way}),
        ("global-reciprocal", "level", "S = bound * maximum * (1 / amax), with both operations in "
         "{}", "second level", {"level_scale": reciprocal}),
        ("block-divided", "scale", "amax / maximum is rounded to {} before it is multiplied by S",
         "rounded", {"exact": divided}),
        ("divided", "undone", "values are divided by scale * S_inv, rounded to {}",
         "rounded", {"multiplier": both, **_DIVIDED}),
        ("byte", "byte", "scales are rounded to {} before they are rounded to a byte",
         "rounded", {"limited": way}),
        ("stored", "narrow", "stored scales are rounded to {}, and elements are made with "
         "unrounded ones", "float32", {"inverse": way}),
        ("scale", "narrow", "stored scales are rounded to {}, and elements are made with these",
         "float32", {"inverse": way, "multiplier": inverted}),
        ("multiplier", "narrow", "scales are rounded to {} before they are inverted",
         "quotient", {"scale": way}),
    ]
    # fmt: on
    for name, step, says, of, edits in rows:
        yield Turn(f"{name}-{dtype}", step, says.format(dtype), of, edits)


# It explains any second level, so that it comes last.
_OUTSIDE = Turn(
    "global-outside",
    "level",
    "the global scale is that of another amax than the tensor's, as of several tensors together",
    "second level",
    takes_stored=True,
)
#: All known wrong turns.
TURNS: tuple[Turn, ...] = (
    *(
        Turn(name, step, says, of, edits)
        for step, rows in _ROWS.items()
        for name, says, of, edits in rows
    ),
    *_crossed(),
    *(Turn(name, "laid out", says, view=view) for name, (says, view) in VIEWS.items()),
    _OUTSIDE,
)
