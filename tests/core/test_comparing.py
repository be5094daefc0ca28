"""The tests' own comparison: what it takes for the same, and what it says of a difference."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.comparing import assert_same

NAN = float("nan")


def test_the_same() -> None:
    assert_same(torch.tensor([1.0, NAN]), torch.tensor([1.0, -NAN]))
    assert_same(np.float32([1.0]), torch.tensor([1.0]))
    assert_same((torch.ones(2), None), [torch.ones(2), None])
    assert_same(torch.tensor([1, 2], dtype=torch.uint8), [1, 2])
    assert_same(torch.ones(3, 2).t(), torch.ones(2, 3))


#: What was got, what was expected, and what is said.
DIFFERENCES: list[tuple[Any, Any, str]] = [
    (torch.tensor([0.0]), torch.tensor([-0.0]), "at [0] of 5 (0x0000000000000005): got 0.0 "),
    (torch.tensor([1.0]), torch.tensor([NAN]), "expected nan"),
    (torch.zeros(2, 2), torch.eye(2)[:, :1], "got the shape (2, 2), expected (2, 1)"),
    (torch.zeros(1), torch.zeros(1).half(), "got torch.float32, expected torch.float16"),
    ((torch.ones(1), None), (torch.ones(1), torch.zeros(1)), "here result 1: got None"),
    ((torch.ones(1),), (torch.ones(1), None), "1 results, expected 2"),
]


@pytest.mark.parametrize(("got", "expected", "said"), DIFFERENCES)
def test_what_differs_is_named(got: Any, expected: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(said)):
        assert_same(got, expected, torch.tensor([5]), "here")


def test_nans_of_eight_bits_differ() -> None:
    one, other = (torch.tensor([code]).to(torch.uint8) for code in (127, 255))
    with pytest.raises(AssertionError, match="got nan"):
        assert_same(one.view(torch.float8_e4m3fn), other.view(torch.float8_e4m3fn))
