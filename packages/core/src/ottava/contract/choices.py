"""The choices of one usage, step by step, each with what it says."""

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
    "quotient": "scale = maximum / amax, and 1 if the amax is 0 or infinite; its inverse is stored",
    "quotient-floor": "as quotient, and the mantissa of the scale is cleared before it is inverted",
    "given": "scale is a float32 from outside, and its inverse is stored",
    "given-fitting": "the smaller one of a float32 from outside and the scale of quotient",
    "up": "code of E8M0: the exponent of amax * float32(1 / maximum), plus 127; one more if its "
    "mantissa is not 0, but for subnormals up to 2^-127; limited to 0 and 254; 254 for infinity",
    "floor": "code of E8M0: the exponent of amax minus that of maximum, plus 127; limited to 0 and "
    "254; 254 for infinity",
    "even": "as floor, of the amax with half of the unit in the last place of an element added to "
    "its bits",
    "nearest": "code of E8M0: log2 of amax * float32(1 / maximum), to the nearest integer, plus "
    "127; limited to 0 and 254; 254 for infinity",
    "rounded": "min(amax, FLT_MAX) * (S * float32(1 / maximum)), or with candidates "
    "(min(amax, FLT_MAX) / maximum) * S times the factor; at most the largest scale, rounded to "
    "nearest even",
}
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

    size: Annotated[int, "elements of a group along the summed dimension"]
    signs: Annotated[str, "hexadecimal: the sign of element i is minus where bit i is set"]
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
    """Step 3: the largest magnitude of a block; 0 for an empty one."""

    block: Annotated[Sides, "rows and columns of the tensor that have one amax"]
    area: Annotated[Sides | None, "rows and columns whose blocks all have the largest amax of them"]
    nan: Annotated[Literal["ignored", "propagates"], "what a NaN does"]
    ranks: Annotated[
        Literal["this", "group"],
        "whether amaxes that span rows are those of all ranks",
    ]


@dataclass(frozen=True)
class SecondLevel:
    """Step 4: ``S = min(bound * maximum / amax, FLT_MAX)``, ``S_inv = 1 / S``."""

    over: Annotated[Sides, "rows and columns of the tensor that have one S"]
    bound: Annotated[float, "the scale that S gives to the block with the largest amax"]
    maximum: Annotated[float, "the largest element"]


@dataclass(frozen=True)
class Scale:
    """Step 5: the scale of a block, from its amax."""

    format: Annotated[Literal["float32", "E8M0", "E4M3", "UE5M3"], "of the stored scale"]
    rule: Annotated[str, _RULES_SAY]
    maximum: Annotated[float, "the largest element, in the formula of the rule"]
    epsilon: Annotated[float, "a smaller amax is replaced by it"]
    infinite: Annotated[
        Literal["float32", "source", "none"],
        "an infinite quotient becomes the largest number of float32, or of the input's dtype",
    ]
    multiplier: Annotated[
        Literal["scale", "2^(127-code)", "min(1/(scale*S_inv), FLT_MAX)"],
        "what values are multiplied by",
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
        "float32 factors of the scale before it is rounded; of the amax, for scales that are "
        "float32 or E8M0",
    ]
    error: Annotated[Literal["MAE", "MSE"], "magnitudes, or squares, of decoded minus value"]
    decoded: Annotated[
        Literal["((element*scale)*amax)/(maximum*bound)", "element*scale"],
        "the value that a candidate's error is of",
    ]
    sums: Annotated[
        Literal["columns in order, rows by halves"],
        "over the block, of the tensor's rows",
    ]
    ties: Annotated[Literal["first"], "which of equal errors wins"]


@dataclass(frozen=True)
class Element:
    """Step 6: ``element = rounded(value * multiplier)``."""

    format: Annotated[
        Literal["E4M3", "E5M2", "E2M1", "E2M3", "E3M2", "INT8", "INT4", "MXINT8", "MXINT8S"],
        "the numbers, as the OCP specifications define them",
    ]
    bits: Annotated[int, "of a code"]
    maximum: Annotated[float, "a larger magnitude, infinities included, becomes this number"]
    least: Annotated[float, "a smaller number becomes this one"]
    rounding: Annotated[Literal["nearest even", "stochastic"], "to a neighbour"]
    nan: Annotated[int, "the code that NaN becomes"]
    zero: Annotated[Literal["signed", "unsigned"], "whether the sign of zero is kept"]


@dataclass(frozen=True)
class Random:
    """Step 6, where elements are rounded at random: away from zero if the word is less than
    ``floor(share * 2^32)``, for a value that lies the share of the way to that neighbour."""

    generator: Annotated[Literal["philox4x32-10"], "of Salmon and others, 2011"]
    key: Annotated[Literal["seed"], "64 bits, low word first"]
    word: Annotated[
        Literal["place % 4 of block place // 4"],
        "place: row * columns + column of the element in the whole tensor",
    ]
    counter: Annotated[Literal["block, stream"], "64 bits of each, low words first"]
    stream: Annotated[int, "0 or 1"]


@dataclass(frozen=True)
class Storage:
    """Step 7: the bytes, row by row."""

    held: Annotated[Literal["tensor", "transpose"], "which matrix the stored data are"]
    per_byte: Annotated[Literal[1, 2], "elements in a byte"]
    first: Annotated[Literal["low", "high"], "the half of a byte that the even element has"]
    odd: Annotated[Literal["zero"], "the other half of an odd last element"]
    scales: Annotated[Literal["unpadded"], "the shape of the scales: that of the grid of blocks"]


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
