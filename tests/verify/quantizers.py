"""Every first-party quantizer with each of its options: alone, and in pairs that are allowed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ottava.errors import OptionError
from ottava.tensors import Quantizer
from ottava_blockwise import Float8BlockQuantizer
from ottava_current import Float8CurrentScalingQuantizer
from ottava_custom import CurrentScalingQuantizerRef, HybridQuantizer
from ottava_delayed import Float8Quantizer
from ottava_mx import MXQuantizer
from ottava_mxfp8 import MXFP8Quantizer
from ottava_nvfp4 import NVFP4Quantizer
from ottava_rowwise import Float8RowwiseQuantizer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Of random words, where a quantizer rounds at random.
SEED = 0x1234_5678_9ABC
#: The scale of delayed scaling.
GIVEN = 0.3


def delayed(fp8_dtype: torch.dtype = E4M3, fits: bool = False) -> Quantizer:
    quantizer = Float8Quantizer(torch.full((1,), GIVEN), torch.zeros(1), fp8_dtype)
    quantizer.fits = fits
    return quantizer


def with_element(cls: Callable[..., Quantizer]) -> Callable[..., Quantizer]:
    """A class whose first argument has the default E4M3."""
    return lambda **options: cls(**{"fp8_dtype": E4M3} | options)


def reference(**options: Any) -> Quantizer:
    return CurrentScalingQuantizerRef(**{"dtype": E4M3} | options)


def hybrid(rows: str = "mxfp8", columns: str = "nvfp4") -> Quantizer:
    return HybridQuantizer(SIDES[rows](), SIDES[columns]())


SIDES: dict[str, Callable[[], Quantizer]] = {
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "nvfp4": NVFP4Quantizer,
    "rowwise": lambda: Float8RowwiseQuantizer(E5M2),
}
ELEMENT = {"fp8_dtype": [E5M2]}
FLOATS: dict[str, list[Any]] = {"force_pow_2_scales": [True], "amax_epsilon": [0.1]}


class Family(NamedTuple):
    """A quantizer, and other values of its options."""

    make: Callable[..., Quantizer]
    options: dict[str, list[Any]]


FAMILIES: dict[str, Family] = {
    "delayed": Family(delayed, ELEMENT | {"fits": [True]}),
    "current": Family(with_element(Float8CurrentScalingQuantizer), ELEMENT | FLOATS),
    "mxfp8": Family(
        with_element(MXFP8Quantizer),
        ELEMENT | {"with_2d_quantization": [True], "scale_rounding": ["floor"]},
    ),
    "blockwise": Family(
        with_element(Float8BlockQuantizer),
        ELEMENT | FLOATS | {"force_pow_2_scales": [False], "block_scaling_dim": [1]},
    ),
    "rowwise": Family(with_element(Float8RowwiseQuantizer), ELEMENT | FLOATS),
    "nvfp4": Family(
        NVFP4Quantizer,
        {
            **{"with_rht": [True], "with_2d_quantization": [True]},
            **{"stochastic_rounding": [True], "row_scaled": [True], "four_over_six": [True]},
            # They matter with four_over_six only.
            **{"four_over_six_bound": [448], "four_over_six_error": ["MSE"]},
        },
    ),
    "mx": Family(
        MXQuantizer,
        {
            "element": ["MXFP6E2M3", "MXFP6E3M2", "MXINT8", "MXINT8S"],
            **{"scale_rounding": ["up", "floor", "nearest"], "with_2d_quantization": [True]},
            **{"stochastic_rounding": [True], "rotation": [16, 32]},
            # It matters with a rotation only.
            "rotated": ["rowwise", "both"],
        },
    ),
    "reference": Family(reference, {"dtype": [E5M2], "pow_2_scales": [True], "eps": [0.1]}),
    "hybrid": Family(hybrid, {"rows": ["nvfp4", "rowwise"], "columns": ["mxfp8", "rowwise"]}),
}


def choices(options: dict[str, list[Any]], at_most: int) -> Iterator[dict[str, Any]]:
    """No option, each value of each option, and so on up to ``at_most`` options together."""
    for count in range(at_most + 1):
        for names in itertools.combinations(options, count):
            for values in itertools.product(*(options[name] for name in names)):
                yield dict(zip(names, values, strict=True))


def variants(name: str, at_most: int) -> Iterator[tuple[dict[str, Any], Quantizer]]:
    """The options and the quantizers of a family that can be made."""
    family = FAMILIES[name]
    for options in choices(family.options, at_most):
        try:
            quantizer = family.make(**options)
        except OptionError:
            assert len(options) > 1, options
            continue
        yield options, quantizer
