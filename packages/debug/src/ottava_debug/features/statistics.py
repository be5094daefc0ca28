"""Features that collect statistics of tensors and of their quantization in a step, and log them
after it."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import nvdlfw_inspect.api as api  # type: ignore[import-untyped]
import torch
from nvdlfw_inspect.logging import MetricLogger  # type: ignore[import-untyped]
from nvdlfw_inspect.registry import api_method  # type: ignore[import-untyped]

from ottava import QuantizerRole, get_recipe, list_recipes
from ottava.collectives import spans_ranks
from ottava.errors import OptionError, PluginError, text_of
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava_debug.features.base import Check, Feature
from ottava_debug.features.sums import (
    BLOCK_DIMS,
    BLOCK_SIZE,
    BLOCKWISE,
    EXPONENTS,
    QUANTIZED,
    VALUES,
    QuantizedSums,
    ValueSums,
    block_of,
    blockwise_name,
)
from ottava_debug.features.together import put_together
from ottava_debug.located import kind_of, unknown
from ottava_debug.operands import ROLES

_COLUMNWISE = "_columnwise"
# The names of recipes in TransformerEngine's configurations -> Ottava's names.
_RECIPES = {
    "fp8_current_scaling": "current",
    "fp8_block_scaling": "blockwise",
    "fp8_delayed_scaling": "delayed",
}


class Statistic(NamedTuple):
    """A statistic of a tensor in a step.

    Attributes:
        step: the number of the step.
        layer, tensor, stat: the names.
        value: a number; for ``exponents`` the counts ``{exponent: count}``.
    """

    step: int
    layer: str
    tensor: str
    stat: str
    value: float | dict[int, int]


def write(statistic: Statistic, loggers: Iterable[Any]) -> None:
    """Log a statistic as nvdlfw-inspect does, under ``LAYER_TENSOR_STAT``.

    A histogram is written as a histogram by a logger that has a TensorBoard writer for histograms.
    Other loggers get a number for each exponent, under ``LAYER_TENSOR_STAT_EXPONENT``.
    """
    name = f"{statistic.layer}_{statistic.tensor}_{statistic.stat}"
    for logger in loggers:
        if not isinstance(statistic.value, dict):
            logger.log_scalar(name, statistic.value, statistic.step)
        elif hasattr(writer := getattr(logger, "tb_writer", None), "add_histogram"):
            _write_histogram(writer, name, statistic.value, statistic.step)
        else:
            for exponent, count in statistic.value.items():
                logger.log_scalar(f"{name}_{exponent}", count, statistic.step)


def _write_histogram(writer: Any, name: str, counts: dict[int, int], step: int) -> None:
    total = max(sum(counts.values()), 1)
    # A writer takes values instead of counts, so each exponent gets its share of a thousand values.
    shares = [(exponent, math.ceil(1000 * count / total)) for exponent, count in counts.items()]
    values = [float(exponent) for exponent, share in shares for _ in range(share)]
    if values:
        writer.add_histogram(name, torch.tensor(values), step)


def reduction_group() -> Any:
    """The process group of nvdlfw-inspect's ``set_tensor_reduction_group``; None if it was not
    called."""
    return None if api.DEBUG_MANAGER is None else api.get_tensor_reduction_group()


class _Stat(NamedTuple):
    """A requested statistic: its name in the configuration, and without recipe and direction; the
    recipe, None for that of the operand which the product takes; and the direction."""

    text: str
    stat: str
    recipe: str | None = None
    columnwise: bool = False


class _Statistics(Feature):
    by_tensor = True
    required = ("stats",)

    def __init__(
        self,
        sink: Callable[[Statistic], None] | None = None,
        group: Callable[[], Any] | None = reduction_group,
    ) -> None:
        self._sink = sink or (lambda statistic: write(statistic, MetricLogger.enabled_loggers))
        self._group = group
        self._is_together = False
        # (step, layer, tensor) -> the requested statistics, and (recipe, columnwise) -> sums.
        self._collected: dict[tuple[int, str, str], tuple[Sequence[_Stat], dict[Any, Any]]] = {}
        # (layer, (recipe, columnwise)) of the weights that were counted in this step.
        self._weights: set[tuple[Any, Any]] = set()

    def _is_counted(self, layer: Any, name: str, tensor: str, kind: Any) -> bool:
        """Whether this is a weight that an earlier microbatch of the step has counted."""
        if tensor != "weight":
            return False
        # Layers with the same name have different weights, so the layer itself is the key.
        weight = (name if layer is None else layer, kind)
        is_counted = weight in self._weights
        self._weights.add(weight)
        return is_counted

    def _sums(
        self, key: tuple[int, str, str], stats: Sequence[_Stat], kind: Any, make: Callable[[], Any]
    ) -> Any:
        sums = self._collected.setdefault(key, (stats, {}))[1]
        if kind not in sums:
            sums[kind] = make()
        return sums[kind]

    def _spans_ranks(self) -> bool:
        return self._group is not None and spans_ranks(self._group())

    def put_together(self) -> None:
        """Replace the sums by those of all ranks of the group.

        The sums of a weight stay the same: unlike a rank's share of a batch, the weight of a rank
        does not belong to a larger tensor.
        """
        if self._group is None or not self._spans_ranks():
            return
        own = {
            (*key, *kind): sums
            for key, (_, by_kind) in self._collected.items()
            for kind, sums in by_kind.items()
            if key[2] != "weight"
        }
        combined = put_together({key: sums.numbers for key, sums in own.items()}, self._group())
        for key, sums in own.items():
            sums.numbers = combined[key]
        self._is_together = True

    def step(self) -> None:
        """Log the statistics of the step."""
        if self._collected and not self._is_together and self._spans_ranks():
            warnings.warn(
                "the last statistics are of this rank alone: no step() followed them",
                UserWarning,
                stacklevel=2,
            )
        self._is_together = False
        collected = self._collected
        self._collected = {}
        self._weights.clear()
        for (step, layer, tensor), (stats, by_kind) in collected.items():
            for requested in stats:
                sums = by_kind.get(requested[2:])
                value = None if sums is None else sums.value(requested.stat)
                if value is not None:
                    self._log(Statistic(step, layer, tensor, requested.text, value))

    def _log(self, statistic: Statistic) -> None:
        try:
            self._sink(statistic)
        except Exception as error:
            raise PluginError(
                f"{statistic.stat} of {statistic.tensor} of layer {statistic.layer!r} cannot be "
                f"logged: {type(error).__name__}: {text_of(error)}"
            ) from error


def _plain_stats(value: Any) -> tuple[_Stat, ...]:
    stats = []
    for name in _names(value):
        text = _of_blocks(name) if isinstance(name, Mapping) or name == BLOCKWISE else str(name)
        if text not in VALUES and text != EXPONENTS and block_of(text) is None:
            raise _unknown(text, [*VALUES, EXPONENTS, BLOCKWISE])
        stats.append(_Stat(text, text))
    return tuple(stats)


def _of_blocks(value: Any) -> str:
    """The name of the blockwise statistic, from its name alone or from ``{name: options}``."""
    expected = f"{{{BLOCKWISE}: {{block_size: {BLOCK_SIZE}, dims: {BLOCK_DIMS}}}}}"
    if isinstance(value, str):
        return blockwise_name(BLOCK_SIZE, BLOCK_DIMS)
    if list(value) != [BLOCKWISE]:
        raise OptionError(
            f"has a mapping of {', '.join(map(str, value)) or 'nothing'}", expected=expected
        )
    options = {} if value[BLOCKWISE] is None else value[BLOCKWISE]
    if not isinstance(options, Mapping):
        raise OptionError(f"has {BLOCKWISE}: {kind_of(options)}", expected=expected)
    for key in options:
        if key not in ("block_size", "dims"):
            raise unknown("", f"has {BLOCKWISE} with the key", key, ("block_size", "dims"))
    size = options.get("block_size", BLOCK_SIZE)
    dims = options.get("dims", BLOCK_DIMS)
    if type(size) is not int or not 0 < size < 10**9:
        raise OptionError(
            f"has {BLOCKWISE} with block_size {kind_of(size)}",
            expected="a number of elements, from 1",
        )
    if type(dims) is not int or dims not in (1, 2):
        raise OptionError(
            f"has {BLOCKWISE} with dims {kind_of(dims)}", expected="1 or 2, for squares"
        )
    return blockwise_name(size, dims)


def _quantized_stats(value: Any) -> tuple[_Stat, ...]:
    return tuple(_quantized_stat(str(name)) for name in _names(value))


def _quantized_stat(text: str) -> _Stat:
    columnwise = text.endswith(_COLUMNWISE)
    rest = text.removesuffix(_COLUMNWISE)
    stat = next(
        (name for name in sorted(QUANTIZED, key=len, reverse=True) if rest.endswith(name)), None
    )
    if stat is None:
        raise _unknown(text, QUANTIZED)
    before = rest.removesuffix(stat)
    if not before:
        return _Stat(text, stat, None, columnwise)
    recipe = _RECIPES.get(before.removesuffix("_"), before.removesuffix("_"))
    recipes = [spec.name for spec in list_recipes() if spec.name != "custom"]
    if not before.endswith("_") or recipe not in recipes:
        raise _unknown(text, [*QUANTIZED, *(f"{name}_{stat}" for name in recipes)])
    return _Stat(text, stat, recipe, columnwise)


def _names(value: Any) -> list[Any]:
    value = [value] if isinstance(value, (str, Mapping)) else value
    if not isinstance(value, (list, tuple)) or not value:
        raise OptionError(f"is {kind_of(value)}", expected="a list of statistics")
    return list(value)


def _unknown(text: str, names: Iterable[str]) -> OptionError:
    return unknown("", "has", text, names)


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

    options: ClassVar[dict[str, Check]] = {"stats": _plain_stats}

    @api_method  # type: ignore[untyped-decorator]
    def inspect_tensor(
        self,
        config: Any,
        layer_name: str,
        tensor_name: str,
        tensor: torch.Tensor,
        iteration: int = 0,
        layer: Any = None,
    ) -> None:
        """Collect the statistics that ``config`` has as ``stats``."""
        if self._is_counted(layer, layer_name, tensor_name, (None, False)):
            return
        stats = config["stats"]
        key = iteration, layer_name, tensor_name
        make = partial(ValueSums, [each.stat for each in stats], tensor_name in ROLES)
        self._sums(key, stats, (None, False), make).add(tensor)


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

    options: ClassVar[dict[str, Check]] = {"stats": _quantized_stats}

    def __init__(
        self,
        sink: Callable[[Statistic], None] | None = None,
        group: Callable[[], Any] | None = reduction_group,
    ) -> None:
        super().__init__(sink, group)
        self._warned: set[tuple[str, str]] = set()
        self._quantizers: dict[tuple[str, str], Quantizer] = {}

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
        """Collect the statistics that ``config`` has as ``stats``."""
        for recipe, columnwise in dict.fromkeys(requested[2:] for requested in config["stats"]):
            if self._is_counted(layer, layer_name, tensor_name, (recipe, columnwise)):
                continue
            quantized: QuantizedTensorStorage | None = None
            if recipe in (None, recipe_name):
                quantized = columnwise_quantized_tensor if columnwise else rowwise_quantized_tensor
            if recipe is not None:
                quantized = self._by(recipe, tensor_name, tensor, columnwise, quantized)
            if quantized is None:
                self._warn_of_unquantized(layer_name, tensor_name, columnwise, recipe)
                continue
            key = (iteration, layer_name, tensor_name)
            make = partial(QuantizedSums, columnwise)
            self._sums(key, config["stats"], (recipe, columnwise), make).add(tensor, quantized)

    def _by(
        self,
        recipe_name: str,
        tensor_name: str,
        tensor: torch.Tensor,
        columnwise: bool,
        operand: QuantizedTensorStorage | None,
    ) -> QuantizedTensorStorage | None:
        """The tensor as a recipe quantizes it, where results count as inputs.

        For a recipe with state this is ``operand``, the operand that the product took.
        """
        role = ROLES.get(tensor_name, "input")
        if (recipe_name, role) not in self._quantizers:
            recipe = get_recipe(recipe_name)
            if recipe.stateful:
                return operand
            quantizer = recipe.make_quantizer(QuantizerRole("linear", role)).copy()
            self._quantizers[recipe_name, role] = quantizer
        quantizer = self._quantizers[recipe_name, role]
        quantizer.set_usage(rowwise=not columnwise, columnwise=columnwise)
        quantized: QuantizedTensorStorage = quantizer.quantize(tensor)
        return quantized

    def _warn_of_unquantized(
        self, layer: str, tensor: str, columnwise: bool, recipe: str | None
    ) -> None:
        if (layer, tensor) in self._warned:
            return
        self._warned.add((layer, tensor))
        direction = "along columns" if columnwise else "along rows"
        if recipe:
            direction += f" by {recipe!r}"
        warnings.warn(
            f"{tensor} of layer {layer!r} is not quantized {direction}: there are no statistics "
            f"of that",
            UserWarning,
            stacklevel=2,
        )
