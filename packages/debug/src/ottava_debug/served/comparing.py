"""Runs the same batches through a trainer's layers and a server's, and measures where they part.

Three models see each batch: the trainer's, under its recipe; the server's, with the bytes of a
published checkpoint; and, for each layer, the product in high precision of the trainer's own input
and weight. The measure is the SQNR of :mod:`ottava_debug.measures`, of outputs.
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
from ottava.errors import UsageError
from ottava.filesystem import AnyPath
from ottava.nn import Linear
from ottava.tensors import QuantizedTensorStorage
from ottava_debug.analysis.captured import call_model, first_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class ServedLayer:
    """One layer under both numerics. All ratios are SQNRs in dB; inf where nothing differs.

    Attributes:
        name: of the layer.
        trainer: the name of the recipe that it trains under; ``"high precision"`` without one.
        server: how the checkpoint stores and serves it; ``"high precision"`` if it is not
            quantized there.
        weight: of the served weight, against the trainer's weight.
        trained: of the trainer's output, against the product in high precision.
        served: of the server's output for the same input, against that product.
        between: of the server's output for the same input, against the trainer's.
        accumulated: as ``between``, where the server's layer has the input of its own run.
    """

    name: str
    trainer: str
    server: str
    weight: float
    trained: float
    served: float
    between: float
    accumulated: float


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
        """The comparison as JSON: an infinite ratio is None, because both sides are equal."""
        layers = [asdict(layer) for layer in self.layers]
        for layer in layers:
            for name, value in layer.items():
                if value == math.inf:
                    layer[name] = None
        return {
            "trainer": self.trainer,
            "server": self.server,
            "steps": self.steps,
            "layers": layers,
        }


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


@dataclass
class _Sums:
    """The ratios of one layer."""

    trained: _Ratio = field(default_factory=_Ratio)
    served: _Ratio = field(default_factory=_Ratio)
    between: _Ratio = field(default_factory=_Ratio)
    accumulated: _Ratio = field(default_factory=_Ratio)


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
    trained = _linear_layers(trainer)
    served = _linear_layers(server)
    sums: dict[str, _Sums] = {}
    count = 0
    for batch in first_of(data, steps):
        # Hooks of one model are off while the other runs.
        with torch.no_grad(), _recorded(trained) as of_trainer:
            call_model(trainer, batch)
        with torch.no_grad(), _recorded(served) as of_server:
            call_model(server, batch)
        for name, calls in of_trainer.items():
            _add(
                sums.setdefault(name, _Sums()), calls, of_server[name], trained[name], served[name]
            )
        count += 1
    if not count:
        raise UsageError("the data have no batch", expected="an iterable of at least one")
    layers = [
        _report(name, ratios, trained[name], served[name], report) for name, ratios in sums.items()
    ]
    return ServedComparison(type(model).__name__, str(checkpoint), tuple(layers), count)


def _server_of(model: torch.nn.Module, checkpoint: AnyPath) -> tuple[torch.nn.Module, Any]:
    """A copy of the model with the bytes of a checkpoint, and what was loaded."""
    from ottava_integrations import load_quantized

    with warnings.catch_warnings(action="ignore"):
        server = ottava.revert(copy.deepcopy(model))
    report = load_quantized(server, checkpoint)
    return server.eval(), report


def _linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The linear layers of a model, by name."""
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, torch.nn.Linear)}


#: The inputs and outputs of the calls of each layer.
_Calls = dict[str, list[tuple[Tensor, Tensor]]]


@contextmanager
def _recorded(layers: Mapping[str, torch.nn.Linear]) -> Iterator[_Calls]:
    """The calls of layers inside the block, in the order in which they ended."""
    calls: _Calls = {}
    handles = []
    for name, layer in layers.items():

        def keep(module: Any, args: Any, output: Tensor, name: str = name) -> None:
            calls.setdefault(name, []).append((args[0].detach(), output.detach()))

        handles.append(layer.register_forward_hook(keep))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _add(
    sums: _Sums,
    calls: list[tuple[Tensor, Tensor]],
    of_server: list[tuple[Tensor, Tensor]],
    trainer: torch.nn.Linear,
    server: torch.nn.Linear,
) -> None:
    """Add the calls of a layer in one batch."""
    weight, bias = _values(trainer.weight), trainer.bias
    for (x, output), (_, output_of_server) in zip(calls, of_server, strict=True):
        with torch.no_grad():
            exact = torch.nn.functional.linear(x.double(), weight.double())
            if bias is not None:
                exact += bias.double()
            same_input = server(x)
        sums.trained.add(exact, output)
        sums.served.add(exact, same_input)
        sums.between.add(output, same_input)
        sums.accumulated.add(output, output_of_server)


def _values(weight: Any) -> Tensor:
    """The values of a weight, which may be quantized."""
    if isinstance(weight, QuantizedTensorStorage):
        return weight.dequantize()
    values: Tensor = weight.detach()
    return values


def _report(
    name: str, sums: _Sums, trainer: torch.nn.Linear, server: torch.nn.Linear, loaded: Any
) -> ServedLayer:
    ratio = _Ratio()
    ratio.add(_values(trainer.weight), _values(server.weight))
    recipe = trainer.recipe if isinstance(trainer, Linear) else None
    stored = loaded.layers.get(name)
    return ServedLayer(
        name,
        "high precision" if recipe is None else recipe._label,
        "high precision" if stored is None else f"{stored.scheme}, inputs {stored.activations}",
        ratio.decibels(),
        sums.trained.decibels(),
        sums.served.decibels(),
        sums.between.decibels(),
        sums.accumulated.decibels(),
    )
