"""``RecipeState``: the quantizers and values that a layer keeps for its recipe."""

import copy
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from ottava.recipes.backward import ALL_QUANTIZED, Reads
from ottava.recipes.role import QuantizerRole

if TYPE_CHECKING:
    import torch

    from ottava.collectives import Group
    from ottava.tensors.quantizer import Quantizer

_USAGES = ((True, False), (False, True), (True, True))
ItemT = TypeVar("ItemT")
RecipeT = TypeVar("RecipeT", bound="RecipeOfState")
# The names in ``reduced_by_max`` of any class of states.
_REDUCED_BY_MAX: set[str] = set()


def is_reduced_by_max(name: str) -> bool:
    """Whether a name in a state dict is that of a buffer with
    :attr:`RecipeState.reduced_by_max`."""
    return ".recipe_state." in f".{name}" and name.rpartition(".")[2] in _REDUCED_BY_MAX


class RecipeOfState(Protocol):
    """What a state asks of its :class:`~ottava.recipes.base.Recipe`."""

    @property
    def _factory(self) -> object: ...

    def same_as(self, other: Any) -> bool: ...

    def quantizer(
        self, role: QuantizerRole, *, amax_reduction_group: "Group" = None
    ) -> "Quantizer": ...


def by_recipe(pairs: Sequence[tuple[RecipeT, ItemT]]) -> list[tuple[RecipeT, list[ItemT]]]:
    """The items of equal recipes together, in the order of the recipes."""
    groups: list[tuple[RecipeT, list[ItemT]]] = []
    for recipe, item in pairs:
        items = next((items for known, items in groups if known.same_as(recipe)), None)
        if items is None:
            items = []
            groups.append((recipe, items))
        items.append(item)
    return groups


class Phase(Enum):
    """Where a stateful state is in its step.

    ==============  ===================================================  =========
    from            event                                                to
    ==============  ===================================================  =========
    SETTLED         the layer runs in a step, or is calibrated           RAN
    SETTLED         a checkpoint is loaded                               RAN
    SETTLED, RAN    a backward pass of the layer                         WENT_BACK
    RAN, WENT_BACK  a step begins with the state                         SETTLED
    any             the layer trains outside of any region               RAN
    WENT_BACK       a warning tells of another forward pass              RAN
    any             a calibrating block ends                             RAN
    any             another state takes its place in the layer           SETTLED
    ==============  ===================================================  =========

    An evaluation in a region leaves the phase as it is, and so does all compiled code but a forward
    pass of a step.
    """

    #: Nothing is new in the state since the last step began.
    SETTLED = "settled"
    #: The state may hold values, such as amaxes, that have not gone into its scales yet. They do
    #: when the next step begins.
    RAN = "ran"
    #: The same, and a backward pass has run. Another forward pass should be one of the next step.
    WENT_BACK = "went back"


class StepOfState(Protocol):
    """What a state asks of the :class:`~ottava.recipes.step.Step` that it belongs to."""

    pipeline_ranks: int

    def add_member(self, layer: object, state: "RecipeState", compiling: bool = False) -> None: ...


class RecipeState:
    """The quantizers of one layer, one for each role and combination of usages.

    They are made before layers run, so that a forward pass only looks them up and never changes
    one: a compiled graph then has nothing to mutate. A stateful recipe's state derives from
    ``torch.nn.Module`` and this, sets :attr:`stateful`, keeps its values in buffers, and defines
    :meth:`quantizer`; the layer owns it as the submodule ``recipe_state``. It is made under the
    default dtype float32 and on the CPU, whatever torch's defaults are; ``model.bfloat16()`` and
    the like move its buffers and leave their dtypes; buffers that leave the meta device are
    :meth:`reset`.
    """

    #: Whether there are values that outlive a step. Such states are kept, saved and updated at the
    #: entry of regions.
    stateful: ClassVar[bool] = False
    #: Buffers whose values the ranks of a group reduce by MAX in the next step. A checkpoint that
    #: is loaded on another number of ranks has the largest values of all ranks in these, and the
    #: values of the first rank in other buffers.
    reduced_by_max: ClassVar[tuple[str, ...]] = ()
    #: Attributes that a copy of a stateful state shares with it.
    shared_by_copies: ClassVar[tuple[str, ...]] = ("factory",)
    #: The :class:`ottava.Recipe`. Any, because its module imports this one.
    recipe: Any
    #: Of a stateful one: whether :meth:`quantizer` always gives the same quantizers for the same
    #: arguments, and these read the state's buffers when they quantize. With True a layer asks for
    #: them once, and with False in each forward pass.
    has_fixed_quantizers: bool = False
    #: What the products of the backward pass read of their operands, as the recipes say.
    backward_reads: Reads = ALL_QUANTIZED
    # The quantizer factory that was put over the recipe when this was made.
    factory: object = None
    amax_reduction_group: "Group"
    # The step that it last ran in, if that was one of a region.
    step: StepOfState | None = None
    _phase: Phase = Phase.SETTLED
    _roles: Sequence[QuantizerRole] = ()  # the roles that a stateful state serves
    #: Whether some steps of training compute in high precision.
    has_schedule: bool = False
    # Whether the results of all quantizers are in high precision, so that the layer computes in it.
    in_high_precision: bool = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _REDUCED_BY_MAX.update(cls.reduced_by_max)

    def __init__(
        self,
        recipe: RecipeOfState,
        roles: Sequence[QuantizerRole],
        *,
        amax_reduction_group: "Group" = None,
    ) -> None:
        self.recipe = recipe
        self.factory = recipe._factory
        self.amax_reduction_group = amax_reduction_group
        self.quantizers: dict[tuple[str, bool, bool], Quantizer] = {}
        for role in roles:
            quantizer = recipe.quantizer(role, amax_reduction_group=amax_reduction_group)
            for rowwise, columnwise in _USAGES:
                variant = quantizer.copy()
                variant.set_usage(rowwise=rowwise, columnwise=columnwise)
                variant.internal = True
                self.quantizers[role.tensor_type, rowwise, columnwise] = variant
        self.in_high_precision = all(
            quantizer.in_high_precision for quantizer in self.quantizers.values()
        )

    def serves(self, recipe: RecipeOfState, amax_reduction_group: "Group") -> bool:
        """Whether this is the state for that recipe and process group."""
        return self.is_of(recipe) and self.amax_reduction_group is amax_reduction_group

    def is_of(self, recipe: RecipeOfState) -> bool:
        """Whether it was made by an equal recipe, under a factory that equals the one that the
        recipe has now."""
        return bool(self.recipe.same_as(recipe) and self.factory == recipe._factory)

    def is_high_precision_step(self) -> bool:
        """Whether the step that runs, or ran last, computes in high precision: by the schedule of
        the recipe, for states with :attr:`stateful`."""
        return False

    def quantizer(
        self, tensor_type: str, *, rowwise: bool, columnwise: bool, recording: bool = True
    ) -> "Quantizer":
        """The quantizer of ``tensor_type`` with these usages.

        ``recording`` is False in the recomputation of activation checkpointing, whose values the
        state has seen, and in evaluation, whose values it is not to see.
        """
        return self.quantizers[tensor_type, rowwise, columnwise]

    def evaluation_quantizer(
        self, tensor_type: str, *, rowwise: bool, columnwise: bool
    ) -> "Quantizer":
        """:meth:`quantizer` of an operand in an evaluation, for states with :attr:`stateful`.

        It may count elements that it clamps, and changes nothing that another pass computes with.
        Compiled evaluation does not ask for it.
        """
        return self.quantizer(tensor_type, rowwise=rowwise, columnwise=columnwise, recording=False)

    def opens_evaluation(self) -> bool:
        """Called before a forward pass of an evaluation, for states with :attr:`stateful`: whether
        the pass has the :meth:`evaluation_quantizer` of its operands, else those of
        :meth:`quantizer`."""
        return True

    def note_evaluation(self, weight: "torch.Tensor") -> None:
        """Called after a forward pass that asked for :meth:`evaluation_quantizer`, and used
        ``weight``. Nothing to do for states that count nothing."""

    def parts(self) -> "Sequence[RecipeState]":
        """The states that begin a step, each together with others of its recipe: this one, or the
        parts that it consists of."""
        return [self]

    def note_backward(self) -> None:
        """Called in the backward pass of a layer, which records amaxes of gradients."""
        if self._phase is Phase.WENT_BACK:
            return
        self.await_next_step()
        self._set_phase(Phase.WENT_BACK)

    def await_next_step(self, layer: object = None) -> None:
        """Have the next step begin with the values that the state holds now.

        The state's own step did not begin with them, because they were recorded in a backward pass,
        or are about to be loaded.

        Args:
            layer: the layer of the state; None stands for the layer that it last ran in.
        """
        if self._phase is not Phase.SETTLED:
            return
        if self.step is not None:
            self.step.add_member(layer, self)
        self._set_phase(Phase.RAN)

    def _set_phase(self, phase: Phase) -> None:
        # Not by an assignment, which modules make slow.
        self.__dict__["_phase"] = phase

    def reset(self) -> None:
        """Go back to the initial values. Nothing to do without state."""

    def weight_quantizer(self, weight: "torch.Tensor") -> "Quantizer | None":
        """The quantizer for in-place updates of an FP8-primary weight; None: the weight keeps its
        own. Compiled passes do not ask for it."""
        return None

    def first_quantizer(self, weight: "torch.Tensor") -> "Quantizer | None":
        """The quantizer for in-place updates of an FP8-primary weight until a pass in eager mode
        asks for :meth:`weight_quantizer`; None: the weight keeps its own.

        A layer asks for it when it gets the weight or the state. Compiled passes ask for no
        quantizer: they only call :meth:`use_gathered`. After such a pass the first quantizer has to
        do at its next update what :meth:`weight_quantizer` would have done.
        """
        return None

    def expect_weight(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Called before values of an FP8-primary weight are loaded from ``state_dict``, which may
        hold this state.

        Modules load their parameters before their submodules. So a weight would be quantized by the
        scale of before, and leave the grid that its values lie on. ``prefix`` is that of this
        state's names. A state that knows the scale takes it here; there is nothing to do without
        state.
        """

    def gather_quantizer(self) -> "Quantizer":
        """The quantizer for a weight in high precision whose shards are quantized when they are
        gathered."""
        quantizer = self.quantizers["weight", True, True].copy()
        quantizer.internal = False
        return quantizer

    def use_gathered(self, weight: "torch.Tensor", *, recording: bool) -> None:
        """Called when a forward pass uses a quantized weight. One that :meth:`gather_quantizer`
        quantized may have been gathered more often than it is used. Nothing to do without state."""

    def __getstate__(self) -> dict[str, object]:
        # A process group belongs to its process, and a step to the states that run together.
        return self.__dict__ | {"amax_reduction_group": None, "step": None}

    def __deepcopy__(self, memo: dict[int, object]) -> "RecipeState":
        # Quantizers without state need not be copied.
        if not self.stateful:
            return self
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        # A state that is a module may have __getstate__ of torch's class, which keeps both.
        attributes = self.__getstate__() | {"amax_reduction_group": None, "step": None}
        shared = {
            name: attributes.pop(name) for name in self.shared_by_copies if name in attributes
        }
        duplicate.__dict__.update(copy.deepcopy(attributes, memo) | shared)
        return duplicate
