"""The step: it owns the states that begin it together, and determines when it begins.

The layers below a converted model begin one step, at its forward pass; layers that run in
``autocast`` blocks of one recipe and process group begin another, at the entry of a block; a layer
outside of both begins its own. Which states begin a step depends on what ran, and in which order.
That is the same on all ranks; the times at which garbage is collected are not.

To begin a step with a state is to call ``update_states`` of its recipe: the amaxes that the state
has recorded since it last began a step are reduced over the ranks, and new scales are computed from
them. All quantizations use these scales until the next step begins.
"""

import weakref
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch

from ottava.collectives import Group, process_groups_ready
from ottava.recipes.base import Recipe
from ottava.recipes.counting import count_joined_step, count_step
from ottava.recipes.members import Members
from ottava.recipes.ranks import compare_layers, group_in_pipeline
from ottava.recipes.state import Phase, RecipeState, by_recipe
from ottava.torch_private import PipelinePass, pipeline_pass


def update_states(
    states: Sequence[RecipeState], group: Group, compiling: bool = False, calibrated: bool = False
) -> None:
    """Update the states at the beginning of a step, those of equal recipes in one call.

    Args:
        group: process group over which recipes reduce; None is the default group, if there is one.
        compiling: whether this is being compiled; no state changes its phase then.
        calibrated: whether a calibrating block ends. The states stay RAN: the next step begins with
            them again.
    """
    # A state that consists of several may be among the states, and its parts as well.
    parts = {id(part): part for state in states for part in state.parts()}.values()
    for recipe, together in by_recipe([(part.recipe, part) for part in parts]):
        recipe.update_states(together, group)
    if compiling:
        return
    phase = Phase.RAN if calibrated else Phase.SETTLED
    for state in states:
        state._set_phase(phase)


class StepPhase(Enum):
    """Where a :class:`Step` is in its life; its docstring has the table of transitions."""

    #: The ranks have not compared the layers that begin the step together.
    UNCOMPARED = "uncompared"
    #: The ranks have compared them. The layers that run now record amaxes for the next step.
    COMPARED = "compared"
    #: The step has begun before the forward pass of its model, which goes on with it.
    AHEAD = "ahead"


# The steps that have members. They are kept alive until they begin, so that every rank begins them:
# each rank collects garbage at its own time.
_awaited: set["Step"] = set()


class Step:
    """The states that begin every step of training together: those of a model, and those that ran.

    It is a lasting object, not one step of training: :meth:`begin` is called once for each of them.

    ==========  ==================================  ==========  ============================
    from        event                               to          what happens
    ==========  ==================================  ==========  ============================
    UNCOMPARED  a region is entered in training     COMPARED    ranks compare, states update
    UNCOMPARED  a calibrating block ends            COMPARED    ranks compare, states update
    COMPARED    either of these                     COMPARED    states update
    not AHEAD   FSDP gathers a weight of the model  AHEAD       as at the entry of a region
    AHEAD       the forward pass of the model       COMPARED    nothing: the step has begun
    AHEAD       another gather, an evaluation       AHEAD       nothing
    not AHEAD   an evaluation or a recomputation    the same    nothing
    not AHEAD   a later microbatch of a pipeline    the same    nothing: the first began it
    any         the model is converted or copied    UNCOMPARED  the ranks compare once more
    ==========  ==================================  ==========  ============================

    A step without states stays UNCOMPARED; a gather is one of a layer that has a state.
    Compiled code updates states and leaves the phase as it is.

    Invariants:

    - A step has one all-reduce for each recipe. Extra are the comparison of the ranks before the
      first one, and the update of a state that comes from another step.
    - All quantizations of a step use one scale, those of recomputations included.
    - Evaluation, and a rank that evaluates alone, move nothing.
    - A state's life ends with its layer, not when a garbage collector runs (:class:`Members`).
    - ``torch.compile(fullgraph=True)`` traces the beginning of a step.
    - Checkpoints restore the states bit for bit: all that outlives a step is in their buffers.

    Attributes:
        phase: see the table.
        model: a reference to the converted model that begins the step, if one does.
        pipeline_ranks: the ranks of the pipeline whose stages run in the step; 0 outside of any.
        members: the states that ran since the step began.
    """

    def __init__(self) -> None:
        self.phase = StepPhase.UNCOMPARED
        self.model: weakref.ref[torch.nn.Module] | None = None
        self.pipeline_ranks = 0
        self.members = Members()

    def begin(
        self, group: Group, model: torch.nn.Module | None = None, *, calibrated: bool = False
    ) -> None:
        """Begin a step.

        Args:
            group: process group over which recipes reduce. None is the default group, or the group
                of this rank where a pipeline runs.
            model: the converted model whose layers begin the step, if one does.
            calibrated: whether a calibrating block ends. The next step begins with its states, too.

        Raises:
            UsageError: the ranks have other layers; the group of a pipeline's stage is not known.
        """
        if torch.compiler.is_compiling():
            states = self._states(model, True)
            update_states(states, group, compiling=True)
            self._count(states, compiling=True)
            return
        states = self._states(model, False)
        if group is None and self.pipeline_ranks:
            group = group_in_pipeline(states, self.pipeline_ranks)
        if states and self.phase is StepPhase.UNCOMPARED:
            compare_layers(states, group)
            self.phase = StepPhase.COMPARED
        update_states(states, group, calibrated=calibrated)
        if calibrated:
            for state in states:
                if state.step is not None and state.step is not self:
                    # The model and the other step, in which the state ran, begin with it again.
                    state.step.add_member(None, state)
        else:
            self._count(states, compiling=False)
            # After an interrupt on the way here, the next step begins with the members.
            self.members.clear()
            self.pipeline_ranks = 0
            _awaited.discard(self)

    def _count(self, states: Sequence[RecipeState], compiling: bool) -> None:
        """Count the step that begins for the states whose recipes have a schedule."""
        scheduled = [state for state in states if state.has_schedule]
        if scheduled:
            count_step(scheduled, self, compiling)

    def _states(self, model: torch.nn.Module | None, compiling: bool) -> list[RecipeState]:
        """The states that begin the next step: all of the model, in the order of its modules, then
        the members."""
        states: dict[int, RecipeState] = {}
        for module in _modules_of(model, compiling):
            if isinstance(module, RecipeState) and module.stateful:
                states[id(module)] = module
        for state in self.members.states():
            if state.step is self and state._phase is not Phase.SETTLED:
                states.setdefault(id(state), state)
        return list(states.values())

    def begin_at_forward(self, model: torch.nn.Module) -> None:
        """Begin a step at the forward pass of its model, unless it has begun ahead of that."""
        if self.phase is StepPhase.AHEAD:
            self.phase = StepPhase.COMPARED
        else:
            self.begin(None, model)

    def begin_at_gather(self) -> None:
        """Begin a step of the model where FSDP gathers a weight before the forward pass, which
        goes on with the step."""
        if self.model is None:
            return
        model = self.model()
        if model is None or self.phase is StepPhase.AHEAD or not model.training:
            return
        if self.enter_pipeline(pipeline_pass()):
            self.begin(None, model)
            self.phase = StepPhase.AHEAD

    def enter_pipeline(self, stage_pass: PipelinePass | None) -> bool:
        """Note the pipeline that runs now.

        Returns:
            Whether the step may begin: the first microbatch of a schedule begins it for all.
        """
        if stage_pass is None:
            return True
        self.pipeline_ranks = stage_pass.ranks
        return not (stage_pass.microbatch or stage_pass.infers)

    def join(
        self,
        layer: object,
        state: RecipeState,
        group: Group,
        calibrating: bool,
        compiling: bool,
    ) -> None:
        """Take in the state of a layer that runs now.

        Args:
            group: process group over which recipes reduce.
            calibrating: whether the quantizers of the state only observe.
            compiling: whether this is being compiled.
        """
        settled = state._phase is Phase.SETTLED
        if state.step is self and not settled:
            return
        if not settled and not calibrating:
            # The state has the amaxes of another step, or of the step before a checkpoint. It
            # begins a step with these first.
            update_states([state], group, compiling)
            self._count([state], compiling)
        elif state.has_schedule and not calibrating:
            count_joined_step(state, self, compiling)
        self.add_member(layer, state, compiling)

    def add_member(self, layer: object, state: RecipeState, compiling: bool = False) -> None:
        """Have the state of a layer begin the next step together with the others.

        Args:
            layer: None stands for the layer that the state was added with before.
        """
        if compiling:
            self.members.add_traced(state)
            state.step = self
            state._phase = Phase.RAN
            return
        self.enter_pipeline(pipeline_pass())
        if not self.members.add(layer, state):
            # A layer that has run in evaluation only begins its step when it runs in training.
            state.step = None
            return
        if process_groups_ready():
            _awaited.add(self)
        phase = state._phase
        if phase is Phase.SETTLED:
            phase = Phase.RAN
        # Last and at once: an interrupt before this line leaves the state in its old step.
        state.__dict__.update(step=self, _phase=phase)

    def __getstate__(self) -> dict[str, object]:
        # Copies and pickles are of another model, which has its own members and ranks.
        return vars(Step())


def _modules_of(model: torch.nn.Module | None, compiling: bool) -> list[torch.nn.Module]:
    """All modules of a model, as ``model.modules()`` does, in a third of the time."""
    if model is None:
        return []
    if compiling:
        return list(model.modules())
    modules: dict[int, torch.nn.Module] = {}
    waiting: list[torch.nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in modules:
            modules[id(module)] = module
            waiting += reversed(module._modules.values())
    return list(modules.values())


class _Entry(NamedTuple):
    """A step of ``autocast`` blocks, with their recipe and the name of their process group."""

    recipe: Recipe | None
    group: Group
    reference: weakref.ref[Step] | None
    # Compiled code makes no weak references.
    traced: Step | None

    def step(self) -> Step | None:
        """The step; None when it is gone."""
        if self.reference is None:
            return self.traced
        return self.reference()

    def matches(self, recipe: Recipe | None, group: Group) -> bool:
        """Whether blocks with this recipe and group begin the step."""
        if self.recipe is None or recipe is None:
            return self.recipe is recipe and bool(self.group == group)
        return self.recipe.same_as(recipe) and bool(self.group == group)


# All blocks with an equal recipe and group share one step. Open regions and the states that ran in
# them keep a step alive; this list does not.
_steps: list[_Entry] = []


def step_for(recipe: Recipe | None, amax_reduction_group: Group) -> Step:
    """The step of ``autocast`` blocks with this recipe (None: those that are bound to layers) and
    process group."""
    # A name keeps no group alive.
    group: Group = getattr(amax_reduction_group, "group_name", amax_reduction_group)
    for entry in _steps:
        step = entry.step()
        if step is not None and entry.matches(recipe, group):
            return step
    step = Step()
    if torch.compiler.is_compiling():
        _steps.append(_Entry(recipe, group, None, step))
        return step
    _steps[:] = [entry for entry in _steps if entry.step() is not None]
    _steps.append(_Entry(recipe, group, weakref.ref(step), None))
    return step
