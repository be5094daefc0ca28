"""Ctrl-C in whatever moment of ``capture`` leaves no hooks on the model, no inspector and no
handler of signals."""

import contextlib
import signal
import sys

import pytest
import torch

import ottava
from ottava.errors import UsageError
from ottava.nn import function
from ottava_debug.capturing import capture


@pytest.fixture(autouse=True)
def _interrupts_arrive():
    """A process that runs in the background, by nohup say, starts with a SIGINT that is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class CtrlC:
    """A profile function that sends SIGINT at the ``at``-th place that it sees, where Python could
    handle it: at the entry of a function and after a call into C."""

    def __init__(self, at):
        self.at, self.seen = at, 0

    def __call__(self, frame, event, argument):
        if event in ("call", "c_return"):
            self.seen += 1
            if self.seen == self.at:
                signal.raise_signal(signal.SIGINT)


def left(model):
    """What is left of a block: hooks, the inspector of layers, and the handler of SIGINT."""
    hooks = len(model._forward_pre_hooks) + len(model._forward_hooks)
    return hooks, function.inspector, signal.getsignal(signal.SIGINT)


def block(model, path, at):
    """Run an empty block, which is not written, with an interrupt; the places that there were."""
    interrupt = CtrlC(at)
    sys.setprofile(interrupt)
    try:
        with capture(model, path, when=lambda step: False):
            pass
    finally:
        sys.setprofile(None)
    return interrupt.seen


def test_an_interrupt_at_any_place(tmp_path):
    model = ottava.convert(torch.nn.Linear(16, 16), "current")
    clean, path = left(model), tmp_path / "step"
    places = block(model, path, 0)
    assert places > 100
    raised = 0
    for at in range(1, places + 1):
        try:
            block(model, path, at)
        except KeyboardInterrupt:
            raised += 1
        assert left(model) == clean, at
    # Python drops those that come as it closes a generator.
    assert raised > 0.9 * places
    assert not path.exists()


def test_an_interrupt_that_the_block_catches(tmp_path):
    """What was seen of the step is not written as the whole of it."""
    model, path = ottava.convert(torch.nn.Linear(16, 16), "current"), tmp_path / "step"
    clean = left(model)
    with pytest.raises(UsageError, match="the step was interrupted"), capture(model, path):
        model(torch.ones(2, 16)).sum().backward()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert left(model) == clean
    assert not path.exists()


def test_a_handler_of_the_users_is_called_and_the_step_goes_on(tmp_path):
    model, path, called = ottava.convert(torch.nn.Linear(16, 16), "current"), tmp_path / "step", []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        clean = left(model)
        with capture(model, path) as step:
            signal.raise_signal(signal.SIGINT)
            step.loss = model(torch.ones(2, 16)).sum()
            step.loss.backward()
        assert left(model) == clean
    finally:
        signal.signal(signal.SIGINT, before)
    assert called == [signal.SIGINT]
    assert step.written
