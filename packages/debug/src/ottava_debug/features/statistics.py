"""Features that collect statistics of tensors and of their quantization in a step, and log them
after it."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import nvdlfw_inspect.api as api  # type: ignore[import-untyped]
from nvdlfw_inspect.logging import MetricLogger  # type: ignore[import-untyped]

from ottava import QuantizerRole, get_recipe
from ottava.collectives import spans_ranks
from ottava.errors import PluginError, text_of
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava_debug.features.formulas import of_quantized, of_values, quantized_sums, value_sums
from ottava_debug.features.observing import Observed, Observing
from ottava_debug.features.requests import Request, plain_requests, quantized_requests
from ottava_debug.located import Check
from ottava_debug.log_files import Statistic, write
from ottava_debug.operands import ROLES
from ottava_debug.sums import Sums, add, over_ranks

# The step, the layer and the tensor; and the recipe and the direction of its quantized values.
_Tensor = tuple[int, str, str]
_Kind = tuple[str | None, bool]


def reduction_group() -> Any:
    """The process group of nvdlfw-inspect's ``set_tensor_reduction_group``; None if it was not
    called."""
    return None if api.DEBUG_MANAGER is None else api.get_tensor_reduction_group()


class _Statistics(Observing):
    required = ("stats",)
    #: ``value_of(stat, sums)``; None where there is no such statistic.
    value_of: ClassVar[Callable[[str, Sums], Any]]

    def __init__(
        self,
        sink: Callable[[Statistic], None] | None = None,
        group: Callable[[], Any] | None = reduction_group,
    ) -> None:
        super().__init__()
        self._sink = sink or (lambda statistic: write(statistic, MetricLogger.enabled_loggers))
        self._group = group
        self._is_together = False
        self._requests: dict[_Tensor, Sequence[Request]] = {}
        self._sums: dict[tuple[_Tensor, _Kind], Sums] = {}

    def _add(
        self, observed: Observed, requests: Sequence[Request], kind: _Kind, sums: Sums
    ) -> None:
        key = observed.step, observed.layer_name, observed.tensor_name
        self._requests[key] = requests
        add(self._sums.setdefault((key, kind), {}), sums)

    def _spans_ranks(self) -> bool:
        return self._group is not None and spans_ranks(self._group())

    def put_together(self) -> None:
        """Replace the sums by those of all ranks of the group.

        The sums of a weight stay the same: unlike a rank's share of a batch, the weight of a rank
        does not belong to a larger tensor.
        """
        if self._group is not None and self._spans_ranks():
            shares = {key: sums for key, sums in self._sums.items() if key[0][2] != "weight"}
            self._sums |= over_ranks(shares, self._group())
            self._is_together = True

    def step(self) -> None:
        """Log the statistics of the step."""
        if self._sums and not self._is_together and self._spans_ranks():
            warnings.warn(
                "the last statistics are of this rank alone: no step() followed them",
                UserWarning,
                stacklevel=2,
            )
        requests, self._requests = self._requests, {}
        all_sums, self._sums = self._sums, {}
        self._is_together = False
        super().step()
        for key, requested in requests.items():
            for request in requested:
                sums = all_sums.get((key, request.kind))
                value = None if sums is None else type(self).value_of(request.stat, sums)
                if value is not None:
                    self._log(Statistic(*key, request.text, value))

    def _log(self, statistic: Statistic) -> None:
        try:
            self._sink(statistic)
        except Exception as error:
            raise PluginError(
                f"{statistic.stat} of {statistic.tensor} of layer {statistic.layer!r} cannot be "
                f"logged: {type(error).__name__}: {text_of(error)}"
            ) from error


class LogTensorStats(_Statistics):
    """Logs statistics of the operands and results of products, in high precision.

    Options: ``tensors`` or ``tensors_struct``, ``freq`` and ranges of steps, and ``stats``. A
    weight is counted once a step, other tensors in each microbatch. The statistics are:

    - ``min``, ``max``, ``mean``, ``std``, ``l1_norm``, ``l2_norm``, ``cur_amax`` (or ``amax``).
    - ``dynamic_range``: the ratio of the largest to the smallest nonzero magnitude, as a power of
      two.
    - ``exponents``: a histogram of the exponents of the values.
    - ``max_blockwise_dynamic_range``: the largest dynamic range of a block. Its options,
      ``{max_blockwise_dynamic_range: {block_size: 32, dims: 1}}``, choose blocks of ``block_size``
      elements of a row, or with ``dims: 2`` square blocks. The blocks of an operand include those
      of its transpose, which products take too. It is logged as
      ``max_blockwise_dynamic_range_block_size_32_dims_1``.
    """

    options: ClassVar[dict[str, Check]] = {"stats": plain_requests}
    value_of = of_values

    def observe(self, config: Any, observed: Observed) -> None:
        """Collect the statistics that ``config`` has as ``stats``."""
        kind = None, False
        if not self.is_known_weight(observed, kind):
            requests = config["stats"]
            stats = [request.stat for request in requests]
            sums = value_sums(observed.values, stats, both_ways=observed.tensor_name in ROLES)
            self._add(observed, requests, kind, sums)


class LogFp8TensorStats(_Statistics):
    """Logs statistics of the quantization of tensors.

    Options: ``tensors`` or ``tensors_struct``, ``freq`` and ranges of steps, and ``stats``. A
    weight is counted once a step, other tensors in each microbatch. The statistics are:

    - ``underflows%``: nonzero values that become zero, in percent of all elements;
      ``underflows_of_nonzero%``: in percent of the nonzero values.
    - ``overflows%``: values that are clamped, in percent of all elements; ``saturation%``: in
      percent of the finite values.
    - ``sqnr`` in dB, ``cosine``, ``mse``.
    - ``scale_inv_min`` and ``scale_inv_max``: the extremes of the blocks' ``scale_inv`` as stored;
      E8M0 scales are bytes, 0 to 255. ``scale_inv_value_min`` and ``scale_inv_value_max``: the
      extremes of the factors that multiply elements when dequantizing. ``scale``: the largest
      factor that multiplied values when quantizing.

    The name of a recipe may precede the name of a statistic, as in ``mxfp8_sqnr``. That recipe then
    quantizes the tensor for the statistic. A recipe with state has statistics only in layers that
    run under it, of the operands that the products take. The suffix ``_columnwise`` chooses the
    columnwise data.
    """

    options: ClassVar[dict[str, Check]] = {"stats": quantized_requests}
    value_of = of_quantized

    def __init__(
        self,
        sink: Callable[[Statistic], None] | None = None,
        group: Callable[[], Any] | None = reduction_group,
    ) -> None:
        super().__init__(sink, group)
        self._quantizers: dict[tuple[str, str], Quantizer] = {}

    def observe(self, config: Any, observed: Observed) -> None:
        """Collect the statistics that ``config`` has as ``stats``."""
        requests = config["stats"]
        for kind in dict.fromkeys(request.kind for request in requests):
            if self.is_known_weight(observed, kind):
                continue
            recipe, columnwise = kind
            quantized = self._quantized(observed, recipe, columnwise)
            if quantized is None:
                direction = " along columns" if columnwise else " along rows"
                by = f" by {recipe!r}" if recipe else ""
                self.warn_of_unquantized(
                    observed, f"{direction}{by}: there are no statistics of that"
                )
                continue
            sums = quantized_sums(observed.values, quantized, columnwise=columnwise)
            self._add(observed, requests, kind, sums)

    def _quantized(
        self, observed: Observed, recipe_name: str | None, columnwise: bool
    ) -> QuantizedTensorStorage | None:
        """The tensor as a recipe quantizes it, where results count as inputs.

        For no recipe, and for a recipe with state that the layer runs under, this is the operand
        that the product took.
        """
        operand = None
        if recipe_name in (None, observed.recipe_name):
            operand = observed.columnwise if columnwise else observed.rowwise
        if recipe_name is None:
            return operand
        role = ROLES.get(observed.tensor_name, "input")
        if (recipe_name, role) not in self._quantizers:
            recipe = get_recipe(recipe_name)
            if recipe.stateful:
                return operand
            quantizer = recipe.make_quantizer(QuantizerRole("linear", role)).copy()
            self._quantizers[recipe_name, role] = quantizer
        quantizer = self._quantizers[recipe_name, role]
        quantizer.set_usage(rowwise=not columnwise, columnwise=columnwise)
        quantized: QuantizedTensorStorage = quantizer.quantize(observed.values)
        return quantized
