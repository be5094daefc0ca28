"""The members of a step: the states of the layers that ran since the step began."""

import gc
import weakref
from collections.abc import Callable
from functools import partial

from ottava.collectives import process_groups_ready
from ottava.recipes.state import RecipeState


class _Collector:
    """Knows whether Python's garbage collector runs now."""

    def __init__(self) -> None:
        self.runs = False

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        self.runs = phase == "start"

    def watch(self) -> None:
        """Have the garbage collector tell when it starts and stops."""
        if self not in gc.callbacks:
            gc.callbacks.append(self)


_collector = _Collector()


class _StateUntilLayerEnds:
    """A layer's state, until the layer ends.

    Reference counting ends a layer at the same place of the program on all ranks, and its state is
    given up then. A layer in a cycle of references ends when the garbage collector runs, which is
    at another time on each rank. Its state stays until the next step begins, so that all ranks
    begin that step with the same states.
    """

    def __init__(self, layer: object, state: RecipeState) -> None:
        self._states = [state]
        # The callback refers to the list, because it would form a cycle with this object.
        self._layer = weakref.ref(layer, partial(_end, self._states))

    def state(self) -> RecipeState | None:
        """The state; None once the layer has ended."""
        if not self._states:
            return None
        return self._states[0]


def _end(states: list[RecipeState], reference: object) -> None:
    """Give up the state of a layer that reference counting has ended."""
    if not _collector.runs:
        states.clear()


# The layer of each state that was a member, where there are ranks.
_layers: weakref.WeakKeyDictionary[RecipeState, weakref.ref[object]]
_layers = weakref.WeakKeyDictionary()


class Members:
    """The states that a step begins with besides those of its model, in the order in which they
    ran.

    A member's life ends with its layer, whether or not a garbage collector runs:

    - Without process groups a member is a weak reference to the state, which its layer owns.
    - With process groups all ranks must have the same members, but each rank collects garbage at
      its own time. So a member keeps its state until its layer ends.
    - Compiled code makes no weak references. There a member is the state itself.
    """

    def __init__(self) -> None:
        self._eager: list[Callable[[], RecipeState | None]] = []
        self._traced: list[RecipeState] = []

    def add(self, layer: object, state: RecipeState) -> bool:
        """Take in the state of a layer.

        Args:
            layer: None stands for the layer that the state was added with before.

        Returns:
            Whether the state is a member now. False if process groups are initialized and no layer
            was ever added with the state, which has run in evaluation only.
        """
        if not process_groups_ready():
            self._eager.append(weakref.ref(state))
            return True
        if layer is None:
            reference = _layers.get(state)
            if reference is not None:
                layer = reference()
        if layer is None:
            return False
        _collector.watch()
        _layers[state] = weakref.ref(layer)
        self._eager.append(_StateUntilLayerEnds(layer, state).state)
        return True

    def add_traced(self, state: RecipeState) -> None:
        """Take in a state in code that is being compiled."""
        self._traced.append(state)

    def states(self) -> list[RecipeState]:
        """The states whose layers live."""
        eager = [member() for member in self._eager]
        return [state for state in eager if state is not None] + self._traced

    def clear(self) -> None:
        """Give up all members. An interrupt on the way here leaves them for the next step."""
        self._eager, self._traced = [], []
