"""The base class of features that look at tensors, and change none."""

import warnings
from typing import Any, NamedTuple

import torch
from nvdlfw_inspect.registry import api_method  # type: ignore[import-untyped]

from ottava.tensors import QuantizedTensorStorage
from ottava_debug.features.base import Feature


class Observed(NamedTuple):
    """A tensor of a layer in a step.

    Attributes:
        layer: the layer, which tells layers of one name apart; its name where it is not known.
        layer_name, tensor_name, step: where the tensor was seen.
        values: the tensor, in high precision.
        rowwise, columnwise: the quantized tensor, if it has these data.
        recipe_name: the recipe that the layer runs under; None for high precision.
    """

    layer: Any
    layer_name: str
    tensor_name: str
    step: int
    values: torch.Tensor
    rowwise: QuantizedTensorStorage | None
    columnwise: QuantizedTensorStorage | None
    recipe_name: str | None


class Observing(Feature):
    """A feature that looks at tensors that a configuration names."""

    by_tensor = True

    def __init__(self) -> None:
        # The weights that were seen in this step.
        self._weights: set[tuple[Any, Any]] = set()
        self._warned: set[tuple[str, str]] = set()

    @api_method  # type: ignore[untyped-decorator]
    def inspect_tensor(
        self,
        config: Any,
        layer_name: str,
        tensor_name: str,
        tensor: torch.Tensor,
        iteration: int = 0,
        rowwise_quantized_tensor: QuantizedTensorStorage | None = None,
        columnwise_quantized_tensor: QuantizedTensorStorage | None = None,
        recipe_name: str | None = None,
        layer: Any = None,
    ) -> None:
        """Observe a tensor."""
        observed = Observed(
            layer_name if layer is None else layer,
            layer_name,
            tensor_name,
            iteration,
            tensor,
            rowwise_quantized_tensor,
            columnwise_quantized_tensor,
            recipe_name,
        )
        self.observe(config, observed)

    def observe(self, config: Any, observed: Observed) -> None:
        """Called for each tensor that a configuration names, with its options."""

    def is_known_weight(self, observed: Observed, kind: Any = None) -> bool:
        """Whether this is a weight that an earlier microbatch of the step has shown.

        ``kind`` tells apart what is done with the weight.
        """
        if observed.tensor_name != "weight":
            return False
        weight = observed.layer, kind
        is_known = weight in self._weights
        self._weights.add(weight)
        return is_known

    def warn_of_unquantized(self, observed: Observed, text: str) -> None:
        """Warn, once for each tensor, that it is not quantized, with the rest of the sentence."""
        name = observed.layer_name, observed.tensor_name
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{observed.tensor_name} of layer {observed.layer_name!r} is not quantized{text}",
                UserWarning,
                stacklevel=2,
            )

    def step(self) -> None:
        """Forget the weights of the step."""
        self._weights.clear()
