"""State dicts with quantized tensors as plain tensors by name, and in one file.

A quantized tensor ``layer.weight`` becomes one plain tensor ``layer.weight.<argument>`` for each of
its inner tensors, in the dtype of its bytes, and a description. If it is sharded, its gathered
inner tensors are sharded in the same way, in rows or blocks of rows. Inner tensors that are not
gathered are equal on all ranks. Derived ones, such as transposes, are left out.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ottava.checkpoint.files import (
    DTYPES,
    METADATA_KEY,
    check_dense,
    check_memory,
    dtype_name,
    read_tensors,
    write_tensors,
)
from ottava.distributed.shards import check_blocks, row_of
from ottava.errors import (
    CheckpointError,
    DeviceError,
    DTypeError,
    ShapeError,
    UsageError,
    named,
    translated,
)
from ottava.filesystem import AnyPath, Partial, as_path, check_file_target, mode_of
from ottava.recipes.registry import import_offered
from ottava.tensors.declaration import InnerTensor, as_data, native_dtype
from ottava.tensors.quantizer import as_device
from ottava.tensors.saving import StorageSpec
from ottava.tensors.storage import QuantizedTensorStorage, storage_classes

#: The JSON description of one quantized tensor: its class ``"module:Class"``, the arguments of its
#: inner tensors, and the static fields by argument.
Entry = dict[str, Any]
_ENTRY = {"class": str, "tensors": list, "static": dict}
_VERSION = 1
_Sizes = Sequence[int]


def check_entry(entry: Any) -> Entry:
    """The entry of a quantized tensor; ValueError, KeyError or TypeError if it has another form."""
    texts = all(isinstance(argument, str) for argument in entry["tensors"])
    if not texts or not all(isinstance(entry[key], kind) for key, kind in _ENTRY.items()):
        raise ValueError("it is of another kind")
    return {key: entry[key] for key in _ENTRY}


def described(
    quantized: Mapping[str, Entry], aliases: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The metadata for quantized tensors, and for aliases: names of tensors stored under others."""
    body = {"quantized": quantized, "version": _VERSION} | ({"aliases": aliases} if aliases else {})
    return {METADATA_KEY: json.dumps(body, sort_keys=True)}


def _decode_description(text: str) -> tuple[dict[str, Entry], dict[str, str]]:
    with translated("the metadata of quantized tensors is damaged", "what was saved"):
        read: Any = json.loads(text)
        version, aliases = (
            read["version"],
            {name: str(stored) for name, stored in read.get("aliases", {}).items()},
        )
        if version != _VERSION:
            what = f"the metadata of quantized tensors has version {version!r:.80}"
            raise CheckpointError(
                what, f"version {_VERSION}", "read it with the ottava that wrote it"
            )
        return {name: check_entry(entry) for name, entry in read["quantized"].items()}, aliases


def flatten_state_dict(
    state_dict: Mapping[str, Any],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Plain tensors by name, and the metadata that :func:`unflatten_state_dict` needs to restore
    the state dict.

    A sharded tensor becomes sharded plain tensors with the same mesh and placements.

    Raises:
        DTypeError: a value is not a tensor, or nested, jagged, sparse or of a dtype that
            safetensors does not have.
        UsageError: two tensors would have one name, a quantized tensor holds no data, or the
            storage of a tensor was resized to less than it needs.
        ShapeError, UsageError: the inner tensors of a sharded quantized tensor cannot be sharded
            like the tensor.
    """
    tensors, quantized = flatten_values(state_dict)
    return tensors, described(quantized)


def flatten_values(
    state_dict: Mapping[str, Any], *, derived: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, Entry]]:
    """As :func:`flatten_state_dict`, but with entries instead of metadata, and without derived
    tensors if ``derived`` is False."""
    if not isinstance(state_dict, Mapping):
        raise DTypeError(
            f"the state dict is a {type(state_dict).__name__}",
            expected="a mapping of names to tensors",
        )
    tensors: dict[str, torch.Tensor] = {}
    quantized: dict[str, Entry] = {}
    for name, value in state_dict.items():
        if not isinstance(name, str) or not isinstance(
            value, (torch.Tensor, QuantizedTensorStorage)
        ):
            raise DTypeError(
                f"{name!r} is a {type(value).__name__}", expected="a state dict of tensors by name"
            )
        with torch.no_grad():
            made, entries = _flatten_value(name, value, derived)
        if taken := made.keys() & tensors.keys():
            raise UsageError(
                f"two tensors would have the name {min(taken)!r}", remedy="rename one of them"
            )
        tensors |= made
        quantized |= entries
    return tensors, quantized


def unflatten_state_dict(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> dict[str, torch.Tensor | QuantizedTensorStorage]:
    """The state dict from which :func:`flatten_state_dict` made ``tensors`` and ``metadata``.

    Quantized tensors have no quantizers; loading copies their bytes into the tensors of a model.

    Raises:
        CheckpointError: the metadata is damaged, of a later version, or names a tensor or a package
            that is missing.
        OttavaError: the class of a quantized tensor refuses its tensors.
    """
    text = (metadata or {}).get(METADATA_KEY)
    quantized, aliases = ({}, {}) if text is None else _decode_description(text)
    state: dict[str, Any] = dict(tensors)
    for alias, stored in aliases.items():
        if stored not in tensors or alias in tensors:
            raise CheckpointError(
                f"damaged metadata: {alias!r} is said to be {stored!r}", "one of the two, stored"
            )
        state[alias] = tensors[stored]
    made = {name: _unflatten_tensor(name, entry, state) for name, entry in quantized.items()}
    if both := state.keys() & made.keys():
        raise CheckpointError(
            f"{min(both)!r} is both a tensor and a quantized one", expected="one tensor of a name"
        )
    return state | made


def save_file(
    state_dict: Mapping[str, Any], path: AnyPath, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state dict, which may have quantized tensors, as one safetensors file.

    An existing file is replaced by one rename. A tensor with several names, such as a tied weight,
    is stored under the first name; overlapping views of one memory are written separately.
    Contiguous tensors on the CPU are written without a copy, and others are copied first. If
    another thread changes tensors during the save, the file mixes old and new values, even inside
    one tensor. A thread that saves while another one trains has to copy the state first
    (docs/checkpoints.md).

    Args:
        state_dict: tensors by name.
        path: the file.
        metadata: more texts for the header.

    Raises:
        DTypeError: a value is not a dense tensor with values, of a dtype that the format has.
        UsageError: two tensors would have one name, the storage of a tensor was resized to less
            than it needs, or the file cannot be written. Nothing has changed then.
    """
    for name, value in state_dict.items() if isinstance(state_dict, Mapping) else ():
        if hasattr(value, "to_local"):
            remedy = (
                "save with save_sharded, or gather them: get_model_state_dict with "
                "full_state_dict=True"
            )
            raise DTypeError(f"{name!r} is sharded", "whole tensors", remedy)
    texts = {} if metadata is None else metadata
    if not isinstance(texts, Mapping) or not all(
        isinstance(text, str) for entry in texts.items() for text in entry
    ):
        raise DTypeError(f"metadata is {metadata!r:.200}", expected="texts by name")
    tensors, quantized = flatten_values(state_dict)
    first: dict[Any, str] = {}
    names = {name: first.setdefault(place_of(tensor), name) for name, tensor in tensors.items()}
    aliases = {name: stored for name, stored in names.items() if stored != name}
    stored = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    place = check_file_target(path)
    unwritten = translated(
        f"{path} cannot be written", "a file in a folder, and room", to=UsageError, of=OSError
    )
    with unwritten, Partial(place) as partial:
        # The new file has the permissions of the old one from its first byte on.
        about = {**texts, **described(quantized, aliases)}
        write_tensors(partial.path / "tensors", stored, about, mode_of(place))
        partial.put_file("tensors")


def load_file(
    path: AnyPath, device: str | int = "cpu", *, verify: bool = True
) -> dict[str, torch.Tensor | QuantizedTensorStorage]:
    """The state dict of a safetensors file. Files of other tools give plain tensors.

    For weights that another tool has quantized, these are the data and the scales as in the file.
    Quantized tensors have no quantizers. On the CPU tensors are mapped, not read: they take memory
    as they are used, writes to them stay in memory, and the file must not be shortened in place
    while they exist.

    Args:
        path: the file. Nothing in it is trusted; memory is bounded by its size.
        device: where the tensors go.
        verify: whether all bytes are read and compared with the file's checksum. Files of other
            tools have none.

    Raises:
        CheckpointError: the file cannot be read, is damaged, is not a safetensors file, or was
            replaced while it was read.
        DeviceError: ``device`` cannot be used.
        OttavaError: as of :func:`unflatten_state_dict`.
    """
    place = as_device(device)
    with translated(
        f"device {str(place)!r} cannot be used", "a device that torch has", to=DeviceError
    ):
        torch.empty(0, device=place)
    tensors, metadata = read_tensors(path, verify=verify)
    with named(as_path(path)):
        return unflatten_state_dict(
            {name: tensor.to(place) for name, tensor in tensors.items()}, metadata
        )


def held_tensors(value: Any) -> list[torch.Tensor]:
    """The inner tensors of a quantized tensor; for a plain tensor, the tensor itself."""
    return (
        [t for t in value.inner_list() if t is not None]
        if isinstance(value, QuantizedTensorStorage)
        else [value]
    )


def place_of(value: Any) -> Any:
    """A key that is equal for two names of one tensor: where its bytes are, and how they are
    read."""
    held = [
        (t.device, t.data_ptr() or id(t), t.is_conj(), t.is_neg(), t) for t in held_tensors(value)
    ]
    return tuple((*place, t.dtype, tuple(t.shape), t.stride()) for *place, t in held)


def _unflatten_tensor(
    name: str, entry: Entry, tensors: dict[str, torch.Tensor]
) -> QuantizedTensorStorage:
    """Make a quantized tensor from its inner tensors, which are removed from ``tensors``."""
    for key in (f"{name}.{argument}" for argument in entry["tensors"]):
        if key not in tensors:
            raise CheckpointError(
                f"tensor {key!r} is missing", expected=f"every inner tensor of {name!r}"
            )
    cls = _find_class(name, entry)
    if not entry["tensors"] or not {*entry["tensors"]} <= {
        declared.argument for declared in cls.inner_tensors
    }:
        raise CheckpointError(
            f"{name!r} has the tensors {entry['tensors']!r:.80}", "those of its class"
        )
    held = {
        argument: tensors.pop(f"{name}.{argument}") for argument in dict.fromkeys(entry["tensors"])
    }
    inner: list[torch.Tensor | None] = []
    # The class may belong to another package, and the values come from a file.
    with named(repr(name)), translated(f"{name!r} cannot be restored", "what it was saved with"):
        fields = {
            field.attribute: _decode_static(entry["static"][field.argument])
            for field in cls.all_static_fields()
        }
        if len(entry["static"]) != len(fields):
            raise ValueError(f"it has the fields {sorted(entry['static'])!r:.200}")
        for declared in cls.inner_tensors:
            # A storage holds 8-bit data as uint8.
            native = (
                fields[declared.native] if isinstance(declared.native, str) else declared.native
            )
            tensor = held.get(declared.argument)
            inner.append(
                tensor if native is None else as_data(tensor, native, repr(declared.argument))
            )
        return StorageSpec(cls, tuple(fields.values()), None).build(inner)  # type: ignore[no-any-return]


def _encode_static(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, tuple):
        return [_encode_static(entry) for entry in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise DTypeError(
        f"a static field holds a {type(value).__name__}", expected="a dtype, number, text or tuple"
    )


def _decode_static(value: Any) -> Any:
    if isinstance(value, dict):
        return DTYPES[str(value["dtype"])]
    return tuple(_decode_static(entry) for entry in value) if isinstance(value, list) else value


def _find_class(name: str, entry: Entry) -> type[QuantizedTensorStorage]:
    """The class of an entry, which is already imported or belongs to an installed recipe."""
    module, _, attribute = entry["class"].partition(":")
    if entry["class"] not in storage_classes():
        # Importing the module, or reading the attribute, may make the class.
        with contextlib.suppress(Exception, SystemExit):
            getattr(import_offered(module), attribute, None)
    if entry["class"] not in storage_classes():
        what = f"{name!r} is a {entry['class']!r:.200}, which is not installed"
        raise CheckpointError(
            what, remedy=f"install the package that has the module {module!r:.200}"
        )
    return storage_classes()[entry["class"]]


def _flatten_value(
    name: str, value: Any, derived: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Entry]]:
    """Plain tensors by name for one tensor, sharded in the same way, and an entry if it is
    quantized.

    Nothing is copied.
    """
    sharded = hasattr(value, "to_local")
    local: Any = value.to_local() if sharded else value
    # ``gather_quantized`` wraps a weight in high precision, which is saved as the plain tensor.
    unwrap = getattr(local, "high_precision", None)
    local = unwrap() if callable(unwrap) and isinstance(local, torch.Tensor) else local
    if not isinstance(local, QuantizedTensorStorage):
        check_dense(name, local)
        return {
            name: _sharded(name, value, local, tuple(value.shape))[0] if sharded else local.detach()
        }, {}
    inner, spec = local.flatten_storage()
    held = [
        (declared, t)
        for declared, t in zip(local.inner_tensors, inner, strict=True)
        if t is not None
    ]
    derived = derived and not sharded
    if not any(derived or declared.gather for declared, _ in held):
        what = f"{name!r} holds {'only what derives from its elements' if held else 'no data'}"
        raise UsageError(
            what,
            expected="rowwise data",
            remedy="keep the rowwise usage of weights; do not clear them",
        )
    static = zip(spec.cls.all_static_fields(), spec.static, strict=True)
    fields = {declared.argument: _encode_static(entry) for declared, entry in static}
    if sharded and "shape" in fields:
        fields["shape"] = list(value.shape)
    tensors: dict[str, torch.Tensor] = {}
    for declared, tensor in held:
        if not derived and local.is_derived(declared):
            continue
        check_memory(f"{name}.{declared.argument}", tensor)
        native = native_dtype(local, declared)
        made = tensor if native is None else tensor.view(native)
        if sharded and declared.gather:
            rows, first = sharded_rows(
                name, declared, tensor, local.shape, value.shape, _begin(name, value)
            )
            # Transposed inner tensors have the rows in their second dimension.
            dim = int(declared.transposed)
            made, begin = _sharded(
                name, value, made, (*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]), dim
            )
            if tensor.numel() and begin[dim] != first:
                what = f"the shards of {name!r} are no shards of {declared.argument!r}"
                raise ShapeError(what, expected="as many blocks on each rank but the last")
        tensors[declared.argument] = made.detach()
    entry = {
        "class": f"{spec.cls.__module__}:{spec.cls.__qualname__}",
        "tensors": list(tensors),
        "static": fields,
    }
    return {f"{name}.{argument}": tensor for argument, tensor in tensors.items()}, {name: entry}


def _sharded(
    name: str, value: Any, local: torch.Tensor, shape: tuple[int, ...], dim: int = 0
) -> tuple[torch.Tensor, _Sizes]:
    """A tensor that is sharded along ``dim`` as ``value`` is by rows; and where this rank's shard
    begins."""
    sizes = {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
    placements = [type(p)(dim) if dim and p.is_shard() else p for p in value.placements]
    made = type(value).from_local(
        local.detach(), value.device_mesh, placements, run_check=False, **sizes
    )
    return made, _begin(name, made)


def _begin(name: str, value: Any) -> _Sizes:
    """The offsets of this rank's shard in a sharded tensor."""
    expected = "shards and replicas, as of a DTensor, over a mesh with all ranks"
    with translated(f"{name!r} cannot be saved in shards", expected, to=UsageError):
        (box,) = value.__create_chunk_list__()
        if tuple(box.sizes) != tuple(value.to_local().shape) or any(
            p.is_partial() for p in value.placements
        ):
            raise ValueError(f"{value.placements} make no single box of it on this rank")
        return tuple(box.offsets)


def sharded_rows(
    name: str,
    inner: InnerTensor,
    tensor: torch.Tensor,
    local: _Sizes,
    shape: _Sizes,
    offsets: _Sizes,
) -> tuple[int, int]:
    """The number of rows of a whole inner tensor, and the first row of this rank's shard
    ``tensor``.

    The shard of the quantized tensor has the shape ``local`` and begins at ``offsets`` of the
    whole, which has the shape ``shape``. Raises ShapeError if the shards are not rows, or cut
    blocks of rows in two.
    """
    if any(offset for offset in offsets[1:]) or tuple(local[1:]) != tuple(shape[1:]):
        raise ShapeError(f"{name!r} is sharded in columns", expected="shards of dimension 0")
    # An empty shard cuts no block, wherever it begins.
    if local[0]:
        check_blocks(
            [inner], shape, range(offsets[0], offsets[0] + local[0]), f"the shard of {name!r}"
        )
    rows, first, own = (row_of(inner, shape, row) for row in (shape[0], offsets[0], local[0]))
    if (found := inner.by_rows(tensor).shape[0]) != own:
        raise ShapeError(f"{inner.argument!r} of {name!r} has {found} rows", expected=str(own))
    return rows, first
