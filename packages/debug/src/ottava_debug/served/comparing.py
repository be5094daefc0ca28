"""Runs the same batches through a trainer's layers and a server's, and measures where they part.

Three models see each batch: the trainer's, under its recipe; the server's, with the bytes of a
published checkpoint; and, for each layer, the product in high precision of the trainer's own input
and weight. The measures are those of :mod:`ottava_debug.measures`: the SQNR of outputs, and the
underflow of the operands, which the SQNR hides.
"""

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import ottava
from ottava.cli.output import plain
from ottava.errors import UsageError
from ottava.filesystem import AnyPath
from ottava.nn import Linear
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.analysis.captured import call_model, first_of
from ottava_debug.measures import compare, loss_sums, measures_of
from ottava_debug.products import Inspection, Watch
from ottava_debug.sums import Sums, add

Tensor = torch.Tensor


@dataclass(frozen=True)
class ServedLayer:
    """One layer under both numerics.

    Ratios are SQNRs in dB: inf where nothing differs, -inf where a side is not finite. Underflow is
    the percentage of the nonzero values that become zero, of the input or of the weight, whichever
    loses more.

    Attributes:
        name: of the layer.
        trainer: the name of the recipe that it trains under; ``"high precision"`` without one.
        server: how the checkpoint stores and serves it; ``"high precision"`` if it is not
            quantized there.
        weight: of the served weight, against the trainer's weight.
        trained: of the trainer's output, against the product in high precision.
        served: of the server's output for the same input, against that product.
        between: of the server's output for the same input, against the trainer's.
        accumulated: as ``between``, where the server's layer has the input of its own run; nan
            where that input has other rows, because a router chose other experts.
        trained_underflow: of the trainer's operands.
        served_underflow: of the server's operands for the same input, whose weight is compared with
            the trainer's.
    """

    name: str
    trainer: str
    server: str
    weight: float
    trained: float
    served: float
    between: float
    accumulated: float
    trained_underflow: float
    served_underflow: float


@dataclass(frozen=True)
class ServedComparison:
    """A trainer and a server, layer by layer.

    Attributes:
        trainer, server: the names of the model and of the checkpoint.
        layers: in the order of the forward pass.
        steps: the number of batches.
    """

    trainer: str
    server: str
    layers: tuple[ServedLayer, ...]
    steps: int

    @property
    def first(self) -> ServedLayer | None:
        """The first layer whose outputs differ for the same input; None if none does."""
        return next((layer for layer in self.layers if layer.between < math.inf), None)

    @property
    def worst(self) -> ServedLayer | None:
        """The layer whose outputs differ most for the same input; None if none does."""
        layers = [layer for layer in self.layers if layer.between < math.inf]
        return min(layers, key=lambda layer: layer.between, default=None)

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON data; numbers that are not finite become ``"inf"``, ``"-inf"`` or
        ``"nan"``."""
        return plain(asdict(self))  # type: ignore[no-any-return]


@dataclass
class _Ratio:
    """Sums of signal and noise over batches."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, expected: Tensor, found: Tensor) -> None:
        """Add one pair of tensors."""
        reference = expected.detach().double()
        self.signal += float(reference.square().sum())
        self.noise += float((reference - found.detach().double()).square().sum())

    def decibels(self) -> float:
        """The SQNR; -inf where the noise is not finite."""
        if self.noise == 0.0:
            return math.inf
        if not math.isfinite(self.noise) or self.signal == 0.0:
            return -math.inf
        return 10 * math.log10(self.signal / self.noise)


class _Underflow(Inspection):
    """Adds up what becomes zero in the quantized operands of a layer's forward passes."""

    def __init__(self) -> None:
        self._sums: dict[str, Sums] = {}

    def observe(
        self, gemm: str, tensor: str, values: Tensor, quantized: QuantizedTensorStorage | None
    ) -> None:
        if quantized is not None and values.numel():
            add(self._sums.setdefault(tensor, {}), loss_sums(values, quantized))

    def percent(self) -> float:
        """The underflow of the operand that loses more; 0 where none is quantized."""
        return max((measures_of(sums).underflow for sums in self._sums.values()), default=0.0)


@dataclass
class _Pair:
    """One layer of both models, and what is added up of it.

    Attributes:
        same_rows: whether the server's own runs had inputs of the same shapes so far.
    """

    trainer: torch.nn.Linear
    server: torch.nn.Linear
    trained: _Ratio = field(default_factory=_Ratio)
    served: _Ratio = field(default_factory=_Ratio)
    between: _Ratio = field(default_factory=_Ratio)
    accumulated: _Ratio = field(default_factory=_Ratio)
    same_rows: bool = True
    trained_underflow: _Underflow = field(default_factory=_Underflow)
    served_underflow: _Underflow = field(default_factory=_Underflow)


def compare_served(
    model: torch.nn.Module,
    checkpoint: AnyPath,
    data: Iterable[Any],
    *,
    steps: int = 3,
) -> ServedComparison:
    """Compare a trainer's forward pass with that of a published checkpoint, layer by layer.

    Args:
        model: the trainer's, converted by :func:`ottava.convert`, or in high precision; it stays as
            it is.
        checkpoint: a published quantized checkpoint of the same model.
        data: batches; each is a tensor, or a tuple or a mapping of arguments of the model.
        steps: the largest number of batches.

    Raises:
        UsageError: ottava-integrations is not installed; there is no batch, or one fails.
        CheckpointError: the checkpoint cannot be read, or does not fit the model.
    """
    server, report = _server_of(model, checkpoint)
    trainer = copy.deepcopy(model).eval()
    trained, served = _linear_layers(trainer), _linear_layers(server)
    pairs = {name: _Pair(trained[name], served[name]) for name in trained if name in served}
    trainers = {name: pair.trainer for name, pair in pairs.items()}
    servers = {name: pair.server for name, pair in pairs.items()}
    called: dict[str, _Pair] = {}
    count = 0
    for batch in first_of(data, steps):
        # Hooks of one model are off while the other runs.
        with torch.no_grad(), _watched(pairs), _recorded(trainers) as of_trainer:
            call_model(trainer, batch)
        with torch.no_grad(), _recorded(servers) as of_server:
            call_model(server, batch)
        with torch.no_grad(), _watched(pairs):
            for name, calls in of_trainer.items():
                pair = called.setdefault(name, pairs[name])
                _add(pair, calls, of_server.get(name, []))
        count += 1
    if not count:
        raise UsageError("the data have no batch", expected="an iterable of at least one")
    layers = [_report(name, pair, report) for name, pair in called.items()]
    return ServedComparison(type(model).__name__, str(checkpoint), tuple(layers), count)


def _server_of(model: torch.nn.Module, checkpoint: AnyPath) -> tuple[torch.nn.Module, Any]:
    """A copy of the model with the bytes of a checkpoint, and what was loaded."""
    try:
        from ottava_integrations import load_quantized
    except ImportError as error:
        raise UsageError(
            "ottava-integrations is not installed, which loads published checkpoints",
            expected="ottava-integrations in this environment",
            remedy="pip install ottava-integrations",
        ) from error

    with warnings.catch_warnings(action="ignore"):
        server = ottava.revert(copy.deepcopy(model))
    report = load_quantized(server, checkpoint)
    return server.eval(), report


def _linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The linear layers of a model, by name."""
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, torch.nn.Linear)}


@contextmanager
def _watched(pairs: Mapping[str, _Pair]) -> Iterator[None]:
    """The operands of both models' layers are inspected inside the block."""
    inspections: dict[Any, Inspection] = {}
    for pair in pairs.values():
        inspections[pair.trainer] = pair.trained_underflow
        inspections[pair.server] = pair.served_underflow
    with Watch(inspections.get):
        yield


#: The inputs and outputs of the calls of each layer.
_Calls = dict[str, list[tuple[Tensor, Tensor]]]


@contextmanager
def _recorded(layers: Mapping[str, torch.nn.Linear]) -> Iterator[_Calls]:
    """The calls of layers inside the block, in the order in which they ended."""
    calls: _Calls = {}
    handles = []
    for name, layer in layers.items():

        def keep(module: Any, args: Any, kwargs: Any, output: Tensor, name: str = name) -> None:
            x = args[0] if args else kwargs["input"]
            calls.setdefault(name, []).append((x.detach(), output.detach()))

        handles.append(layer.register_forward_hook(keep, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _add(
    pair: _Pair, calls: list[tuple[Tensor, Tensor]], of_server: list[tuple[Tensor, Tensor]]
) -> None:
    """Add the calls of a layer in one batch."""
    weight, bias = _values(pair.trainer.weight).double(), pair.trainer.bias
    for x, output in calls:
        exact = torch.nn.functional.linear(x.double(), weight)
        if bias is not None:
            exact += bias.double()
        same_input = pair.server(x)
        pair.trained.add(exact, output)
        pair.served.add(exact, same_input)
        pair.between.add(output, same_input)
    shapes, of_others = ([output.shape for _, output in each] for each in (calls, of_server))
    if shapes != of_others:
        pair.same_rows = False
        return
    for (_, output), (_, output_of_server) in zip(calls, of_server, strict=True):
        pair.accumulated.add(output, output_of_server)


def _values(weight: Any) -> Tensor:
    """The values of a weight, which may be quantized."""
    if isinstance(weight, QuantizedTensorStorage):
        return weight.dequantize()
    values: Tensor = weight.detach()
    return values


def _report(name: str, pair: _Pair, loaded: Any) -> ServedLayer:
    weight = compare(_values(pair.trainer.weight), _values(pair.server.weight))
    recipe = pair.trainer.recipe if isinstance(pair.trainer, Linear) else None
    server = "high precision"
    if name in loaded.layers:
        stored = loaded.layers[name]
        server = f"{stored.scheme}, inputs {stored.activations}"
    return ServedLayer(
        name=name,
        trainer="high precision" if recipe is None else recipe._label,
        server=server,
        weight=weight.sqnr,
        trained=pair.trained.decibels(),
        served=pair.served.decibels(),
        between=pair.between.decibels(),
        accumulated=pair.accumulated.decibels() if pair.same_rows else math.nan,
        trained_underflow=pair.trained_underflow.percent(),
        served_underflow=max(weight.underflow, pair.served_underflow.percent()),
    )
