"""The CUDA kernels as loops in several orders of threads and blocks: nothing depends on them."""

from __future__ import annotations

import itertools

import pytest
import torch

from ottava import Layout, kernels
from ottava.kernels import table
from tests import arrays, samples
from tests.comparing import assert_same
from tests.core import placing
from tests.core.conftest import running
from tests.core.kernels import test_levels as levels
from tests.core.kernels.test_grids import E4M3, LAYOUTS
from tests.core.kernels.test_shards import cut

pytestmark = pytest.mark.grid
#: Everything else runs in ascending order; a number is the seed of a shuffle.
ORDERS = ["descending", "7"]


@pytest.fixture(autouse=True, params=ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTTAVA_GRID_ORDER", request.param)


@pytest.mark.parametrize("shape", [(160, 144), (131, 77)], ids=str)
def test_one_scale(shape: tuple[int, int]) -> None:
    x = samples.wide(*shape, dtype=torch.bfloat16)
    parts = arrays.quantize(x, Layout(E4M3, (None, None), columnwise="transposed"))
    scale = torch.tensor(200.0)
    values = arrays.encode(x.float().numpy() * 200, E4M3)
    beyond = int((x.float().abs() * 200 > 448).sum())
    amax, count = torch.zeros(()), torch.tensor(0)
    with running("grid"):
        data, transpose, _, scale_inv, seen = kernels.quantize(x, E4M3, transposed=True)
        again = kernels.transpose(data)
        cast, cast_t, _ = kernels.cast_amax(x, scale, amax, E4M3, saturated=count, transposed=True)
    assert_same((data, transpose, again), (parts[0], parts[2], parts[2]))
    assert_same((scale_inv, seen, amax), (parts[1].view(()), x.abs().amax().float(), seen))
    assert_same((cast, cast_t.t().contiguous()), (torch.from_numpy(values),) * 2)
    assert count == beyond > 0


@pytest.mark.parametrize("name", ["1x128", "128x128-own", "rows", "mxfp8", "mx-squares-floor"])
def test_grids(name: str) -> None:
    x, layout = samples.tiles(260, 200, dtype=torch.bfloat16), LAYOUTS[name]
    parts = arrays.quantize(x, layout)
    values = arrays.decode(*parts[2:], layout, columnwise=True, dtype=x.dtype)
    with running("grid"):
        for sides in itertools.product((True, False), repeat=2):
            if any(sides):
                made = kernels.grid_quantize(x, layout, rowwise=sides[0], columnwise=sides[1])
                for part, expected, asked in zip(made, parts, sides[:1] * 2 + sides[1:] * 2):
                    assert_same(part, expected if asked else torch.zeros(0, dtype=torch.uint8))
        decoded = kernels.grid_decode(*parts[2:], layout, x.dtype, columnwise=True)
    assert_same(decoded, values)


@pytest.mark.parametrize(
    "name",
    [
        *("nvfp4-rotated-stochastic", "nvfp4-rows-rotated", "nvfp4-128x128-candidates"),
        *("mxfp4-squares-candidates", "e3m2-8x16-candidates", "mxint8"),
    ],
)
def test_levels(name: str) -> None:
    layout, x = levels.LAYOUTS[name], samples.tiles(131, 77, dtype=torch.bfloat16)
    seed = levels.seed_of(layout)
    expected = levels.quantized(x, layout, seed, True, True)
    with running("grid"):
        placing.check(
            table.grid_quantize_levels, (x, seed, 0, layout.text, True, True), expected, name
        )


def test_shards_and_updates() -> None:
    scales, history = [torch.ones(43)], samples.wide(131, 43).abs()
    expected = torch.div(torch.full((43,), 448.0), history.amax(0))
    with running("grid"):
        for name in ("mxfp8", "mxfp8-squares", "tensor"):
            cut((70, 300), [1, 130, 9000], LAYOUTS[name]).check()
        kernels.update_scales(scales, [history], [448.0] * 43)
    assert_same(scales[0], expected)
