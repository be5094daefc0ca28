"""What tensors on grids and their quantizers refuse: the kind of error, and what it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ottava import GridQuantizer, GridTensor, GridTensorStorage
from ottava.errors import DeviceError, DTypeError, OptionError, OttavaError, ShapeError, UsageError
from ottava.tensors import PackedTensor, PackedTensorStorage
from tests.cases import told
from tests.comparing import assert_same
from tests.core.layouts.layouts import (
    E4M3,
    E5M2,
    E8M0,
    EACH,
    LAYOUTS,
    QUANTIZERS,
    inner,
    quantizer,
)
from tests.samples import wide


def of_bytes(*shape: int, dtype: torch.dtype = torch.uint8, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)


def parts(**replaced: Any) -> dict[str, Any]:
    """Arguments of an MX tensor of 33 × 70."""
    made = {
        "dtype": torch.float32,
        "rowwise_data": of_bytes(33, 70),
        "rowwise_scale_inv": of_bytes(33, 3),
        "columnwise_data": of_bytes(33, 70),
        "columnwise_scale_inv": of_bytes(2, 70),
        "layout": LAYOUTS["mxfp8"],
    }
    return made | replaced


def on_meta(direction: str, *, of: dict[str, Any]) -> dict[str, Any]:
    """The parts of a direction on another device than those of the other one."""
    return {name: part.to("meta") for name, part in of.items() if direction in name}


TURNED = {"columnwise_data": of_bytes(70, 33), "columnwise_scale_inv": of_bytes(3, 33)}
# What is replaced, the error, and its words.
CONSTRUCTION: list[tuple[dict[str, Any], type[OttavaError], str]] = [
    (
        {"rowwise_scale_inv": of_bytes(33, 4)},
        ShapeError,
        r"rowwise_scale_inv.*\(33, 4\).*\(33, 3\)",
    ),
    ({"columnwise_scale_inv": of_bytes(70, 2)}, ShapeError, r"\(70, 2\).*\(2, 70\)"),
    (TURNED, ShapeError, r"columnwise_data.*\(70, 33\).*\(33, 70\)"),
    ({"rowwise_scale_inv": None}, UsageError, "rowwise_scale_inv is missing"),
    ({"rowwise_data": None}, UsageError, "rowwise_data is missing"),
    ({"rowwise_data": of_bytes(33, 70, device="meta")}, DeviceError, "cpu, its operand on meta"),
    ({"columnwise_scale_inv": of_bytes(2, 70, device="meta")}, DeviceError, "on meta"),
    (on_meta("columnwise", of=parts()), DeviceError, "cpu and meta"),
    ({"rowwise_data": torch.zeros(33, 70)}, DTypeError, "rowwise_data is of torch.float32"),
    ({"columnwise_data": of_bytes(33, 70, dtype=torch.int8)}, DTypeError, "int8"),
    ({"rowwise_data": of_bytes(33, 70, dtype=E5M2)}, DTypeError, "e5m2.*e4m3"),
    ({"rowwise_data": [[0] * 70] * 33}, DTypeError, "list"),
    ({"rowwise_scale_inv": torch.ones(33, 3)}, DTypeError, "torch.float32.*e8m0"),
    ({"dtype": torch.float64}, DTypeError, "nominal dtype torch.float64"),
    ({"values_from_columns": "x"}, OptionError, "values_from_columns is 'x'"),
    ({"layout": "mx"}, OptionError, "'mx' is no layout"),
    ({"data": None}, OptionError, "unknown keyword 'data'.*columnwise_data"),
]


@pytest.mark.parametrize("number", range(len(CONSTRUCTION)))
def test_arguments_that_do_not_fit_together(number: int) -> None:
    replaced, error, match = CONSTRUCTION[number]
    for cls in (GridTensor, GridTensorStorage):
        with pytest.raises(error, match=match):
            cls(**parts(**replaced))


def test_arguments_that_fit() -> None:
    """Data and scales of the formats' own dtypes are viewed, not copied."""
    rows = of_bytes(33, 70)
    for cls in (GridTensor, GridTensorStorage):
        made = cls(
            **parts(
                rowwise_data=rows.view(E4M3),
                rowwise_scale_inv=of_bytes(33, 3, dtype=E8M0),
                columnwise_scale_inv=of_bytes(2, 70, dtype=E8M0),
                layout=LAYOUTS["mxfp8"].text,
            )
        )
        assert {t.dtype for t in made.inner_list()} == {torch.uint8}
        assert made._rowwise_data.data_ptr() == rows.data_ptr()
        assert not made.dequantize().any()
    assert GridTensor(**parts(), shape=(33, 70), requires_grad=True).requires_grad
    with pytest.raises(ShapeError, match=r"\(33, 70\).*\(3,\)"):
        GridTensor(**parts(), shape=(3,))
    nothing = dict.fromkeys([name for name in parts() if name.endswith(("data", "inv"))])
    with pytest.raises(UsageError, match=r"needs data.*rowwise_data or columnwise_data"):
        GridTensor(**parts(**nothing))
    with pytest.raises(DTypeError, match=r"called with Tensor.*quantizer\(values\)"):
        GridTensor(torch.ones(2))
    with pytest.raises(DTypeError, match="make_like of a Tensor"):
        GridTensor.make_like(torch.ones(2))
    # One buffer is taken by either name.
    q = QUANTIZERS["int8-tensor"](wide(4, 4))
    data, scale, _ = q.for_usage(False)
    for given in ({}, {"rowwise_data": data, "rowwise_scale_inv": scale}):
        given |= {"columnwise_data": data, "columnwise_scale_inv": scale}
        made = GridTensor(**given, layout=q.grid_layout, dtype=q.dtype)
        assert_same(made.dequantize(), q.dequantize())
        assert made.nbytes == q.nbytes


def packed_parts(**replaced: Any) -> dict[str, Any]:
    """Arguments of a tensor of 33 × 70 with four bits and two levels of scales."""
    made = {
        "dtype": torch.float32,
        "rowwise_data": of_bytes(33, 35),
        "rowwise_scale_inv": of_bytes(33, 5),
        "amax_rowwise": torch.ones(()),
        "columnwise_data": of_bytes(70, 17),
        "columnwise_scale_inv": of_bytes(70, 3),
        "amax_columnwise": torch.ones(()),
        "layout": LAYOUTS["nvfp4"],
        "shape": (33, 70),
    }
    return made | replaced


ONE_LEVEL = {
    "layout": LAYOUTS["int4-rows"],
    "rowwise_scale_inv": torch.ones(33, 1),
    "columnwise_scale_inv": torch.ones(70, 1),
}
PACKED_CONSTRUCTION: list[tuple[dict[str, Any], type[OttavaError], str]] = [
    ({"amax_rowwise": None}, UsageError, "amax_rowwise is missing"),
    ({"amax_columnwise": torch.ones(70)}, ShapeError, r"amax.*\(70,\)"),
    ({"amax_rowwise": torch.ones((), dtype=torch.float64)}, DTypeError, "amax.*float64"),
    ({"layout": LAYOUTS["mxfp4"]}, ShapeError, r"rowwise_scale_inv.*\(33, 5\).*\(33, 3\)"),
    (ONE_LEVEL, UsageError, "amax_rowwise in a layout without a second level"),
    ({"rowwise_scale_inv": of_bytes(33, 4)}, ShapeError, r"\(33, 4\).*\(33, 5\)"),
    ({"columnwise_data": None}, UsageError, "columnwise_data is missing"),
    ({"rowwise_data": torch.zeros(33, 35)}, DTypeError, "rowwise_data is of torch.float32"),
    ({"shape": (33, 68)}, ShapeError, r"rowwise_data.*\(33, 68\).*\(33, 35\).*\(33, 34\)"),
    ({"shape": (35, 70)}, ShapeError, r"rowwise_data.*\(35, 70\)"),
    (on_meta("columnwise", of=packed_parts()), DeviceError, "cpu and meta"),
]


@pytest.mark.parametrize("number", range(len(PACKED_CONSTRUCTION)))
def test_arguments_of_packed_tensors_that_do_not_fit_together(number: int) -> None:
    replaced, error, match = PACKED_CONSTRUCTION[number]
    for cls in (PackedTensor, PackedTensorStorage):
        with pytest.raises(error, match=match):
            cls(**packed_parts(**replaced))


def test_packed_arguments_that_fit() -> None:
    """A shape that is left out has whole bytes; each direction says where it has not."""
    nothing = dict.fromkeys([name for name in packed_parts() if name[:3] in ("row", "col", "ama")])
    rows = {name: None for name in nothing if "col" in name}
    columns = {name: None for name in nothing if "row" in name}
    for cls in (PackedTensor, PackedTensorStorage):
        for replaced, shape in (({}, (33, 70)), (rows, (33, 70)), (columns, (34, 70))):
            made = cls(**packed_parts(**replaced, shape=None))
            assert tuple(made.shape) == shape
            assert not made.dequantize().any()
            assert cls(**packed_parts(**replaced)).shape == (33, 70)
        with pytest.raises(UsageError, match=r"needs data.*rowwise_data or columnwise_data"):
            cls(**packed_parts(**nothing, shape=None))


def _without_usages(name: str) -> GridQuantizer:
    made = quantizer(name)
    made.set_usage(rowwise=False, columnwise=False)
    return made


def _cleared(name: str) -> GridTensor:
    q: GridTensor = QUANTIZERS[name](X)
    q.clear()
    return q


X = torch.ones(4, 8)
Ask = Callable[[str], Any]
QUANTIZING: list[tuple[type[OttavaError], str, Ask]] = [
    (OptionError, "neither.*set_usage", lambda n: _without_usages(n)(X)),
    (OptionError, "neither.*set_usage", lambda n: _without_usages(n).make_empty((2,))),
    (OptionError, "columnwise is 0", lambda n: quantizer(n).set_usage(columnwise=0)),
    (DTypeError, "float64", lambda n: QUANTIZERS[n](X.double())),
    (DTypeError, "int32", lambda n: QUANTIZERS[n](X.int())),
    (DTypeError, "complex", lambda n: QUANTIZERS[n](X.cfloat())),
    (DTypeError, "sparse", lambda n: QUANTIZERS[n](X.to_sparse())),
    (DTypeError, "list", lambda n: QUANTIZERS[n]([1.0])),
    (DTypeError, "nominal.*float64", lambda n: QUANTIZERS[n](X, dtype=torch.float64)),
    (ShapeError, "shape 5", lambda n: QUANTIZERS[n].make_empty(5)),
    (ShapeError, "-1", lambda n: QUANTIZERS[n].make_empty((2, -1))),
    (DTypeError, "int32", lambda n: QUANTIZERS[n].make_empty((2,), dtype=torch.int32)),
    (DeviceError, "bogus", lambda n: QUANTIZERS[n].make_empty((2,), device="bogus")),
    (
        OptionError,
        "bare storage",
        lambda n: quantizer(n, internal=True).make_empty((2,), requires_grad=True),
    ),
    (ShapeError, r"\(2, 8\)", lambda n: QUANTIZERS[n](X[:2], out=QUANTIZERS[n](X))),
    (ShapeError, r"\(8, 4\)", lambda n: QUANTIZERS[n](X.t(), out=QUANTIZERS[n](X))),
    (DTypeError, "destination is a Tensor", lambda n: QUANTIZERS[n](X, out=X.clone())),
    (UsageError, "holds no data", lambda n: QUANTIZERS[n](X, out=_cleared(n))),
    (DeviceError, "meta", lambda n: QUANTIZERS[n](X.to("meta"), out=QUANTIZERS[n](X))),
    (
        DTypeError,
        "noop_flag",
        lambda n: QUANTIZERS[n].update_quantized(X, QUANTIZERS[n](X), noop_flag=True),
    ),
]


@EACH
def test_quantizing(name: str) -> None:
    for number, (error, match, ask) in enumerate(QUANTIZING):
        with told(number), pytest.raises(error, match=match):
            ask(name)
    assert QUANTIZERS[name].is_quantizable(X.half())
    for wrong in (X.double(), X.int(), X.to_sparse(), [1.0], None):
        assert not QUANTIZERS[name].is_quantizable(wrong)


UPDATES: list[tuple[type[OttavaError], Callable[[Any], Any]]] = [
    (ShapeError, lambda q: q.quantize_(torch.zeros(3))),
    (ShapeError, lambda q: q.quantize_(torch.zeros(70, 40))),
    (DTypeError, lambda q: q.quantize_(torch.zeros(40, 70, dtype=torch.int64))),
    (DTypeError, lambda q: q.quantize_(torch.zeros(40, 70, dtype=torch.float64))),
    (DeviceError, lambda q: q.quantize_(torch.zeros(40, 70, device="meta"))),
    (DTypeError, lambda q: q.quantize_(torch.zeros(40, 70), noop_flag=torch.ones(1).int())),
    (ShapeError, lambda q: q.quantize_(torch.zeros(40, 70), noop_flag=torch.ones(2))),
    (DTypeError, lambda q: q.copy_from_storage(q.clone(), noop_flag=torch.ones(1).int())),
    (
        DeviceError,
        lambda q: q.quantize_(torch.zeros(40, 70), noop_flag=torch.ones(1, device="meta")),
    ),
    (DTypeError, lambda q: q.dequantize("x")),
    (DTypeError, lambda q: q.dequantize(torch.int32)),
]


@EACH
def test_bad_updates_change_nothing(name: str) -> None:
    q = QUANTIZERS[name](wide(40, 70))
    before = inner(q)
    for number, (error, update) in enumerate(UPDATES):
        with told(number), pytest.raises(error):
            update(q)
    assert_same(inner(q), before)


def test_a_quantizer_needs_a_layout() -> None:
    for wrong in (E4M3, LAYOUTS["mxfp8"].text, None):
        with pytest.raises(DTypeError, match=r"the layout is a .*ottava.Layout"):
            GridQuantizer(wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="rowwise is 'yes'"):
        GridQuantizer(LAYOUTS["mxfp8"], rowwise="yes")  # type: ignore[arg-type]
