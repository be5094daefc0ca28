"""An enabled feature: its layers, products, tensors and steps, its answers, and its errors."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ottava.errors import PluginError, text_of
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.features.base import Target
from ottava_debug.operands import BY_COLUMN
from ottava_debug.products import Inspection, quantizer_of

#: The remedy for errors of features.
GO_ON = "on_error: warn switches the feature off, and goes on"
# The operands of the backward pass that were operands of the forward pass before.
_AGAIN = {("dgrad", "weight"), ("wgrad", "activation")}


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
        targets: its products and tensors; None for a feature that is no
            :class:`~ottava_debug.Feature`, and reads ``config`` itself.
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

    def is_off(self, layer_name: str) -> bool:
        """Whether the feature is switched off for a layer."""
        return self.stopped or layer_name in self.off

    def has(self, method: str) -> bool:
        """Whether the feature has a method of the API."""
        return callable(getattr(type(self.feature), method, None))

    def ask(self, method: str, step: int, layer_name: str, **arguments: Any) -> Any:
        """The answer of a method of the API.

        None where the feature lacks the method, is switched off, does not target the product or the
        tensor, or fails; see :meth:`fail`.
        """
        if self.is_off(layer_name) or not self.has(method):
            return None
        try:
            config = self._config_for(step, arguments.get("gemm"), arguments.get("tensor_name"))
            if config is None:
                return None
            function = getattr(self.feature, method)
            return function(config, layer_name, **_accepted(function, iteration=step, **arguments))
        except (Exception, SystemExit) as error:
            self.fail(layer_name, method, error)
            return None

    def _config_for(self, step: int, gemm: str | None, tensor: str | None) -> Any:
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

    def fail(self, layer_name: str, method: str, error: BaseException) -> None:
        """Switch the feature off for a layer with a warning; or raise PluginError if ``on_error``
        is ``"raise"``."""
        text = (
            f"{self.title}: {method} failed in layer {layer_name!r}: "
            f"{type(error).__name__}: {text_of(error)}"
        )
        if self.on_error == "raise":
            raise PluginError(text, remedy=GO_ON) from error
        self.off.add(layer_name)
        warnings.warn(f"{text}. It is switched off for this layer", UserWarning, stacklevel=2)


def _accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """The arguments that a function accepts."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _truth_of(answer: Any, default: bool) -> bool:
    """The boolean in an answer, which is a boolean or a pair of it and the next step in which it
    may change; ``default`` for None."""
    answer = answer[0] if isinstance(answer, tuple) else answer
    return default if answer is None else bool(answer)


class FeatureInspection(Inspection):
    """Applies a feature to one pass of a layer."""

    def __init__(self, enabled: Enabled, name: str, layer: Any, step: int) -> None:
        self._enabled = enabled
        self._name = name
        self._layer = layer
        self._step = step
        self._observed: set[str] = set()

    def _ask(self, method: str, **arguments: Any) -> Any:
        return self._enabled.ask(method, self._step, self._name, **arguments)

    def quantizes(self, gemm: str, tensor: str) -> bool:
        return _truth_of(self._ask("fp8_gemm_enabled", gemm=gemm), True)

    def modifies(self, gemm: str, tensor: str) -> bool:
        return _truth_of(self._ask("modify_tensor_enabled", gemm=gemm, tensor_name=tensor), False)

    def modify(
        self, gemm: str, tensor: str, values: torch.Tensor
    ) -> torch.Tensor | QuantizedTensorStorage:
        answer = self._ask(
            "modify_tensor",
            gemm=gemm,
            tensor_name=tensor,
            # The feature gets a copy, which it may change in place; the original may be the
            # parameter.
            tensor=values.clone(),
            default_quantizer=self._quantizer(gemm, tensor),
            out=None,
            dtype=values.dtype,
        )
        return values if answer is None else self._fitting(answer, values)

    def _quantizer(self, gemm: str, tensor: str) -> Any:
        """The recipe's quantizer of an operand; None for an operand in high precision, and for a
        result."""
        state = self.call.state
        if state is None or (gemm, tensor) not in self.quantized:
            return None
        return quantizer_of(state, gemm, tensor)

    def _fitting(self, answer: Any, values: torch.Tensor) -> torch.Tensor | QuantizedTensorStorage:
        """``answer`` in the dtype of ``values``; or ``values``, where ``answer`` does not fit and
        the error is not raised."""
        description = f"a {type(answer).__name__}"
        if isinstance(answer, (torch.Tensor, QuantizedTensorStorage)):
            description = f"{tuple(answer.shape)} of {answer.dtype}"
            is_like = answer.shape == values.shape and answer.device == values.device
            if is_like and answer.dtype.is_floating_point:
                if isinstance(answer, QuantizedTensorStorage):
                    return answer
                return answer.detach().to(values.dtype)
        error = PluginError(
            f"it returned {description}",
            expected=f"a tensor {tuple(values.shape)} on {values.device}",
        )
        self._enabled.fail(self._name, "modify_tensor", error)
        return values

    def observe(
        self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None
    ) -> None:
        # The forward pass observed the operands that the backward pass shares with it. After a
        # recomputation another object did so.
        first = (gemm, tensor) not in _AGAIN and tensor not in self._observed
        self._observed.add(tensor)
        about = {"tensor_name": tensor, "tp_group": None}
        if first and self._is_enabled("inspect_tensor", about):
            usages = {} if quantized is None else quantized.get_usages()
            self._ask(
                "inspect_tensor",
                layer=self._layer,
                tensor=values,
                quantizer=getattr(quantized, "_quantizer", None),
                recipe_name=None if self.call.recipe is None else self.call.recipe.name,
                rowwise_quantized_tensor=quantized if usages.get("rowwise") else None,
                columnwise_quantized_tensor=quantized if usages.get("columnwise") else None,
                **about,
            )
        about["gemm"] = gemm
        method = "inspect_tensor_postquantize"
        if quantized is not None and self._is_enabled(method, about):
            by_row = (gemm, tensor) not in BY_COLUMN
            self._ask(method, tensor=quantized, rowwise=by_row, **about)

    def _is_enabled(self, method: str, about: dict[str, Any]) -> bool:
        """Whether the feature has a method, and its ``METHOD_enabled`` does not deny it."""
        return _truth_of(self._ask(f"{method}_enabled", **about), self._enabled.has(method))
