"""Ranks are forked by one process: it stays, it is replaced when it is gone, and what went wrong is
told by name."""

from __future__ import annotations

import os
import signal

import pytest

from ottava_testing import launch

BODY = "rank_bodies:body"


def test_what_went_wrong_is_told_by_name() -> None:
    names = ["passes", "fails on one", "dies", "raises", "passes too"]
    told = launch.run_on_ranks(BODY, names)
    assert told["passes"] is None
    assert told["passes too"] is None
    assert told["fails on one"] == "this one"
    assert str(told["dies"]).startswith("dies: a process ended without a result")
    assert str(told["raises"]).startswith("raises, on rank ")
    assert "KeyError: 'a key'" in str(told["raises"])


def test_ranks_have_the_environment_of_now_and_what_was_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for given in ("one", "another"):
        monkeypatch.setenv("GIVEN", given)
        told = launch.run_on_ranks(
            BODY,
            ["reads"],
            prepare=lambda f, g=given: (f / "given").write_text(g),  # type: ignore[misc]
        )
        assert told == {"reads": None}


def test_one_process_serves_all_launches_until_it_is_gone() -> None:
    assert launch.run_on_ranks(BODY, ["passes"]) == {"passes": None}
    first = launch._launcher().process
    assert launch.run_on_ranks(BODY, ["passes"], world=3) == {"passes": None}
    assert launch._launcher().process is first
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert launch.run_on_ranks(BODY, ["passes"]) == {"passes": None}
    assert launch._launcher().process is not first


def test_ranks_that_do_not_end_are_ended() -> None:
    launch.run_on_ranks(BODY, ["passes"])
    told = launch.run_on_ranks(BODY, ["hangs"], seconds=4)
    assert told == {
        "hangs": "hangs: the processes did not end in 4 s: do the ranks wait for each other?"
    }
