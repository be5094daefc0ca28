"""A training step in a file.

:class:`ottava_bisect.capture` writes it, and ``ottava bisect`` reads it.

The safetensors file has tensors and JSON, and no code. Reading it runs nothing, and imports nothing
that it names.
"""

import ctypes
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ottava.checkpoint.files import DTYPES, dtype_name, read_tensors
from ottava.checkpoint.flatten import save_file, unflatten_state_dict
from ottava.errors import CheckpointError, named
from ottava.filesystem import AnyPath, as_path
from ottava_debug.losses import LOSSES

#: The entry of the file's metadata that describes the step.
METADATA_KEY = "ottava.step"
_VERSION = 1
_FOREIGN = "a file that ottava_bisect.capture has written"


@dataclass(frozen=True)
class LayerCall:
    """One forward pass of a layer and its backward pass.

    Attributes:
        layer: the qualified name of the layer.
        digests: a quantized operand, such as ``"fprop.weight"`` -> the :func:`digest` of the values
            that the product took.
    """

    layer: str
    digests: dict[str, str]


@dataclass
class Bundle:
    """A captured step.

    Attributes:
        state: the model's state dict before the step, with quantized tensors.
        buffers: the buffers that are not in the state dict, by qualified name.
        operands: the operands in high precision, as matrices ``[*, K]``:
            ``"<number of the call>.activation"``, ``".gradient"``, and ``".weight"`` where that is
            not the parameter itself.
        tensors: the tensors of the arguments, of the targets, of the gradients of the model's
            outputs, and of the random generators.
        recipes: the recipes, described by :func:`ottava_bisect.recipe_data.describe`.
        layers: each layer that ran under a recipe -> the number of that recipe, in the order in
            which the layers ran.
        calls: the passes of these layers, in the order of the forward passes.
        arguments: ``{"args", "kwargs"}`` for each call of the model, described by
            :mod:`ottava_bisect.trees`.
        targets: the targets, described in the same way.
        events: the passes of the model in order, ``"forward 0"`` and ``"backward 0"`` for its first
            call.
        autocast: the dtype of ``torch.autocast``; empty without it.
        training: the qualified names of modules in training mode.
        frozen: the names of parameters that require no gradient.
        loss_name: the name of a known loss function, or empty.
        loss, grad_norm: the results of the step; None where they are not known.
        device: the type of the device on which the step ran.
        versions: the versions of the software that wrote the file.
    """

    state: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    operands: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    recipes: list[Any] = field(default_factory=list)
    layers: dict[str, int] = field(default_factory=dict)
    calls: list[LayerCall] = field(default_factory=list)
    arguments: list[Any] = field(default_factory=list)
    targets: Any = None
    events: list[str] = field(default_factory=list)
    autocast: str = ""
    training: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    loss_name: str = ""
    loss: float | None = None
    grad_norm: float | None = None
    device: str = "cpu"
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, path: AnyPath) -> None:
        """Write the file; an existing one is replaced atomically.

        Raises:
            UsageError: the file cannot be written. Then nothing has changed.
            DTypeError: a tensor cannot be stored in a safetensors file.
        """
        tensors = {
            f"{group}/{name}": tensor
            for group in _GROUPS
            for name, tensor in getattr(self, group).items()
        }
        entries: dict[str, Any] = {name: getattr(self, name) for name in _JSON}
        entries["version"] = _VERSION
        entries["calls"] = [asdict(call) for call in self.calls]
        for name in _FLOATS:
            # JSON has no NaN.
            entries[name] = None if entries[name] is None else repr(entries[name])
        save_file(tensors, path, metadata={METADATA_KEY: json.dumps(entries)})

    @classmethod
    def read(cls, path: AnyPath) -> "Bundle":
        """Read the step in a file, and check everything in it.

        Raises:
            CheckpointError: the file cannot be read, is damaged, or is not a captured step.
        """
        tensors, metadata = read_tensors(path)
        with named(as_path(path)):
            if METADATA_KEY not in metadata:
                raise CheckpointError(
                    "this is no captured step",
                    expected=_FOREIGN,
                    remedy="`ottava analyze` reads checkpoints",
                )
            entries = _entries(metadata[METADATA_KEY])
            groups: dict[str, Any] = {group: {} for group in _GROUPS}
            for name, value in unflatten_state_dict(tensors, metadata).items():
                group, _, rest = name.partition("/")
                if group not in groups or (group != "state" and type(value) is not torch.Tensor):
                    raise CheckpointError(f"it has a tensor {name!r:.200}", expected=_FOREIGN)
                groups[group][rest] = value
            step = cls(**groups, **entries)
            _check(step)
            return step


_GROUPS = ("state", "buffers", "operands", "tensors")
_FLOATS = ("loss", "grad_norm")
#: The entries of the JSON description -> their types.
_JSON: dict[str, Any] = {
    "recipes": list,
    "layers": dict,
    "calls": list,
    "arguments": list,
    "targets": object,
    "events": list,
    "autocast": str,
    "training": list,
    "frozen": list,
    "loss_name": str,
    "loss": str | None,
    "grad_norm": str | None,
    "device": str,
    "versions": dict,
}


def _entries(text: str) -> dict[str, Any]:
    """The entries of the JSON description, with checked types; tensors are checked elsewhere."""
    try:
        entries = json.loads(text)
        version = entries.pop("version")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "the description of the step is damaged", expected=_FOREIGN
        ) from error
    if version != _VERSION:
        raise CheckpointError(
            f"the step is of version {version!r:.80}",
            expected=f"version {_VERSION}",
            remedy="read it with the ottava-bisect that wrote it",
        )
    wrong = [
        name
        for name, kind in _JSON.items()
        if name not in entries or not isinstance(entries[name], kind)
    ]
    wrong += sorted(set(entries) - set(_JSON))
    if wrong:
        raise CheckpointError(
            f"{wrong[0]!r:.80} of the step is not as it should be", expected=_FOREIGN
        )
    for name in ("events", "training", "frozen"):
        if not all(isinstance(entry, str) for entry in entries[name]):
            raise CheckpointError(
                f"{name!r} of the step has {entries[name]!r:.80}", expected="texts"
            )
    try:
        entries["calls"] = [LayerCall(**call) for call in entries["calls"]]
        for name in _FLOATS:
            entries[name] = None if entries[name] is None else float(entries[name])
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            "the calls of the step are not as they should be", expected=_FOREIGN
        ) from error
    return entries  # type: ignore[no-any-return]


def _check(step: Bundle) -> None:
    """Check that the entries of a step fit together."""
    wrong_entries: dict[str, list[Any]] = {
        "layers": _bad_layers(step),
        "calls": _bad_calls(step),
        "events": _bad_events(step),
        "arguments": [each for each in step.arguments if not _are_arguments(each)],
        "dtypes": [step.autocast] if step.autocast not in ("", *DTYPES) else [],
        "loss functions": [step.loss_name] if step.loss_name not in ("", *LOSSES) else [],
    }
    for kind, wrong in wrong_entries.items():
        if wrong:
            raise CheckpointError(
                f"the {kind} of the step have {wrong[0]!r:.80}", expected=_FOREIGN
            )
    for name in ("recipes", "layers", "calls", "arguments"):
        if not getattr(step, name):
            raise CheckpointError(f"the step has no {name}", expected=_FOREIGN)
    for number, call in enumerate(step.calls):
        _check_operands(step, number, needed=bool(call.digests))


def _bad_layers(step: Bundle) -> list[str]:
    """The layers whose recipe is none of the step's."""
    numbers = range(len(step.recipes))
    return [
        name
        for name, number in step.layers.items()
        if type(number) is not int or number not in numbers
    ]


def _bad_calls(step: Bundle) -> list[LayerCall]:
    return [
        call
        for call in step.calls
        if not isinstance(call.layer, str)
        or call.layer not in step.layers
        or not isinstance(call.digests, dict)
    ]


def _bad_events(step: Bundle) -> list[str]:
    """The events that are out of order.

    Forward passes must be numbered in order. Each backward pass must come at most once, after its
    forward pass.
    """
    bad, begun, ended = [], 0, set[str]()
    for event in step.events:
        kind, _, number = event.partition(" ")
        if event == f"forward {begun}":
            begun += 1
        elif kind == "backward" and number in map(str, range(begun)) and number not in ended:
            ended.add(number)
        else:
            bad.append(event)
    if not bad and begun != len(step.arguments):
        return [f"{begun} forward passes of {len(step.arguments)}"]
    return bad


def _check_operands(step: Bundle, number: int, needed: bool) -> None:
    """Check that the operands of a call are high-precision matrices with the same number of
    rows."""
    activation, gradient = (
        step.operands.get(f"{number}.{tensor}") for tensor in ("activation", "gradient")
    )
    if needed and activation is None:
        raise CheckpointError(f"the activation of call {number} is missing", expected=_FOREIGN)
    for tensor, values in (("activation", activation), ("gradient", gradient)):
        if values is None:
            continue
        is_matrix = values.dim() == 2 and values.is_floating_point()
        if not is_matrix or activation is None or len(values) != len(activation):
            raise CheckpointError(
                f"the {tensor} of call {number} is {dtype_name(values.dtype)} {list(values.shape)}",
                expected="matrices in high precision, of as many rows as each other",
            )


def _are_arguments(data: Any) -> bool:
    """Whether ``data`` is a tuple and a dict, described by :mod:`ottava_bisect.trees`."""
    kinds = {"args": "tuple", "kwargs": "dict"}
    if not isinstance(data, dict) or set(data) != set(kinds):
        return False
    return all(
        isinstance(data[key], dict) and set(data[key]) == {kind} for key, kind in kinds.items()
    )


def digest(values: torch.Tensor) -> str:
    """A fingerprint of a tensor's shape and exact values: 16 bytes of BLAKE2b, in hexadecimal.

    The values are converted to float32 first, and operands are decoded before. Therefore data that
    another GPU stores in another order has the same digest.
    """
    plain = values.detach().to("cpu", torch.float32).contiguous()
    fingerprint = hashlib.blake2b(repr(tuple(plain.shape)).encode(), digest_size=16)
    if plain.numel():
        fingerprint.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
    return fingerprint.hexdigest()


def norm_of(tensors: Mapping[str, torch.Tensor]) -> float:
    """The norm of all values together, computed in float64; NaN and infinities propagate."""
    if not tensors:
        return 0.0
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors.values()))
