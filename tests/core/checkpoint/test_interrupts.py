"""Ctrl-C at any moment of a load or a save: tensors are all old or all new, files whole, and
nothing is left behind."""

from __future__ import annotations

import _thread
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ottava
from ottava import checkpoint, filesystem
from ottava.checkpoint import files

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


def lines_of(job: Job, times: int) -> list[int]:
    """Lines at which a job is to be interrupted: as many as are asked for, the last, where it
    writes, among them."""
    every = interrupted(job, None)
    last = range(max(1, every - times // 2), every + 1)
    return sorted({*last, *random.Random(0).sample(range(1, every + 1), min(every, times // 2))})


MANY = [40, pytest.param(600, marks=pytest.mark.slow)]


@pytest.mark.parametrize("times", MANY)
def test_load_sharded_is_interrupted_at_any_line(
    state: Any, contents: Any, times: int, tmp_path: Path
) -> None:
    checkpoint.save_sharded(state(1), tmp_path / "saved")
    target = state(2)

    def now() -> Any:
        flat = target["model"] | dict(enumerate(target["moments"]))
        return contents(flat)

    before = now()
    checkpoint.load_sharded(target, tmp_path / "saved")
    after = now()
    ends = set()
    for line in lines_of(lambda: checkpoint.load_sharded(state(2), tmp_path / "saved"), times):
        for name, value in (old := state(2))["model"].items():
            target["model"][name].copy_(value)
        for value, other in zip(target["moments"], old["moments"], strict=True):
            value.copy_(other)
        assert now() == before
        interrupted(lambda: checkpoint.load_sharded(target, tmp_path / "saved"), line)
        assert now() in (before, after), line
        ends.add(now() == after)
    assert ends == {True, False}


@pytest.mark.parametrize("times", MANY)
def test_load_model_is_interrupted_at_any_line(
    small: Any, contents: Any, times: int, tmp_path: Path
) -> None:
    checkpoint.save_model(small(1), tmp_path / "saved")
    before, after = contents(small(2)), contents(small(1))
    for line in lines_of(lambda: checkpoint.load_model(small(2), tmp_path / "saved"), times):
        model = small(2)
        interrupted(lambda model=model: checkpoint.load_model(model, tmp_path / "saved"), line)  # type: ignore[misc]
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


def test_an_interrupt_inside_of_torch_is_no_damage(small: Any, tmp_path: Path) -> None:
    """A signal at any line that torch comes to while it maps a file; there an exception may become
    another one."""
    checkpoint.save_model(small(0), tmp_path / "saved")
    calls = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal calls
        if frame.f_globals.get("__name__", "").startswith("torch."):
            calls += 1
            if calls == stop:
                signal.raise_signal(signal.SIGINT)
        return trace

    before, stop = sys.gettrace(), 0
    while calls >= stop:
        calls, stop = 0, stop + 1
        sys.settrace(trace)
        try:
            files.read_tensors(tmp_path / "saved", verify=False)
            assert calls < stop
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
    assert stop > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("times", MANY)
def test_saves_are_interrupted_at_any_line(
    state: Any, contents: Any, times: int, tmp_path: Path
) -> None:
    """What had the name has it still, or the new one has: whole, and alone, once the next save has
    come."""
    old, new = state(1), state(2)
    file, folder = tmp_path / "file", tmp_path / "folder"
    for line in lines_of(lambda: checkpoint.save_file(new["model"], tmp_path / "counted"), times):
        checkpoint.save_file(old["model"], file)
        interrupted(lambda: checkpoint.save_file(new["model"], file), line)
        read = contents(checkpoint.load_file(file))
        assert read in (contents(old["model"]), contents(new["model"])), line
    (tmp_path / "counted").unlink()
    for line in lines_of(
        lambda: checkpoint.save_sharded(new, tmp_path / "counted", overwrite=True), times
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


@pytest.fixture
def no_collections() -> Iterator[None]:
    """A callback of the garbage collector, of which hypothesis has one, can only report that it was
    interrupted."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("times", [10, pytest.param(250, marks=pytest.mark.slow)])
def test_signals_at_random_times(state: Any, contents: Any, times: int, tmp_path: Path) -> None:
    """The signal itself, from another thread, and twice: in the middle of a write it waits for the
    end."""
    checkpoint.save_sharded(state(1), tmp_path / "saved")
    after, before = contents(state(1)["model"]), contents(state(2)["model"])
    chance, start = random.Random(0), time.monotonic()
    checkpoint.load_sharded(state(2), tmp_path / "saved")
    longest = time.monotonic() - start
    ends = set()
    for _ in range(times):
        target, stop = state(2), threading.Event()
        delays = sorted(chance.uniform(0, longest) for _ in range(2))

        def interrupt(delays: list[float] = delays, stop: threading.Event = stop) -> None:
            for delay in (delays[0], delays[1] - delays[0]):
                if stop.wait(delay):
                    return
                _thread.interrupt_main()

        thread = threading.Thread(target=interrupt)
        try:
            try:
                thread.start()
                checkpoint.load_sharded(target, tmp_path / "saved")
            finally:
                stop.set()
                thread.join()
        except KeyboardInterrupt:
            stop.set()
            thread.join()
        assert contents(target["model"]) in (before, after)
        ends.add(contents(target["model"]) == after)
    # Few signals may all have come too late.
    assert len(ends) == 2 or times < 100
