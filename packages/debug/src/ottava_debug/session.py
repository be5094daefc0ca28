"""The enabled features of a run: which of them a layer has, their answers, and their errors."""

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

import torch

from ottava.errors import OptionError, PluginError, text_of
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.features.base import Feature, Target
from ottava_debug.operands import BY_COLUMN
from ottava_debug.products import Inspection, Watch, dense, quantizer_of


class Selection(Protocol):
    """A choice of layers by their names."""

    #: The patterns, numbers and names that no layer has matched so far -> their place in the
    #: configuration.
    unmatched: dict[str, str]

    def matches(self, name: str) -> bool:
        """Whether a layer of this name is chosen."""


@dataclass(eq=False)
class Enabled:
    """A feature that a section enables.

    Attributes:
        title: the name of the feature in messages, with the line.
        targets: its products and tensors; None for a feature that is no :class:`Feature`, and reads
            ``config`` itself.
        off: names of layers for which it is switched off, because it raised.
        stopped: whether it is switched off for all layers, because it raised after a step.
    """

    title: str
    namespace: str
    feature: Any
    config: Any
    selector: Selection
    targets: list[Target] | None
    on_error: str = "warn"
    off: set[str] = field(default_factory=set)
    stopped: bool = False
    _configs: dict[Any, Any] = field(default_factory=dict)
    _active: tuple[int, list[Target]] = -1, []

    @property
    def name(self) -> str:
        """The name of the feature."""
        return type(self.feature).__name__

    def is_chosen(self, step: int) -> bool:
        """Whether the configuration chooses a step for the feature; the answer is the same on all
        ranks."""
        return self.targets is None or bool(self._in_step(step))

    def _in_step(self, step: int) -> list[Target]:
        if self._active[0] != step:
            self._active = step, [target for target in self.targets or [] if target.active(step)]
        return self._active[1]

    def config_for(self, step: int, gemm: str | None, tensor: str | None) -> Any:
        """The options for a call about a product and a tensor, or None where the feature does not
        target them.

        ``gemm`` and ``tensor`` are None for a call that does not name them.
        """
        if self.targets is not None:
            for target in self._in_step(step):
                if target.gemm in (None, gemm) and (
                    tensor is None or target.tensor in (None, tensor)
                ):
                    return target.options
            return None
        if not hasattr(self.feature, "parse_config_and_api"):
            return self.config
        if (gemm, tensor) not in self._configs:
            names = {"gemm": gemm, "tensor_name": tensor}
            call: dict[str, Any] = {key: name for key, name in names.items() if name}
            call["gemm_parsing"], call["tensor_parsing"] = gemm is not None, tensor is not None
            status, options = self.feature.parse_config_and_api(dict(self.config), **call)
            self._configs[gemm, tensor] = (options or self.config) if status else None
        return self._configs[gemm, tensor]

    def has(self, method: str) -> bool:
        """Whether the feature has a method of the API."""
        return callable(getattr(type(self.feature), method, None))

    def call(self, method: str, step: int, layer_name: str, **arguments: Any) -> Any:
        """The answer of a method; None where the feature lacks the method, or does not target the
        product or the tensor."""
        if not self.has(method):
            return None
        config = self.config_for(step, arguments.get("gemm"), arguments.get("tensor_name"))
        if config is None:
            return None
        function = getattr(self.feature, method)
        parameters = inspect.signature(function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        return function(config, layer_name, **arguments)


# The operands of the backward pass that were operands of the forward pass before.
_AGAIN = {("dgrad", "weight"), ("wgrad", "activation")}
_GO_ON = "on_error: warn switches the feature off, and goes on"


def truth_of(answer: Any, default: bool) -> bool:
    """The boolean in an answer, which is a boolean or a pair of it and the next step in which it
    may change; ``default`` for None."""
    answer = answer[0] if isinstance(answer, tuple) else answer
    return default if answer is None else bool(answer)


class Session:
    """The enabled features of a run, and the watch that applies them to layers.

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
        self._watch: Watch | None = None
        if self.enabled:
            self._watch = Watch(self.inspection, may_select or (lambda name: bool(self.plan(name))))

    def plan(self, name: str) -> list[Enabled]:
        """The features of a layer.

        Raises:
            OptionError: two sections enable the same feature for it.
        """
        if name not in self._plans:
            plan = [enabled for enabled in self.enabled if enabled.selector.matches(name)]
            for number, second in enumerate(plan):
                for first in plan[:number]:
                    if first.name == second.name:
                        raise OptionError(
                            f"layer {name!r} has {first.name} twice, of {first.title} and of "
                            f"{second.title}",
                            expected="each feature once",
                            remedy="make their layers differ",
                        )
            self._plans[name] = plan
        return self._plans[name]

    def inspection(self, layer: Any) -> Inspection | None:
        """The inspection of a layer in this step; None if no feature is active for it."""
        name = self._name_of(layer)
        plan = None if name is None else self.plan(name)
        if not plan:
            return None
        self._warn_of_namesake(str(name), layer)
        step = self.step()
        active = [
            enabled
            for enabled in plan
            if not enabled.stopped and name not in enabled.off and enabled.is_chosen(step)
        ]
        return LayerInspection(self, str(name), layer, active, step) if active else None

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

    def attempt(
        self, enabled: Enabled, layer_name: str, method: str, step: int, **arguments: Any
    ) -> Any:
        """The answer of a feature; if the feature raises, see :meth:`failed`."""
        if enabled.stopped or layer_name in enabled.off:
            return None
        try:
            return enabled.call(method, step, layer_name, iteration=step, **arguments)
        except (Exception, SystemExit) as error:
            self.failed(enabled, layer_name, method, error)
            return None

    def failed(self, enabled: Enabled, layer_name: str, method: str, error: BaseException) -> None:
        """Switch a feature off for a layer with a warning, or raise.

        Raises:
            PluginError: the feature's ``on_error`` is ``"raise"``.
        """
        text = (
            f"{enabled.title}: {method} failed in layer {layer_name!r}: "
            f"{type(error).__name__}: {text_of(error)}"
        )
        if enabled.on_error == "raise":
            raise PluginError(text, remedy=_GO_ON) from error
        enabled.off.add(layer_name)
        warnings.warn(f"{text}. It is switched off for this layer", UserWarning, stacklevel=2)

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
        if self._watch is not None:
            self._watch.close()
            self._watch = None
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
                    raise PluginError(text, remedy=_GO_ON) from error
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


class LayerInspection(Inspection):
    """Applies the features of a layer in one pass."""

    def __init__(
        self, session: Session, name: str, layer: Any, enabled: list[Enabled], step: int
    ) -> None:
        self._session = session
        self._name = name
        self._layer = layer
        self._enabled = enabled
        self._step = step
        self._observed: set[str] = set()

    def _ask(self, enabled: Enabled, method: str, **arguments: Any) -> Any:
        return self._session.attempt(enabled, self._name, method, self._step, **arguments)

    def quantizes(self, gemm: str, tensor: str) -> bool:
        answers = [self._ask(enabled, "fp8_gemm_enabled", gemm=gemm) for enabled in self._enabled]
        return all(truth_of(answer, True) for answer in answers)

    def modifies(self, gemm: str, tensor: str) -> bool:
        return any(self._modifies(enabled, gemm, tensor) for enabled in self._enabled)

    def _modifies(self, enabled: Enabled, gemm: str, tensor: str) -> bool:
        return truth_of(
            self._ask(enabled, "modify_tensor_enabled", gemm=gemm, tensor_name=tensor), False
        )

    def modify(
        self, gemm: str, tensor: str, values: torch.Tensor
    ) -> torch.Tensor | QuantizedTensorStorage:
        current: Any = values
        for enabled in self._enabled:
            if not self._modifies(enabled, gemm, tensor):
                continue
            plain = dense(current)
            answer = self._ask(
                enabled,
                "modify_tensor",
                gemm=gemm,
                tensor_name=tensor,
                # The feature gets a copy, which it may change in place; the original may be the
                # parameter.
                tensor=plain.clone(),
                default_quantizer=self._quantizer(gemm, tensor),
                out=None,
                dtype=plain.dtype,
            )
            if answer is not None:
                current = self._fitting(enabled, answer, plain)
        return current  # type: ignore[no-any-return]

    def _quantizer(self, gemm: str, tensor: str) -> Any:
        """The recipe's quantizer of an operand; None for an operand in high precision, and for a
        result."""
        state = self.call.state
        if state is None or (gemm, tensor) not in self.quantized:
            return None
        return quantizer_of(state, gemm, tensor)

    def _fitting(self, enabled: Enabled, answer: Any, plain: torch.Tensor) -> Any:
        """``answer`` in the dtype of ``plain``; or ``plain``, where ``answer`` does not fit and the
        error is not raised."""
        is_quantized = isinstance(answer, QuantizedTensorStorage)
        description = f"a {type(answer).__name__}"
        if is_quantized or isinstance(answer, torch.Tensor):
            description = f"{tuple(answer.shape)} of {answer.dtype}"
            is_like = answer.shape == plain.shape and answer.device == plain.device
            if is_like and answer.dtype.is_floating_point:
                return answer if is_quantized else answer.detach().to(plain.dtype)
        error = PluginError(
            f"it returned {description}",
            expected=f"a tensor {tuple(plain.shape)} on {plain.device}",
        )
        self._session.failed(enabled, self._name, "modify_tensor", error)
        return plain

    def observe(
        self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None
    ) -> None:
        # The forward pass observed the operands that the backward pass shares with it. After a
        # recomputation another object did so.
        first = (gemm, tensor) not in _AGAIN and tensor not in self._observed
        self._observed.add(tensor)
        about = {"tensor_name": tensor, "tp_group": None}
        for enabled in self._enabled:
            if first and self._is_asked(enabled, "inspect_tensor", about):
                usages = {} if quantized is None else quantized.get_usages()
                self._ask(
                    enabled,
                    "inspect_tensor",
                    layer=self._layer,
                    tensor=values,
                    quantizer=getattr(quantized, "_quantizer", None),
                    recipe_name=None if self.call.recipe is None else self.call.recipe.name,
                    rowwise_quantized_tensor=quantized if usages.get("rowwise") else None,
                    columnwise_quantized_tensor=quantized if usages.get("columnwise") else None,
                    **about,
                )
            of_product = {**about, "gemm": gemm}
            method = "inspect_tensor_postquantize"
            if quantized is not None and self._is_asked(enabled, method, of_product):
                by_row = (gemm, tensor) not in BY_COLUMN
                self._ask(enabled, method, tensor=quantized, rowwise=by_row, **of_product)

    def _is_asked(self, enabled: Enabled, method: str, about: dict[str, Any]) -> bool:
        """Whether a feature has a method, and its ``METHOD_enabled`` does not deny it."""
        return truth_of(self._ask(enabled, f"{method}_enabled", **about), enabled.has(method))
