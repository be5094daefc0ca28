"""All 2^32 float32 values against c10's conversions (what torch's ``.to`` runs on the host)."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_same

from ottava import kernels

FP8 = {"e4m3": (torch.float8_e4m3fn, 448.0, 0x7E), "e5m2": (torch.float8_e5m2, 57344.0, 0x7B)}
CHUNK = 1 << 24


def check_chunk(start: int, fmt: str, count: int = CHUNK) -> None:
    """Codes of the float32 values whose bits are ``start`` to ``start + count``."""
    dtype, largest, top = FP8[fmt]
    x = torch.arange(start, start + count, dtype=torch.int64).to(torch.uint32).view(torch.float32)
    data = kernels.cast(x, torch.ones(()), dtype)
    expected = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    expected = torch.where(x.isinf(), (x.signbit().to(torch.uint8) << 7) | top, expected)
    expected = torch.where(x.isnan(), torch.full_like(expected, 0x7F), expected)
    assert_same(data, expected, x, fmt)


@pytest.mark.slow
def test_every_float32(code_path: str, fmt: str) -> None:
    for start in range(0, 1 << 32, CHUNK):
        check_chunk(start, fmt)


def test_some_chunks_of_float32(code_path: str) -> None:
    """Zero and the smallest, around ties below one, the largest of both formats, NaN."""
    for fmt in FP8:
        for start in (0, 0x38000000, 0x3AF80000, 0x43D80000, 0xC75C0000, 0xFF780000):
            check_chunk(start, fmt, 1 << 19)
