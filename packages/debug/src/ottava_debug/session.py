"""Sections that are in force: which features a layer has, what they answer, and what becomes of
their errors."""

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

from ottava.errors import OptionError, PluginError, text_of
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.features.base import Feature, Target
from ottava_debug.products import BY_COLUMN, ROLES, Inspection, Watch
from ottava_debug.selectors import Selector


@dataclass(eq=False)
class Enabled:
    """A feature that a section switches on.

    Attributes:
        title: what messages call it, with the line.
        selector: the layers that it is for.
        targets: what of them; None where the feature is not of :class:`Feature`, and reads
            ``config`` itself.
        off: names of layers for which it is switched off, because it raised.
        stopped: whether it is switched off for all, because it raised after a step.
    """

    title: str
    namespace: str
    feature: Any
    config: Any
    selector: Selector
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

    def active(self, step: int) -> bool:
        """Whether it does anything in a step."""
        return not self.stopped and self.is_chosen(step)

    def is_chosen(self, step: int) -> bool:
        """Whether the configuration has it do anything in a step, which all ranks agree on."""
        return self.targets is None or bool(self._in_step(step))

    def _in_step(self, step: int) -> list[Target]:
        if self._active[0] != step:
            self._active = step, [target for target in self.targets or [] if target.active(step)]
        return self._active[1]

    def config_for(self, step: int, gemm: str | None, tensor: str | None) -> Any:
        """The options for a call that names a product and a tensor, or not; None where it is not
        about those."""
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
            call: dict[str, Any] = {
                "gemm_parsing": gemm is not None,
                "tensor_parsing": tensor is not None,
            }
            call |= {"gemm": gemm} if gemm else {}
            call |= {"tensor_name": tensor} if tensor else {}
            status, options = self.feature.parse_config_and_api(dict(self.config), **call)
            self._configs[gemm, tensor] = (options or self.config) if status else None
        return self._configs[gemm, tensor]

    def has(self, method: str) -> bool:
        """Whether the feature has a method of the API."""
        return callable(getattr(type(self.feature), method, None))

    def call(self, method: str, step: int, layer_name: str, **given: Any) -> Any:
        """What a method answers; None where the feature has none, or is not about the product or
        the tensor."""
        if not self.has(method):
            return None
        config = self.config_for(step, given.get("gemm"), given.get("tensor_name"))
        if config is None:
            return None
        function = getattr(self.feature, method)
        parameters = inspect.signature(function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        return function(config, layer_name, **given)


# What the forward pass has shown before.
_AGAIN = {("dgrad", "weight"), ("wgrad", "activation")}
_GO_ON = "on_error: warn switches the feature off, and goes on"


def truth_of(answer: Any, default: bool) -> bool:
    """What an answer says: a boolean, or a pair of one and the next step in which it may change."""
    answer = answer[0] if isinstance(answer, tuple) else answer
    return default if answer is None else bool(answer)


class Session:
    """Features in force.

    Args:
        enabled: in the order of the sections.
        step: gives the number of the step.
        name_of: gives the name of a layer; None for one that is not looked at.
        may_select: whether a layer that calls itself so may be looked at.
    """

    def __init__(
        self,
        enabled: Iterable[Enabled],
        step: Callable[[], int],
        name_of: Callable[[Any], str | None],
        may_select: Callable[[str], bool] | None = None,
    ) -> None:
        self.enabled, self.step, self._name_of = list(enabled), step, name_of
        self._plans: dict[str, list[Enabled]] = {}
        self._layers: dict[str, ref[Any]] = {}
        self._namesakes: set[str] = set()
        self._told = False
        self._watch = (
            Watch(self.inspection, may_select or (lambda name: bool(self.plan(name))))
            if self.enabled
            else None
        )

    def plan(self, name: str) -> list[Enabled]:
        """The features of a layer.

        Raises:
            OptionError: two sections switch the same feature on for it.
        """
        if name not in self._plans:
            found = [enabled for enabled in self.enabled if enabled.selector.matches(name)]
            for number, second in enumerate(found):
                for first in found[:number]:
                    if first.name == second.name:
                        what = (
                            f"layer {name!r} has {first.name} twice, of {first.title} and of "
                            f"{second.title}"
                        )
                        raise OptionError(
                            what, expected="each feature once", remedy="make their layers differ"
                        )
            self._plans[name] = found
        return self._plans[name]

    def inspection(self, layer: Any) -> Inspection | None:
        """What looks at a layer in this step, if anything does."""
        name = self._name_of(layer)
        plan = None if name is None else self.plan(name)
        if not plan:
            return None
        self._tell_of_namesake(str(name), layer)
        step = self.step()
        active = [enabled for enabled in plan if enabled.active(step) and name not in enabled.off]
        return LayerInspection(self, str(name), layer, active, step) if active else None

    def _tell_of_namesake(self, name: str, layer: Any) -> None:
        other = self._layers.setdefault(name, ref(layer))()
        if other is not layer:
            self._layers[name] = ref(layer)
            if other is not None and name not in self._namesakes:
                self._namesakes.add(name)
                what = (
                    f"several layers are called {name!r}: sections cannot tell them apart, "
                    f"statistics take them as one"
                )
                remedy = "nvdlfw_inspect.api.infer_and_assign_layer_names(model) names them"
                warnings.warn(f"{what}. {remedy}", UserWarning, stacklevel=2)

    def attempt(
        self, enabled: Enabled, layer_name: str, method: str, step: int, **given: Any
    ) -> Any:
        """What a feature answers. Where it raises, it is switched off for the layer, or the error
        is raised."""
        if enabled.stopped or layer_name in enabled.off:
            return None
        try:
            return enabled.call(method, step, layer_name, iteration=step, **given)
        except (Exception, SystemExit) as error:
            self.failed(enabled, layer_name, method, error)
            return None

    def failed(self, enabled: Enabled, layer_name: str, method: str, error: BaseException) -> None:
        """A warning, and the feature is switched off for the layer; or the error."""
        text = (
            f"{enabled.title}: {method} failed in layer {layer_name!r}: "
            f"{type(error).__name__}: {text_of(error)}"
        )
        if enabled.on_error == "raise":
            raise PluginError(text, remedy=_GO_ON) from error
        enabled.off.add(layer_name)
        warnings.warn(f"{text}. It is switched off for this layer", UserWarning, stacklevel=2)

    def after_step(self) -> None:
        """What features do after a step; after the first, patterns that matched no layer are warned
        of."""
        self._end_step()
        self.warn_of_unmatched("Layers that ran", self._plans)

    def warn_of_unmatched(self, known: str, names: Iterable[str]) -> None:
        """Warn, the first time, of patterns that matched no layer so far; and tell some names that
        are ``known``."""
        if self._told:
            return
        self._told = True
        some = ", ".join(map(repr, list(names)[:5])) or "none"
        for pattern, where in {
            p: w for enabled in self.enabled for p, w in enabled.selector.unmatched.items()
        }.items():
            warnings.warn(
                f"{where}: {pattern} matches no layer. {known}: {some}", UserWarning, stacklevel=3
            )

    def close(self) -> None:
        """No feature is in force from here on; what :meth:`after_step` does is done once more, by
        this rank alone: others may be elsewhere, if this one ends because something failed."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
            self._end_step(together=False)
            self.warn_of_unmatched("Layers that ran", self._plans)

    def _end_step(self, together: bool = True) -> None:
        # The sections of a feature share the object.
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
        # Where it is switched off on this rank, others wait for this one all the same.
        if together and any(enabled.is_chosen(step) for enabled in sections):
            feature.put_together()
        if not all(enabled.stopped for enabled in sections):
            feature.step()


class LayerInspection(Inspection):
    """What the features of a layer do in one pass."""

    def __init__(
        self, session: Session, name: str, layer: Any, enabled: list[Enabled], step: int
    ) -> None:
        self._session, self._name, self._layer = session, name, layer
        self._enabled, self._step = enabled, step
        self._seen: set[str] = set()

    def _ask(self, enabled: Enabled, method: str, **given: Any) -> Any:
        return self._session.attempt(enabled, self._name, method, self._step, **given)

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
        found: Any = values
        for enabled in self._enabled:
            if self._modifies(enabled, gemm, tensor):
                plain = found.dequantize() if isinstance(found, QuantizedTensorStorage) else found
                # A copy, so that a feature may change it in place: it may be the parameter itself.
                given = {"gemm": gemm, "tensor_name": tensor, "tensor": plain.clone()}
                about = {
                    "default_quantizer": self._quantizer(gemm, tensor),
                    "out": None,
                    "dtype": plain.dtype,
                }
                made = self._ask(enabled, "modify_tensor", **about, **given)
                found = self._fitting(enabled, made, plain) if made is not None else found
        return found  # type: ignore[no-any-return]

    def _quantizer(self, gemm: str, tensor: str) -> Any:
        """The recipe's quantizer of an operand; None for what the product takes in high precision,
        and a result."""
        state = self.call.state
        if state is None or (gemm, tensor) not in self.quantized:
            return None
        columnwise = (gemm, tensor) in BY_COLUMN
        usages = {"rowwise": not columnwise, "columnwise": columnwise}
        return state.quantizer(ROLES[tensor], **usages, recording=False)

    def _fitting(self, enabled: Enabled, made: Any, plain: torch.Tensor) -> Any:
        fits = isinstance(made, (torch.Tensor, QuantizedTensorStorage))
        if (
            fits
            and made.shape == plain.shape
            and made.device == plain.device
            and made.dtype.is_floating_point
        ):
            return (
                made if isinstance(made, QuantizedTensorStorage) else made.detach().to(plain.dtype)
            )
        given = f"{tuple(made.shape)} of {made.dtype}" if fits else f"a {type(made).__name__}"
        error = PluginError(
            f"it returned {given}", expected=f"a tensor {tuple(plain.shape)} on {plain.device}"
        )
        self._session.failed(enabled, self._name, "modify_tensor", error)
        return plain

    def observe(
        self, gemm: str, tensor: str, values: torch.Tensor, quantized: QuantizedTensorStorage | None
    ) -> None:
        # What a backward pass takes of the forward pass has been seen, if not by this object: of
        # recomputed passes.
        first = (gemm, tensor) not in _AGAIN and tensor not in self._seen
        self._seen.add(tensor)
        recipe = None if self.call.recipe is None else self.call.recipe.name
        usages = (
            {"rowwise": False, "columnwise": False} if quantized is None else quantized.get_usages()
        )
        both = {
            f"{usage}_quantized_tensor": quantized if held else None
            for usage, held in usages.items()
        }
        for enabled in self._enabled:
            given = {"tensor_name": tensor, "tp_group": None}
            if first and truth_of(
                self._ask(enabled, "inspect_tensor_enabled", **given), enabled.has("inspect_tensor")
            ):
                quantizer = getattr(quantized, "_quantizer", None)
                taken = {"tensor": values, "quantizer": quantizer, "recipe_name": recipe}
                self._ask(enabled, "inspect_tensor", layer=self._layer, **taken, **both, **given)
            given["gemm"] = gemm
            method = "inspect_tensor_postquantize"
            if quantized is not None and truth_of(
                self._ask(enabled, f"{method}_enabled", **given), enabled.has(method)
            ):
                self._ask(
                    enabled,
                    method,
                    tensor=quantized,
                    rowwise=(gemm, tensor) not in BY_COLUMN,
                    **given,
                )
