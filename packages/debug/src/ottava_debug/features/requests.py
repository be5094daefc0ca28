"""The statistics that configurations name."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ottava import list_recipes
from ottava.errors import OptionError
from ottava_debug.features.formulas import (
    BLOCK_DIMS,
    BLOCK_SIZE,
    BLOCKWISE,
    EXPONENTS,
    QUANTIZED,
    VALUES,
    block_of,
    blockwise_name,
)
from ottava_debug.located import kind_of, unknown

_COLUMNWISE = "_columnwise"
# The names of recipes in TransformerEngine's configurations -> Ottava's names.
_RECIPES = {
    "fp8_current_scaling": "current",
    "fp8_block_scaling": "blockwise",
    "fp8_delayed_scaling": "delayed",
}
# The options of the blockwise statistic -> the largest value, and what is allowed, in words.
_OF_BLOCKS = {
    "block_size": (10**9 - 1, "a number of elements, from 1"),
    "dims": (2, "1 or 2, for squares"),
}


class Request(NamedTuple):
    """A requested statistic.

    Attributes:
        text: its name in the configuration.
        stat: its name without recipe and direction.
        kind: the recipe, None for that of the operand which the product takes; and whether
            columnwise data are read.
    """

    text: str
    stat: str
    kind: tuple[str | None, bool] = (None, False)


def is_of_quantized(name: str) -> bool:
    """Whether a statistic is one of quantized values."""
    return name.removesuffix(_COLUMNWISE).endswith(QUANTIZED)


def plain_requests(value: Any) -> tuple[Request, ...]:
    """The requested statistics of high-precision values."""
    requests = []
    for name in _names(value):
        text = _of_blocks(name) if isinstance(name, Mapping) or name == BLOCKWISE else str(name)
        if text not in VALUES and text != EXPONENTS and block_of(text) is None:
            raise unknown("has", text, [*VALUES, EXPONENTS, BLOCKWISE])
        requests.append(Request(text, text))
    return tuple(requests)


def _of_blocks(value: Any) -> str:
    """The name of the blockwise statistic, from its name alone or from ``{name: options}``."""
    expected = f"{{{BLOCKWISE}: {{block_size: {BLOCK_SIZE}, dims: {BLOCK_DIMS}}}}}"
    if isinstance(value, str):
        return blockwise_name(BLOCK_SIZE, BLOCK_DIMS)
    if list(value) != [BLOCKWISE]:
        keys = ", ".join(map(str, value)) or "nothing"
        raise OptionError(f"has a mapping of {keys}", expected=expected)
    options = {} if value[BLOCKWISE] is None else value[BLOCKWISE]
    if not isinstance(options, Mapping):
        raise OptionError(f"has {BLOCKWISE}: {kind_of(options)}", expected=expected)
    for key, option in options.items():
        if key not in _OF_BLOCKS:
            raise unknown(f"has {BLOCKWISE} with the key", key, _OF_BLOCKS)
        most, words = _OF_BLOCKS[key]
        if type(option) is not int or not 1 <= option <= most:
            raise OptionError(f"has {BLOCKWISE} with {key} {kind_of(option)}", expected=words)
    return blockwise_name(options.get("block_size", BLOCK_SIZE), options.get("dims", BLOCK_DIMS))


def quantized_requests(value: Any) -> tuple[Request, ...]:
    """The requested statistics of quantized values."""
    return tuple(_quantized_request(str(name)) for name in _names(value))


def _quantized_request(text: str) -> Request:
    columnwise = text.endswith(_COLUMNWISE)
    rest = text.removesuffix(_COLUMNWISE)
    stat = next((name for name in sorted(QUANTIZED, key=len)[::-1] if rest.endswith(name)), None)
    if stat is None:
        raise unknown("has", text, QUANTIZED)
    before = rest.removesuffix(stat)
    if not before:
        return Request(text, stat, (None, columnwise))
    recipe = _RECIPES.get(before.removesuffix("_"), before.removesuffix("_"))
    recipes = [spec.name for spec in list_recipes() if spec.name != "custom"]
    if not before.endswith("_") or recipe not in recipes:
        raise unknown("has", text, [*QUANTIZED, *(f"{name}_{stat}" for name in recipes)])
    return Request(text, stat, (recipe, columnwise))


def _names(value: Any) -> list[Any]:
    value = [value] if isinstance(value, (str, Mapping)) else value
    if not isinstance(value, (list, tuple)) or not value:
        raise OptionError(f"is {kind_of(value)}", expected="a list of statistics")
    return list(value)
