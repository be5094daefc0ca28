"""From what a configuration says to features that are enabled for layers: every key and value is
checked."""

from collections.abc import Mapping
from typing import Any

from ottava.errors import OptionError
from ottava_debug.features.base import COMMON, Feature, checked
from ottava_debug.located import Located, mapping, plain, truth, unknown
from ottava_debug.selectors import Selector
from ottava_debug.session import Enabled

#: Under these names sections switch on features for layers of Ottava.
NAMESPACES = ("transformer_engine", "ottava")
#: Namespace -> its features by name.
Known = Mapping[str, Mapping[str, Any]]
_SECTION = ("enabled", "layers", "on_error")


def enabled_in(
    root: Located, known: Known, others: Mapping[str, Any], on_error: str
) -> list[Enabled]:
    """The features of sections that are enabled, in their order.

    Args:
        known: the features of :data:`NAMESPACES` and of other namespaces.
        others: features of nvdlfw-inspect's own, which stand in a section without a namespace.
        on_error: what holds where a section and a feature say nothing, as of
            :func:`ottava_debug.on_error`.

    Raises:
        OptionError: something is not allowed; the message names the section, the key and the line.
    """
    found = []
    for name in root:
        what = f"section {name!r}"
        section = mapping(root, name, what)
        if "enabled" not in section:
            raise OptionError(
                f"{root.where(name)}: {what} has no enabled", expected="enabled: True or False"
            )
        if not truth(section, "enabled", what):
            continue
        if "layers" not in section:
            raise OptionError(
                f"{root.where(name)}: {what} has no layers", expected="layers: which it is for"
            )
        selector = Selector(mapping(section, "layers", what), what)
        policy = _policy(section, what, on_error)
        for key in section:
            if key in known:
                found += _features(section, key, known[key], selector, what, policy)
            elif key not in _SECTION and key not in others:
                raise unknown(
                    section.where(key), f"{what} has no key", key, [*_SECTION, *known, *others]
                )
    return found


def _features(
    section: Located,
    namespace: str,
    known: Mapping[str, Any],
    selector: Selector,
    what: str,
    on_error: str,
) -> list[Enabled]:
    found = []
    features = mapping(section, namespace, what)
    for name in features:
        title = f"{what}, {name}"
        if name not in known:
            raise unknown(features.where(name), f"{what}: {namespace} has no feature", name, known)
        config = mapping(features, name, what)
        if "enabled" not in config:
            raise OptionError(
                f"{features.where(name)}: {title} has no enabled", expected="enabled: True or False"
            )
        if not truth(config, "enabled", title):
            continue
        feature = known[name]
        targets = feature.targets(config, title) if isinstance(feature, Feature) else None
        policy = _policy(config, title, on_error)
        told = f"{features.where(name)}: {title}"
        if namespace in NAMESPACES:
            found.append(
                Enabled(told, namespace, feature, plain(config), selector, targets, policy)
            )
    return found


def _policy(given: Located, what: str, default: str) -> str:
    return (
        str(checked(given, "on_error", COMMON["on_error"], what))
        if "on_error" in given
        else default
    )


def for_nvdlfw(root: Located) -> dict[str, Any]:
    """The sections that are enabled, as nvdlfw-inspect takes them: without what it does not know,
    and without a single layer number, which it refuses."""
    found = {}
    for name, section in root.items():
        if section["enabled"]:
            found[name] = {key: value for key, value in plain(section).items() if key != "on_error"}
            numbers = found[name]["layers"].get("layer_numbers")
            if isinstance(numbers, int):
                found[name]["layers"]["layer_numbers"] = [numbers]
    return found
