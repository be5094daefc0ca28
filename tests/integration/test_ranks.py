"""What runs on several ranks, in one launch: every case is a function of a module named here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).with_name("rank_launcher.py")
#: By the number of ranks, or "" for functions that start ranks themselves; by module.
TABLE = {
    "2": {
        # Scales and histories after each event of programs are those of the rule.
        "step_ranks": "of_ranks alone alone_in_another_block in_evaluation_mode",
    },
    "": {
        # Ranks are killed, in steps and while they write checkpoints; saved by four ranks, loaded
        # by two and by one.
        "kill_cases": "zero_is_killed primary_is_killed resharded",
        # 4, 2 x 2, 2 and 1 ranks and a process without a group load what each of them saved.
        "sharded_checkpoint_cases": "every_recipe_on_any_number_of_ranks",
    },
}
CASES = [
    f"{ranks}:{module}.{name}"
    for ranks, of in TABLE.items()
    for module in of
    for name in of[module].split()
]


def launch(folder: Path, cases: list[str], **environment: str) -> dict[str, str]:
    """The error of each case."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(LAUNCHER), str(folder), *cases],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=3600)
    finally:
        # The ranks too.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    told = {line["case"]: line["error"] for line in found}
    return {case: told.get(case, f"did not run:\n{errors[-6000:]}") for case in cases}


def chosen(request: pytest.FixtureRequest, test: str) -> list[str]:
    """The cases that this run has of a test."""
    items = [item for item in request.session.items if getattr(item, "originalname", None) == test]
    return [item.callspec.params["case"] for item in items if isinstance(item, pytest.Function)]


@pytest.fixture(scope="module")
def errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    return launch(tmp_path_factory.mktemp("ranks"), chosen(request, "test_case"))


@pytest.fixture(scope="module")
def errors_of_every_combination(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    folder, cases = tmp_path_factory.mktemp("ranks"), chosen(request, "test_every_combination")
    return launch(folder, cases, OTTAVA_TESTS_EVERY="1")


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, errors: dict[str, str]) -> None:
    assert not errors[case], errors[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_combination(case: str, errors_of_every_combination: dict[str, str]) -> None:
    assert not errors_of_every_combination[case], errors_of_every_combination[case]
