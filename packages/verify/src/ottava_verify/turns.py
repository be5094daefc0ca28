"""The wrong turns that quantizers take, as data.

A turn is one choice that somebody made in another way than a contract says. It changes fields of
the contract, takes another way in steps of the interpreter, or looks at stored tensors in another
way. Whether it explains given bytes is decided by computing them.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ottava.contract import Transform
from ottava_verify import ways
from ottava_verify.arrays import Interpreter
from ottava_verify.steps import Steps
from ottava_verify.views import VIEWS, View
from ottava_verify.ways import Way

When = Callable[[Steps], bool]
#: The turn that takes a second level as it was stored.
OUTSIDE = "global-outside"


@dataclass(frozen=True)
class Turn:
    """One wrong turn.

    Attributes:
        name: a word for programs.
        step: what it changes. The turns of one explanation change different steps.
        says: a clause for people: how the bytes were made.
        when: whether the contract of a direction has what it changes.
        fields: fields of the contract, ``"scale.rule"``, with other values, or functions of the
            direction that give them.
        ways: methods of the interpreter, with what they do instead.
        view: how stored tensors are looked at.
    """

    name: str
    step: str
    says: str
    when: When = field(hash=False)
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    ways: Mapping[str, Way] = field(default_factory=dict, hash=False)
    view: View | None = None

    def changed(self, choices: Steps) -> Steps | None:
        """The choices with other fields; None where the turn does not apply, or changes nothing."""
        if not self.when(choices):
            return None
        result = choices
        for path, given in self.fields.items():
            step, _, name = path.partition(".")
            value = given(choices) if callable(given) else given
            before = getattr(result, step)
            if name and before is None:
                return None
            result = result._replace(**{step: replace(before, **{name: value}) if name else value})
        return None if self.fields and result == choices else result


def interpreter(turns: Sequence[Turn]) -> type[Interpreter]:
    """The interpreter that takes the ways of some turns."""
    taken: Any = Interpreter
    for turn in turns:
        if turn.ways:
            methods = {name: _method(taken, name, way) for name, way in turn.ways.items()}
            taken = type("Turned", (taken,), methods)
    result: type[Interpreter] = taken
    return result


def _method(base: type[Interpreter], name: str, way: Way) -> Way:
    step = getattr(base, name)

    def method(self: Interpreter, *arguments: Any) -> Any:
        return way(self, functools.partial(step, self), *arguments)

    return method


def _edit(name: str, step: str, says: str, when: When, **fields: Any) -> Turn:
    """A turn of fields, whose dots are written as two underscores."""
    return Turn(name, step, says, when, {path.replace("__", "."): v for path, v in fields.items()})


def _way(name: str, step: str, says: str, when: When, **taken: Way) -> Turn:
    return Turn(name, step, says, when, ways=taken)


# Conditions.


def _always(choices: Steps) -> bool:
    return True


def _of_element(*names: str) -> When:
    return lambda choices: choices.element.format in names


def _float(choices: Steps) -> bool:
    return choices.scale.format == "float32"


def _divides(choices: Steps) -> bool:
    return choices.scale.rule.startswith("quotient")


def _e8m0(choices: Steps) -> bool:
    return choices.scale.format == "E8M0"


def _byte(choices: Steps) -> bool:
    return choices.scale.rule == "rounded"


def _levels(choices: Steps) -> bool:
    return choices.second_level is not None


def _packed(choices: Steps) -> bool:
    return choices.storage.per_byte == 2


def _plain(choices: Steps) -> bool:
    return choices.transform is None and choices.element.format == "E2M1"


def _random(choices: Steps) -> bool:
    return choices.random is not None


def _nearest(choices: Steps) -> bool:
    return choices.random is None


def _candidates(choices: Steps) -> bool:
    return choices.candidates is not None


def _blocks(choices: Steps) -> bool:
    return None not in choices.amax.block


_E4M3, _E5M2, _E2M1 = _of_element("E4M3"), _of_element("E5M2"), _of_element("E2M1")
_FP8, _SIGNED = _of_element("E4M3", "E5M2"), _of_element("E4M3", "E5M2", "E2M1", "E2M3", "E3M2")
_SHORT, _INTEGER = _of_element("E2M1", "E2M3", "E3M2", "E5M2"), _of_element("INT8", "INT4")

# Other values of fields.

_RHT = Transform(
    16, "0x5bd0", "sylvester", "butterfly 1 2 4", "float32(1/sqrt(size))", "source", "zeros"
)


def _square(choices: Steps) -> tuple[int, int]:
    size = max(side or 1 for side in choices.amax.block)
    return size, size


def _turned(choices: Steps) -> tuple[int | None, int | None]:
    rows, columns = choices.amax.block
    return columns, rows


def _long(size: int) -> Callable[[Steps], tuple[int | None, int | None]]:
    """Blocks of another length along the summed dimension."""

    def block(choices: Steps) -> tuple[int | None, int | None]:
        rows, columns = choices.amax.block
        return (rows, size) if columns != 1 and rows is not None else (size, columns)

    return block


def _other_half(choices: Steps) -> str:
    return "low" if choices.storage.first == "high" else "high"


def _other_matrix(choices: Steps) -> str:
    return "tensor" if choices.storage.held == "transpose" else "transpose"


def _one_more(choices: Steps) -> float:
    return -(choices.element.maximum + 1)


# The table.

_OF_TRANSFORMS = (
    _edit("transform-unsigned", "transform", "the Hadamard transform has no signs", _always,
          transform__signs="0x0"),
    _way("transform-unscaled", "transform", "the Hadamard transform is not divided by the root of "
         "its size", lambda choices: choices.transform is not None, factor=lambda *_: 1.0),
    _edit("transform-none", "transform", "there is no Hadamard transform", _always, transform=None),
    _edit("transform-added", "transform", "groups of 16 go through a Hadamard transform", _plain,
          transform=_RHT),
)  # fmt: skip
_OF_AMAXES = (
    _edit("amax-nan", "nan", "a NaN becomes the amax of its block", _always,
          amax__nan="propagates"),
    _way("amax-signed", "amax", "an amax is the largest value, not the largest magnitude", _always,
         magnitudes=ways.largest_value),
    _edit("area-none", "area", "each block has an amax of its own, not that of a square", _always,
          amax__area=None),
    _edit("area-square", "area", "the blocks of a square share an amax", _blocks,
          amax__area=_square),
    _edit("block-other-dimension", "block", "blocks lie along the other dimension", _always,
          amax__block=_turned, amax__area=None),
    _edit("block-tensor", "block", "the tensor has one scale", _always, amax__block=(None, None),
          amax__area=None),
    _edit("block-row", "block", "each row has one scale", _always, amax__block=(1, None),
          amax__area=None),
    _edit("block-column", "block", "each column has one scale", _always, amax__block=(None, 1),
          amax__area=None),
    _edit("block-tile", "block", "each tile of 128 x 128 has one scale", _always,
          amax__block=(128, 128), amax__area=None),
)  # fmt: skip
_OF_LEVELS = (
    _edit("global-256", "level", "the global scale is made with 256, not with 448", _always,
          second_level__bound=256.0),
    _edit("global-448", "level", "the global scale is made with 448, not with 256", _always,
          second_level__bound=448.0),
    _edit("global-none", "level", "there is no global scale", _always, second_level=None),
    _edit("global-rows", "level", "each row has a global scale", _always,
          second_level__over=(1, None)),
    _edit("global-tensor", "level", "the tensor has one global scale, not each row", _always,
          second_level__over=(None, None)),
    _way("global-inverse", "level", "S_inv = amax / (bound * maximum), and S = 1 / S_inv", _levels,
         second_level=ways.level_inverse_first),
    _way("global-reciprocal", "level", "S = bound * maximum * (1 / amax), with a rounded "
         "reciprocal", _levels, second_level=ways.level_reciprocal),
    _way("global-inverted", "scale", "block scales are divided by the global scale, not multiplied",
         _levels, exact_scales=ways.level_inverted),
    _way("global-left-out", "undone", "elements are made without the global scale", _levels,
         undone=ways.level_left_out),
    _way("global-twice", "undone", "elements are multiplied by the global scale, not divided",
         _levels, undone=ways.level_twice),
)  # fmt: skip
_OF_FLOAT_SCALES = (
    _way("reciprocal", "scale", "scale = maximum * (1 / amax), with a rounded reciprocal", _divides,
         quotients=ways.reciprocal),
    _way("inverse-product", "scale", "scale_inv = amax * (1 / maximum), and scale = 1 / scale_inv",
         _divides, quotients=ways.quotient_of_product, inverses=ways.inverse_product),
    _way("inverse-quotient", "scale", "scale_inv = amax / maximum, and scale = 1 / scale_inv",
         _divides, quotients=ways.quotient_of_inverse, inverses=ways.inverse_quotient),
    _way("two-quotients", "scale", "scale_inv = amax / maximum, and scale = maximum / amax",
         _divides, inverses=ways.inverse_quotient),
    _way("quotient-product", "scale", "scale_inv = amax * (1 / maximum), and scale = maximum / "
         "amax", _divides, inverses=ways.inverse_product),
    _edit("power-of-two", "power", "scales are rounded down to powers of two", _divides,
          scale__rule="quotient-floor"),
    _edit("no-power-of-two", "power", "scales are not rounded to powers of two", _divides,
          scale__rule="quotient"),
    _way("power-of-two-up", "power", "scales are rounded up to powers of two", _divides,
         float_scales=ways.power_up),
    _way("power-of-two-nearest", "power", "scales are rounded to the nearest powers of two",
         _divides, float_scales=ways.power_nearest),
    _edit("infinite-source", "infinite", "an infinite scale becomes the largest number of the "
          "input's dtype", _divides, scale__infinite="source"),
    _edit("infinite-float32", "infinite", "an infinite scale becomes the largest float32", _divides,
          scale__infinite="float32"),
    _way("multiplier-stored", "stored", "stored scales multiply when quantizing, and are not "
         "inverted", lambda choices: not _byte(choices), scales=ways.multiplier_stored),
    _way("amax-stored", "stored", "amaxes are stored, not scales", _divides,
         inverses=ways.amax_stored),
)  # fmt: skip
_OF_BYTE_SCALES = (
    _edit("scale-up", "scale", "scales agree with `up`: the exponent of amax / maximum, rounded up",
          _e8m0, scale__rule="up"),
    _edit("scale-floor", "scale", "scales agree with `floor`: the exponent of amax less that of "
          "the largest element", _e8m0, scale__rule="floor"),
    _edit("scale-even", "scale", "scales agree with `even`: as floor, of a rounded amax", _e8m0,
          scale__rule="even"),
    _edit("scale-nearest", "scale", "scales agree with `nearest`: the nearest power of two", _e8m0,
          scale__rule="nearest"),
    _way("scale-even-e2m1", "scale", "scales agree with `even` of E2M1: a quarter is added to the "
         "mantissa of amax", _e8m0, exponent_codes=ways.even_of_e2m1),
    _way("bias-128", "stored", "codes of E8M0 have a bias of 128, not of 127", _e8m0,
         scales=ways.shifted(1)),
    _way("bias-126", "stored", "codes of E8M0 have a bias of 126, not of 127", _e8m0,
         scales=ways.shifted(-1)),
    _way("block-divided", "scale", "block scales are (amax / maximum) * S, not amax * (S * (1 / "
         "maximum))", _byte, exact_scales=ways.divided_first),
    _way("block-divided-inverse", "scale", "block scales are (amax / maximum) / S_inv, not amax * "
         "(S * (1 / maximum))", _byte, exact_scales=ways.divided_by_inverse),
    _way("block-divided-last", "scale", "block scales are (amax * S) / maximum, not amax * (S * (1 "
         "/ maximum))", _byte, exact_scales=ways.divided_last),
    _way("block-unrounded", "undone", "elements are made with block scales that are not rounded to "
         "a byte", _byte, byte_scales=ways.exact_multiplier),
    _way("block-truncated", "byte", "block scales are truncated to a byte", _byte,
         scale_codes=ways.byte_below),
    _way("block-up", "byte", "block scales are rounded up to a byte", _byte,
         scale_codes=ways.byte_above),
    _way("block-not-zero", "byte", "a block scale of 0 becomes the next one", _byte,
         scale_codes=ways.byte_not_zero),
)  # fmt: skip
_OF_LIMITS = (
    _edit("maximum-240", "maximum", "the largest E4M3 is 240, as with infinities, not 448", _E4M3,
          scale__maximum=240.0, element__maximum=240.0, element__least=-240.0),
    _edit("scale-240", "maximum", "scales are made with 240, not with 448", _E4M3,
          scale__maximum=240.0),
    _edit("scale-e5m2", "maximum", "scales are made with 57344, the largest E5M2", _E4M3,
          scale__maximum=57344.0),
    _edit("scale-e4m3", "maximum", "scales are made with 448, the largest E4M3", _E5M2,
          scale__maximum=448.0),
    _edit("scale-4", "maximum", "scales are made with 4, not with 6, the largest E2M1", _E2M1,
          scale__maximum=4.0),
    _way("overflow-nan", "overflow", "what is beyond the largest element becomes NaN", _FP8,
         elements=ways.overflow(0x7F)),
    _way("overflow-inf", "overflow", "what is beyond the largest element becomes infinite", _E5M2,
         elements=ways.overflow(0x7C)),
    _edit("integer-least", "overflow", "the least integer is used, too", _INTEGER,
          element__least=_one_more),
)  # fmt: skip
_OF_CANDIDATES = (
    _edit("candidates-mse", "candidates", "candidates are compared by squares, not by magnitudes",
          _always, candidates__error="MSE"),
    _edit("candidates-mae", "candidates", "candidates are compared by magnitudes, not by squares",
          _always, candidates__error="MAE"),
    _edit("candidates-none", "candidates", "there is no choice among scales", _always,
          candidates=None),
    _way("candidates-last", "equal candidates", "the last one of equal candidates is taken: <= for "
         "<", _candidates, is_better=ways.last_of_equals),
)  # fmt: skip
_OF_ELEMENTS = (
    _way("divided", "product", "values are divided by scale_inv, not multiplied by scale", _float,
         multiplied=ways.divided),
    _way("divided-by-both", "undone", "values are divided by scale * S_inv, not multiplied by the "
         "inverse", _byte, undone=ways.not_inverted(torch.float32),
         multiplied=ways.divided_by_multiplier),
    _way("divided-by-quotient", "undone", "values are divided by scale / S, not multiplied by its "
         "inverse", _byte, undone=ways.number_over_scale, multiplied=ways.divided_by_multiplier),
    _way("multiplied-by-quotient", "undone", "values are multiplied by S / scale, not by 1 / "
         "(scale * S_inv)", _byte, undone=ways.scale_over_number),
    _way("truncated", "rounding", "elements are truncated, not rounded", _nearest,
         places=ways.truncated),
    _way("ties-away", "rounding", "ties go away from zero, not to the even element", _nearest,
         places=ways.ties(True)),
    _way("ties-to-zero", "rounding", "ties go towards zero, not to the even element", _nearest,
         places=ways.ties(False)),
    _edit("not-random", "rounding", "elements are rounded to nearest, not at random", _random,
          random=None, element__rounding="nearest even"),
    _way("via-e4m3", "twice", "scaled values are rounded to E4M3 first: two roundings", _SHORT,
         elements=ways.via_format("E4M3")),
    _way("via-e5m2", "twice", "scaled values are rounded to E5M2 first: two roundings",
         _of_element("E2M1", "E4M3"), elements=ways.via_format("E5M2")),
    _way("flushed", "subnormals", "subnormal elements become zero", _SIGNED, places=ways.flushed),
    _edit("nan-zero", "nan code", "NaN becomes 0", _always, element__nan=0),
    _edit("nan-largest", "nan code", "NaN becomes the largest element", _E4M3, element__nan=0x7E),
    _edit("nan-quiet", "nan code", "NaN has the code 0x7E", _E5M2, element__nan=0x7E),
    _way("nan-signed", "nan code", "NaN keeps its sign", _FP8, elements=ways.nan_signed),
    _way("zero-unsigned", "zero", "zero has no sign", _SIGNED, signed=ways.zero_unsigned),
)  # fmt: skip
_OF_STORAGE = (
    _edit("nibbles", "nibbles", "the halves of bytes are exchanged", _packed,
          storage__first=_other_half),
    _edit("held-other", "held", "data and scales are those of the transpose, or not of it", _always,
          storage__held=_other_matrix),
    _edit("one-in-a-byte", "nibbles", "each element has a byte of its own", _packed,
          storage__per_byte=1),
)  # fmt: skip
_EPSILONS = (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


def _families() -> Iterator[Turn]:
    """Turns with a number or a dtype."""
    for size in (16, 32, 64, 128):
        says = f"blocks have {size} elements along the summed dimension"
        yield _edit(f"block-{size}", "block", says, _always, amax__block=_long(size),
                    amax__area=None)  # fmt: skip
    for epsilon in _EPSILONS:
        says = f"an amax below {epsilon:g} is replaced by it"
        yield _edit(f"epsilon-{epsilon:g}", "epsilon", says, _always, scale__epsilon=epsilon)
        says = f"{epsilon:g} is added to each amax"
        yield _way(f"added-{epsilon:g}", "epsilon", says, _always, raised=ways.added(epsilon))
    for name in ("bfloat16", "float16"):
        yield from _roundings(name, getattr(torch, name))


def _roundings(name: str, dtype: torch.dtype) -> Iterator[Turn]:
    """Turns that round something to a dtype of 16 bits."""
    says = f"values are rounded to {name} first"
    yield _edit(f"source-{name}", "source", says, _always, source__rounded_to=name)
    says = f"amaxes are rounded to {name}"
    yield _way(f"amax-{name}", "amax", says, _always, amaxes=ways.result_in(dtype))
    says = f"scaled values are rounded to {name} first: two roundings"
    yield _way(f"product-{name}", "twice", says, _always, multiplied=ways.result_in(dtype))
    says = f"the global scale is rounded to {name}"
    yield _way(f"global-{name}", "level", says, _levels, second_level=ways.level_in(dtype))
    says = f"S = bound * maximum * (1 / amax), with both operations in {name}"
    way = ways.level_reciprocal_in(dtype)
    yield _way(f"global-reciprocal-{name}", "level", says, _levels, second_level=way)
    says = f"amax / maximum is rounded to {name} before it is multiplied by S"
    way = ways.divided_in(dtype)
    yield _way(f"block-divided-{name}", "scale", says, _byte, exact_scales=way)
    says = f"values are divided by scale * S_inv, rounded to {name}"
    undone, product = ways.not_inverted(dtype), ways.divided_by_multiplier
    yield _way(f"divided-{name}", "undone", says, _byte, undone=undone, multiplied=product)
    says = f"scales are rounded to {name} before they are rounded to a byte"
    yield _way(f"byte-{name}", "byte", says, _byte, scale_codes=ways.byte_via(dtype))
    says = f"stored scales are rounded to {name}, and elements are made with "
    way = ways.stored_in(dtype, used=False)
    yield _way(f"stored-{name}", "narrow", f"{says}unrounded ones", _float, scales=way)
    way = ways.stored_in(dtype, used=True)
    yield _way(f"scale-{name}", "narrow", f"{says}these", _float, scales=way)
    says = f"scales are rounded to {name} before they are inverted"
    yield _way(f"multiplier-{name}", "narrow", says, _divides, float_scales=ways.result_in(dtype))


# It explains any second level, so that it comes last.
_OUTSIDE = _way(
    OUTSIDE,
    "level",
    "the global scale is that of another amax than the tensor's, as of several tensors together",
    _levels,
    second_level=ways.level_from_outside,
)
#: All known wrong turns.
TURNS: tuple[Turn, ...] = (
    *_OF_BYTE_SCALES,
    *_OF_FLOAT_SCALES,
    *_OF_LIMITS,
    *_OF_ELEMENTS,
    *_OF_LEVELS,
    *_OF_CANDIDATES,
    *_OF_AMAXES,
    *_OF_TRANSFORMS,
    *_OF_STORAGE,
    *_families(),
    *(Turn(name, "laid out", says, _always, view=view) for name, says, view in VIEWS),
    _OUTSIDE,
)
