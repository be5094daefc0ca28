"""Quantizer factories: functions of a role, and what puts them together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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

Given = Quantizer | QuantizerRequest | None
Factory = Callable[[QuantizerRole], Given]

#: What a role may be of.
TENSOR_TYPES = ("input", "weight", "output", "grad_output", "grad_input")


def current_scaling_ref_quantizer_factory(role: QuantizerRole | str) -> CurrentScalingQuantizerRef:
    """The reference of current scaling: E4M3 for ``input`` and ``weight``, E5M2 for every other
    tensor.

    Raises:
        OptionError: the role has a tensor type that there is not.
    """
    tensor_type = QuantizerRole.of(role).tensor_type
    _check_tensor_type(tensor_type)
    # Results and gradients are in E5M2.
    forward = tensor_type in ("input", "weight")
    return CurrentScalingQuantizerRef(torch.float8_e4m3fn if forward else torch.float8_e5m2)


def _check_tensor_type(tensor_type: str) -> None:
    if tensor_type not in TENSOR_TYPES:
        raise OptionError(f"tensor type {tensor_type!r}", expected=", ".join(TENSOR_TYPES))


#: The same under another name that is known for it.
current_scaling_ref_factory = current_scaling_ref_quantizer_factory


def identity_factory(role: QuantizerRole | str) -> IdentityQuantizer:
    """High precision for every role."""
    return IdentityQuantizer()


def mirror(recipe: Recipe | str | os.PathLike[str], **options: Any) -> Factory:
    """A factory that gives what a recipe would use: ``mirror("mxfp8", with_2d_quantization=True)``.

    Args:
        recipe: a recipe, the name of an installed one, or the path of a recipe file.
        options: of the recipe that is named.

    Raises:
        DTypeError: ``recipe`` is neither a recipe nor a name, or options come with a recipe that is
            built already.
        RecipeNotFoundError, OptionError, PluginError: as of :func:`ottava.get_recipe`.
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
    """What :func:`mirror` returns: one request for every role."""

    request: QuantizerRequest

    def __call__(self, role: QuantizerRole | str) -> QuantizerRequest:
        """The request."""
        return self.request


def by_layer(patterns: Mapping[str, Factory | str], default: Factory | str) -> Factory:
    """A factory for each pattern, the first that matches; ``default`` for the other layers.

    Patterns (``fnmatch``) fit the qualified name of a layer, or of a module that it is in, as those
    of :func:`ottava.convert` do. A factory may be given by the name of a published one or of an
    installed recipe.

    Raises:
        DTypeError: one of them is no factory, or a pattern no string.
        RecipeNotFoundError: nothing installed has the name.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise DTypeError(
                f"a pattern is a {type(pattern).__name__}", expected="a pattern of layer names"
            )
    return Choice(
        "name",
        tuple((pattern, as_factory(f)) for pattern, f in patterns.items()),
        as_factory(default),
    )


def by_tensor(default: Factory | str, **tensors: Factory | str) -> Factory:
    """A factory for each tensor type, ``by_tensor("current", weight="identity")``; ``default`` for
    the others.

    Raises:
        OptionError: there is no such tensor type.
        DTypeError, RecipeNotFoundError: as of :func:`by_layer`.
    """
    for tensor_type in tensors:
        _check_tensor_type(tensor_type)
    return Choice(
        "tensor_type",
        tuple((name, as_factory(f)) for name, f in tensors.items()),
        as_factory(default),
    )


@dataclass(frozen=True)
class Choice:
    """What :func:`by_layer` and :func:`by_tensor` return: the first pattern that fits the role
    serves."""

    asked: str
    choices: tuple[tuple[str, Factory], ...]
    default: Factory

    def __call__(self, role: QuantizerRole | str) -> Given:
        """What the factory for the role gives."""
        role = QuantizerRole.of(role)
        text = getattr(role, self.asked)
        return next(
            (factory for pattern, factory in self.choices if fits(text, pattern)), self.default
        )(role)

    def check_layers(self, names: Sequence[str]) -> None:
        """Refuse a pattern that fits none of the names of a model's layers, here or in one of the
        factories.

        Raises:
            OptionError: the message has the nearest pattern that would fit.
        """
        modules = modules_of(names)
        for pattern, _ in self.choices if self.asked == "name" else ():
            if not fits_some(pattern, modules):
                expected = suggestion(
                    pattern, names, "the name of a linear layer, or of a module that it is in"
                )
                raise OptionError(
                    f"pattern {pattern!r} of by_layer matches no layer of the model",
                    expected=expected,
                )
        for factory in (*(factory for _, factory in self.choices), self.default):
            check = getattr(factory, "check_layers", None)
            if callable(check):
                check(names)


def by_direction(forward: Factory | str, backward: Factory | str) -> Factory:
    """What ``forward`` gives for what fprop reads, what ``backward`` gives for what dgrad and wgrad
    read.

    Inputs and weights are quantized twice where the two differ: along rows for the forward pass,
    along columns for the backward pass. Gradients are the backward factory's.

    Raises:
        DTypeError, RecipeNotFoundError: as of :func:`by_layer`.
    """
    return ByDirection(as_factory(forward), as_factory(backward))


@dataclass(frozen=True)
class ByDirection:
    """What :func:`by_direction` returns."""

    forward: Factory
    backward: Factory

    def __call__(self, role: QuantizerRole | str) -> Given:
        """A hybrid for inputs and weights."""
        role = QuantizerRole.of(role)
        if role.is_gradient:
            return self.backward(role)
        return HybridQuantizer(
            quantizer_for_side(self.forward, role, "rowwise"),
            quantizer_for_side(self.backward, role, "columnwise"),
        )


def as_factory(factory: Factory | str) -> Factory:
    """A factory as it is; a name is that of an installed recipe, or of a published factory."""
    if isinstance(factory, str):
        published = {spec.name for spec in list_quantizer_factories()}
        return get_quantizer_factory(factory) if factory in published else mirror(factory)
    if not callable(factory):
        raise DTypeError(
            f"the factory is a {type(factory).__name__}",
            expected="a callable factory(role), or a name",
        )
    return factory
