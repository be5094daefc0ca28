"""The fake-quantization formats of the package, found through the hook."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ottava
from ottava.debug import fake_quantize
from ottava.errors import OptionError
from ottava.recipes import registry
from ottava_mxfp8 import MXFP8Quantizer

FORMATS = {"MXFP8E4M3": torch.float8_e4m3fn, "MXFP8E5M2": torch.float8_e5m2}


def test_the_spec_lists_them() -> None:
    (spec,) = (spec for spec in ottava.list_recipes() if spec.name == "mxfp8")
    assert set(spec.fake_quant_formats) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_those_of_blocks_along_rows(name: str, dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (1,), (33, 65), (2, 5, 70)):
        x = (
            torch.exp(2 * torch.randn(shape, generator=torch.Generator().manual_seed(2)))
            .to(dtype)
            .requires_grad_()
        )
        got = fake_quantize(x, name)
        assert (got.dtype, got.shape) == (x.dtype, x.shape)
        quantizer = MXFP8Quantizer(FORMATS[name], columnwise=False)
        assert torch.equal(got, quantizer(x.detach()).dequantize())
        got.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))


def test_out() -> None:
    x, out = torch.randn(40, 40), torch.empty(40, 40)
    assert fake_quantize(x, "MXFP8E4M3", out) is out
    assert torch.equal(out, fake_quantize(x, "MXFP8E4M3"))


@pytest.fixture
def _no_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OTTAVA_DISABLE_PLUGINS", "ottava-recipes-mxfp8")
    registry.reload()
    yield
    monkeypatch.undo()
    registry.reload()


@pytest.mark.usefixtures("_no_package")
def test_without_the_package_the_error_names_it() -> None:
    with pytest.raises(OptionError, match="pip install ottava-recipes-mxfp8"):
        fake_quantize(torch.ones(3), "MXFP8E4M3")
