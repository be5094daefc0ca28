"""``Recipe``: which quantizer serves which tensor; and recipes by name."""

import copy
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from ottava.errors import DTypeError, OptionError, PluginError, check_takes, translated
from ottava.recipes.backward import (
    HIGH_PRECISION,
    QUANTIZED,
    Reads,
    check_backward,
    in_words,
    reads_of_word,
)
from ottava.recipes.registry import (
    RECIPE,
    get_quantizer_factory,
    import_by_name,
    is_path,
    reader_of,
)
from ottava.recipes.role import Explanation, QuantizerRole, RecipeRule, words
from ottava.recipes.schedule import schedule_of
from ottava.recipes.state import RecipeState

if TYPE_CHECKING:
    from ottava.collectives import Group
    from ottava.tensors import Quantizer

#: Gives a quantizer, a request or None. :meth:`Recipe.given` refuses other answers.
QuantizerFactory = Callable[[QuantizerRole], object]
_Answers: TypeAlias = dict[tuple[int, QuantizerRole], tuple[QuantizerFactory, object]]

#: (factory, answer) of each call inside :func:`asked_once`, by the factory's id and the role. The
#: factory is kept alive with its answer, so that no other factory gets the same id.
_answers: ContextVar[_Answers | None] = ContextVar("answers", default=None)


@contextmanager
def asked_once() -> Iterator[None]:
    """Ask each factory once for a role inside the block, and give later callers the same answer.

    A layer needs the answer several times: to find the recipe that serves the role, to make the
    quantizers, and to quantize a weight that is kept.
    """
    import torch

    if torch.compiler.is_compiling() or _answers.get() is not None:
        yield
        return
    token = _answers.set({})
    try:
        yield
    finally:
        _answers.reset(token)


def _ask(factory: QuantizerFactory, role: QuantizerRole) -> object:
    # Imported here, because listing the recipes imports this module, and must not import torch.
    import torch

    answers = None if torch.compiler.is_compiling() else _answers.get()
    if answers is None:
        return factory(role)
    key = id(factory), role
    if key not in answers:
        answers[key] = factory, factory(role)
    return answers[key][1]


class Recipe(ABC):
    """Base class of recipes. A subclass names itself and defines :meth:`make_quantizer`.

    Recipes are configuration: they hold no tensors, and one recipe serves any number of layers.
    """

    #: The name under which the recipe is registered.
    name: ClassVar[str] = ""
    #: Whether layers keep state for it: its :meth:`make_state` returns a stateful one.
    stateful: ClassVar[bool] = False
    #: What the backward pass reads of the tensors that the recipe serves: ``"quantized"`` ones;
    #: those in ``"high_precision"`` that the layer was given; or the values of the input and the
    #: weight that the forward pass read, ``"dequantized"``. Only ``"quantized"`` quantizes the
    #: gradient of the output. A dataclass has it as a field.
    backward: str = QUANTIZED
    #: Whether a layer computes the gradient of its weight from values of the tensors that the
    #: recipe serves, the input and the gradient of the output, that are not quantized.
    wgrad_high_precision: bool = False
    #: The number of the first steps of training that compute in high precision.
    high_precision_until_step: int = 0
    #: The last step of training that is quantized: those after it compute in high precision. None:
    #: all are quantized to the end.
    high_precision_after_step: int | None = None
    #: Whether :meth:`update_states` reduces over ranks: these are compared then, before the first
    #: step.
    reduces_amaxes: bool = False
    _factory: QuantizerFactory | None = None

    def __post_init__(self) -> None:
        """Check :attr:`backward` and the steps in high precision. Dataclasses call it; one with a
        ``__post_init__`` of its own calls it by ``super()``, or is checked when it is bound to a
        layer.

        Raises:
            OptionError: a value is refused, or contradicts another.
        """
        check_backward(self)
        schedule_of(self)

    @property
    def _label(self) -> str:
        return self.name or type(self).__name__

    @abstractmethod
    def make_quantizer(
        self, role: QuantizerRole, *, amax_reduction_group: "Group" = None
    ) -> "Quantizer":
        """A quantizer for ``role``; the group is the one of the enclosing ``autocast``, if any."""

    def set_quantizer_factory(self, factory: QuantizerFactory | str | None) -> None:
        """Put a factory over this recipe: for each role it gives a quantizer, or an answer that
        stands for one.

        Args:
            factory: ``factory(role)`` gives a :class:`~ottava.Quantizer`; a
                :class:`~ottava.QuantizerRequest` for the quantizer of another recipe; or None where
                this recipe's own serves. A name is that of a published factory.

        Raises:
            DTypeError: it is neither callable nor a name. A name may be refused by
                :func:`get_quantizer_factory`.
        """
        if isinstance(factory, str):
            factory = get_quantizer_factory(factory)
        if factory is not None:
            check_takes(factory, "the factory", "a callable factory(role), or a name", None)
        # Recipes may be frozen dataclasses: their fields say what they do, the factory is set over
        # them.
        object.__setattr__(self, "_factory", factory)

    def quantizer(
        self, role: QuantizerRole | str, *, amax_reduction_group: "Group" = None
    ) -> "Quantizer":
        """The quantizer for ``role``: the factory's, if one is set, else the recipe's.

        Where a stateful recipe serves the role, this one has a state of its own; those of a layer
        share the layer's. Answers of the factory are refused as by :meth:`factory_answer`.
        """
        role = QuantizerRole.of(role)
        answer = self.factory_answer(role)
        if answer is None:
            return self.make_quantizer(role, amax_reduction_group=amax_reduction_group)
        if isinstance(answer, QuantizerRequest):
            return answer.recipe.quantizer(role, amax_reduction_group=amax_reduction_group)
        return answer

    def factory_answer(
        self, role: QuantizerRole, of: QuantizerFactory | None = None
    ) -> "Quantizer | QuantizerRequest | None":
        """The answer of the factory ``of``, or else of the one put over this recipe, for ``role``.

        Returns:
            None where the recipe's own quantizer serves.

        Raises:
            DTypeError: the answer is of another kind.
            OptionError: the answer requests this recipe, which would lead back to it.
        """
        from ottava.tensors import Quantizer

        factory = self._factory if of is None else of
        answer = None if factory is None else _ask(factory, role)
        if answer is not None and not isinstance(answer, (Quantizer, QuantizerRequest)):
            raise DTypeError(
                f"the quantizer factory returned a {type(answer).__name__} for {role}",
                expected="an ottava.Quantizer, an ottava.QuantizerRequest or None",
            )
        if isinstance(answer, QuantizerRequest) and answer.recipe.same_as(self):
            raise OptionError(
                f"the quantizer factory of {self._label!r} asks for that recipe, for {role}",
                expected="None, where the recipe's own quantizer is to serve",
            )
        return answer

    def backward_reads(self, role: QuantizerRole) -> Reads:
        """What the products of the backward pass read of the tensor of ``role``, by the names of
        the product and the tensor.

        Where a factory requests other recipes, :attr:`backward` of the outermost recipe that has
        another value than ``"quantized"`` decides.

        Raises:
            OptionError: :attr:`backward` of this recipe, or of a requested one, is refused.
        """
        check_backward(self)
        reads = reads_of_word(self.backward, role.tensor_type)
        if self.backward != QUANTIZED:
            return reads
        answer = self.factory_answer(role)
        if isinstance(answer, QuantizerRequest):
            return answer.recipe.backward_reads(role)
        read_by_wgrad = "wgrad", role.tensor_type
        if self.wgrad_high_precision and read_by_wgrad in reads:
            reads[read_by_wgrad] = HIGH_PRECISION
        return reads

    def fake_quantizer(self, fp8_format: str) -> "Quantizer | None":
        """The quantizer of a fake-quantization format that the recipe's spec lists: by default that
        of inputs."""
        return self.quantizer("input")

    def explain(self, role: QuantizerRole | str) -> Explanation:
        """Describe in words what serves ``role``: by default the quantizer that is made for it."""
        role = QuantizerRole.of(role)
        answer = self.factory_answer(role)
        if isinstance(answer, QuantizerRequest):
            reads = reads_of_word(self.backward, role.tensor_type)
            return in_words(reads, answer.recipe.explain(role))
        name, quantizer = "", answer
        if quantizer is None:
            name, quantizer = self._label, self.make_quantizer(role)
        rowwise = words(quantizer.for_usage(False), name)
        columnwise = words(quantizer.for_usage(True), name)
        return in_words(self.backward_reads(role), Explanation(rowwise, columnwise))

    def rules(self) -> tuple[RecipeRule, ...]:
        """The rules that :meth:`explain` may name, in their order: none, unless the recipe has
        any."""
        return ()

    def check_layers(self, names: Sequence[str]) -> None:
        """Refuse rules for layers that a model does not have, before the model is converted.

        Args:
            names: the qualified names of the model's linear layers, those that are left alone
                included.

        Raises:
            OptionError: a pattern fits no layer; by default nothing is refused.
        """

    def same_as(self, other: "Recipe | None") -> bool:
        """Whether ``other`` says the same: the same object, or an equal one under an equal
        factory."""
        if self is other:
            return True
        if other is None or self._factory != other._factory:
            return False
        # Not every recipe has the option as a field.
        return self.backward == other.backward and bool(self == other)

    def __deepcopy__(self, memo: dict[int, object]) -> "Recipe":
        # A copy has the same factory: states know their recipe by it, and copies of an object are
        # not equal to it by default.
        duplicate = copy.copy(self)
        memo[id(self)] = duplicate
        attributes = {name: value for name, value in vars(self).items() if name != "_factory"}
        vars(duplicate).update(copy.deepcopy(attributes, memo))
        return duplicate

    def update_states(self, states: Sequence[RecipeState], amax_reduction_group: "Group") -> None:
        """Begin a step: called with every stateful state of this recipe that takes part.

        All of them together, so that whatever needs the other ranks of ``amax_reduction_group``
        (None: the default group, if there is one) takes one collective. A step begins at the entry
        of an :class:`~ottava.autocast` block, or of the forward pass of the outermost module that
        ``convert`` returned, with gradients enabled and outside a backward pass; and at the exit of
        a calibrating block.
        """

    def make_state(
        self, roles: Sequence[QuantizerRole], *, amax_reduction_group: "Group" = None
    ) -> RecipeState:
        """The state that a layer keeps for this recipe: its quantizers. A stateful recipe returns a
        module with buffers."""
        return RecipeState(self, roles, amax_reduction_group=amax_reduction_group)


@dataclass(frozen=True)
class QuantizerRequest:
    """The answer of a quantizer factory that asks for the quantizer of ``recipe`` for the role.

    A recipe that keeps state (delayed scaling, say) cannot be served by a quantizer that a factory
    makes: its state belongs to the layer. The layer answers the requests that name equal recipes
    with one state.

    Attributes:
        recipe: a recipe; the name of an installed one is built with its defaults, or refused as by
            :func:`get_recipe`.
    """

    recipe: Recipe

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", as_recipe(self.recipe))


def get_recipe(name: str | os.PathLike[str], **options: object) -> Recipe:
    """Build the recipe registered as ``name``, or from the recipe file whose path it is.

    A path has a suffix, which no name has: the recipe whose spec lists the suffix in
    ``file_suffixes`` reads the file. Where the default of an option is the member of an enumeration
    or a tuple, a member's name or a list will do. The option ``backward`` sets
    :attr:`Recipe.backward` of a recipe that has no such argument, too.

    Raises:
        RecipeNotFoundError, DuplicateRecipeError: no installed package provides it, or several
            claim the name.
        OptionError: an option that the recipe does not take, one that is missing, or a value that
            it refuses.
        PluginError: the package that provides it cannot be imported, or does not build a recipe.
    """
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    if is_path(name):
        path = os.path.expanduser(name)
        name, options = reader_of(path), {"file": path, **options}
    description, factory = import_by_name(RECIPE, name)
    with translated(
        f"{description} cannot be built",
        "",
        "tell its authors",
        to=PluginError,
        of=(Exception, SystemExit),
    ):
        signature = inspect.signature(factory)
        word: object = QUANTIZED
        if not _takes(signature, "backward"):
            word = options.pop("backward", QUANTIZED)
        try:
            signature.bind(**options)
        except TypeError as error:
            raise OptionError(
                f"recipe {name!r}: {error}", ", ".join(signature.parameters) or "no options"
            ) from None
        recipe = factory(**{key: _converted(signature, key, options[key]) for key in options})
        if not isinstance(recipe, Recipe):
            raise TypeError(f"an object of type {type(recipe).__name__} is no ottava.Recipe")
        if word != QUANTIZED:
            recipe = copy.copy(recipe)
            object.__setattr__(recipe, "backward", word)
            check_backward(recipe)
    return recipe


def _takes(signature: inspect.Signature, option: str) -> bool:
    """Whether a function with this signature takes an argument by this name."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return option in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _converted(signature: inspect.Signature, option: str, value: object) -> object:
    """An option in the type of its default, where files and command lines write another one."""
    default: object = getattr(signature.parameters.get(option), "default", None)
    if isinstance(default, Enum) and isinstance(value, str) and not isinstance(value, Enum):
        members = type(default).__members__
        if value not in members:
            raise OptionError(f"{option} is {value!r}", expected=f"one of {', '.join(members)}")
        return members[value]
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    return value


def as_recipe(recipe: Recipe | str | os.PathLike[str]) -> Recipe:
    """A recipe object, built by :func:`get_recipe` with its defaults when given by name or path;
    else a DTypeError."""
    if isinstance(recipe, (str, os.PathLike)):
        return get_recipe(recipe)
    if not isinstance(recipe, Recipe):
        raise DTypeError(
            f"recipe is a {type(recipe).__name__}: {recipe!r}",
            expected="an ottava.Recipe, or the name of one that `ottava recipes` lists",
        )
    return recipe
