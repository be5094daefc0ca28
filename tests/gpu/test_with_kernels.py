"""Every kernel on the GPU: the CPU backend's bytes, on any stream, in graphs, on any device, far
beyond 2^31."""

from __future__ import annotations

import pytest
import torch

from benchmarks.on_gpu import kernel_cases, runner
from benchmarks.on_gpu.runner import Gpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", runner.MODES)
@pytest.mark.parametrize("kernel", kernel_cases.KERNELS)
def test_bytes(place: Gpu, kernel: str, mode: str) -> None:
    outcome = runner.check(kernel, kernel_cases.byte_cases()[kernel], place, mode)
    assert outcome.passed, "\n".join([f"{outcome.failed} of {outcome.cases}", *outcome.failures])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only")
@pytest.mark.parametrize("kernel", kernel_cases.KERNELS)
def test_another_gpu_than_the_current_one(kernel: str) -> None:
    outcome = runner.check(kernel, kernel_cases.byte_cases(small=True)[kernel], Gpu(1))
    assert outcome.passed, outcome.failures
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("shape", kernel_cases.LARGE)
def test_more_than_two_to_the_31_elements(place: Gpu, shape: tuple[int, int]) -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("24 GiB of GPU memory are not free")
    outcomes = list(runner.run(kernel_cases.large_cases([shape]), place))
    assert all(outcome.passed for outcome in outcomes), [outcome.failures for outcome in outcomes]
