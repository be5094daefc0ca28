"""``conversion_report``: which layers of a model run under which recipe, and the weights of products that do not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from ottava.errors import DTypeError
from ottava.nn.converters import is_convertible, refusal
from ottava.nn.linear import Linear
from ottava.tensors import QuantizedTensor
from ottava.torch_private import local_tensor

# On a converted model: the name of each convertible module that `convert` left alone -> why, as it was told.
LEFT_ALONE = "_ottava_left_alone"
_LOOKED_UP_OR_ELEMENTWISE = (torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.LayerNorm, torch.nn.RMSNorm)
_NO_WEIGHT_OF_PRODUCTS = re.compile("bias|embed|position|token|scale|norm")


@dataclass(frozen=True)
class Decision:
    """What is with one linear module: its qualified name, whether it runs under a recipe, and which, or why not."""

    name: str
    swapped: bool
    reason: str


@dataclass(frozen=True)
class ProductWeight:
    """One parameter that takes part in products: its qualified name, its whole shape, its share of the elements of all
    of them (0 to 1), the name of the recipe that its products run under (None for high precision), and why."""

    name: str
    shape: tuple[int, ...]
    share: float
    recipe: str | None
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """A model as it was when :func:`conversion_report` looked at it.

    Attributes:
        recipe: the names of the recipes that layers run under, with commas; empty where none does.
        decisions: one for each linear module, and for each of another class that a converter is registered for.
        weights: the parameters that take part in products. One that several modules share is counted once, and as
            quantized where all products by it are.
    """

    recipe: str
    decisions: tuple[Decision, ...]
    weights: tuple[ProductWeight, ...] = ()

    @property
    def swapped(self) -> tuple[str, ...]:
        """Qualified names of the modules that run under a recipe now."""
        return tuple(d.name for d in self.decisions if d.swapped)

    @property
    def skipped(self) -> dict[str, str]:
        """Qualified name -> reason, for linear modules that are left alone."""
        return {d.name: d.reason for d in self.decisions if not d.swapped}

    @property
    def left_out(self) -> tuple[ProductWeight, ...]:
        """The weights of products in high precision, largest first."""
        return tuple(sorted((w for w in self.weights if w.recipe is None), key=lambda weight: -weight.share))

    @property
    def share(self) -> float:
        """How many of the elements of all weights of products are multiplied quantized, 0 to 1; 0 without any."""
        sizes = [(math.prod(weight.shape), weight.recipe is not None) for weight in self.weights]
        return sum(size for size, quantized in sizes if quantized) / (sum(size for size, _ in sizes) or 1)

    def __str__(self) -> str:
        under = f"under {self.recipe!r}" if self.recipe else "under a recipe"
        lines = [
            f"{len(self.swapped)} of {len(self.decisions)} linear modules run {under}, "
            f"with {self.share:.1%} of the weights of products"
        ]
        lines += [f"  {'+' if d.swapped else '-'} {d.name or '(root)'}: {d.reason}" for d in self.decisions]
        lines += [f"  {w.share:6.1%} in high precision: {w.name} {[*w.shape]}, {w.reason}" for w in self.left_out]
        return "\n".join(lines)


def conversion_report(model: torch.nn.Module) -> ConversionReport:
    """What of ``model`` runs quantized now, whether it was converted or built of Ottava's layers, and what does not.

    Parameters of two or more dimensions count as weights of products, except those of embeddings and norms, and those
    outside linear layers that are named as what is added or scaled by (``bias``, ``embed``, ``position``, ``token``,
    ``scale``, ``norm``) or have less than two dimensions longer than 1. Regions (``ottava.autocast``) do not count.

    Raises:
        DTypeError: ``model`` is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
    modules = dict(model.named_modules())
    told: dict[str, str] = {}
    default = "not converted"
    for prefix, module in modules.items():
        if LEFT_ALONE in module.__dict__:
            told |= {f"{prefix}.{name}".strip("."): reason for name, reason in module.__dict__[LEFT_ALONE].items()}
            default = "not converted: it was put there after the last conversion"
    decisions = {}
    for name, module in modules.items():
        if isinstance(module, Linear) and module.recipe is not None:
            decisions[name] = Decision(name, True, _how(module, modules.get(name.rpartition(".")[0])))
        elif is_convertible(module):
            unbound = "no recipe is bound" if isinstance(module, Linear) else default
            decisions[name] = Decision(name, False, told.get(name) or refusal(module) or unbound)
    names = {_named(modules[name]) for name, decision in decisions.items() if decision.swapped}
    return ConversionReport(", ".join(sorted(names)), (*decisions.values(),), (*_weights(modules, decisions),))


def _named(layer: Any) -> str:
    return layer.recipe.name or type(layer.recipe).__name__


def _keeps_values(layer: Any) -> bool:
    """Whether the bound recipe has the layer compute in high precision."""
    state = layer._binding.state
    return state is not None and state.keeps_values and state.recipe is layer.recipe


def _how(layer: Any, parent: Any) -> str:
    how = f"recipe bound: {_named(layer)}"
    if _keeps_values(layer):
        how += ", which keeps its operands in high precision"
    if isinstance(local_tensor(layer.weight), QuantizedTensor):
        how += "; the weight is kept quantized"
    if isinstance(parent, torch.nn.TransformerEncoderLayer):
        how += "; evaluated without gradients its nn.TransformerEncoderLayer bypasses it, in high precision"
    return how


def _weights(modules: dict[str, torch.nn.Module], decisions: dict[str, Decision]) -> Iterator[ProductWeight]:
    # Each parameter with what is known of a product by it, of one in high precision if there is any.
    found: dict[Any, tuple[str, str | None, str]] = {}
    for path, module in modules.items():
        parametrized = isinstance(module, ParametrizationList)
        # What a parametrization keeps counts as the layer's.
        name = path.rpartition("parametrizations.")[0].rstrip(".") if parametrized else path
        known = decisions.get(name)
        reason = known.reason if known else f"{type(module).__name__} has no converter"
        for key, parameter in module._parameters.items():
            if parameter is None or not _multiplies(module, key, parameter, known is not None):
                continue
            recipe = _named(modules[name]) if known and known.swapped and not _keeps_values(modules[name]) else None
            if parameter not in found or (found[parameter][1] is not None and recipe is None):
                found[parameter] = f"{path}.{key}".strip("."), recipe, reason
    total = sum(parameter.numel() for parameter in found) or 1
    for parameter, (name, recipe, reason) in found.items():
        yield ProductWeight(name, tuple(parameter.shape), parameter.numel() / total, recipe, reason)


def _multiplies(module: torch.nn.Module, key: str, parameter: torch.nn.Parameter, linear: bool) -> bool:
    """Whether a parameter is a weight of products, as far as one can see without running the model."""
    if is_lazy(parameter) or parameter.dim() < 2 or isinstance(module, _LOOKED_UP_OR_ELEMENTWISE):
        return False
    other = "Embedding" in type(module).__name__ or _NO_WEIGHT_OF_PRODUCTS.search(key)
    return linear or (not other and sum(size > 1 for size in parameter.shape) > 1)
