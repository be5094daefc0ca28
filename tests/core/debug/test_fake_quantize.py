"""``fake_quantize`` against values computed from the formats, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forking
import ml_dtypes
import numpy as np
import pytest
import torch
from fake_plugins import offers, plugin

from ottava.debug import fake_quantize
from ottava.errors import DeviceError, DTypeError, OptionError, ShapeError

FORMATS = {"FP8E4M3": (448.0, ml_dtypes.float8_e4m3fn), "FP8E5M2": (57344.0, ml_dtypes.float8_e5m2)}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 33, 7)])
def test_values(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    largest, element = FORMATS[name]
    x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(4))).to(dtype)
    got = fake_quantize(x, name)
    assert (got.dtype, got.shape, got.device) == (x.dtype, x.shape, x.device)
    values = x.float().numpy()
    scale = np.float32(largest) / np.float32(np.abs(values).max()) if values.size else np.float32(1)
    codes = (values * scale).astype(np.float32).astype(element)
    expected = codes.astype(np.float32) * (np.float32(1) / scale)
    assert torch.equal(got, torch.from_numpy(np.asarray(expected, dtype=np.float32)).to(dtype))


def test_the_gradient_is_that_of_the_identity() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    upstream = torch.randn(4, 6)
    fake_quantize(x, "FP8E4M3").backward(upstream)
    assert torch.equal(x.grad, upstream)


def test_out() -> None:
    x, out = torch.randn(4, 6), torch.empty(4, 6)
    assert fake_quantize(x, "FP8E5M2", out) is out
    assert torch.equal(out, fake_quantize(x, "FP8E5M2"))


def test_compiled() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    compiled = torch.compile(
        lambda t: fake_quantize(t, "FP8E4M3"), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), fake_quantize(x, "FP8E4M3"))


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (torch.empty(4, 5), ShapeError),
        (torch.empty(2, 4, 6), ShapeError),
        (torch.empty(4, 6, dtype=torch.bfloat16), DTypeError),
        (torch.empty(4, 6, device="meta"), DeviceError),
        ("out", DTypeError),
    ],
)
def test_an_out_that_does_not_fit(out: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        fake_quantize(torch.randn(4, 6), "FP8E4M3", out)


@pytest.mark.parametrize(
    "value", [torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.float64), 3.0]
)
def test_what_is_no_high_precision_tensor(value: Any) -> None:
    with pytest.raises(DTypeError):
        fake_quantize(value, "FP8E4M3")


def test_an_unknown_format_says_what_to_install() -> None:
    with pytest.raises(OptionError, match=r"FP8E4M3, FP8E5M2.*pip install ottava-recipes-acme8"):
        fake_quantize(torch.ones(3), "ACME8E4M3")
    for wrong in ("INT4", "", "E4M3"):
        with pytest.raises(OptionError, match="no installed recipe serves") as caught:
            fake_quantize(torch.ones(3), wrong)
        assert "pip install" not in str(caught.value)
    for no_name in (None, ["FP8E4M3"]):
        with pytest.raises(OptionError, match="the name of a format"):
            fake_quantize(torch.ones(3), no_name)  # type: ignore[arg-type]


THING = """
import torch
from ottava import Recipe, kernels
from ottava.tensors import Float8QuantizerBase


class Q(Float8QuantizerBase):
    def quantize_impl(self, tensor, dtype):
        data, _, _, scale_inv, _ = kernels.quantize(tensor, self.fp8_dtype, force_pow_2=True)
        return self.wrap(data, None, scale_inv, dtype)


class Thing(Recipe):
    def make_quantizer(self, role, *, amax_reduction_group=None):
        return Q(torch.float8_e4m3fn)

    def fake_quantizer(self, fp8_format):
        return Q(torch.float8_e4m3fn) if fp8_format == "ACME8E4M3" else None
"""
SHOW = """
import torch
from ottava.debug import fake_quantize
from ottava.errors import OttavaError
print(fake_quantize(torch.tensor([1.0, 0.3]), "ACME8E4M3").tolist())
try:
    fake_quantize(torch.ones(2), "ACME8E5M2")
except OttavaError as error:
    print(type(error).__name__, error)
"""


def test_a_format_of_a_recipe_package(tmp_path: Path) -> None:
    """A stranger's package announces formats by the hook; one that it has no quantizer for is its
    mistake."""
    formats = "fake_quant_formats=('ACME8E4M3', 'ACME8E5M2')"
    source = offers("acme", factory="acme_impl:Thing").replace("factory=", f"{formats}, factory=")
    plugin(tmp_path, "acme-fp8", "acme_fp8", source)
    (tmp_path / "acme_impl.py").write_text(THING)
    done = forking.python(SHOW, path=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "[1.0, 0.3125]"
    assert second.startswith("PluginError recipe 'acme' lists the format 'ACME8E5M2'")
