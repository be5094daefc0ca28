"""nvdlfw-inspect's manager, extended for Ottava's layers.

nvdlfw-inspect creates its manager in ``initialize()``, and forgets every feature in
``end_debug()``. :func:`register_features` replaces the class of the manager by one that registers
the first-party features each time, reads the configuration, and watches the layers that the
configuration selects.
"""

import logging
from typing import Any

import nvdlfw_inspect.api as api  # type: ignore[import-untyped]
import nvdlfw_inspect.debug_manager as debug_manager  # type: ignore[import-untyped]
from nvdlfw_inspect.base import BaseNamespaceAPI  # type: ignore[import-untyped]
from nvdlfw_inspect.config_manager import ConfigManager  # type: ignore[import-untyped]
from nvdlfw_inspect.registry import Registry  # type: ignore[import-untyped]

from ottava.errors import OptionError, PluginError, UsageError
from ottava_debug.features import FEATURES
from ottava_debug.features.base import ON_ERROR
from ottava_debug.located import read
from ottava_debug.sections import NAMESPACES, enabled_in, for_nvdlfw
from ottava_debug.session import Session

# The answers of API calls that no feature answers, as for layers that no section selects.
_DEFAULTS = {"fp8_gemm_enabled": True, "modify_tensor_enabled": False}
_LOGS = ("nvdlfw_inspect", "Default Statistics")
_on_error = "warn"


def on_error(action: str) -> None:
    """Set the reaction to a feature that raises, for sections that do not set ``on_error``.

    ``"warn"`` switches the feature off for the layer, with a warning, and training continues.
    ``"raise"`` raises. The setting affects configurations that are loaded later.

    Raises:
        OptionError: ``action`` is something else.
    """
    global _on_error
    if action not in ON_ERROR:
        raise OptionError(f"action is {action!r}", expected=" or ".join(map(repr, ON_ERROR)))
    _on_error = action


def register_features() -> None:
    """Make the features available to configurations of nvdlfw-inspect.

    Call this before ``nvdlfw_inspect.api.initialize()``. One call serves every later
    ``initialize()``; further calls change nothing.

    Raises:
        UsageError: nvdlfw-inspect was initialized before.
    """
    if debug_manager.DebugManager is Manager:
        return
    if api.DEBUG_MANAGER is not None:
        raise UsageError(
            "nvdlfw-inspect is initialized already",
            expected="ottava_debug.register_features() before initialize()",
            remedy="call nvdlfw_inspect.api.end_debug() before, and initialize() again",
        )
    debug_manager.DebugManager = Manager


class Namespace(BaseNamespaceAPI):  # type: ignore[misc]
    """The class of ``nvdlfw_inspect.api.ottava`` and ``.transformer_engine``, which calls the
    features of a layer."""

    def route_api(self, layer_name: str, api_name: str, **arguments: Any) -> Any:
        """The first answer of the layer's features that have the method and apply to the call."""
        manager: Manager = api.DEBUG_MANAGER
        iteration = arguments.pop("iteration", None)
        step = manager._trainer_iteration_count if iteration is None else iteration
        for enabled in manager.session.plan(layer_name) if manager.session else ():
            if enabled.namespace == self.name:
                answer = enabled.ask(api_name, step, layer_name, **arguments)
                if answer is not None:
                    return answer
        return _DEFAULTS.get(api_name)

    def input_assertions_hook(self, api_name: str, **kwargs: Any) -> None:
        pass

    def output_assertions_hook(self, api_name: str, ret: Any, **kwargs: Any) -> None:
        pass

    def routing_condition(
        self, api_name: str, config: Any, layer_name: str, feature_obj: Any, **kwargs: Any
    ) -> Any:
        return True, config

    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:
        return True


class Manager(debug_manager.DebugManager):  # type: ignore[misc]
    """The manager of a run, with the session of its configuration."""

    session: Session | None = None

    def _load_namespace_apis_and_features(self, feature_dirs: Any) -> None:
        for namespace in NAMESPACES:
            if namespace not in Registry.data or Registry.data[namespace].api is None:
                Registry.register_namespace_api(namespace)(Namespace)
        try:
            super()._load_namespace_apis_and_features(feature_dirs)
        except SystemExit as exit_error:
            self.close()
            error = exit_error.__context__ or exit_error
            raise PluginError(
                f"a feature in {feature_dirs} cannot be imported: {type(error).__name__}: {error}",
                expected="modules that can be imported",
            ) from error
        for namespace in NAMESPACES:
            for feature in FEATURES:
                # A user's feature of this name, from feature_dirs, is registered already and stays.
                Registry.register_feature(namespace)(feature)
            for name, feature in Registry.data[namespace].features.items():
                self._features_explainer[f"{namespace}.{name}"] = feature

    def load_config(self) -> None:
        """Read the configuration, and watch the layers that it selects; errors are those of
        :func:`~ottava_debug.sections.enabled_in`."""
        if not self.config_file:
            super().load_config()
            return
        try:
            root = read(self.config_file)
            features = {
                name: data.features for name, data in Registry.data.items() if name != "base"
            }
            enabled = enabled_in(root, features, Registry.data["base"].features, _on_error)
            if remaining := for_nvdlfw(root):
                ConfigManager._load_config(remaining, registry_data=Registry.data)
            self.session = Session(
                enabled, lambda: int(self._trainer_iteration_count), lambda layer: layer.name
            )
        except BaseException:
            # After this initialize() can be called again, with a corrected configuration.
            api.end_debug()
            raise

    def step(self) -> None:
        if self.session is not None:
            self.session.after_step()
        super().step()

    def close(self) -> None:
        session, self.session = self.session, None
        try:
            if session is not None:
                session.close()
        finally:
            super().close()
            # end_debug() does this as well, but not if a feature raises above. Then initialize()
            # could not be called again.
            api.DEBUG_MANAGER = None
            # Handlers that stay would write the messages of a later run to this run's files, too.
            for logger in map(logging.getLogger, _LOGS):
                for handler in list(logger.handlers):
                    logger.removeHandler(handler)
                    handler.close()
