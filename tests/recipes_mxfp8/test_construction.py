"""What an MXFP8 tensor is built of, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava.errors import DeviceError, DTypeError, OptionError, OttavaError, ShapeError, UsageError
from ottava_mxfp8 import MXFP8Tensor, MXFP8TensorStorage
from tests.recipes_mxfp8.blocks import (
    E4M3,
    E5M2,
    INNER,
    check_bytes,
    inner,
    quantizer,
    wide,
)

ROWS, COLUMNS = torch.zeros(33, 70, dtype=torch.uint8), torch.zeros(33, 70, dtype=torch.uint8)


def parts(**replaced: Any) -> dict[str, Any]:
    made = {
        "dtype": torch.float32,
        "rowwise_data": ROWS.clone(),
        "rowwise_scale_inv": torch.zeros(33, 3, dtype=torch.uint8),
        "columnwise_data": COLUMNS.clone(),
        "columnwise_scale_inv": torch.zeros(2, 70, dtype=torch.uint8),
        "fp8_dtype": E4M3,
    }
    return made | replaced


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def bytes_of(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return (
        torch.zeros(shape, dtype=torch.uint8).view(dtype)
        if dtype.itemsize == 1
        else torch.zeros(shape, dtype=dtype)
    )


CONSTRUCTION: dict[str, tuple[type[OttavaError], str, dict[str, Any]]] = {
    "padded rows": (
        ShapeError,
        r"rowwise_scale_inv.*\(33, 4\).*\(33, 3\)",
        {"rowwise_scale_inv": bytes_of(33, 4)},
    ),
    "swapped rows": (ShapeError, r"\(3, 33\).*\(33, 3\)", {"rowwise_scale_inv": bytes_of(3, 33)}),
    "flat rows": (ShapeError, r"\(99,\).*\(33, 3\)", {"rowwise_scale_inv": bytes_of(99)}),
    "padded columns": (
        ShapeError,
        r"columnwise_scale_inv.*\(4, 70\).*\(2, 70\)",
        {"columnwise_scale_inv": bytes_of(4, 70)},
    ),
    "transposed columns": (
        ShapeError,
        r"\(70, 2\).*\(2, 70\)",
        {"columnwise_scale_inv": bytes_of(70, 2)},
    ),
    "transposed data": (
        ShapeError,
        r"columnwise_data.*\(70, 33\).*\(33, 70\)",
        {"columnwise_data": bytes_of(70, 33), "columnwise_scale_inv": bytes_of(3, 33)},
    ),
    "rows without scales": (
        UsageError,
        "rowwise_scale_inv is missing",
        {"rowwise_scale_inv": None},
    ),
    "columns without scales": (
        UsageError,
        "columnwise_scale_inv is missing",
        {"columnwise_scale_inv": None},
    ),
    "scales without rows": (UsageError, "rowwise_data is missing", {"rowwise_data": None}),
    "scales without columns": (UsageError, "columnwise_data is missing", {"columnwise_data": None}),
    "rows on meta": (
        DeviceError,
        "rowwise_scale_inv is on cpu, its operand on meta",
        {"rowwise_data": meta(33, 70)},
    ),
    "scales on meta": (
        DeviceError,
        "columnwise_scale_inv is on meta",
        {"columnwise_scale_inv": meta(2, 70)},
    ),
    "directions apart": (
        DeviceError,
        "cpu and meta",
        {"columnwise_data": meta(33, 70), "columnwise_scale_inv": meta(2, 70)},
    ),
    "data of floats": (
        DTypeError,
        "rowwise_data is of torch.float32",
        {"rowwise_data": torch.zeros(33, 70)},
    ),
    "data of int8": (DTypeError, "int8", {"columnwise_data": bytes_of(33, 70, dtype=torch.int8)}),
    "data of the other format": (
        DTypeError,
        "e5m2.*e4m3",
        {"rowwise_data": bytes_of(33, 70, dtype=E5M2)},
    ),
    "data in a list": (DTypeError, "list", {"rowwise_data": [[0] * 70] * 33}),
    "scales of floats": (
        DTypeError,
        "rowwise_scale_inv is of torch.float32.*e8m0",
        {"rowwise_scale_inv": torch.ones(33, 3)},
    ),
    "scales of e4m3": (DTypeError, "e4m3", {"rowwise_scale_inv": bytes_of(33, 3, dtype=E4M3)}),
    "format": (DTypeError, "float16", {"fp8_dtype": torch.float16}),
    "format e8m0": (DTypeError, "e8m0", {"fp8_dtype": torch.float8_e8m0fnu}),
    "nominal float64": (DTypeError, "nominal dtype torch.float64", {"dtype": torch.float64}),
    "nominal int": (DTypeError, "nominal dtype torch.int32", {"dtype": torch.int32}),
    "squares": (OptionError, "with_2d_quantization is 1", {"with_2d_quantization": 1}),
    "values_from_columns": (
        OptionError,
        "values_from_columns is 'x'",
        {"values_from_columns": "x"},
    ),
}


@pytest.mark.parametrize("case", CONSTRUCTION)
def test_refused_construction(case: str) -> None:
    error, message, replaced = CONSTRUCTION[case]
    for cls in (MXFP8Tensor, MXFP8TensorStorage):
        with pytest.raises(error, match=message):
            cls(**parts(**replaced))


def test_construction() -> None:
    nothing = {name.removeprefix("_"): None for name in INNER}
    with pytest.raises(UsageError, match=r"needs data.*rowwise_data or columnwise_data"):
        MXFP8Tensor(**parts(**nothing))
    with pytest.raises(ShapeError, match=r"\(33, 70\).*\(3,\)"):
        MXFP8Tensor(**parts(), shape=(3,))
    for cls in (MXFP8Tensor, MXFP8TensorStorage):
        given = parts(
            rowwise_data=ROWS.view(E4M3),
            rowwise_scale_inv=bytes_of(33, 3, dtype=torch.float8_e8m0fnu),
            columnwise_scale_inv=bytes_of(2, 70, dtype=torch.float8_e8m0fnu),
        )
        made = cls(**given)
        assert {t.dtype for t in inner(made)} == {torch.uint8}
        # Viewed, not copied.
        assert made._rowwise_data.data_ptr() == ROWS.data_ptr()
        assert not bool(made.dequantize().any())
    assert MXFP8Tensor(**parts(), requires_grad=True).requires_grad
    assert MXFP8Tensor(**parts(), shape=(33, 70)).shape == (33, 70)


def test_bad_updates_change_nothing() -> None:
    q = quantizer()(wide((40, 70)))
    calls: list[tuple[type[OttavaError], Callable[[], Any]]] = [
        (ShapeError, lambda: q.quantize_(torch.zeros(3))),
        (ShapeError, lambda: q.quantize_(torch.zeros(70, 40))),
        (DTypeError, lambda: q.quantize_(torch.zeros(40, 70, dtype=torch.int64))),
        (DTypeError, lambda: q.quantize_(torch.zeros(40, 70, dtype=torch.float64))),
        (DeviceError, lambda: q.quantize_(torch.zeros(40, 70, device="meta"))),
        (
            DTypeError,
            lambda: q.quantize_(torch.zeros(40, 70), noop_flag=torch.ones(1, dtype=torch.int32)),
        ),
        (ShapeError, lambda: q.quantize_(torch.zeros(40, 70), noop_flag=torch.ones(2))),
        (
            DeviceError,
            lambda: q.quantize_(torch.zeros(40, 70), noop_flag=torch.ones(1, device="meta")),
        ),
        (DTypeError, lambda: q.dequantize("x")),
        (DTypeError, lambda: q.dequantize(torch.int32)),
    ]
    for number, (error, call) in enumerate(calls):
        with pytest.raises(error):
            call()
            pytest.fail(f"call {number} was accepted")
    check_bytes(q, quantizer()(wide((40, 70))))


@pytest.mark.parametrize("columnwise", [False, True])
def test_a_usage_that_is_not_held_is_named_with_the_remedy(columnwise: bool) -> None:
    name, kind = ("columnwise", "rowwise") if columnwise else ("rowwise", "columnwise")
    q = quantizer(kind)(wide((64, 64)))
    for call in (
        lambda: q.grid_operand(columnwise=columnwise),
        lambda: q.update_usage(**{f"{name}_usage": True}),
    ):
        with pytest.raises(
            UsageError, match=rf"no {name} data.*{name}=True.*quantizer.set_usage\({name}=True\)"
        ):
            call()
    check_bytes(q, quantizer(kind)(wide((64, 64))))
