"""Statistics of two ranks are those of one that saw all the data; see ``rank_cases``."""

import functools

import pytest
import torch

import ottava_debug
from ottava.errors import OptionError
from tests import ranks
from tests.debug.rank_cases import CASES, layer_of


@pytest.fixture(scope="module")
def failures():
    return functools.cache(lambda: ranks.failures("tests.debug.rank_cases", CASES))


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case, failures):
    assert failures()[case] is None, failures()[case]


@pytest.mark.parametrize("reduce", [None, 3, torch.zeros(1)], ids=["None", "number", "tensor"])
def test_what_is_no_group(reduce):
    with pytest.raises(OptionError, match=r"reduce is None|the group is"):
        ottava_debug.statistics(layer_of(), ["max"], reduce=reduce)
    assert ottava_debug.products._watches == []
