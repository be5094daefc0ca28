"""``conversion_report``: which layers of a model run under which recipe, and the weights of
products that do not."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from ottava.errors import DTypeError
from ottava.nn.converters import is_convertible, refusal
from ottava.nn.linear import Linear
from ottava.tensors import QuantizedTensor
from ottava.torch_private import local_tensor

#: The attribute of a module that says why ``convert`` left the module alone; it is empty on a model
#: that was converted.
LEFT_ALONE = "_ottava_left_alone"
#: How the reason of a layer ends whose recipe quantizes nothing of it.
KEEPS_OPERANDS = "which keeps its operands in high precision"
_LOOKED_UP_OR_ELEMENTWISE = (
    torch.nn.Embedding,
    torch.nn.EmbeddingBag,
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
)
_NO_WEIGHT_OF_PRODUCTS = re.compile("bias|embed|position|token|scale|norm")


@dataclass(frozen=True)
class Decision:
    """Whether one linear module runs under a recipe.

    Attributes:
        name: the qualified name of the module.
        swapped: whether it runs under a recipe.
        reason: the recipe, or why there is none.
    """

    name: str
    swapped: bool
    reason: str


@dataclass(frozen=True)
class ProductWeight:
    """One parameter that takes part in products.

    Attributes:
        name: the qualified name of the parameter.
        shape: the shape of the whole parameter, also where it is sharded.
        share: its share of the elements of all such parameters, 0 to 1.
        recipe: the name of the recipe that its products run under; None for high precision.
        reason: why they do.
    """

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
        decisions: one for each linear module, and for each of another class that a converter is
            registered for.
        weights: the parameters that take part in products. One that several modules share is
            counted once, and as quantized where all products by it are.
    """

    recipe: str
    decisions: tuple[Decision, ...]
    weights: tuple[ProductWeight, ...] = ()

    @property
    def swapped(self) -> tuple[str, ...]:
        """Qualified names of the modules that run under a recipe now."""
        return tuple(decision.name for decision in self.decisions if decision.swapped)

    @property
    def skipped(self) -> dict[str, str]:
        """Qualified name -> reason, for linear modules that are left alone."""
        return {
            decision.name: decision.reason for decision in self.decisions if not decision.swapped
        }

    @property
    def left_out(self) -> tuple[ProductWeight, ...]:
        """The weights of products in high precision, largest first."""
        weights = [weight for weight in self.weights if weight.recipe is None]
        return tuple(sorted(weights, key=lambda weight: -weight.share))

    @property
    def share(self) -> float:
        """How many of the elements of all weights of products are multiplied quantized, 0 to 1; 0
        without any."""
        total = sum(math.prod(weight.shape) for weight in self.weights)
        quantized = sum(
            math.prod(weight.shape) for weight in self.weights if weight.recipe is not None
        )
        return quantized / (total or 1)

    def __str__(self) -> str:
        recipe = repr(self.recipe) if self.recipe else "a recipe"
        summary = (
            f"{len(self.swapped)} of {len(self.decisions)} linear modules run under {recipe}, "
            f"with {self.share:.1%} of the weights of products"
        )
        decisions = [
            (decision.name or "(root)", "yes" if decision.swapped else "no", decision.reason)
            for decision in self.decisions
        ]
        weights = [
            (weight.name, str([*weight.shape]), f"{weight.share:.1%}", weight.reason)
            for weight in self.left_out
        ]
        paragraphs = [summary]
        if decisions:
            paragraphs.append(_table(("linear module", "recipe", "reason"), decisions))
        if weights:
            heads = ("weight in high precision", "shape", "share", "reason")
            paragraphs.append(_table(heads, weights, right=("share",)))
        return "\n\n".join(paragraphs)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A table as plain text, its columns aligned to the left, those in ``right`` to the right."""
    columns = list(zip(heads, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    rules = ["-" * width for width in widths]
    lines = []
    for row in (heads, rules, *rows):
        cells = [
            cell.rjust(width) if head in right else cell.ljust(width)
            for head, cell, width in zip(heads, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class _Products(NamedTuple):
    """The products of one linear module.

    Attributes:
        bound: the name of the recipe that is bound to the module; None without one.
        recipe: the name of the recipe that the products run under; None for high precision.
        reason: why they do.
    """

    bound: str | None
    recipe: str | None
    reason: str


def conversion_report(model: torch.nn.Module) -> ConversionReport:
    """Which layers and weights of ``model`` run quantized now, and which do not.

    The model may be converted, or built of Ottava's layers.

    Parameters of two or more dimensions count as weights of products, with these exceptions: those
    of embeddings and norms; and outside linear layers those with a name that says addend or factor
    (``bias``, ``embed``, ``position``, ``token``, ``scale``, ``norm``), or with less than two
    dimensions longer than 1. Regions (``ottava.autocast``) are not considered.

    Raises:
        DTypeError: ``model`` is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
    modules = dict(model.named_modules())
    products: dict[str, _Products] = {}
    for name, module in modules.items():
        if isinstance(module, Linear) and module.recipe is not None:
            parent = modules.get(name.rpartition(".")[0])
            products[name] = _products_of_layer(module, module.recipe._label, parent)
        elif is_convertible(module):
            products[name] = _Products(None, None, _reason(module, modules))
    recipes = {product.bound for product in products.values() if product.bound is not None}
    decisions = [
        Decision(name, product.bound is not None, product.reason)
        for name, product in products.items()
    ]
    weights = tuple(_weights(modules, products))
    return ConversionReport(", ".join(sorted(recipes)), tuple(decisions), weights)


def _products_of_layer(layer: Linear, recipe: str, parent: torch.nn.Module | None) -> _Products:
    """The products of a layer, to which the recipe of this name is bound."""
    reason = f"recipe bound: {recipe}"
    state = layer._binding.state
    unquantized = state is not None and state.in_high_precision and state.recipe is layer.recipe
    if unquantized:
        reason += f", {KEEPS_OPERANDS}"
    if isinstance(local_tensor(layer.weight), QuantizedTensor):
        reason += "; the weight is kept quantized"
    if isinstance(parent, torch.nn.TransformerEncoderLayer):
        reason += (
            "; evaluated without gradients its nn.TransformerEncoderLayer bypasses it, in high "
            "precision"
        )
    return _Products(recipe, None if unquantized else recipe, reason)


def _reason(module: torch.nn.Module, modules: Mapping[str, torch.nn.Module]) -> str:
    """Why no recipe is bound to a linear module, which is one of the ``modules`` of a model."""
    choice: str | None = module.__dict__.get(LEFT_ALONE)
    reason = choice or refusal(module)
    if reason:
        return reason
    if isinstance(module, Linear):
        return "no recipe is bound"
    if any(other.__dict__.get(LEFT_ALONE) == "" for other in modules.values()):
        return "not converted: it was put there after the last conversion"
    return "not converted"


def _weights(
    modules: Mapping[str, torch.nn.Module], products: Mapping[str, _Products]
) -> Iterator[ProductWeight]:
    """The weights of the products of a model, whose linear modules have these products."""
    uses: dict[torch.nn.Parameter, tuple[str, _Products]] = {}
    for path, module in modules.items():
        name = path
        if isinstance(module, ParametrizationList):
            # The parameters of a parametrization count as the layer's.
            name = path.rpartition("parametrizations.")[0].rstrip(".")
        others = _Products(None, None, f"{type(module).__name__} has no converter")
        use = products.get(name, others)
        for key, parameter in module._parameters.items():
            if parameter is None or not _multiplies(module, key, parameter, name in products):
                continue
            # A parameter that several modules share counts as quantized if all its products are.
            if parameter not in uses or (uses[parameter][1].recipe and use.recipe is None):
                uses[parameter] = f"{path}.{key}".strip("."), use
    total = sum(parameter.numel() for parameter in uses) or 1
    for parameter, (name, use) in uses.items():
        share = parameter.numel() / total
        yield ProductWeight(name, tuple(parameter.shape), share, use.recipe, use.reason)


def _multiplies(
    module: torch.nn.Module, key: str, parameter: torch.nn.Parameter, linear: bool
) -> bool:
    """Whether a parameter is a weight of products, as far as its module and its name tell.

    Args:
        key: the name of the parameter in the module.
        linear: whether the module is a linear module.
    """
    if is_lazy(parameter) or parameter.dim() < 2 or isinstance(module, _LOOKED_UP_OR_ELEMENTWISE):
        return False
    if linear:
        return True
    if "Embedding" in type(module).__name__ or _NO_WEIGHT_OF_PRODUCTS.search(key):
        return False
    return sum(size > 1 for size in parameter.shape) > 1
