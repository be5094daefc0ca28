"""The choices that a layout makes."""

from typing import Any, Literal

from ottava.contract.choices import (
    OWN,
    Amax,
    Candidates,
    Direction,
    Element,
    Random,
    Scale,
    SecondLevel,
    Source,
    Storage,
    Transform,
)
from ottava.formats import FloatFormat, IntegerFormat
from ottava.layout import OWN_RULES, SCALES, Layout


def choices_of(
    layout: Layout, columnwise: bool, ranks: Literal["this", "group"] = "this"
) -> Direction:
    """The choices of a quantizer that is a layout, for one usage.

    Args:
        ranks: whose amaxes decide scales that span rows.
    """
    return Direction(
        source=Source("float32", "none"),
        transform=_transform(layout, columnwise),
        amax=Amax(
            block=layout.block_of(columnwise),
            area=None if layout.shared is None else layout.block_of(columnwise, shared=True),
            nan="ignored",
            ranks=ranks,
        ),
        second_level=_second_level(layout, columnwise),
        scale=_scale(layout),
        candidates=_candidates(layout, columnwise),
        element=_element(layout),
        random=_random(layout, columnwise),
        storage=Storage(
            held="transpose" if columnwise and layout.transposed else "tensor",
            per_byte=2 if layout.elements_per_byte == 2 else 1,
            first="low",
            odd="zero",
            scales="unpadded",
        ),
    )


def _transform(layout: Layout, columnwise: bool) -> Transform | None:
    rotation = layout.rotation
    if rotation is None or not rotation.turns(columnwise):
        return None
    return Transform(
        size=rotation.size,
        signs=f"{rotation.signs:#x}",
        matrix="sylvester",
        sums="butterfly 1 2 4",
        factor="float32(1/sqrt(size))",
        rounded_to="source",
        padding="zeros",
    )


def _second_level(layout: Layout, columnwise: bool) -> SecondLevel | None:
    over = layout.block_of_amax(columnwise)
    if over is None:
        return None
    number = SCALES[layout.scale].number
    assert number is not None
    bound = number.max if layout.bound is None else layout.bound
    return SecondLevel(over, float(bound), float(layout.format.max))


#: Format of scales and rule of a layout -> the rule of the contract.
_RULES = {
    ("float32", "nearest"): "quotient",
    ("float32", "floor"): "quotient-floor",
    ("E4M3", "nearest"): "rounded",
    ("UE5M3", "nearest"): "rounded",
}
#: Format of scales -> the multiplier.
_MULTIPLIERS: dict[str, Any] = {"float32": "scale", "E8M0": "2^(127-code)"}
_OF_BYTES: Any = "min(1/(scale*S_inv), FLT_MAX)"


def _scale(layout: Layout) -> Scale:
    number = SCALES[layout.scale].number
    name: Any = "float32" if number is None else number.name
    rule = layout.rounding
    if rule in OWN_RULES:
        rule = OWN + rule
    infinite: Any = "none"
    if number is None:
        infinite = {"input": "source"}.get(layout.finite_as, layout.finite_as)
    return Scale(
        format=name,
        rule=_RULES.get((name, rule), rule),
        maximum=float(layout.format.max),
        epsilon=layout.epsilon,
        infinite=infinite,
        multiplier=_MULTIPLIERS.get(name, _OF_BYTES),
        decoded="element*stored"
        if layout.second_level == "none"
        else "(element*stored)*(amax/(maximum*bound))",
    )


def _candidates(layout: Layout, columnwise: bool) -> Candidates | None:
    if not layout.candidates:
        return None
    has_levels = layout.second_level != "none"
    # Both directions of squares choose alike.
    along_columns = columnwise and not layout.square
    return Candidates(
        factors=layout.candidates,
        error="MSE" if layout.error == "MSE" else "MAE",
        decoded="((element*scale)*amax)/(maximum*bound)" if has_levels else "element*scale",
        sums="rows in order, columns by halves"
        if along_columns
        else "columns in order, rows by halves",
        ties="first",
    )


def _element(layout: Layout) -> Element:
    fmt = layout.format
    name: Any = fmt.name
    return Element(
        format=name,
        bits=fmt.bits,
        maximum=float(fmt.max),
        least=float(fmt.least if isinstance(fmt, IntegerFormat) else -fmt.max),
        rounding="stochastic" if layout.stochastic else "nearest even",
        nan=fmt.nan_code,
        zero="signed" if isinstance(fmt, FloatFormat) else "unsigned",
    )


def _random(layout: Layout, columnwise: bool) -> Random | None:
    if not layout.stochastic:
        return None
    # Both directions of squares are rounded alike.
    stream = int(columnwise and not layout.square)
    return Random("philox4x32-10", "seed", "place % 4 of block place // 4", "block, stream", stream)
