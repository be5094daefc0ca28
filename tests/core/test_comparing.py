"""The tests' own comparison: what it takes for the same, and what it says of a difference."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.comparing import assert_same

NAN = float("nan")


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, -NAN])),
        (np.float32([1.0]), torch.tensor([1.0])),
        ((torch.ones(2), None), [torch.ones(2), None]),
        (torch.tensor([1, 2], dtype=torch.uint8), [1, 2]),
        (torch.ones(3, 2).t(), torch.ones(2, 3)),
        (torch.zeros(0), torch.zeros(0)),
    ],
)
def test_the_same(got: Any, expected: Any) -> None:
    assert_same(got, expected)


@pytest.mark.parametrize(
    ("got", "expected", "inputs", "said"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), None,
         "at [0]: got 0.0 (0x00000000), expected -0.0 (0x80000000)"),
        (torch.tensor([1.0]), torch.tensor([NAN]), None, "expected nan"),
        (torch.tensor([7, 8]), torch.tensor([7, 9]), torch.tensor([0.5, 1.5]),
         "at [1] of 1.5 (0x3fc00000): got 8 "),
        (torch.zeros(2, 2), torch.eye(2), ["a", "b"],
         "2 of 4 elements differ\n  at [0, 0] of a: got 0.0"),
        (torch.zeros(2, 2), torch.eye(2)[:, :1], None, "got the shape (2, 2), expected (2, 1)"),
        (torch.zeros(1), torch.zeros(1).half(), None, "got torch.float32, expected torch.float16"),
        ((torch.ones(1), torch.ones(1)), (torch.ones(1), torch.zeros(1)), None,
         "here result 1: 1 of 1"),
        ((torch.ones(1), None), (torch.ones(1), torch.zeros(1)), None, "here result 1: got None"),
        ((torch.ones(1),), (torch.ones(1), None), None, "1 results, expected 2"),
        (torch.tensor([127, 5]).to(torch.uint8).view(torch.float8_e4m3fn),
         torch.tensor([255, 5]).to(torch.uint8).view(torch.float8_e4m3fn), None,
         "got nan (0x7f), expected nan (0xff)"),
    ],
)  # fmt: skip
def test_what_differs_is_named(got: Any, expected: Any, inputs: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(said)):
        assert_same(got, expected, inputs, "here")
