"""The CUDA kernels as loops in several orders of threads and blocks: no result depends on who comes
first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from sequential_grid import grid_orders, serving_cpu
from whole_tensors import multi_amax, multi_cast

from ottava import kernels
from ottava.kernels import use_backend

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
Results = tuple[torch.Tensor, ...]


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def scale() -> torch.Tensor:
    return torch.tensor(200.0)


def cast_amax(x: torch.Tensor) -> Results:
    amax, saturated = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    data, turned, scale_inv = kernels.cast_amax(
        x, scale(), amax, E4M3, transposed=True, saturated=saturated
    )
    return data, turned, scale_inv, amax, saturated


def multi(x: torch.Tensor) -> Results:
    xs = list(x.unbind())
    dtypes, outs = [BF16] * len(xs), [torch.zeros(row.shape, dtype=torch.uint8) for row in xs]
    multi_cast(xs, dtypes, torch.full((len(xs),), 3.0), [E4M3] * len(xs), outs)
    return multi_amax(xs, dtypes), *outs


def update(x: torch.Tensor) -> Results:
    scales, histories = (
        [torch.ones(3), torch.ones(40)],
        [x[:, :3].float().abs(), x[:, 3:43].float().abs()],
    )
    histories = [history.contiguous() for history in histories]
    kernels.update_scales(scales, histories, [448.0] * 43)
    return *scales, *histories


CALLS: dict[str, Callable[[torch.Tensor], Results]] = {
    "amax": lambda x: (kernels.amax(x),),
    "cast": lambda x: (kernels.cast(x, scale(), E4M3),),
    "cast_transpose": lambda x: kernels.cast_transpose(x, scale(), E4M3),
    "cast_amax": cast_amax,
    "quantize": lambda x: kernels.quantize(x, E4M3, transposed=True),
    "transpose": lambda x: (kernels.transpose(x.view(torch.uint8)),),
    "multi": multi,
    "update": update,
}


@pytest.fixture(params=grid_orders())
def grid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OTTAVA_GRID_ORDER", request.param)
    with serving_cpu():
        yield


@pytest.mark.parametrize("shape", [(160, 144), (131, 77)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_bytes_are_the_cpus_in_any_order(grid: None, name: str, shape: tuple[int, int]) -> None:
    x = values(*shape)
    found = CALLS[name](x)
    with use_backend("cpu"):
        expected = CALLS[name](x)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
