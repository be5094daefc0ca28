"""The choices of one usage, step by step, each with what it says."""

import struct
from dataclasses import dataclass
from typing import Annotated, Literal

#: The version of the fields and of the meaning of their words.
VERSION: Literal[1] = 1
#: What nobody has said about a choice.
UNSTATED: Literal["unstated"] = "unstated"
#: Rows and columns of the tensor, where null means all.
Sides = tuple[int | None, int | None]
Unstated = Literal["unstated"]

#: The rules of :class:`Scale`, with what each says. ``amax`` is a block's, ``S`` that of step 4.
RULES = {
    "quotient": "scale = maximum / amax, and 1 if the amax is 0, infinite or NaN; its inverse is "
    "stored",
    "quotient-floor": "scale = maximum / amax, and 1 if the amax is 0, infinite or NaN; the bits "
    "of its mantissa are cleared, so that a subnormal scale becomes 0; its inverse is stored",
    "given": "scale is a float32 from outside, and its inverse is stored",
    "given-fitting": "scale is the smaller one of a float32 from outside and maximum / amax, which "
    "is 1 if the amax is 0, infinite or NaN; its inverse is stored",
    "up": "code of E8M0: 127 plus the exponent of the least power of two that is not below amax * "
    "float32(1 / maximum); limited to 0 and 254; of an infinite amax 254, of NaN 255",
    "floor": "code of E8M0: the exponent of amax minus that of maximum, plus 127; limited to 0 and "
    "254; of an infinite amax 254, of NaN 255",
    "even": "code of E8M0: to the bits of amax 2^(22 - m) is added, where m is the mantissa bits "
    "of an element, and bits - 2 of an integer; then the exponent minus that of maximum, plus 127; "
    "limited to 0 and 254; of an infinite amax 254, of NaN 255",
    "nearest": "code of E8M0: the exponent of amax * float32(1 / maximum), one more if its "
    "mantissa is above the root of 2, plus 127; limited to 0 and 254; of an infinite amax 254, of "
    "NaN 255",
    "rounded": "min(amax, FLT_MAX) * (S * float32(1 / maximum)), or with candidates "
    "(min(amax, FLT_MAX) / maximum) * S times the factor; at most the largest number of the "
    "format, rounded to nearest even; NaN of NaN",
}
#: Limits of numbers: sides of blocks, and what values are divided by.
_SIDE = {"minimum": 1}
_POSITIVE = {"exclusiveMinimum": 0.0, "maximum": struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]}
#: Before the name of a rule that somebody has registered, and whose formula is not stated.
OWN = "own:"
_RULES_SAY = "from amax to scale: " + "; ".join(f"{name}: {text}" for name, text in RULES.items())
_RULES_SAY += "; own:NAME: a function that is registered under this name"


@dataclass(frozen=True)
class Source:
    """Step 1: what values are quantized."""

    arithmetic: Annotated[
        Literal["float32"],
        "the dtype of all steps, into which values go exactly",
    ]
    rounded_to: Annotated[
        Literal["none", "bfloat16", "float16"],
        "a dtype that values are rounded to first, whatever dtype they have",
    ]


@dataclass(frozen=True)
class Transform:
    """Step 2: a Hadamard transform of groups, ``x * diag(signs) * H / sqrt(size)``."""

    size: Annotated[
        int, "elements of a group along the summed dimension", {"enum": [16, 32, 64, 128]}
    ]
    signs: Annotated[
        str,
        "hexadecimal: the sign of element i is minus where bit i is set",
        {"pattern": "^0x[0-9a-f]{1,32}$"},
    ]
    matrix: Annotated[Literal["sylvester"], "H: of [1], each time [[H, H], [H, -H]]"]
    sums: Annotated[Literal["butterfly 1 2 4"], "(a + b, a - b) at strides 1, 2, 4 and so on"]
    factor: Annotated[Literal["float32(1/sqrt(size))"], "the sums are multiplied by it, at the end"]
    rounded_to: Annotated[
        Literal["source"],
        "the transformed values are rounded to the input's dtype",
    ]
    padding: Annotated[Literal["zeros"], "a ragged last group is padded, and the padding is stored"]


@dataclass(frozen=True)
class Amax:
    """Step 3: the largest magnitude of a block; 0 for an empty one.

    Blocks begin at the first row and column; the last ones may be smaller. Where a side is null
    there is one block, even if the tensor is empty. The padding of step 2 belongs to the tensor.
    """

    block: Annotated[Sides, "rows and columns of the tensor that have one scale", _SIDE]
    area: Annotated[
        Sides | None,
        "rows and columns whose blocks all have the largest amax of them, and one scale",
        _SIDE,
    ]
    nan: Annotated[Literal["ignored", "propagates"], "what a NaN does"]
    ranks: Annotated[
        Literal["this", "group"],
        "whether amaxes that span rows are those of all ranks",
    ]


@dataclass(frozen=True)
class SecondLevel:
    """Step 4: ``S = min(float32(bound * maximum) / min(amax, FLT_MAX), FLT_MAX)``, and
    ``S_inv = 1 / S``. The amax ignores NaN; an amax of 0 gives FLT_MAX. ``min(amax, FLT_MAX)`` is
    stored."""

    over: Annotated[Sides, "rows and columns of the tensor that have one S", _SIDE]
    bound: Annotated[float, "the scale that S gives to the block with the largest amax", _POSITIVE]
    maximum: Annotated[float, "the largest element", _POSITIVE]


@dataclass(frozen=True)
class Scale:
    """Step 5: the scale of a block, from its amax."""

    format: Annotated[
        Literal["float32", "E8M0", "E4M3", "UE5M3"],
        "of the stored scale. E8M0: 2^(code - 127), and NaN for 255. E4M3: as OCP defines it. "
        "UE5M3: 5 bits of exponent with bias 15 and 3 of mantissa, no sign, and NaN for 255",
    ]
    rule: Annotated[str, _RULES_SAY, {"pattern": f"^({'|'.join(RULES)}|{OWN}.+)$"}]
    maximum: Annotated[float, "the largest element, in the formula of the rule", _POSITIVE]
    epsilon: Annotated[
        float, "a smaller amax is replaced by it, rounded to float32", {"minimum": 0.0}
    ]
    infinite: Annotated[
        Literal["float32", "source", "none"],
        "an infinite quotient becomes the largest number of float32, or of the input's dtype",
    ]
    multiplier: Annotated[
        Literal["scale", "2^(127-code)", "min(1/(scale*S_inv), FLT_MAX)"],
        "what values are multiplied by; S_inv is 1 without step 4",
    ]
    decoded: Annotated[
        Literal["element*stored", "(element*stored)*(amax/(maximum*bound))"],
        "what an element stands for: the stored scale multiplies",
    ]


@dataclass(frozen=True)
class Candidates:
    """Step 5, where several scales are tried, and the one with the least error is taken."""

    factors: Annotated[
        tuple[float, ...],
        "float32 factors of the scale before it is rounded; for scales that are float32 or E8M0 "
        "of the amax, before epsilon",
        _POSITIVE,
    ]
    error: Annotated[Literal["MAE", "MSE"], "magnitudes, or squares, of decoded minus value"]
    decoded: Annotated[
        Literal["((element*scale)*amax)/(maximum*bound)", "element*scale"],
        "the value that a candidate's error is of",
    ]
    sums: Annotated[
        Literal["columns in order, rows by halves", "rows in order, columns by halves"],
        "errors are added over the area, or the block without one: those of a row (a column) in "
        "order; then the second half of the sums to the first until one is left, after zeros to a "
        "power of two",
    ]
    ties: Annotated[Literal["first"], "of equal errors; a NaN is never less"]


@dataclass(frozen=True)
class Element:
    """Step 6: ``element = rounded(value * multiplier)``."""

    format: Annotated[
        Literal["E4M3", "E5M2", "E2M1", "E2M3", "E3M2", "INT8", "INT4", "MXINT8", "MXINT8S"],
        "E4M3 to E3M2: as OCP defines them, the sign first. INT8, INT4: integers in two's "
        "complement. MXINT8, MXINT8S: these times 2^-6",
    ]
    bits: Annotated[int, "of a code", {"enum": [4, 6, 8]}]
    maximum: Annotated[
        float, "a larger magnitude, infinities included, becomes this number", _POSITIVE
    ]
    least: Annotated[float, "a smaller number becomes this one", {"exclusiveMaximum": 0.0}]
    rounding: Annotated[Literal["nearest even", "stochastic"], "to a neighbour"]
    nan: Annotated[int, "the code that NaN becomes", {"minimum": 0, "maximum": 255}]
    zero: Annotated[Literal["signed", "unsigned"], "whether the sign of zero is kept"]


@dataclass(frozen=True)
class Random:
    """Step 6, where elements are rounded at random: away from zero if the word is less than
    ``floor(share * 2^32)``, for a value that lies the share of the way to that neighbour."""

    generator: Annotated[Literal["philox4x32-10"], "of Salmon and others, 2011"]
    key: Annotated[Literal["seed"], "64 bits, low word first"]
    word: Annotated[
        Literal["place % 4 of block place // 4"],
        "place: row * columns + column of the element in the whole tensor, whose columns count the "
        "padding of step 2",
    ]
    counter: Annotated[Literal["block, stream"], "64 bits of each, low words first"]
    stream: Annotated[int, "0 or 1", {"enum": [0, 1]}]


@dataclass(frozen=True)
class Storage:
    """Step 7: the bytes, row by row. float32 scales have the low byte first."""

    held: Annotated[Literal["tensor", "transpose"], "which matrix the stored data are"]
    per_byte: Annotated[Literal[1, 2], "elements in a byte"]
    first: Annotated[Literal["low", "high"], "the half of a byte that the even element has"]
    odd: Annotated[Literal["zero"], "the other half of an odd last element"]
    scales: Annotated[Literal["unpadded"], "the grid of blocks, of the matrix that is held"]


@dataclass(frozen=True)
class Direction:
    """The choices for the data of one usage. A step that nobody has stated is ``"unstated"``."""

    source: Annotated[Source | Unstated, "step 1"]
    transform: Annotated[Transform | Unstated | None, "step 2; null for none"]
    amax: Annotated[Amax | Unstated, "step 3"]
    second_level: Annotated[SecondLevel | Unstated | None, "step 4; null for none: S is 1"]
    scale: Annotated[Scale | Unstated, "step 5"]
    candidates: Annotated[Candidates | Unstated | None, "step 5; null for one scale"]
    element: Annotated[Element | Unstated, "step 6"]
    random: Annotated[Random | Unstated | None, "step 6; null for rounding to nearest"]
    storage: Annotated[Storage | Unstated, "step 7"]


#: The choices of one usage; ``"unstated"`` where a quantizer cannot say; ``"identity"`` where
#: values are kept as they come.
Choices = Direction | Literal["unstated", "identity"]
