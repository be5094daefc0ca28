"""Features without a configuration file, for one model and until the end of a ``with`` block."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ottava.collectives import check_group
from ottava.errors import DTypeError, OptionError
from ottava.nn import Linear
from ottava_debug.enabled import Enabled
from ottava_debug.features.base import GEMMS, Feature
from ottava_debug.features.fake_quant import DisableFP8GEMM, FakeQuant
from ottava_debug.features.requests import is_of_quantized
from ottava_debug.features.statistics import LogFp8TensorStats, LogTensorStats
from ottava_debug.located import Located
from ottava_debug.log_files import Statistic, StatisticsFile, of_tensorboard, write
from ottava_debug.session import Session

#: A choice of layers: :mod:`fnmatch` patterns of names, or a function of a name and a layer.
Layers = str | Iterable[str] | Callable[[str, Any], bool] | None

#: Names of statistics; a statistic with options is a mapping.
Stats = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]


def _as_list(names: Any) -> list[Any]:
    return [names] if isinstance(names, str) else list(names)


class LayerSelection:
    """The chosen layers of a model, a :class:`~ottava_debug.enabled.Selection`."""

    def __init__(self, model: torch.nn.Module, layers: Layers) -> None:
        if not isinstance(model, torch.nn.Module):
            raise DTypeError(f"model is a {type(model).__name__}", expected="a torch.nn.Module")
        every: dict[torch.nn.Module, str] = {
            module: name for name, module in model.named_modules() if isinstance(module, Linear)
        }
        if not every:
            raise OptionError(
                "the model has no layer of Ottava",
                remedy="call ottava.convert(model, recipe) before",
            )
        self.unmatched: dict[str, str] = {}
        self.of_model = list(every.values())
        self.names = WeakKeyDictionary(self._selected(every, layers))
        # Compiled code identifies layers by their own names.
        self.own_names = {str(layer.name) for layer in self.names}

    def _selected(
        self, every: dict[torch.nn.Module, str], layers: Layers
    ) -> dict[torch.nn.Module, str]:
        if layers is None:
            return every
        if callable(layers):
            return {module: name for module, name in every.items() if layers(name, module)}
        selected: dict[torch.nn.Module, str] = {}
        for pattern in _as_list(layers):
            matching = {m: name for m, name in every.items() if fnmatchcase(name, pattern)}
            selected |= matching
            if not matching:
                self.unmatched[f"layers {pattern!r}"] = "the model"
        return selected

    def matches(self, name: str) -> bool:
        """Whether a layer of this name is chosen."""
        return name in self.names.values()


class Run:
    """Features that are active for a model until :meth:`close` or the end of a ``with`` block.

    Attributes:
        iteration: the number of the step, from 0; :meth:`step` increments it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Layers,
        features: Iterable[tuple[Feature, dict[str, Any]]],
    ) -> None:
        selection = LayerSelection(model, layers)
        self.iteration = 0
        enabled = []
        for feature, options in features:
            config = {key: value for key, value in options.items() if value is not None}
            title = type(feature).__name__
            targets = feature.targets(Located(config, "the arguments", title), title)
            policy = str(options.get("on_error", "raise"))
            enabled.append(Enabled(title, "ottava", feature, config, selection, targets, policy))
        self._session = Session(
            enabled, lambda: self.iteration, selection.names.get, selection.own_names.__contains__
        )
        self._session.warn_of_unmatched("Layers of the model", selection.of_model)

    def step(self) -> None:
        """Begin the next step; ranges of steps count these calls."""
        self._session.after_step()
        self.iteration += 1

    def close(self) -> None:
        """End the features, so that the layers compute as before."""
        self._session.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def fake_quant(
    model: torch.nn.Module,
    quant_format: str,
    *,
    layers: Layers = None,
    gemms: str | Sequence[str] = GEMMS,
    tensors: str | Sequence[str] = ("activation", "weight", "gradient"),
    on_error: str = "raise",
    **steps: Any,
) -> Run:
    """Compute products in high precision, with tensors that were quantized and dequantized before.

    Args:
        model: a model with Ottava's layers, such as one from :func:`ottava.convert`.
        quant_format: a format of :func:`ottava.debug.fake_quantize`.
        layers: patterns of the layers' names in the model, or ``predicate(name, layer)``; None for
            all layers.
        gemms: some of ``fprop``, ``dgrad`` and ``wgrad``.
        tensors: some of ``activation``, ``weight``, ``gradient``, and the results ``output``,
            ``dgrad`` and ``wgrad``.
        on_error: ``"raise"``, or ``"warn"``, which switches the feature off for a layer in which it
            fails.
        steps: ``start_step``, ``end_step``, ``start_end_list`` and ``freq``, as in a configuration.

    Returns:
        A context manager, which is active from this call on.

    Raises:
        OptionError: a name or a value is not allowed, or the model has no layers of Ottava.
    """
    options = {
        "gemms": _as_list(gemms),
        "tensors": _as_list(tensors),
        "quant_format": quant_format,
        "on_error": on_error,
    }
    return Run(model, layers, [(FakeQuant(), options | steps)])


def high_precision(
    model: torch.nn.Module,
    *,
    layers: Layers = None,
    gemms: str | Sequence[str] = GEMMS,
    on_error: str = "raise",
    **steps: Any,
) -> Run:
    """Compute products in high precision; arguments and errors are those of :func:`fake_quant`."""
    options = {"gemms": _as_list(gemms), "on_error": on_error}
    return Run(model, layers, [(DisableFP8GEMM(), options | steps)])


class Statistics(Run):
    """Statistics of a model's tensors, which :meth:`step` collects.

    Attributes:
        found: all statistics so far, a list of :class:`Statistic`.
        file: the file that they are written to; None without ``log_dir``.
    """

    found: list[Statistic]
    file: StatisticsFile | None

    def latest(self) -> dict[tuple[str, str, str], float | dict[int, int]]:
        """``(layer, tensor, stat)`` -> the last value."""
        return {(each.layer, each.tensor, each.stat): each.value for each in self.found}

    def close(self) -> None:
        """End the statistics; those since the last step are added to :attr:`found` first."""
        try:
            super().close()
        finally:
            if self.file is not None:
                self.file.close()


def _group_of(reduce: Any) -> Callable[[], Any] | None:
    """A function that returns the group to reduce over; None for this rank alone."""
    if reduce is True:
        return lambda: None
    if reduce is False:
        return None
    if reduce is None:
        raise OptionError(
            "reduce is None",
            expected="True for all ranks, False for this one alone, or a process group",
        )
    check_group(reduce)
    return lambda: reduce


def statistics(
    model: torch.nn.Module,
    stats: Stats = ("cur_amax", "underflows%", "saturation%", "sqnr"),
    *,
    layers: Layers = None,
    tensors: str | Sequence[str] = ("activation", "weight", "gradient"),
    freq: int = 1,
    log_dir: str | os.PathLike[str] | None = None,
    tb_writer: Any = None,
    reduce: Any = True,
    on_error: str = "raise",
    **steps: Any,
) -> Statistics:
    """Collect statistics of tensors every ``freq`` steps; results do not change.

    Args:
        stats: names of statistics, which :class:`LogTensorStats` and :class:`LogFp8TensorStats`
            define.
        freq: collect in every ``freq``-th step; the other steps cost nothing.
        log_dir: a folder for a file in nvdlfw-inspect's format.
        tb_writer: a ``torch.utils.tensorboard.SummaryWriter``, or an object with its
            ``add_scalar``.
        reduce: True combines the tensors of all ranks, and a process group those of its ranks; each
            of these ranks then has to call this function and ``step()``. False stays on this rank.
            Statistics of weights stay each rank's own, because ranks have copies of them.
        model, layers, tensors, on_error, steps: see :func:`fake_quant`.

    Raises:
        OptionError: see :func:`fake_quant`; or the file cannot be written, or ``reduce`` is not a
            group.
        DTypeError: ``tb_writer`` has no ``add_scalar``.
    """
    collected: list[Statistic] = []
    names = [stats] if isinstance(stats, Mapping) else _as_list(stats)
    group = _group_of(reduce)
    writers: list[Any] = of_tensorboard(tb_writer)
    file = None if log_dir is None else StatisticsFile(log_dir)
    if file is not None:
        writers.append(file)

    def sink(each: Statistic) -> None:
        collected.append(each)
        write(each, writers)

    of_quantized = [name for name in names if isinstance(name, str) and is_of_quantized(name)]
    of_values = [name for name in names if name not in of_quantized]
    common = {"tensors": _as_list(tensors), "freq": freq, "on_error": on_error} | steps
    features: list[tuple[Feature, dict[str, Any]]] = []
    if of_values or not of_quantized:
        features.append((LogTensorStats(sink, group), {"stats": of_values, **common}))
    if of_quantized:
        features.append((LogFp8TensorStats(sink, group), {"stats": of_quantized, **common}))
    try:
        run = Statistics(model, layers, features)
    except BaseException:
        if file is not None:
            file.close()
        raise
    run.found = collected
    run.file = file
    return run
