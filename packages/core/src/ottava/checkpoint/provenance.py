"""By which recipe a tensor was quantized, for the description of a file: asked of the installed packages.

Core knows no recipe: a quantizer's (else a tensor's) package is looked up among the plugins. Tensors that were loaded
have no quantizer, because a file does not say everything that one needs; they remember their origin themselves, and
copies and views of them do not.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ottava.errors import DTypeError, OttavaError
from ottava.recipes.base import Recipe
from ottava.recipes.ownership import PluginStatus
from ottava.recipes.registry import get_recipe, plugin_statuses
from ottava.tensors.quantizer import Quantizer
from ottava.tensors.storage import QuantizedTensorStorage

_ATTRIBUTE = "_ottava_origin"
_TEXTS = ("recipe", "package", "version")


@dataclass(frozen=True)
class Origin:
    """What quantized a tensor; empty where it is not known.

    Attributes:
        recipe: the name of the recipe.
        package, version: the distribution of the quantizer.
        options: what the quantizer was set to, encoded for JSON: to tell whether another one would do the same.
    """

    recipe: str = ""
    package: str = ""
    version: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def encoded(self) -> dict[str, Any]:
        """What is known of it, for JSON."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _TEXTS if getattr(self, name)}
        return found | ({"options": dict(self.options)} if self.options else {})

    @classmethod
    def decoded(cls, entry: Mapping[str, Any]) -> Origin:
        """What a description says.

        Raises:
            ValueError: it is of another kind.
        """
        texts = {name: entry.get(name, "") for name in _TEXTS}
        options = entry.get("options", {})
        if not all(isinstance(text, str) for text in texts.values()) or not isinstance(options, dict):
            raise ValueError("its recipe, package, version or options are of another kind")
        return cls(**texts, options=options)


def remember(tensor: QuantizedTensorStorage, origin: Origin) -> None:
    """Keep the origin of a tensor that comes without a quantizer."""
    setattr(tensor, _ATTRIBUTE, origin)


def origin_of(tensor: QuantizedTensorStorage) -> Origin:
    """The origin of a tensor: of its quantizer, remembered, or of its class."""
    quantizer = tensor._quantizer
    if isinstance(quantizer, Quantizer):
        return origin_of_quantizer(quantizer)
    remembered = getattr(tensor, _ATTRIBUTE, None)
    return remembered if isinstance(remembered, Origin) else _looked_up(type(tensor).__module__, None)


def origin_of_quantizer(quantizer: Quantizer, recipe: Recipe | None = None) -> Origin:
    """The origin of what a quantizer makes; ``recipe`` where it is known."""
    found = _looked_up(type(quantizer).__module__, quantizer)
    name = found.recipe if recipe is None else recipe.name
    return Origin(name, found.package, found.version, _options(quantizer))


def encode_static(value: Any) -> Any:
    """A value of a static field for JSON.

    Raises:
        DTypeError: it is of a kind that JSON has no way to say.
    """
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return [encode_static(entry) for entry in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise DTypeError(f"a static field holds a {type(value).__name__}", expected="a dtype, number, text or tuple")


def _options(quantizer: Quantizer) -> dict[str, Any]:
    """What tells quantizers of one class from each other: plain values, not what they learn or what a process owns."""
    if quantizer.stateful:
        return {}
    usages = {"rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm"}
    options: dict[str, Any] = {}
    for name, value in sorted(vars(quantizer).items()):
        if name in usages or name in quantizer.process_attributes or name.startswith("_") or value is None:
            continue
        try:
            options[name] = encode_static(value)
        except DTypeError:
            continue
    return options


def _looked_up(module: str, quantizer: Quantizer | None) -> Origin:
    package = module.partition(".")[0]
    for status in plugins():
        names = [spec.name for spec in status.recipes if spec.factory.partition(":")[0].partition(".")[0] == package]
        if names:
            return Origin(_chosen(names, quantizer), status.distribution, status.version)
    return Origin("", *_distribution(package))


def _chosen(names: list[str], quantizer: Quantizer | None) -> str:
    """Of several recipes in one package, the only one whose weights are quantized like this."""
    if quantizer is not None and len(names) > 1:
        made = {name: _weight_quantizer(name) for name in names}
        names = [name for name in names if type(made[name]) is type(quantizer)]
        if len(names) > 1:
            names = [name for name in names if made[name] == quantizer]
    return names[0] if len(names) == 1 else ""


def _weight_quantizer(name: str) -> Quantizer | None:
    try:
        return get_recipe(name).quantizer("weight")
    except OttavaError:  # it has options without defaults, say
        return None


@functools.cache
def _distribution(package: str) -> tuple[str, str]:
    """Name and version of the distribution that has a module; empty for modules of none."""
    found = importlib.metadata.packages_distributions().get(package, [])
    return (found[0], importlib.metadata.version(found[0])) if len(found) == 1 else ("", "")


def where_to_find(reference: str, origin: Origin) -> str:
    """What to install for a class ``"module:Class"`` that is missing."""
    if origin.package:
        return f"install {origin.package}" + (f" {origin.version}" if origin.version else "")
    return f"install the distribution of {reference.partition(':')[0].partition('.')[0]!r}"


def plugins() -> list[PluginStatus]:
    """The plugins; none where one is broken and all are required: that must not keep a model from being saved."""
    try:
        return plugin_statuses()
    except OttavaError:
        return []
