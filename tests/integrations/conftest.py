"""Lets the tests use what those of core and of several packages have, and a recipe without
options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ottava

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "core"), str(TESTS / "integration")]


@pytest.fixture
def recipe() -> ottava.Recipe:
    return ottava.get_recipe("current")
