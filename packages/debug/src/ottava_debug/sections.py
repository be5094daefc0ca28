"""Turns the sections of a configuration into features that are enabled for layers.

Every key and value is checked.
"""

from collections.abc import Mapping
from typing import Any

from ottava.errors import OptionError
from ottava_debug.enabled import Enabled
from ottava_debug.features.base import COMMON, Feature
from ottava_debug.located import Located, unknown
from ottava_debug.selectors import Selector

#: The keys under which sections enable features for Ottava's layers.
NAMESPACES = ("transformer_engine", "ottava")
#: Namespace -> its features by name.
FeaturesByName = Mapping[str, Mapping[str, Any]]
_SECTION = ("enabled", "layers", "on_error")


def enabled_in(
    root: Located, registry: FeaturesByName, others: Mapping[str, Any], on_error: str
) -> list[Enabled]:
    """The features of the enabled sections, in their order.

    ``others`` are nvdlfw-inspect's own features, which stand in a section without a namespace.
    """
    features: list[Enabled] = []
    for name in root:
        section = root.mapping(name, f"section {name!r}")
        if not _is_enabled(section):
            continue
        if "layers" not in section:
            raise OptionError(f"{section.where()} has no layers", expected="layers: …")
        section.check_keys([*_SECTION, *registry, *others])
        selector = Selector(section.mapping("layers", f"{section.title}, layers"))
        policy = _policy(section, on_error)
        for namespace in section:
            if namespace in registry:
                features += _features(section, namespace, registry[namespace], selector, policy)
    return features


def _features(
    section: Located, namespace: str, known: Mapping[str, Any], selector: Selector, on_error: str
) -> list[Enabled]:
    """The features that a section enables in a namespace."""
    enabled: list[Enabled] = []
    configs = section.mapping(namespace, section.title)
    for name in configs:
        if name not in known:
            raise unknown(f"{configs.where(name)}: {namespace} has no feature", name, known)
        config = configs.mapping(name, f"{section.title}, {name}")
        if not _is_enabled(config):
            continue
        feature = known[name]
        targets = feature.targets(config, config.title) if isinstance(feature, Feature) else None
        policy = _policy(config, on_error)
        if namespace in NAMESPACES:
            enabled.append(
                Enabled(config.where(), namespace, feature, config, selector, targets, policy)
            )
    return enabled


def _is_enabled(section: Located) -> bool:
    """Whether a section or a feature is enabled, which it has to say."""
    if "enabled" not in section:
        raise OptionError(f"{section.where()} has no enabled", expected="enabled: True or False")
    return section.truth("enabled")


def _policy(section: Located, default: str) -> str:
    if "on_error" not in section:
        return default
    return str(section.value("on_error", COMMON["on_error"]))


def for_nvdlfw(root: Located) -> dict[str, Any]:
    """The enabled sections in the form that nvdlfw-inspect accepts.

    The key ``on_error``, which nvdlfw-inspect does not know, is removed. A single layer number,
    which it refuses, becomes a list.
    """
    sections = {}
    for name, section in root.items():
        if section["enabled"]:
            accepted = {key: value for key, value in section.items() if key != "on_error"}
            numbers = accepted["layers"].get("layer_numbers")
            if isinstance(numbers, int):
                accepted["layers"] = {**accepted["layers"], "layer_numbers": [numbers]}
            sections[name] = accepted
    return sections
