"""Quantizer factories, functions of a role, and functions that combine them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ottava import get_quantizer_factory, get_recipe, list_quantizer_factories
from ottava.errors import DTypeError, OptionError
from ottava.recipes import QuantizerRequest, QuantizerRole, Recipe
from ottava.recipes.patterns import fits, fits_some, modules_of, suggestion
from ottava.tensors import Quantizer
from ottava_custom.hybrid import HybridQuantizer, quantizer_for_side
from ottava_custom.identity import IdentityQuantizer
from ottava_custom.reference.quantizer import CurrentScalingQuantizerRef

#: What a factory returns: None leaves the role to others.
Answer = Quantizer | QuantizerRequest | None
Factory = Callable[[QuantizerRole], Answer]

#: The tensors that a role may name.
TENSOR_TYPES = ("input", "weight", "output", "grad_output", "grad_input")


def current_scaling_ref_quantizer_factory(role: QuantizerRole | str) -> CurrentScalingQuantizerRef:
    """The reference of current scaling: E4M3 for ``input`` and ``weight``, E5M2 for every other
    tensor.

    Raises:
        OptionError: the role has an unknown tensor type.
    """
    tensor_type = QuantizerRole.of(role).tensor_type
    _check_tensor_type(tensor_type)
    if tensor_type in ("input", "weight"):
        return CurrentScalingQuantizerRef(torch.float8_e4m3fn)
    return CurrentScalingQuantizerRef(torch.float8_e5m2)


def _check_tensor_type(tensor_type: str) -> None:
    if tensor_type not in TENSOR_TYPES:
        raise OptionError(f"tensor type {tensor_type!r}", expected=", ".join(TENSOR_TYPES))


#: The same function, under the other name by which people know it.
current_scaling_ref_factory = current_scaling_ref_quantizer_factory


def identity_factory(role: QuantizerRole | str) -> IdentityQuantizer:
    """High precision for every role."""
    return IdentityQuantizer()


def mirror(recipe: Recipe | str | os.PathLike[str], **options: Any) -> Factory:
    """A factory that returns what a recipe uses: ``mirror("mxfp8", with_2d_quantization=True)``.

    Args:
        recipe: a recipe, the name of an installed recipe, or the path of a recipe file.
        options: options of the recipe that is named.

    Raises:
        DTypeError: ``recipe`` is neither a recipe nor a name, or options come with a recipe that is
            built already.
        RecipeNotFoundError, OptionError, PluginError: :func:`ottava.get_recipe` raised it.
    """
    if isinstance(recipe, (str, os.PathLike)):
        recipe = get_recipe(recipe, **options)
    elif options:
        raise DTypeError(
            "options for a recipe that is built already",
            expected="its name",
            remedy="leave them out",
        )
    return Mirror(QuantizerRequest(recipe))


@dataclass(frozen=True)
class Mirror:
    """The factory of :func:`mirror`: one request for every role."""

    request: QuantizerRequest

    def __call__(self, role: QuantizerRole | str) -> QuantizerRequest:
        """The request, whatever the role."""
        return self.request


def by_layer(patterns: Mapping[str, Factory | str], default: Factory | str) -> Factory:
    """The factory of the first pattern that fits a layer; ``default`` for other layers.

    Patterns (``fnmatch``) fit the qualified name of a layer, or of a module that the layer is in,
    as the patterns of :func:`ottava.convert` do. The name of a published factory or of an installed
    recipe stands for a factory.

    Raises:
        DTypeError: a factory is not callable, or a pattern is no string.
        RecipeNotFoundError: no installed recipe or factory has the name.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise DTypeError(
                f"a pattern is a {type(pattern).__name__}", expected="a pattern of layer names"
            )
    return Choice.of("name", patterns, default)


def by_tensor(default: Factory | str, **tensors: Factory | str) -> Factory:
    """The factory of a tensor type: ``by_tensor("current", weight="identity")``; ``default`` for
    other tensors.

    Raises:
        OptionError: a tensor type is unknown.
        DTypeError, RecipeNotFoundError: as :func:`by_layer` raises them.
    """
    for tensor_type in tensors:
        _check_tensor_type(tensor_type)
    return Choice.of("tensor_type", tensors, default)


@dataclass(frozen=True)
class Choice:
    """The factory of :func:`by_layer` and :func:`by_tensor`.

    Attributes:
        attribute: the attribute of a role that patterns are compared with.
        choices: patterns and their factories, in the order in which they are compared.
        default: the factory of roles that no pattern fits.
    """

    attribute: str
    choices: tuple[tuple[str, Factory], ...]
    default: Factory

    @classmethod
    def of(
        cls, attribute: str, choices: Mapping[str, Factory | str], default: Factory | str
    ) -> Choice:
        """The factory of factories, some of which are given by their names."""
        factories = [(pattern, as_factory(factory)) for pattern, factory in choices.items()]
        return cls(attribute, tuple(factories), as_factory(default))

    def __call__(self, role: QuantizerRole | str) -> Answer:
        """What the factory of the first pattern that fits returns."""
        role = QuantizerRole.of(role)
        text = getattr(role, self.attribute)
        for pattern, factory in self.choices:
            if fits(text, pattern):
                return factory(role)
        return self.default(role)

    def check_layers(self, names: Sequence[str]) -> None:
        """Check that each pattern fits a layer of a model, here and in the factories.

        Raises:
            OptionError: a pattern fits none of ``names``; the message has the nearest that would.
        """
        if self.attribute == "name":
            for pattern, expected in unmatched([pattern for pattern, _ in self.choices], names):
                raise OptionError(
                    f"pattern {pattern!r} of by_layer matches no layer of the model", expected
                )
        for factory in (*(factory for _, factory in self.choices), self.default):
            check = getattr(factory, "check_layers", None)
            if callable(check):
                check(names)


def unmatched(patterns: Iterable[str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The patterns that fit none of the names of a model's layers, each with what is expected."""
    modules = modules_of(names)
    otherwise = "the name of a linear layer, or of a module that it is in"
    for pattern in patterns:
        if not fits_some(pattern, modules):
            yield pattern, suggestion(pattern, names, otherwise)


def by_direction(forward: Factory | str, backward: Factory | str) -> Factory:
    """The quantizers of ``forward`` for what fprop reads, those of ``backward`` for what dgrad and
    wgrad read.

    Inputs and weights are quantized by a :class:`HybridQuantizer`, along rows for the forward pass
    and along columns for the backward pass. Gradients are quantized by the backward factory.

    Raises:
        DTypeError, RecipeNotFoundError: as :func:`by_layer` raises them.
    """
    return ByDirection(as_factory(forward), as_factory(backward))


@dataclass(frozen=True)
class ByDirection:
    """The factory of :func:`by_direction`."""

    forward: Factory
    backward: Factory

    def __call__(self, role: QuantizerRole | str) -> Answer:
        """A hybrid for inputs and weights, and what ``backward`` returns for gradients.

        Raises:
            OptionError: a factory gives no quantizer, or one that keeps state, for a side.
        """
        role = QuantizerRole.of(role)
        if role.is_gradient:
            return self.backward(role)
        return HybridQuantizer(
            quantizer_for_side(self.forward, role, "rowwise"),
            quantizer_for_side(self.backward, role, "columnwise"),
        )


def as_factory(factory: Factory | str) -> Factory:
    """The factory of a name, which is that of a published factory or else of an installed recipe;
    a callable as it is."""
    if isinstance(factory, str):
        published = {spec.name for spec in list_quantizer_factories()}
        if factory in published:
            return get_quantizer_factory(factory)
        return mirror(factory)
    if not callable(factory):
        raise DTypeError(
            f"the factory is a {type(factory).__name__}",
            expected="a callable factory(role), or a name",
        )
    return factory
