"""``conversion_report``: which layers of a model run under which recipe, and the weights of
products that do not."""

import math
import re
from collections.abc import Iterator, Sequence
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

# On a module: why `convert` left it alone, as it was told; nothing, on a model that was converted.
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
    """What is with one linear module: its qualified name, whether it runs under a recipe, and
    which, or why not."""

    name: str
    swapped: bool
    reason: str


@dataclass(frozen=True)
class ProductWeight:
    """One parameter that takes part in products: its qualified name, its whole shape, its share of
    the elements of all of them (0 to 1), the name of the recipe that its products run under (None
    for high precision), and why."""

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
        return tuple(d.name for d in self.decisions if d.swapped)

    @property
    def skipped(self) -> dict[str, str]:
        """Qualified name -> reason, for linear modules that are left alone."""
        return {d.name: d.reason for d in self.decisions if not d.swapped}

    @property
    def left_out(self) -> tuple[ProductWeight, ...]:
        """The weights of products in high precision, largest first."""
        return tuple(
            sorted((w for w in self.weights if w.recipe is None), key=lambda weight: -weight.share)
        )

    @property
    def share(self) -> float:
        """How many of the elements of all weights of products are multiplied quantized, 0 to 1; 0
        without any."""
        sizes = [(math.prod(weight.shape), weight.recipe is not None) for weight in self.weights]
        return sum(size for size, quantized in sizes if quantized) / (
            sum(size for size, _ in sizes) or 1
        )

    def __str__(self) -> str:
        under = f"under {self.recipe!r}" if self.recipe else "under a recipe"
        modules = f"{len(self.swapped)} of {len(self.decisions)} linear modules run {under}"
        share = f"{modules}, with {self.share:.1%} of the weights of products"
        linear = [
            (d.name or "(root)", "yes" if d.swapped else "no", d.reason) for d in self.decisions
        ]
        others = [(w.name, str([*w.shape]), f"{w.share:.1%}", w.reason) for w in self.left_out]
        parts = [[share]]
        if linear:
            parts.append(_table(("linear module", "recipe", "reason"), linear))
        if others:
            heads = ("weight in high precision", "shape", "share", "reason")
            parts.append(_table(heads, others, right=("share",)))
        return "\n\n".join("\n".join(part) for part in parts)


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()
) -> list[str]:
    """The lines of a table as plain text, its columns aligned, those in ``right`` by their ends."""
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
    return lines


def conversion_report(model: torch.nn.Module) -> ConversionReport:
    """What of ``model`` runs quantized now, whether it was converted or built of Ottava's layers,
    and what does not.

    Parameters of two or more dimensions count as weights of products, except those of embeddings
    and norms, and those outside linear layers that are named as what is added or scaled by
    (``bias``, ``embed``, ``position``, ``token``, ``scale``, ``norm``) or have less than two
    dimensions longer than 1. Regions (``ottava.autocast``) do not count. What is no module is a
    DTypeError.
    """
    if not isinstance(model, torch.nn.Module):
        raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
    modules = dict(model.named_modules())
    default = "not converted"
    if any(module.__dict__.get(LEFT_ALONE) == "" for module in modules.values()):
        default += ": it was put there after the last conversion"
    decisions, recipes = {}, set()
    # Of linear modules: the recipe that their products run under (None for high precision), and
    # why.
    products: dict[str, tuple[str | None, str]] = {}
    for name, module in modules.items():
        recipe, bound = None, isinstance(module, Linear) and module.recipe is not None
        if bound:
            recipes.add(recipe := module.recipe._label)
            reason = f"recipe bound: {recipe}"
            state = module._binding.state
            if state is not None and state.keeps_values and state.recipe is module.recipe:
                recipe, reason = None, f"{reason}, {KEEPS_OPERANDS}"
            if isinstance(local_tensor(module.weight), QuantizedTensor):
                reason += "; the weight is kept quantized"
            if isinstance(modules.get(name.rpartition(".")[0]), torch.nn.TransformerEncoderLayer):
                reason += (
                    "; evaluated without gradients its nn.TransformerEncoderLayer bypasses "
                    "it, in high precision"
                )
        elif is_convertible(module):
            unbound = "no recipe is bound" if isinstance(module, Linear) else default
            reason = module.__dict__.get(LEFT_ALONE) or refusal(module) or unbound
        else:
            continue
        decisions[name], products[name] = Decision(name, bound, reason), (recipe, reason)
    return ConversionReport(
        ", ".join(sorted(recipes)), (*decisions.values(),), (*_weights(modules, products),)
    )


def _weights(
    modules: dict[str, Any], products: dict[str, tuple[str | None, str]]
) -> Iterator[ProductWeight]:
    # Each parameter with what is known of a product by it, of one in high precision if there is
    # any.
    found: dict[Any, tuple[str, str | None, str]] = {}
    for path, module in modules.items():
        parametrized = isinstance(module, ParametrizationList)
        # What a parametrization keeps counts as the layer's.
        name = path.rpartition("parametrizations.")[0].rstrip(".") if parametrized else path
        recipe, reason = products.get(name, (None, f"{type(module).__name__} has no converter"))
        for key, parameter in module._parameters.items():
            if parameter is None or not _multiplies(module, key, parameter, name in products):
                continue
            if parameter not in found or (found[parameter][1] is not None and recipe is None):
                found[parameter] = f"{path}.{key}".strip("."), recipe, reason
    total = sum(parameter.numel() for parameter in found) or 1
    for parameter, (name, recipe, reason) in found.items():
        yield ProductWeight(name, tuple(parameter.shape), parameter.numel() / total, recipe, reason)


def _multiplies(
    module: torch.nn.Module, key: str, parameter: torch.nn.Parameter, linear: bool
) -> bool:
    """Whether a parameter is a weight of products, as far as one can see without running the
    model."""
    if is_lazy(parameter) or parameter.dim() < 2 or isinstance(module, _LOOKED_UP_OR_ELEMENTWISE):
        return False
    other = "Embedding" in type(module).__name__ or _NO_WEIGHT_OF_PRODUCTS.search(key)
    return linear or (not other and sum(size > 1 for size in parameter.shape) > 1)
