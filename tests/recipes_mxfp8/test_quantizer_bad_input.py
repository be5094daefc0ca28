"""What ``MXFP8Quantizer`` refuses, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava.errors import DeviceError, DTypeError, OptionError, OttavaError, ShapeError, UsageError
from ottava_mxfp8 import MXFP8Quantizer, MXFP8Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
X = torch.ones(4, 8)


def _nothing() -> MXFP8Quantizer:
    quantizer = MXFP8Quantizer(E4M3)
    quantizer.set_usage(rowwise=False, columnwise=False)
    return quantizer


def _internal() -> MXFP8Quantizer:
    quantizer = MXFP8Quantizer(E4M3)
    quantizer.internal = True
    return quantizer


def _cleared() -> MXFP8Tensor:
    q = MXFP8Quantizer(E4M3)(X)
    q.clear()
    return q


REFUSED: dict[str, tuple[type[OttavaError], str, Callable[[], Any]]] = {
    "format float16": (DTypeError, "float16.*float8_e4m3fn", lambda: MXFP8Quantizer(torch.float16)),
    "format e8m0": (DTypeError, "e8m0", lambda: MXFP8Quantizer(torch.float8_e8m0fnu)),
    "format text": (DTypeError, "'e4m3'", lambda: MXFP8Quantizer("e4m3")),
    "rounding": (
        OptionError,
        "scale_rounding is 'down'.*'up' or 'floor'",
        lambda: MXFP8Quantizer(E4M3, scale_rounding="down"),
    ),
    "rounding case": (OptionError, "'UP'", lambda: MXFP8Quantizer(E4M3, scale_rounding="UP")),
    "rounding None": (
        OptionError,
        "scale_rounding is None",
        lambda: MXFP8Quantizer(E4M3, scale_rounding=None),
    ),
    "rounding list": (
        OptionError,
        "scale_rounding",
        lambda: MXFP8Quantizer(E4M3, scale_rounding=["up"]),
    ),
    "squares": (
        OptionError,
        "with_2d_quantization is 1.*True or False",
        lambda: MXFP8Quantizer(E4M3, with_2d_quantization=1),
    ),
    "usage": (OptionError, "rowwise is 'yes'", lambda: MXFP8Quantizer(E4M3, rowwise="yes")),
    "set usage": (
        OptionError,
        "columnwise is 0",
        lambda: MXFP8Quantizer(E4M3).set_usage(columnwise=0),
    ),
    "no usage": (OptionError, "neither.*set_usage", lambda: _nothing()(X)),
    "no usage empty": (OptionError, "neither.*set_usage", lambda: _nothing().make_empty((2,))),
    "float64": (DTypeError, "float64", lambda: MXFP8Quantizer(E4M3)(X.double())),
    "integers": (DTypeError, "int32", lambda: MXFP8Quantizer(E4M3)(X.int())),
    "complex": (DTypeError, "complex", lambda: MXFP8Quantizer(E4M3)(X.cfloat())),
    "sparse": (DTypeError, "sparse", lambda: MXFP8Quantizer(E4M3)(X.to_sparse())),
    "a list": (DTypeError, "list", lambda: MXFP8Quantizer(E4M3)([1.0])),
    "nominal": (
        DTypeError,
        "nominal dtype torch.float64",
        lambda: MXFP8Quantizer(E4M3)(X, dtype=torch.float64),
    ),
    "empty shape": (ShapeError, "shape 5", lambda: MXFP8Quantizer(E4M3).make_empty(5)),
    "empty size": (ShapeError, "-1", lambda: MXFP8Quantizer(E4M3).make_empty((2, -1))),
    "empty dtype": (
        DTypeError,
        "int32",
        lambda: MXFP8Quantizer(E4M3).make_empty((2,), dtype=torch.int32),
    ),
    "empty device": (
        DeviceError,
        "bogus",
        lambda: MXFP8Quantizer(E4M3).make_empty((2,), device="bogus"),
    ),
    "empty grad": (
        OptionError,
        "bare storage",
        lambda: _internal().make_empty((2,), requires_grad=True),
    ),
    "out shape": (
        ShapeError,
        r"\(2, 8\)",
        lambda: MXFP8Quantizer(E4M3)(X[:2], out=MXFP8Quantizer(E4M3)(X)),
    ),
    "out same size": (
        ShapeError,
        r"\(8, 4\)",
        lambda: MXFP8Quantizer(E4M3)(X.t(), out=MXFP8Quantizer(E4M3)(X)),
    ),
    "out plain": (
        DTypeError,
        "destination is a Tensor",
        lambda: MXFP8Quantizer(E4M3)(X, out=X.clone()),
    ),
    "out cleared": (OttavaError, "holds no data", lambda: MXFP8Quantizer(E4M3)(X, out=_cleared())),
    "out format": (
        DTypeError,
        "e5m2",
        lambda: MXFP8Quantizer(E5M2)(X, out=MXFP8Quantizer(E4M3)(X)),
    ),
    "out device": (
        DeviceError,
        "meta",
        lambda: MXFP8Quantizer(E4M3)(X.to("meta"), out=MXFP8Quantizer(E4M3)(X)),
    ),
    "flag kind": (
        DTypeError,
        "noop_flag",
        lambda: MXFP8Quantizer(E4M3).update_quantized(X, MXFP8Quantizer(E4M3)(X), noop_flag=True),
    ),
    "flag size": (
        ShapeError,
        "noop_flag",
        lambda: MXFP8Quantizer(E4M3).update_quantized(
            X, MXFP8Quantizer(E4M3)(X), noop_flag=torch.ones(2)
        ),
    ),
    "no quantizer": (UsageError, "update_quantizer", lambda: _without_quantizer().quantize_(X)),
}


def _without_quantizer() -> MXFP8Tensor:
    q = MXFP8Quantizer(E4M3)(X)
    q.update_quantizer(None)
    return q


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    error, message, call = REFUSED[case]
    with pytest.raises(error, match=message):
        call()
