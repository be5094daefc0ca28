"""Statistics of tensors of every layout, of the table of core's tests."""

from __future__ import annotations

import pytest
import torch

import ottava_debug
from tests.arrays import scale_values
from tests.core.layouts.layouts import EACH_OF_A_LAYER, OneQuantizer, quantizer
from tests.debug import by_hand


@EACH_OF_A_LAYER
def test_statistics_of_what_a_product_takes(name: str) -> None:
    """Losses, and the extremes of stored scales, of each direction."""
    x, dy = by_hand.inputs()
    x = x * torch.logspace(-7, 0, 32)
    expected = {}
    for tensor, values in (("activation", x), ("gradient", dy)):
        for suffix, columnwise in (("", False), ("_columnwise", True)):
            q = quantizer(name, "columnwise" if columnwise else "rowwise")(values)
            stored = q.grid_operand(columnwise=columnwise)[1]
            factors = torch.from_numpy(scale_values(stored.numpy(), q.grid_layout)).float()
            found = by_hand.losses(values, q.dequantize(torch.float32)) | {
                "scale_inv_min": stored.min(),
                "scale_inv_max": stored.max(),
                "scale_inv_value_min": factors.min(),
                "scale_inv_value_max": factors.max(),
                "scale": 1 / factors.min(),
            }
            expected |= {(tensor, f"{stat}{suffix}"): float(v) for stat, v in found.items()}
    layer = by_hand.layer_of(OneQuantizer(row=name))
    stats = sorted({stat for _, stat in expected})
    with ottava_debug.statistics(layer, stats, tensors=["activation", "gradient"]) as run:
        by_hand.passes(layer, x, dy)
        run.step()
    latest = {key[1:]: value for key, value in run.latest().items()}
    assert latest == pytest.approx(expected, rel=1e-6, abs=1e-9)
