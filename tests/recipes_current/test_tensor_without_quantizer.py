"""Tensors of which no quantizer is known: those of files, say."""

from __future__ import annotations

import pytest
import torch

import ottava
from ottava.tensors import Float8Tensor


@pytest.mark.parametrize("shape", [(6, 9), (4, 8), (3, 2, 5), (3,), (0, 8), ()], ids=str)
def test_new_tensors_keep_the_class(shape: tuple[int, ...]) -> None:
    tensor: Float8Tensor = (
        ottava.get_recipe("current").quantizer("weight").quantize(torch.randn(4, 8))
    )
    tensor.update_quantizer(None)
    for made in (tensor.new_zeros(shape), tensor.new_empty(shape), torch.empty_like(tensor)):
        assert type(made) is Float8Tensor
        assert made._fp8_dtype is tensor._fp8_dtype
    zeros = tensor.new_zeros(shape, dtype=torch.bfloat16)
    assert zeros.dtype is torch.bfloat16
    assert torch.equal(zeros.dequantize(), torch.zeros(shape, dtype=torch.bfloat16))
    assert tensor.new_empty(shape, device="meta").device.type == "meta"


def test_a_padded_shard_has_the_same_bytes() -> None:
    tensor: Float8Tensor = (
        ottava.get_recipe("current").quantizer("weight").quantize(torch.randn(4, 8))
    )
    tensor.update_quantizer(None)
    padded = tensor.new_zeros((6, 8))
    padded[:4].copy_(tensor)
    assert torch.equal(padded._data[:4], tensor._data)
    assert torch.equal(padded._scale_inv, tensor._scale_inv)
