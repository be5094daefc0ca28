"""The enabled features of a run, and the layers that have them."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

from ottava.errors import OptionError, PluginError, text_of
from ottava_debug.enabled import GO_ON, Enabled, FeatureInspection
from ottava_debug.features.base import Feature
from ottava_debug.products import Inspection, Watch


class Session:
    """The enabled features of a run, and the watches that apply them to layers.

    Args:
        enabled: the features, in the order of the sections.
        step: returns the number of the step.
        name_of: returns the name of a layer, or None for a layer that is not inspected.
        may_select: whether a layer with this own name may be inspected.
    """

    def __init__(
        self,
        enabled: Iterable[Enabled],
        step: Callable[[], int],
        name_of: Callable[[Any], str | None],
        may_select: Callable[[str], bool] | None = None,
    ) -> None:
        self.enabled = list(enabled)
        self.step = step
        self._name_of = name_of
        self._plans: dict[str, list[Enabled]] = {}
        self._layers: dict[str, ref[Any]] = {}
        self._namesakes: set[str] = set()
        self._warned_of_unmatched = False
        selects = may_select or (lambda name: bool(self.plan(name)))
        self._watches = [Watch(partial(self.inspection, each), selects) for each in self.enabled]

    def plan(self, name: str) -> list[Enabled]:
        """The features of a layer; OptionError if two sections enable the same one for it."""
        if name not in self._plans:
            plan: dict[str, Enabled] = {}
            for enabled in self.enabled:
                if enabled.selector.matches(name):
                    first = plan.setdefault(enabled.name, enabled)
                    if first is not enabled:
                        raise OptionError(
                            f"layer {name!r} has {enabled.name} twice, of {first.title} and of "
                            f"{enabled.title}",
                            expected="each feature once",
                            remedy="make their layers differ",
                        )
            self._plans[name] = list(plan.values())
        return self._plans[name]

    def inspection(self, enabled: Enabled, layer: Any) -> Inspection | None:
        """The inspection of a layer by a feature in this step; None if it is not active for the
        layer."""
        name = self._name_of(layer)
        if name is None or enabled not in self.plan(name):
            return None
        self._warn_of_namesake(name, layer)
        step = self.step()
        if enabled.is_off(name) or not enabled.is_chosen(step):
            return None
        return FeatureInspection(enabled, name, layer, step)

    def _warn_of_namesake(self, name: str, layer: Any) -> None:
        other = self._layers.setdefault(name, ref(layer))()
        if other is not layer:
            self._layers[name] = ref(layer)
            if other is not None and name not in self._namesakes:
                self._namesakes.add(name)
                warnings.warn(
                    f"several layers are called {name!r}: sections cannot tell them apart, "
                    f"statistics take them as one. "
                    f"nvdlfw_inspect.api.infer_and_assign_layer_names(model) names them",
                    UserWarning,
                    stacklevel=2,
                )

    def after_step(self) -> None:
        """Call ``step`` of each feature; once, warn of patterns that matched no layer."""
        self._end_step()
        self.warn_of_unmatched("Layers that ran", self._plans)

    def warn_of_unmatched(self, introduction: str, names: Iterable[str]) -> None:
        """Warn, at the first call only, of patterns that matched no layer, with some ``names``."""
        if self._warned_of_unmatched:
            return
        self._warned_of_unmatched = True
        some = ", ".join(map(repr, list(names)[:5])) or "none"
        unmatched: dict[str, str] = {}
        for enabled in self.enabled:
            unmatched |= enabled.selector.unmatched
        for pattern, where in unmatched.items():
            warnings.warn(
                f"{where}: {pattern} matches no layer. {introduction}: {some}",
                UserWarning,
                stacklevel=3,
            )

    def close(self) -> None:
        """End all features, after a last :meth:`after_step` on this rank alone.

        Other ranks do not take part, because they may be elsewhere if this one ends by an error.
        """
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.close()
        if watches:
            self._end_step(together=False)
            self.warn_of_unmatched("Layers that ran", self._plans)

    def _end_step(self, together: bool = True) -> None:
        # Sections that enable the same feature share one object.
        shared: dict[int, list[Enabled]] = {}
        for enabled in self.enabled:
            if isinstance(enabled.feature, Feature):
                shared.setdefault(id(enabled.feature), []).append(enabled)
        for sections in shared.values():
            try:
                self._end_step_of(sections, together)
            except (Exception, SystemExit) as error:
                titles = " and ".join(enabled.title for enabled in sections)
                text = f"{titles}: step failed: {type(error).__name__}: {text_of(error)}"
                if any(enabled.on_error == "raise" for enabled in sections):
                    raise PluginError(text, remedy=GO_ON) from error
                for enabled in sections:
                    enabled.stopped = True
                warnings.warn(f"{text}. It is switched off", UserWarning, stacklevel=3)

    def _end_step_of(self, sections: list[Enabled], together: bool) -> None:
        feature, step = sections[0].feature, self.step()
        # This rank takes part even if the feature is switched off here, because others wait for it.
        if together and any(enabled.is_chosen(step) for enabled in sections):
            feature.put_together()
        if not all(enabled.stopped for enabled in sections):
            feature.step()
