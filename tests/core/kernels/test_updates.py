"""The update of delayed scaling's state, on every path, against the rules with Python numbers."""

from __future__ import annotations

import itertools
import math
import operator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ottava import kernels
from tests import oracle
from tests.comparing import assert_same
from tests.slot_oracle import Slot, largest

Tensor = torch.Tensor
AMAXES = [0.0, math.nan, math.inf, 1e-42, 3e38, 2.5, 448.0, -0.0]


def tensors(groups: list[list[Slot]], length: int) -> tuple[list[Tensor], list[Tensor]]:
    """The scales and the histories of some tensors' slots."""
    scales = [torch.tensor([slot.scale for slot in slots]) for slots in groups]
    histories = [
        torch.tensor([slot.history for slot in slots]).view(len(slots), length).t().contiguous()
        for slots in groups
    ]
    return scales, histories


#: The amaxes of all slots, whether they are given as ``last``, and ``most_recent``.
Step = tuple[list[float], bool, bool]


def check_steps(counts: list[int], length: int, steps: list[Step]) -> None:
    maxima = [[448.0, 57344.0, 28672.0][i % 3] for i in range(sum(counts))]
    slots = [Slot(length, maximum) for maximum in maxima]
    ends = list(itertools.accumulate(counts, initial=0))
    groups = [slots[start:end] for start, end in itertools.pairwise(ends)]
    scales, histories = tensors(groups, length)
    for step, (values, is_last, most_recent) in enumerate(steps):
        amaxes = [oracle.float32(value) for value in values]
        last = torch.tensor(amaxes)
        for history, row in zip(histories, last.split(counts), strict=True):
            # Where the last amaxes are given, the first rows are only compared with 0.
            history[0] = torch.where(row == 0, row, 123.0) if is_last else row
        given = last if is_last else None
        kernels.update_scales(scales, histories, maxima, most_recent=most_recent, last=given)
        for slot, amax in zip(slots, amaxes, strict=True):
            slot.amax_of = operator.itemgetter(0) if most_recent else largest
            slot.calibrate(amax)
            slot.update()
        assert_same((scales, histories), tensors(groups, length), note=step)


@st.composite
def any_steps(draw: st.DrawFn, slots: int = 4) -> list[Step]:
    amaxes = st.lists(
        st.sampled_from(AMAXES) | st.floats(0.0, width=32), min_size=slots, max_size=slots
    )
    return draw(st.lists(st.tuples(amaxes, st.booleans(), st.booleans()), min_size=1, max_size=8))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 5), any_steps())
def test_any_steps(code_path: str, length: int, steps: list[Step]) -> None:
    check_steps([1, 3], length, steps)


@pytest.mark.parametrize(
    ("counts", "length", "count"),
    [
        # The module for these tests launches for at most 91 tensors and 320 slots.
        pytest.param([1] * 100 + [0, 3], 2, 1, id="more tensors than a launch takes"),
        pytest.param([5, 340, 1], 2, 1, id="more slots than a launch takes"),
        pytest.param([2, 1], 1024, 3, id="1024"),
        pytest.param([3, 2], 1026, 3, id="1026"),
        pytest.param([4, 7, 30], 17, 3, id="17"),
    ],
)
def test_many_slots_and_long_histories(
    code_path: str, counts: list[int], length: int, count: int
) -> None:
    random = torch.Generator().manual_seed(length)
    steps = []
    for step in range(count):
        amaxes = torch.rand(sum(counts), generator=random) * 400
        unusual = torch.tensor(AMAXES)[torch.randint(8, amaxes.shape, generator=random)]
        amaxes = torch.where(torch.rand(amaxes.shape, generator=random) < 0.2, unusual, amaxes)
        steps.append((amaxes.tolist(), step == 1, False))
    check_steps(counts, length, steps)


def test_nothing_moves_in_a_backward_pass(code_path: str) -> None:
    """Recomputation runs the update again there, and no step begins."""
    scale, history = torch.ones(1), torch.full((2, 1), 4.0)
    # The compiled module updates them itself, once a kernel has chosen it.
    kernels.backend_for("cpu")

    def update(grad: Tensor) -> None:
        kernels.update_scales([scale], [history], [448.0])

    x = torch.ones(1, requires_grad=True)
    x.register_hook(update)
    x.sum().backward()
    assert scale.item() == 1.0
    kernels.update_scales([scale], [history], [448.0])
    assert scale.item() == 112.0
    kernels.update_scales([], [], [])
