"""Statistics of tensors, and of what quantization makes of them: collected in a step, and logged
after it."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

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
    QUANTIZED,
    VALUES,
    QuantizedSums,
    ValueSums,
    block_of,
    blockwise_name,
)
from ottava_debug.features.together import put_together
from ottava_debug.located import kind_of, unknown
from ottava_debug.products import ROLES

#: The histogram, the one statistic that is no number.
EXPONENTS = "exponents"
_COLUMNWISE = "_columnwise"
# What TransformerEngine's configurations call recipes.
_RECIPES = {
    "fp8_current_scaling": "current",
    "fp8_block_scaling": "blockwise",
    "fp8_delayed_scaling": "delayed",
}


class Statistic(NamedTuple):
    """A statistic of a tensor in a step.

    Attributes:
        step: the number of the step.
        layer, tensor, stat: the name of each.
        value: a number; of exponents, how many values have which, ``{exponent: count}``.
    """

    step: int
    layer: str
    tensor: str
    stat: str
    value: float | dict[int, int]


def write(found: Statistic, loggers: Iterable[Any]) -> None:
    """Log a statistic as nvdlfw-inspect does, under ``LAYER_TENSOR_STAT``.

    A histogram is one where a logger has a writer of TensorBoard that takes histograms; others get
    a number for each exponent, under ``LAYER_TENSOR_STAT_EXPONENT``.
    """
    name = f"{found.layer}_{found.tensor}_{found.stat}"
    for logger in loggers:
        if not isinstance(found.value, dict):
            logger.log_scalar(name, found.value, found.step)
        elif hasattr(writer := getattr(logger, "tb_writer", None), "add_histogram"):
            _write_histogram(writer, name, found.value, found.step)
        else:
            for exponent, count in found.value.items():
                logger.log_scalar(f"{name}_{exponent}", count, found.step)


def _write_histogram(writer: Any, name: str, counts: dict[int, int], step: int) -> None:
    total = max(sum(counts.values()), 1)
    # A writer takes values, not counts of them: of each exponent as many of a thousand as it has.
    shares = [(exponent, math.ceil(1000 * count / total)) for exponent, count in counts.items()]
    values = [float(exponent) for exponent, share in shares for _ in range(share)]
    if values:
        writer.add_histogram(name, torch.tensor(values), step)


def reduction_group() -> Any:
    """The process group that nvdlfw-inspect was given by ``set_tensor_reduction_group``; None if it
    was not."""
    # Its import may lead back here.
    import nvdlfw_inspect.api as api  # type: ignore[import-untyped]

    return None if api.DEBUG_MANAGER is None else api.get_tensor_reduction_group()


class _Stat(NamedTuple):
    """A statistic as it is asked for: of what a recipe would make of the tensor, or of the
    product's own operand."""

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
        self._sink = sink or (lambda found: write(found, MetricLogger.enabled_loggers))
        self._group = group
        self._is_together = False
        # (Step, layer, tensor) -> the statistics, and (recipe, whether along columns) -> their
        # sums.
        self._collected: dict[tuple[int, str, str], tuple[Sequence[_Stat], dict[Any, Any]]] = {}
        # Layers, and (recipe, whether along columns), whose weights the step has counted.
        self._weights: set[tuple[Any, Any]] = set()

    def _is_counted(self, layer: Any, name: str, tensor: str, of: Any) -> bool:
        """Whether this is a weight that the step has counted, in an earlier microbatch."""
        if tensor != "weight":
            return False
        # Layers of one name have weights of their own.
        weight = (name if layer is None else layer, of)
        known = weight in self._weights
        self._weights.add(weight)
        return known

    def _sums(
        self, key: tuple[int, str, str], stats: Sequence[_Stat], of: Any, make: Callable[[], Any]
    ) -> Any:
        held = self._collected.setdefault(key, (stats, {}))[1]
        if of not in held:
            held[of] = make()
        return held[of]

    def _spans_ranks(self) -> bool:
        return self._group is not None and spans_ranks(self._group())

    def put_together(self) -> None:
        """Have the sums be those of all ranks of the group. A rank's weight, unlike its share of a
        batch, is no part of a larger tensor: its sums stay what they are."""
        if self._group is None or not self._spans_ranks():
            return
        own = {
            (*key, *of): sums
            for key, (_, held) in self._collected.items()
            for of, sums in held.items()
            if key[2] != "weight"
        }
        found = put_together({key: sums.numbers() for key, sums in own.items()}, self._group())
        for key, sums in own.items():
            sums.take(found[key])
        self._is_together = True

    def step(self) -> None:
        """Log what was collected."""
        if self._collected and not self._is_together and self._spans_ranks():
            what = "the last statistics are of this rank alone: no step() followed them"
            warnings.warn(what, UserWarning, stacklevel=2)
        self._is_together = False
        collected, self._collected = self._collected, {}
        self._weights.clear()
        for (step, layer, tensor), (stats, held) in collected.items():
            for asked in stats:
                value = held[asked[2:]].value(asked.stat) if asked[2:] in held else None
                if value is not None:
                    self._log(Statistic(step, layer, tensor, asked.text, value))

    def _log(self, found: Statistic) -> None:
        try:
            self._sink(found)
        except Exception as error:
            what = f"{found.stat} of {found.tensor} of layer {found.layer!r} cannot be logged"
            raise PluginError(f"{what}: {type(error).__name__}: {text_of(error)}") from error


def _plain_stats(value: Any) -> tuple[_Stat, ...]:
    found = []
    for name in _names(value):
        text = _of_blocks(name) if isinstance(name, Mapping) or name == BLOCKWISE else str(name)
        if text not in VALUES and text != EXPONENTS and block_of(text) is None:
            raise _unknown(text, [*VALUES, EXPONENTS, BLOCKWISE])
        found.append(_Stat(text, text))
    return tuple(found)


def _of_blocks(given: Any) -> str:
    """The name of the statistic of blocks: of its name alone, or of a mapping of that to its
    options."""
    expected = f"{{{BLOCKWISE}: {{block_size: {BLOCK_SIZE}, dims: {BLOCK_DIMS}}}}}"
    if isinstance(given, str):
        return blockwise_name(BLOCK_SIZE, BLOCK_DIMS)
    if list(given) != [BLOCKWISE]:
        raise OptionError(
            f"has a mapping of {', '.join(map(str, given)) or 'nothing'}", expected=expected
        )
    options = {} if given[BLOCKWISE] is None else given[BLOCKWISE]
    if not isinstance(options, Mapping):
        raise OptionError(f"has {BLOCKWISE}: {kind_of(options)}", expected=expected)
    for key in options:
        if key not in ("block_size", "dims"):
            raise unknown("", f"has {BLOCKWISE} with the key", key, ("block_size", "dims"))
    size, dims = options.get("block_size", BLOCK_SIZE), options.get("dims", BLOCK_DIMS)
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
    return tuple(_parsed(str(name)) for name in _names(value))


def _parsed(text: str) -> _Stat:
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
    known = [spec.name for spec in list_recipes() if spec.name != "custom"]
    if not before.endswith("_") or recipe not in known:
        raise _unknown(text, [*QUANTIZED, *(f"{name}_{stat}" for name in known)])
    return _Stat(text, stat, recipe, columnwise)


def _names(value: Any) -> list[Any]:
    value = [value] if isinstance(value, (str, Mapping)) else value
    if not isinstance(value, (list, tuple)) or not value:
        raise OptionError(f"is {kind_of(value)}", expected="a list of statistics")
    return list(value)


def _unknown(text: str, known: Iterable[str]) -> OptionError:
    return unknown("", "has", text, known)


class LogTensorStats(_Statistics):
    """Statistics of tensors in high precision, as products take and give them.

    Options: ``tensors`` or ``tensors_struct``, ``stats``: of ``min``, ``max``, ``mean``, ``std``,
    ``l1_norm``,
    ``l2_norm``, ``cur_amax`` (``amax``), ``dynamic_range``, the distance of the largest and the
    smallest magnitude in powers of two, ``exponents``, a histogram of those, and
    ``max_blockwise_dynamic_range``; ``freq`` and ranges of steps. A weight is counted once a step,
    other tensors in each microbatch.

    ``{max_blockwise_dynamic_range: {block_size: 32, dims: 1}}`` is the largest of the dynamic
    ranges of blocks of ``block_size`` elements of a row, or with ``dims: 2`` of squares; of
    operands also of their transposes, which products take too. It is logged as
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
        names = [asked.stat for asked in stats]
        key = iteration, layer_name, tensor_name
        make = partial(ValueSums, names, EXPONENTS in names, tensor_name in ROLES)
        self._sums(key, stats, (None, False), make).add(tensor)


class LogFp8TensorStats(_Statistics):
    """Statistics of what quantization makes of tensors.

    Options: ``tensors`` or ``tensors_struct``, ``stats``, ``freq`` and ranges of steps. Statistics:

    - ``underflows%``: values that are not zero and become zero, in percent of all elements;
      ``underflows_of_nonzero%``: in percent of the values that are not zero.
    - ``overflows%``: values that are clamped, in percent of all elements; ``saturation%``: in
      percent of the finite values.
    - ``sqnr`` in dB, ``cosine``, ``mse``.
    - ``scale_inv_min`` and ``scale_inv_max``, of the blocks, as they are stored: of E8M0 scales the
      bytes, 0 to 255; ``scale_inv_value_min`` and ``scale_inv_value_max``: what elements are
      multiplied by; ``scale``: the largest factor by which values were multiplied.

    Before a name may stand that of a recipe, as in ``mxfp8_sqnr``: what it would make of the
    tensor; of a recipe with state what it made of it, in layers that run under it. After it may
    stand ``_columnwise``, for the data along columns. A weight is counted once a step, other
    tensors in each microbatch.
    """

    options: ClassVar[dict[str, Check]] = {"stats": _quantized_stats}

    def __init__(
        self,
        sink: Callable[[Statistic], None] | None = None,
        group: Callable[[], Any] | None = reduction_group,
    ) -> None:
        super().__init__(sink, group)
        self._told: set[tuple[str, str]] = set()
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
        held = {False: rowwise_quantized_tensor, True: columnwise_quantized_tensor}
        for recipe, columnwise in dict.fromkeys(asked[2:] for asked in config["stats"]):
            if self._is_counted(layer, layer_name, tensor_name, (recipe, columnwise)):
                continue
            made = held[columnwise] if recipe in (None, recipe_name) else None
            if recipe is not None:
                made = self._by(recipe, tensor_name, tensor, columnwise, made)
            if made is None:
                self._tell(layer_name, tensor_name, columnwise, recipe)
                continue
            key, make = (iteration, layer_name, tensor_name), partial(QuantizedSums, columnwise)
            self._sums(key, config["stats"], (recipe, columnwise), make).add(tensor, made)

    def _by(
        self,
        recipe: str,
        tensor_name: str,
        tensor: torch.Tensor,
        columnwise: bool,
        taken: QuantizedTensorStorage | None,
    ) -> QuantizedTensorStorage | None:
        """What a recipe makes of a tensor, of results as of inputs; of one with state what it made,
        and was taken."""
        role = ROLES.get(tensor_name, "input")
        if (recipe, role) not in self._quantizers:
            made_by = get_recipe(recipe)
            if made_by.stateful:
                return taken
            self._quantizers[recipe, role] = made_by.make_quantizer(
                QuantizerRole("linear", role)
            ).copy()
        quantizer = self._quantizers[recipe, role]
        quantizer.set_usage(rowwise=not columnwise, columnwise=columnwise)
        made: QuantizedTensorStorage = quantizer.quantize(tensor)
        return made

    def _tell(self, layer: str, tensor: str, columnwise: bool, recipe: str | None) -> None:
        if (layer, tensor) not in self._told:
            self._told.add((layer, tensor))
            along = ("along columns" if columnwise else "along rows") + (
                f" by {recipe!r}" if recipe else ""
            )
            what = (
                f"{tensor} of layer {layer!r} is not quantized {along}: there are no "
                f"statistics of that"
            )
            warnings.warn(what, UserWarning, stacklevel=2)
