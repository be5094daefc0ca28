"""How a forward pass of a layer enters its step.

========================  ====================================================================
the pass runs             what happens
========================  ====================================================================
in a region, in training  the region's step begins, unless it has; the state becomes a member
in a calibrating region   the state becomes a member of the step that begins at the region's end
outside, in training      a step begins that is the layer's own
in evaluation             no step begins; a settled state notes the step of its region
as a recomputation        nothing
========================  ====================================================================
"""

import sys
import warnings

from ottava.collectives import Group
from ottava.nn.call import Call
from ottava.nn.layer import Layer, label_of
from ottava.recipes.counting import count_step
from ottava.recipes.ranks import group_in_pipeline
from ottava.recipes.region import Region, regions
from ottava.recipes.state import Phase, RecipeState
from ottava.torch_private import KNOWS_BACKWARD, PIPELINES, pipeline_pass


def enter_step(layer: Layer, call: Call, compiling: bool) -> None:
    """Have the layer's stateful state enter the step that a forward pass belongs to.

    Args:
        call: which has a state with ``stateful``.
        compiling: whether the call is traced by a compiler. No phase changes then.
    """
    state = call.state
    assert state is not None
    if call.recomputed:
        return
    if regions.stack:
        enter_step_of_region(layer, state, regions.stack[-1], call.of_step, compiling)
    elif call.of_step:
        begin_lone_step(state, compiling)
    if call.of_step and call.records and not (compiling or call.calibrating):
        warn_of_another_pass(layer, state)


def begin_lone_step(state: RecipeState, compiling: bool) -> None:
    """Begin the step of a layer that runs in no region.

    The first microbatch of a pipeline begins it for the others.
    """
    stage_pass = None
    # Compiled code must not ask which modules are imported: it would be compiled again with each
    # new one.
    if not compiling and PIPELINES in sys.modules:
        stage_pass = pipeline_pass()
    if stage_pass is None or not stage_pass.microbatch:
        group: Group = None
        if stage_pass is not None:
            group = group_in_pipeline([state], stage_pass.ranks)
        for part in state.parts():
            part.recipe.update_states([part], group)
        if state.has_schedule:
            count_step([state], None, compiling)
    if not compiling:
        state.__dict__.update(step=None, _phase=Phase.RAN)


def enter_step_of_region(
    layer: Layer, state: RecipeState, region: Region, of_step: bool, compiling: bool
) -> None:
    """Have a stateful state begin its steps with a region.

    Args:
        of_step: whether the layer runs in a step of the region, not in an evaluation.
    """
    if compiling and region.model is not None:
        # The model begins a step with all its layers, and compiled code must change nothing.
        return
    if of_step and region.is_quantized:
        region.begin_step()
    if of_step or region.calibrating:
        region.step.join(layer, state, region.group, region.calibrating, compiling)
    elif not compiling and state._phase is Phase.SETTLED:
        # No step begins. But if a checkpoint is loaded next, its values are to be taken up when the
        # step of this region begins.
        state.step = region.step


def warn_of_another_pass(layer: Layer, state: RecipeState) -> None:
    """Warn, once for each backward pass, of a forward pass that follows it in the same step.

    Microbatches of a pipeline do that, and are not warned of. Where torch does not tell what runs
    in a backward pass, a recomputation would look the same.
    """
    if state._phase is not Phase.WENT_BACK or not KNOWS_BACKWARD:
        return
    if state.step is not None and state.step.pipeline_ranks:
        return
    state._set_phase(Phase.RAN)
    text = (
        f"{label_of(layer)} runs another forward pass after a backward pass, in one region: scales "
        f"are updated at the entry of a region only; enter it anew for every step"
    )
    warnings.warn(text, UserWarning, stacklevel=6)
