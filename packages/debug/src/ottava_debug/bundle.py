"""A training step in a file, which :func:`ottava_debug.capture` writes and ``ottava bisect`` reads.

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
_FOREIGN = "a file that ottava_debug.capture has written"


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
        recipes: the recipes, described by :func:`ottava_debug.recipe_data.describe`.
        layers: each layer that ran under a recipe -> the number of that recipe, in the order in
            which the layers ran.
        calls: the passes of these layers, in the order of the forward passes.
        arguments: ``{"args", "kwargs"}`` for each call of the model, described by
            :mod:`ottava_debug.trees`.
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
        values = {
            f"{group}/{name}": t for group in _GROUPS for name, t in getattr(self, group).items()
        }
        told = {name: getattr(self, name) for name in _JSON} | {"version": _VERSION}
        told["calls"] = [asdict(call) for call in self.calls]
        told |= {name: None if told[name] is None else repr(told[name]) for name in _FLOATS}
        save_file(values, path, metadata={METADATA_KEY: json.dumps(told)})

    @classmethod
    def read(cls, path: AnyPath) -> "Bundle":
        """Read the step in a file, and check everything in it.

        Raises:
            CheckpointError: the file cannot be read, is damaged, or is not a captured step.
        """
        tensors, metadata = read_tensors(path)
        with named(as_path(path)):
            if METADATA_KEY not in metadata:
                remedy = "`ottava analyze` reads checkpoints"
                raise CheckpointError("this is no captured step", expected=_FOREIGN, remedy=remedy)
            told = _parsed(metadata[METADATA_KEY])
            groups: dict[str, Any] = {group: {} for group in _GROUPS}
            for name, value in unflatten_state_dict(tensors, metadata).items():
                group, _, rest = name.partition("/")
                if group not in groups or (group != "state" and type(value) is not torch.Tensor):
                    raise CheckpointError(f"it has a tensor {name!r:.200}", expected=_FOREIGN)
                groups[group][rest] = value
            made = cls(**groups, **told)
            _check(made)
            return made


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


def _parsed(text: str) -> dict[str, Any]:
    """The entries of the JSON description, with checked types; tensors are checked elsewhere."""
    try:
        told = json.loads(text)
        version = told.pop("version")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "the description of the step is damaged", expected=_FOREIGN
        ) from error
    if version != _VERSION:
        what = f"the step is of version {version!r:.80}"
        raise CheckpointError(
            what,
            expected=f"version {_VERSION}",
            remedy="read it with the ottava-debug that wrote it",
        )
    wrong = [
        name for name, kind in _JSON.items() if name not in told or not isinstance(told[name], kind)
    ]
    if wrong or len(told) != len(_JSON):
        what = (
            f"{(wrong or sorted(set(told) - set(_JSON)))[0]!r:.80} of the step is not as it "
            f"should be"
        )
        raise CheckpointError(what, expected=_FOREIGN)
    for name in ("events", "training", "frozen"):
        if not all(isinstance(entry, str) for entry in told[name]):
            raise CheckpointError(f"{name!r} of the step has {told[name]!r:.80}", expected="texts")
    try:
        told["calls"] = [LayerCall(**call) for call in told["calls"]]
        told |= {name: None if told[name] is None else float(told[name]) for name in _FLOATS}
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            "the calls of the step are not as they should be", expected=_FOREIGN
        ) from error
    return told  # type: ignore[no-any-return]


def _check(step: Bundle) -> None:
    """Check that the entries of a step fit together."""
    numbers = range(len(step.recipes))
    bad_layers = [
        name
        for name, number in step.layers.items()
        if type(number) is not int or number not in numbers
    ]
    bad_calls = [
        c for c in step.calls if not isinstance(c.layer, str) or c.layer not in step.layers
    ]
    bad_calls += [c for c in step.calls if not isinstance(c.digests, dict)]
    bad_arguments = [said for said in step.arguments if not _are_arguments(said)]
    bad_dtypes = [step.autocast] if step.autocast not in ("", *DTYPES) else []
    bad_losses = [step.loss_name] if step.loss_name not in ("", *LOSSES) else []
    found: dict[str, list[Any]] = {
        "layers": bad_layers,
        "calls": bad_calls,
        "events": _bad_events(step),
    }
    found |= {"arguments": bad_arguments, "dtypes": bad_dtypes, "loss functions": bad_losses}
    for what, wrong in found.items():
        if wrong:
            raise CheckpointError(
                f"the {what} of the step have {wrong[0]!r:.80}", expected=_FOREIGN
            )
    if missing := [
        name for name in ("recipes", "layers", "calls", "arguments") if not getattr(step, name)
    ]:
        raise CheckpointError(f"the step has no {missing[0]}", expected=_FOREIGN)
    for number, call in enumerate(step.calls):
        _check_operands(step, number, needed=bool(call.digests))


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
        if (
            values.dim() != 2
            or not values.is_floating_point()
            or activation is None
            or len(values) != len(activation)
        ):
            what = (
                f"the {tensor} of call {number} is {dtype_name(values.dtype)} {list(values.shape)}"
            )
            raise CheckpointError(
                what, expected="matrices in high precision, of as many rows as each other"
            )


def _are_arguments(said: Any) -> bool:
    """Whether ``said`` is a tuple and a dict, described by :mod:`ottava_debug.trees`."""
    kinds = {"args": "tuple", "kwargs": "dict"}
    if not isinstance(said, dict) or set(said) != set(kinds):
        return False
    return all(
        isinstance(said[key], dict) and set(said[key]) == {kind} for key, kind in kinds.items()
    )


def digest(values: torch.Tensor) -> str:
    """A fingerprint of a tensor's shape and exact values: 16 bytes of BLAKE2b, in hexadecimal.

    The values are converted to float32 first, and operands are decoded before. Therefore data that
    another GPU stores in another order has the same digest.
    """
    plain = values.detach().to("cpu", torch.float32).contiguous()
    found = hashlib.blake2b(repr(tuple(plain.shape)).encode(), digest_size=16)
    found.update(
        (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()) if plain.numel() else b""
    )
    return found.hexdigest()


def norm_of(tensors: Mapping[str, torch.Tensor]) -> float:
    """The norm of all values together, computed in float64; NaN and infinities propagate."""
    if not tensors:
        return 0.0
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors.values()))
