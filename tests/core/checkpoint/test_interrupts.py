"""Ctrl-C during a load or a save: tensors are all old or all new, and files are whole."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint, filesystem

OURS = (os.path.dirname(checkpoint.__file__), filesystem.__file__)
Job = Callable[[], object]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C is heard, which a process that was started in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def state(recipe: Any) -> Callable[[int], dict[str, Any]]:
    """A model with quantized weights and what belongs to a training."""

    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        with ottava.quantized_model_init(recipe):
            net = torch.nn.Sequential(*(ottava.nn.Linear(5, 5, recipe=recipe) for _ in range(4)))
        return {
            "model": net.state_dict(),
            "moments": [torch.full((3,), float(seed)) for _ in range(4)],
            "step": seed,
        }

    return make


def interrupted(job: Job, line: int | None) -> int:
    """Run a job that is interrupted before the given line of the room that it comes to; how many
    lines it came to."""
    seen = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return trace

    before, handler = sys.gettrace(), signal.getsignal(signal.SIGINT)
    sys.settrace(trace)
    try:
        job()
    except KeyboardInterrupt:
        assert line is not None
    finally:
        sys.settrace(before)
        # An exception in the line of a with statement as its block ends keeps Python from leaving
        # it: the signal would wait there, a trace function does not, and so torch.no_grad() may
        # stay in force, and a handler of signals too.
        torch.set_grad_enabled(True)
        signal.signal(signal.SIGINT, handler)
    return seen


def lines_of(job: Job) -> list[int]:
    """Lines at which a job is interrupted: random ones, and the last ones, where it writes."""
    every = interrupted(job, None)
    last = range(max(1, every - TIMES // 2), every + 1)
    return sorted({*last, *random.Random(0).sample(range(1, every + 1), min(every, TIMES // 2))})


# The lines of each job at which it is interrupted.
TIMES = 30


def test_load_sharded_is_interrupted(state: Any, contents: Any, tmp_path: Path) -> None:
    checkpoint.save_sharded(state(1), tmp_path / "saved")
    target = state(2)

    def now() -> Any:
        flat = target["model"] | dict(enumerate(target["moments"]))
        return contents(flat)

    before = now()
    checkpoint.load_sharded(target, tmp_path / "saved")
    after = now()
    ends = set()
    for line in lines_of(lambda: checkpoint.load_sharded(state(2), tmp_path / "saved")):
        for name, value in (old := state(2))["model"].items():
            target["model"][name].copy_(value)
        for value, other in zip(target["moments"], old["moments"], strict=True):
            value.copy_(other)
        assert now() == before
        interrupted(lambda: checkpoint.load_sharded(target, tmp_path / "saved"), line)
        assert now() in (before, after), line
        ends.add(now() == after)
    assert ends == {True, False}


def test_load_model_is_interrupted(small: Any, contents: Any, tmp_path: Path) -> None:
    checkpoint.save_model(small(1), tmp_path / "saved")
    before, after = contents(small(2)), contents(small(1))
    for line in lines_of(lambda: checkpoint.load_model(small(2), tmp_path / "saved")):
        model = small(2)
        interrupted(partial(checkpoint.load_model, model, tmp_path / "saved"), line)
        assert contents(model) in (before, after), line


def test_an_interrupt_of_a_load_leaves_state_that_waits_for_a_region(
    recipe: Any, contents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while the modules load, and is raised at the end: what they took, they
    keep."""
    saved, net = (
        torch.nn.Sequential(ottava.nn.Linear(4, 4), ottava.nn.Linear(4, 4)) for _ in range(2)
    )
    state = saved.state_dict() | {"1.recipe_state.scales": torch.full((3,), 7.0)}
    checkpoint.save_file(state, tmp_path / "saved")
    before, real = contents(net), torch.nn.Module.load_state_dict

    def interrupted_load(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        signal.raise_signal(signal.SIGINT)
        return made

    interrupted_load.__module__ = "torch.nn"
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", interrupted_load)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.load_model(net, tmp_path / "saved")
    assert contents(net) == contents(state) != before
    assert net[1]._binding.loaded is not None
    assert net[1]._binding.loaded["scales"].tolist() == [7.0] * 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_saves_are_interrupted(state: Any, contents: Any, tmp_path: Path) -> None:
    """What had the name has it still, or the new one has: whole, and alone, once the next save has
    come."""
    old, new = state(1), state(2)
    file, folder = tmp_path / "file", tmp_path / "folder"
    for line in lines_of(lambda: checkpoint.save_file(new["model"], tmp_path / "counted")):
        checkpoint.save_file(old["model"], file)
        interrupted(lambda: checkpoint.save_file(new["model"], file), line)
        read = contents(checkpoint.load_file(file))
        assert read in (contents(old["model"]), contents(new["model"])), line
    (tmp_path / "counted").unlink()
    for line in lines_of(
        lambda: checkpoint.save_sharded(new, tmp_path / "counted", overwrite=True)
    ):
        checkpoint.save_sharded(old, folder, overwrite=True)
        interrupted(lambda: checkpoint.save_sharded(new, folder, overwrite=True), line)
        assert checkpoint.is_complete(folder)
        target = state(3)
        assert checkpoint.load_sharded(target, folder)["step"] in (1, 2)
        expected = old if int(target["moments"][0][0]) == 1 else new
        assert contents(target["model"]) == contents(expected["model"]), line
    checkpoint.save_file(old["model"], file)
    checkpoint.save_sharded(old, folder, overwrite=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["counted", "file", "folder"]
    assert len(list(folder.iterdir())) == 2
