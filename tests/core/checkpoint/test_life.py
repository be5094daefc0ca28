"""The life of a file and of a folder: saved, replaced, interrupted and loaded. A reader finds the
old state or the new one, whole, or an error."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import ottava
from ottava import checkpoint, filesystem
from tests.core.checkpoint.files import contents, refusal, save_sharded
from tests.core.sample_recipe import SampleRecipe

OURS = (os.path.dirname(checkpoint.__file__), filesystem.__file__)
KINDS = st.sampled_from(["file", "folder"])
SEEDS = st.integers(1, 5)
SHARES = st.floats(0, 1)
#: What the system does for a writer, and may fail to do.
CALLS = st.sampled_from(["mkdir", "fsync", "fchmod", "rename", "replace"])


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    with ottava.quantized_model_init(SampleRecipe()):
        net = torch.nn.Sequential(ottava.nn.Linear(5, 4, recipe=SampleRecipe()))
    net.register_buffer("seed", torch.full((3,), seed))
    return net


def state(seed: int) -> dict[str, Any]:
    return dict(model(seed).state_dict())


STATES = {seed: contents(state(seed)) for seed in range(6)}


def interrupted(job: Callable[[], object], line: int | None, folder: Path) -> int:
    """Run a job in a folder that Ctrl-C interrupts before a line of the checkpoint's code; the
    number of lines."""
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
        # An exception in the line that ends a with statement keeps Python from leaving it, and one
        # in the line that closes a descriptor leaves it open. A signal would wait there, a trace
        # function does not.
        torch.set_grad_enabled(True)
        signal.signal(signal.SIGINT, handler)
        close_all(folder)
    return seen


def close_all(folder: Path) -> None:
    """Close what this process still has open in a folder. An open folder may be locked."""
    gc.collect()
    for entry in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith(str(folder)):
                os.close(int(entry))


class Life(RuleBasedStateMachine):
    """A file and a folder, of which each holds the state of a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp())
        self.held = dict.fromkeys(("file", "folder"), 0)
        self.lines: dict[tuple[str, str], int] = {}

    @initialize()
    def begin(self) -> None:
        # A process that was started in the background ignores Ctrl-C.
        self.handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        for kind in self.held:
            self.save(kind, 1)

    def teardown(self) -> None:
        shutil.rmtree(self.top)
        signal.signal(signal.SIGINT, self.handler)

    def saving(self, kind: str, seed: int) -> Callable[[], object]:
        save = checkpoint.save_file if kind == "file" else save_sharded
        value = state(seed)
        return lambda: save(value, self.top / kind)

    def loading(self, kind: str, target: torch.nn.Module) -> Callable[[], object]:
        path = self.top / kind
        if kind == "file":
            return lambda: checkpoint.load_model(target, path)
        return lambda: checkpoint.load_sharded(target.state_dict(), path)

    def load(self, kind: str) -> Any:
        target = model(0)
        self.loading(kind, target)()
        return contents(target)

    def line(self, kind: str, share: float, job: Callable[[], object]) -> int:
        """A line of a job: more often one of the last, where it writes."""
        key = (kind, getattr(job, "__qualname__", ""))
        if key not in self.lines:
            self.lines[key] = interrupted(job, None, self.top)
        last = self.lines[key]
        return max(1, last - round(share * share * last))

    def is_whole(self, kind: str, *seeds: int) -> None:
        found = self.load(kind)
        assert kind == "file" or checkpoint.is_complete(self.top / kind)
        assert found in [STATES[seed] for seed in seeds]
        self.held[kind] = next(seed for seed in seeds if STATES[seed] == found)

    @rule(kind=KINDS, seed=SEEDS)
    def save(self, kind: str, seed: int) -> None:
        self.saving(kind, seed)()
        self.is_whole(kind, seed)
        # What an interrupted writer of the same name left is gone, and nothing else.
        assert {entry.name for entry in self.top.glob(f".{kind}*")} == set()
        assert kind == "file" or len(list((self.top / "folder").iterdir())) == 2

    @rule(kind=KINDS, seed=SEEDS, share=SHARES)
    def interrupted_save(self, kind: str, seed: int, share: float) -> None:
        line = self.line(kind, share, self.saving(kind, self.held[kind]))
        interrupted(self.saving(kind, seed), line, self.top)
        self.is_whole(kind, self.held[kind], seed)

    @rule(kind=KINDS, seed=SEEDS, name=CALLS, number=st.integers(1, 6))
    def save_that_fails(self, kind: str, seed: int, name: str, number: int) -> None:
        real, calls = getattr(os, name), 0

        def fails(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise OSError(28, "No space left on device")
            return real(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, name, fails)
            error = refusal(self.saving(kind, seed))
        assert not error or re.search("cannot be written.*No space left", error)
        self.is_whole(kind, self.held[kind], seed)

    @rule(kind=KINDS, seed=SEEDS, share=SHARES)
    def interrupted_load(self, kind: str, seed: int, share: float) -> None:
        line = self.line(kind, share, self.loading(kind, model(0)))
        target = model(seed)
        interrupted(self.loading(kind, target), line, self.top)
        assert contents(target) in (STATES[seed], STATES[self.held[kind]])


TestLife = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")(
    Life.TestCase
)
TestLife.settings = settings(max_examples=5, stateful_step_count=12)
