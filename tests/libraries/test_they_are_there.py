"""The one line that says why the tests of this folder are not run."""

from __future__ import annotations

import pytest


def test_the_libraries_are_there(missing_libraries: list[str]) -> None:
    if missing_libraries:
        names = ", ".join(missing_libraries)
        pytest.skip(
            f"{names} are not installed: nothing of tests/libraries is run (nox -s integrations "
            f"runs it)"
        )
