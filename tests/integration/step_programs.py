"""Programs of steps for the oracle: what they are made of, and how hypothesis draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

#: How a model of layers comes to run under a recipe: as ``convert`` returned it, in blocks of the
#: recipe, or converted and in blocks that name none.
WAYS = ("converted", "block", "bound")
#: Blocks around the use of a layer: of the recipe around it, of none, switched off, of another
#: recipe with state (for layers that run under that one only), of one without.
BLOCKS = ("same", "none", "off", "other", "current")


@dataclass(frozen=True)
class Use:
    """A call of a layer.

    Attributes:
        layer: its number, modulo the number of layers that there are.
        x, dy: which values it is given, forward and backward.
        recompute: None, or ``use_reentrant`` of the checkpoint around it.
        blocks: around the call, the outermost first.
        inside: whether the blocks stand inside the checkpoint.
        first: ``is_first_microbatch``.
        needs: whether the input needs a gradient.
    """

    layer: int
    x: int
    dy: int
    recompute: bool | None = None
    blocks: tuple[str, ...] = ()
    inside: bool = False
    first: bool | None = None
    needs: bool = True


@dataclass(frozen=True)
class Evaluate:
    """A forward pass without gradients, on all ranks or on one.

    Attributes:
        mode: ``no_grad``, ``inference``, or ``eval``: no_grad in evaluation mode.
    """

    bank: int
    uses: tuple[Use, ...]
    mode: str = "eval"
    rank: int | None = None


@dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        passes: how many forward passes, in one block.
        whole: None, or ``use_reentrant`` of a checkpoint around each pass.
        weights: which values the weights take before it.
        outer: a block around the model's.
        backward: ``each`` output by itself, last first; all ``together``; or ``none``.
        around_backward: a block around the backward pass.
        fail: where an error is raised: in which pass (``forward``) before which use, or in the
            backward pass of which use, ``before`` its layer or ``after`` it.
        between: what happens between forward and backward.
    """

    bank: int
    uses: tuple[Use, ...]
    passes: int = 1
    whole: bool | None = None
    weights: int = 0
    outer: str = ""
    backward: str = "each"
    around_backward: str = ""
    fail: tuple[str, int] | None = None
    between: Any = None


@dataclass(frozen=True)
class Replace:
    """Another model takes the place of one: ``loaded``, loaded before it was ``bound``, ``copied``,
    or ``fresh``."""

    bank: int
    how: str


@dataclass(frozen=True)
class Add:
    """A layer comes."""

    bank: int


@dataclass(frozen=True)
class Remove:
    """A layer goes, unless it is the last one."""

    bank: int
    layer: int


@dataclass(frozen=True)
class Program:
    """What runs: two models of one recipe and one that runs in blocks of another one, and the
    options of both."""

    ways: tuple[str, str]
    options: tuple[tuple[int, str, int], tuple[int, str, int]]
    reduce: bool
    events: tuple[Any, ...]


_values = st.integers(0, 7)
_blocks = st.one_of(
    st.just(()), st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=2).map(tuple)
)
_use = st.builds(
    Use,
    layer=st.integers(0, 3),
    x=_values,
    dy=_values,
    recompute=st.sampled_from((None, None, False, True)),
    blocks=_blocks,
    inside=st.booleans(),
    first=st.sampled_from((None, None, True, False)),
    needs=st.booleans(),
)
_uses = st.lists(_use, min_size=1, max_size=4).map(tuple)
_bank = st.sampled_from((0, 0, 0, 1, 2))
_evaluate = st.builds(
    Evaluate,
    bank=_bank,
    uses=_uses,
    mode=st.sampled_from(("no_grad", "inference", "eval")),
    rank=st.sampled_from((None, 0, 1)),
)
_failure = st.tuples(st.sampled_from(("forward", "before", "after")), st.integers(0, 3))


def _steps(between: Any) -> Any:
    return st.builds(
        Step,
        bank=_bank,
        uses=_uses,
        passes=st.sampled_from((1, 1, 2)),
        whole=st.sampled_from((None, None, None, False, True)),
        weights=_values,
        outer=st.sampled_from(("", "", "", "off", "other", "current")),
        backward=st.sampled_from(("each", "together", "each", "together", "none")),
        around_backward=st.sampled_from(("", "", "", "off", "other", "same")),
        fail=st.one_of(st.none(), st.none(), st.none(), _failure),
        between=between,
    )


_simple = _steps(st.none())
_step = _steps(st.one_of(st.none(), st.none(), _evaluate, _simple))
_change = st.one_of(
    st.builds(Replace, bank=_bank, how=st.sampled_from(("loaded", "bound", "copied", "fresh"))),
    st.builds(Add, bank=_bank),
    st.builds(Remove, bank=_bank, layer=st.integers(0, 3)),
)
_options = st.tuples(st.integers(1, 3), st.sampled_from(("max", "most_recent")), st.integers(-1, 1))

programs = st.builds(
    Program,
    ways=st.tuples(st.sampled_from(WAYS), st.sampled_from(WAYS)),
    options=st.tuples(_options, _options),
    reduce=st.sampled_from((True, True, False)),
    events=st.lists(st.one_of(_step, _step, _step, _evaluate, _change), min_size=2, max_size=8).map(
        tuple
    ),
)
