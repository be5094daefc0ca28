"""Turns the sections of a configuration into features that are enabled for layers.

Every key and value is checked.
"""

from collections.abc import Mapping
from typing import Any

from ottava.errors import OptionError
from ottava_debug.features.base import COMMON, Feature, value_at
from ottava_debug.located import Located, mapping, plain, truth, unknown
from ottava_debug.selectors import Selector
from ottava_debug.session import Enabled

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
        title = f"section {name!r}"
        section = mapping(root, name, title)
        if not _is_enabled(root, name, section, title):
            continue
        if "layers" not in section:
            raise OptionError(
                f"{root.where(name)}: {title} has no layers", expected="layers: which it is for"
            )
        selector = Selector(mapping(section, "layers", title), title)
        policy = _policy(section, title, on_error)
        for key in section:
            if key in registry:
                features += _features(section, key, registry[key], selector, title, policy)
            elif key not in _SECTION and key not in others:
                raise unknown(
                    section.where(key), f"{title} has no key", key, [*_SECTION, *registry, *others]
                )
    return features


def _features(
    section: Located,
    namespace: str,
    known_features: Mapping[str, Any],
    selector: Selector,
    section_title: str,
    on_error: str,
) -> list[Enabled]:
    """The features that a section enables in a namespace."""
    enabled: list[Enabled] = []
    features = mapping(section, namespace, section_title)
    for name in features:
        title = f"{section_title}, {name}"
        if name not in known_features:
            problem = f"{section_title}: {namespace} has no feature"
            raise unknown(features.where(name), problem, name, known_features)
        config = mapping(features, name, section_title)
        if not _is_enabled(features, name, config, title):
            continue
        feature = known_features[name]
        targets = feature.targets(config, title) if isinstance(feature, Feature) else None
        policy = _policy(config, title, on_error)
        located_title = f"{features.where(name)}: {title}"
        if namespace in NAMESPACES:
            enabled.append(
                Enabled(located_title, namespace, feature, plain(config), selector, targets, policy)
            )
    return enabled


def _is_enabled(parent: Located, name: str, section: Located, title: str) -> bool:
    """Whether the section or feature ``name`` of ``parent`` is enabled, which it has to say."""
    if "enabled" not in section:
        raise OptionError(
            f"{parent.where(name)}: {title} has no enabled", expected="enabled: True or False"
        )
    return truth(section, "enabled", title)


def _policy(section: Located, title: str, default: str) -> str:
    if "on_error" not in section:
        return default
    return str(value_at(section, "on_error", COMMON["on_error"], title))


def for_nvdlfw(root: Located) -> dict[str, Any]:
    """The enabled sections in the form that nvdlfw-inspect accepts.

    The key ``on_error``, which nvdlfw-inspect does not know, is removed. A single layer number,
    which it refuses, becomes a list.
    """
    sections = {}
    for name, section in root.items():
        if section["enabled"]:
            accepted = {key: value for key, value in plain(section).items() if key != "on_error"}
            numbers = accepted["layers"].get("layer_numbers")
            if isinstance(numbers, int):
                accepted["layers"]["layer_numbers"] = [numbers]
            sections[name] = accepted
    return sections
