"""The seeds of stochastic rounding."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ottava.errors import OptionError
from ottava.kernels import draw_seed, fixed_seed

CPU = torch.device("cpu")


def test_seeds_follow_the_generator() -> None:
    torch.manual_seed(1)
    seeds = [int(draw_seed(CPU)) for _ in range(3)]
    assert len(set(seeds)) == 3
    torch.manual_seed(1)
    assert [int(draw_seed(CPU)) for _ in range(3)] == seeds


def test_a_fixed_seed_holds_in_its_block_and_for_all_threads() -> None:
    state = torch.get_rng_state()
    seen: list[int] = []
    with fixed_seed(5):
        thread = threading.Thread(target=lambda: seen.append(int(draw_seed(CPU))))
        thread.start()
        thread.join()
        with pytest.raises(ZeroDivisionError), fixed_seed():
            seen.append(int(draw_seed(CPU)))
            raise ZeroDivisionError
        seen.append(int(draw_seed(CPU)))
        assert draw_seed(CPU).dtype is torch.int64
    assert seen == [5, 0, 5]
    assert torch.equal(torch.get_rng_state(), state)
    assert int(draw_seed(CPU)) not in (0, 5)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, None])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(OptionError, match=r"the seed is .*0 to 2\*\*63 - 1"), fixed_seed(seed):
        pass
