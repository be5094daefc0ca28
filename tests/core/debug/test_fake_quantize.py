"""``fake_quantize`` against values computed from the formats, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ottava.debug import fake_quantize
from ottava.errors import DeviceError, DTypeError, OptionError, PluginError, ShapeError
from tests.core.fake_plugins import installed, offers, plugin

FORMATS: dict[str, tuple[float, Any]] = {
    "FP8E4M3": (448.0, ml_dtypes.float8_e4m3fn),
    "FP8E5M2": (57344.0, ml_dtypes.float8_e5m2),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_those_of_the_format_and_one_scale(name: str, dtype: torch.dtype) -> None:
    largest, element = FORMATS[name]
    for shape in ((), (0,), (1,), (3, 5), (2, 33, 7)):
        x = (3 * torch.randn(shape)).to(dtype)
        got, out = fake_quantize(x, name), torch.empty_like(x)
        assert (got.dtype, got.shape, got.device) == (x.dtype, x.shape, x.device)
        values = x.float().numpy()
        amax = np.abs(values).max() if values.size else np.float32(largest)
        scale = np.float32(largest) / np.float32(amax)
        codes = (values * scale).astype(np.float32).astype(element)
        expected = np.asarray(codes.astype(np.float32) * (np.float32(1) / scale), dtype=np.float32)
        assert torch.equal(got, torch.from_numpy(expected).to(dtype))
        assert fake_quantize(x, name, out) is out
        assert torch.equal(out, got)


@pytest.mark.xdist_group("compiler")
def test_the_gradient_is_that_of_the_identity_and_it_compiles() -> None:
    x, upstream = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    compiled = torch.compile(lambda t: fake_quantize(t, "FP8E4M3"), fullgraph=True, backend="eager")
    y = fake_quantize(x, "FP8E4M3")
    assert torch.equal(compiled(x.detach()), y)
    y.backward(upstream)
    assert torch.equal(x.grad, upstream)


def test_a_quantized_tensor_or_storage_stands_for_its_values(quantizer: Any) -> None:
    for quantizer.internal in (False, True):
        q = quantizer(torch.randn(4, 6))
        expected = fake_quantize(q.dequantize(), "FP8E5M2")
        assert torch.equal(fake_quantize(q, "FP8E5M2"), expected)


def test_tensors_that_do_not_fit_are_refused() -> None:
    x = torch.randn(4, 6)
    outs: list[tuple[Any, type[Exception]]] = [
        (torch.empty(4, 5), ShapeError),
        (torch.empty(2, 4, 6), ShapeError),
        (torch.empty(4, 6, dtype=torch.bfloat16), DTypeError),
        (torch.empty(4, 6, device="meta"), DeviceError),
        ("out", DTypeError),
    ]
    for out, error in outs:
        with pytest.raises(error):
            fake_quantize(x, "FP8E4M3", out)
    values: list[Any] = [torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.float64), 3.0]
    for value in values:
        with pytest.raises(DTypeError):
            fake_quantize(value, "FP8E4M3")


def test_an_unknown_format_says_what_to_install() -> None:
    with pytest.raises(OptionError, match=r"FP8E4M3, FP8E5M2.*pip install ottava-recipes-acme8"):
        fake_quantize(torch.ones(3), "ACME8E4M3")
    for wrong in ("INT4", "", "E4M3"):
        with pytest.raises(OptionError, match="no installed recipe serves") as caught:
            fake_quantize(torch.ones(3), wrong)
        assert "pip install" not in str(caught.value)
    no_names: list[Any] = [None, ["FP8E4M3"]]
    for no_name in no_names:
        with pytest.raises(OptionError, match="the name of a format"):
            fake_quantize(torch.ones(3), no_name)


THING = """
import torch
from ottava import Layout, Recipe
from ottava.tensors import GridQuantizer


quantizer = GridQuantizer(Layout(torch.float8_e4m3fn, (None, None), rounding="floor"))


class Thing(Recipe):
    def make_quantizer(self, role, *, amax_reduction_group=None): ...

    def fake_quantizer(self, fp8_format):
        return quantizer if fp8_format == "ACME8E4M3" else None
"""


def test_a_package_brings_formats_and_is_told_of_one_that_it_does_not_serve(tmp_path: Path) -> None:
    formats = "fake_quant_formats=('ACME8E4M3', 'ACME8E5M2')"
    source = offers("acme", factory="acme_impl:Thing").replace("factory=", f"{formats}, factory=")
    plugin(tmp_path, "acme-fp8", "acme_fp8", source)
    (tmp_path / "acme_impl.py").write_text(THING)
    with installed(tmp_path):
        assert fake_quantize(torch.tensor([1.0, 0.3]), "ACME8E4M3").tolist() == [1.0, 0.3125]
        assert not sys.modules["acme_impl"].quantizer.internal, "it is the package's own"
        with pytest.raises(PluginError, match="recipe 'acme' lists the format 'ACME8E5M2'"):
            fake_quantize(torch.ones(2), "ACME8E5M2")
