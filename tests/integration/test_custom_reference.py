"""The reference of current scaling, mirrors and ``recipes-current`` train alike, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ottava import kernels
from ottava_custom import (
    CustomRecipe,
    by_layer,
    current_scaling_ref_quantizer_factory,
    mirror,
)
from ottava_demo.data import batch, load_corpus
from ottava_demo.model import SIZES
from ottava_demo.training import Trainee


def losses(recipe: Any, dtype: torch.dtype) -> list[float]:
    """Training of the demo's model; every linear layer of the blocks runs under the recipe."""
    size, corpus, generator = SIZES["tiny"], load_corpus(), torch.Generator().manual_seed(1)
    trainee = Trainee(recipe, size=size, dtype=dtype)
    return [trainee.step(batch(corpus.train, size.batch, size.length, generator)) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_whole_training_is_the_same(dtype: torch.dtype) -> None:
    with kernels.use_backend("reference"):
        current = losses("current", dtype)
        assert losses(CustomRecipe(current_scaling_ref_quantizer_factory), dtype) == current
        # What is compared depends on the quantization.
        assert losses("mxfp8", dtype) != current
    if dtype is torch.float32:
        assert losses("custom", dtype) == losses("current", dtype)


@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8", "custom"])
def test_a_mirror_trains_as_its_recipe(name: str) -> None:
    expected = losses(name, torch.bfloat16)
    assert losses(CustomRecipe(mirror(name)), torch.bfloat16) == expected
    by_name = CustomRecipe(by_layer({"blocks.*": name}, "identity"))
    assert losses(by_name, torch.bfloat16) == expected
