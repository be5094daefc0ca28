"""State dicts with quantized tensors as plain tensors by name, and in one file.

A quantized tensor ``layer.weight`` becomes one plain tensor ``layer.weight.<argument>`` for each of
its inner tensors, in the dtype of its bytes, and a description. If it is sharded, its gathered
inner tensors are sharded in the same way, in rows or blocks of rows. Inner tensors that are not
gathered are equal on all ranks. Derived ones, such as transposes, are left out.
"""

import contextlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, NotRequired, TypedDict

import torch

from ottava.checkpoint.contracts import Table, contract_of, contracts_in, table_of
from ottava.checkpoint.files import (
    DTYPES,
    METADATA_KEY,
    check_dense,
    check_memory,
    dtype_name,
    read_tensors,
    write_tensors,
)
from ottava.contract import Contract
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
from ottava.torch_private import Private, is_distributed

#: A tensor of a state dict.
Value = torch.Tensor | QuantizedTensorStorage
#: The description of one quantized tensor as JSON. ``class`` is ``"module:Class"``, ``tensors`` are
#: the arguments of its inner tensors, ``static`` has the static fields by argument, and
#: ``contract`` is the hash of the contract, if it is stated.
Entry = TypedDict(
    "Entry",
    {
        "class": str,
        "tensors": list[str],
        "static": dict[str, object],
        "contract": NotRequired[str],
    },
)
_VERSION = 1
_Sizes = Sequence[int]


def check_entry(entry: object) -> Entry:
    """The entry of a quantized tensor; ValueError, KeyError or TypeError if it has another form."""
    if not isinstance(entry, dict):
        raise TypeError("it is no object")
    name, tensors, static = entry["class"], entry["tensors"], entry["static"]
    if not isinstance(name, str) or not isinstance(tensors, list) or not isinstance(static, dict):
        raise ValueError("it is of another kind")
    if not all(isinstance(argument, str) for argument in tensors):
        raise ValueError("it is of another kind")
    checked: Entry = {"class": name, "tensors": tensors, "static": static}
    if "contract" in entry:
        checked["contract"] = str(entry["contract"])
    return checked


def described(
    quantized: Mapping[str, Entry],
    contracts: Mapping[str, dict[str, object]],
    aliases: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The metadata for quantized tensors, their contracts by hash, and for aliases: names of
    tensors stored under others."""
    body: dict[str, object] = {"quantized": quantized, "version": _VERSION}
    if contracts:
        body["contracts"] = contracts
    if aliases:
        body["aliases"] = aliases
    return {METADATA_KEY: json.dumps(body, sort_keys=True)}


class _Description(NamedTuple):
    """The metadata of quantized tensors: their entries, the contracts by hash, and the aliases."""

    quantized: dict[str, Entry]
    contracts: dict[str, Contract]
    aliases: dict[str, str]


def _decode_description(text: str) -> _Description:
    with translated("the metadata of quantized tensors is damaged", "what was saved"):
        body = json.loads(text)
        version = body["version"]
        aliases = {name: str(first) for name, first in body.get("aliases", {}).items()}
        if version != _VERSION:
            raise CheckpointError(
                f"the metadata of quantized tensors has version {version!r:.80}",
                f"version {_VERSION}",
                "read it with the ottava that wrote it",
            )
        entries = {name: check_entry(entry) for name, entry in body["quantized"].items()}
        return _Description(entries, contracts_in(body.get("contracts", {})), aliases)


def flatten_state_dict(
    state_dict: Mapping[str, Value],
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
    return tensors, described(quantized, contract_table(state_dict))


def contract_table(state_dict: Mapping[str, Value]) -> Table:
    """The stated contracts of the quantized tensors of a state dict, by hash."""
    own = map(_local_value, state_dict.values())
    stated = [contract_of(value) for value in own if isinstance(value, QuantizedTensorStorage)]
    return table_of(contract for contract in stated if contract is not None)


def flatten_values(
    state_dict: Mapping[str, Value], *, derived: bool = True
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
            inner, entry = _flatten_value(name, value, derived)
        duplicates = inner.keys() & tensors.keys()
        if duplicates:
            raise UsageError(
                f"two tensors would have the name {min(duplicates)!r}", remedy="rename one of them"
            )
        tensors |= inner
        if entry is not None:
            quantized[name] = entry
    return tensors, quantized


def unflatten_state_dict(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> dict[str, Value]:
    """The state dict from which :func:`flatten_state_dict` made ``tensors`` and ``metadata``.

    Quantized tensors have no quantizers; loading copies their bytes into the tensors of a model.

    Raises:
        CheckpointError: the metadata is damaged, of a later version, or names a tensor or a package
            that is missing.
        OttavaError: the class of a quantized tensor refuses its tensors.
    """
    description = _Description({}, {}, {})
    if metadata is not None and METADATA_KEY in metadata:
        description = _decode_description(metadata[METADATA_KEY])
    state = dict(tensors)
    for alias, first in description.aliases.items():
        if first not in tensors or alias in tensors:
            raise CheckpointError(
                f"damaged metadata: {alias!r} is said to be {first!r}", "one of the two, stored"
            )
        state[alias] = tensors[first]
    storages: dict[str, QuantizedTensorStorage] = {}
    for name, entry in description.quantized.items():
        storages[name] = _unflatten_tensor(name, entry, state)
        storages[name].saved_contract = description.contracts.get(entry.get("contract", ""))
    duplicates = state.keys() & storages.keys()
    if duplicates:
        raise CheckpointError(
            f"{min(duplicates)!r} is both a tensor and a quantized one",
            expected="one tensor of a name",
        )
    return {**state, **storages}


def save_file(
    state_dict: Mapping[str, Value], path: AnyPath, *, metadata: Mapping[str, str] | None = None
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
    texts = {} if metadata is None else metadata
    _check_whole(state_dict)
    _check_texts(texts)
    tensors, quantized = flatten_values(state_dict)
    # Names of one tensor: the first name stores it, and the others are aliases.
    first_names: dict[Hashable, str] = {}
    aliases: dict[str, str] = {}
    unique: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        first = first_names.setdefault(place_of(tensor), name)
        if first == name:
            unique[name] = tensor
        else:
            aliases[name] = first
    place = check_file_target(path)
    unwritten = translated(
        f"{path} cannot be written", "a file in a folder, and room", to=UsageError, of=OSError
    )
    with unwritten, Partial(place) as partial:
        # The new file has the permissions of the old one from its first byte on.
        texts = {**texts, **described(quantized, contract_table(state_dict), aliases)}
        write_tensors(partial.path / "tensors", unique, texts, mode_of(place))
        partial.put_file("tensors")


def _check_whole(state_dict: Mapping[str, Value]) -> None:
    """Raise DTypeError if a tensor is sharded. Another object than a mapping is refused later."""
    if not isinstance(state_dict, Mapping):
        return
    for name, value in state_dict.items():
        if is_distributed(value):
            raise DTypeError(
                f"{name!r} is sharded",
                "whole tensors",
                "save with save_sharded, or gather them: get_model_state_dict with "
                "full_state_dict=True",
            )


def _check_texts(metadata: object) -> None:
    has_texts = isinstance(metadata, Mapping) and all(
        isinstance(text, str) for pair in metadata.items() for text in pair
    )
    if not has_texts:
        raise DTypeError(f"metadata is {metadata!r:.200}", expected="texts by name")


def load_file(path: AnyPath, device: str | int = "cpu", *, verify: bool = True) -> dict[str, Value]:
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
    on_device = {name: tensor.to(place) for name, tensor in tensors.items()}
    with named(as_path(path)):
        return unflatten_state_dict(on_device, metadata)


def held_tensors(value: Value) -> list[torch.Tensor]:
    """The inner tensors of a quantized tensor; for a plain tensor, the tensor itself."""
    if isinstance(value, QuantizedTensorStorage):
        return [tensor for tensor in value.inner_list() if tensor is not None]
    return [value]


def place_of(value: Value) -> Hashable:
    """A key that is equal for two names of one tensor: where its bytes are, and how they are
    read."""
    return tuple(
        (
            tensor.device,
            tensor.data_ptr() or id(tensor),
            tensor.is_conj(),
            tensor.is_neg(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
        )
        for tensor in held_tensors(value)
    )


def _unflatten_tensor(
    name: str, entry: Entry, tensors: dict[str, torch.Tensor]
) -> QuantizedTensorStorage:
    """Make a quantized tensor from its inner tensors, which are removed from ``tensors``."""
    arguments = dict.fromkeys(entry["tensors"])
    for key in (f"{name}.{argument}" for argument in arguments):
        if key not in tensors:
            raise CheckpointError(
                f"tensor {key!r} is missing", expected=f"every inner tensor of {name!r}"
            )
    cls = _find_class(name, entry)
    if not arguments or not arguments.keys() <= {inner.argument for inner in cls.inner_tensors}:
        raise CheckpointError(
            f"{name!r} has the tensors {entry['tensors']!r:.80}", "those of its class"
        )
    inner_by_argument = {argument: tensors.pop(f"{name}.{argument}") for argument in arguments}
    # The class may belong to another package, and the values come from a file.
    with named(repr(name)), translated(f"{name!r} cannot be restored", "what it was saved with"):
        fields = {
            field.attribute: _decode_static(entry["static"][field.argument])
            for field in cls.all_static_fields()
        }
        if len(entry["static"]) != len(fields):
            raise ValueError(f"it has the fields {sorted(entry['static'])!r:.200}")
        inner_tensors = [
            _as_stored(inner, inner_by_argument.get(inner.argument), fields)
            for inner in cls.inner_tensors
        ]
        storage: QuantizedTensorStorage
        storage = StorageSpec(cls, tuple(fields.values()), None).build(inner_tensors)
        return storage


def _as_stored(
    inner: InnerTensor, tensor: torch.Tensor | None, fields: Mapping[str, object]
) -> torch.Tensor | None:
    """A tensor of a file in the dtype in which a storage has it: uint8 for 8-bit data."""
    dtype: object = inner.native
    if isinstance(inner.native, str):
        dtype = fields[inner.native]
    if dtype is None:
        return tensor
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{inner.native!r} is {dtype!r:.80}")
    return as_data(tensor, dtype, repr(inner.argument))


def _encode_static(value: object) -> object:
    """A static field as JSON."""
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, tuple):
        return [_encode_static(entry) for entry in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise DTypeError(
        f"a static field holds a {type(value).__name__}", expected="a dtype, number, text or tuple"
    )


def _decode_static(value: object) -> object:
    if isinstance(value, dict):
        return DTYPES[str(value["dtype"])]
    if isinstance(value, list):
        return tuple(_decode_static(entry) for entry in value)
    return value


def _find_class(name: str, entry: Entry) -> type[QuantizedTensorStorage]:
    """The class of an entry, which is already imported or belongs to an installed recipe."""
    module, _, attribute = entry["class"].partition(":")
    if entry["class"] not in storage_classes():
        # Importing the module, or reading the attribute, may make the class.
        with contextlib.suppress(Exception, SystemExit):
            getattr(import_offered(module), attribute, None)
    if entry["class"] not in storage_classes():
        raise CheckpointError(
            f"{name!r} is a {entry['class']!r:.200}, which is not installed",
            remedy=f"install the package that has the module {module!r:.200}",
        )
    return storage_classes()[entry["class"]]


def _flatten_value(
    name: str, value: Value, derived: bool
) -> tuple[dict[str, torch.Tensor], Entry | None]:
    """Plain tensors by name for one tensor, sharded in the same way, and an entry if it is
    quantized.

    Nothing is copied.
    """
    sharded = value if isinstance(value, torch.Tensor) and is_distributed(value) else None
    local = _local_value(value)
    if not isinstance(local, QuantizedTensorStorage):
        check_dense(name, local)
        if sharded is None:
            return {name: local.detach()}, None
        return {name: _sharded(name, sharded, local, tuple(sharded.shape))[0]}, None
    derived = derived and sharded is None
    tensors: dict[str, torch.Tensor] = {}
    for inner, data in _saved_inner(name, local, derived):
        check_memory(f"{name}.{inner.argument}", data)
        native = native_dtype(local, inner)
        plain = data if native is None else data.view(native)
        if sharded is not None and inner.gather:
            plain = _sharded_inner(name, sharded, local, inner, plain)
        tensors[inner.argument] = plain.detach()
    entry = _entry_of(local, list(tensors))
    if sharded is not None and "shape" in entry["static"]:
        entry["static"]["shape"] = list(sharded.shape)
    return {f"{name}.{argument}": tensor for argument, tensor in tensors.items()}, entry


def _local_value(value: Value) -> Value:
    """This rank's shard of a sharded tensor, or the tensor; a weight in high precision unwrapped.

    ``gather_quantized`` wraps such a weight, which is saved as the plain tensor.
    """
    local: Value = value
    to_local: Callable[[], torch.Tensor] | None = getattr(value, "to_local", None)
    if to_local is not None:
        local = to_local()
    unwrap: Callable[[], torch.Tensor] | None = getattr(local, "high_precision", None)
    if callable(unwrap) and isinstance(local, torch.Tensor):
        return unwrap()
    return local


def _saved_inner(
    name: str, storage: QuantizedTensorStorage, derived: bool
) -> list[tuple[InnerTensor, torch.Tensor]]:
    """The inner tensors of a storage that are saved, and with ``derived`` those that derive from
    them.

    Raises:
        UsageError: the storage has no data from which the others derive.
    """
    inner_tensors = [
        (inner, tensor)
        for inner, tensor in zip(storage.inner_tensors, storage.inner_list(), strict=True)
        if tensor is not None
    ]
    if not any(derived or inner.gather for inner, _ in inner_tensors):
        content = "only what derives from its elements" if inner_tensors else "no data"
        raise UsageError(
            f"{name!r} holds {content}",
            expected="rowwise data",
            remedy="keep the rowwise usage of weights; do not clear them",
        )
    if derived:
        return inner_tensors
    return [(inner, tensor) for inner, tensor in inner_tensors if not storage.is_derived(inner)]


def _entry_of(storage: QuantizedTensorStorage, arguments: list[str]) -> Entry:
    spec = storage.flatten_storage()[1]
    cls = spec.cls
    entry: Entry = {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "tensors": arguments,
        "static": {
            field.argument: _encode_static(value)
            for field, value in zip(cls.all_static_fields(), spec.static, strict=True)
        },
    }
    contract = contract_of(storage)
    if contract is not None:
        entry["contract"] = contract.hash
    return entry


def _sharded_inner(
    name: str,
    whole: torch.Tensor,
    local: QuantizedTensorStorage,
    inner: InnerTensor,
    data: torch.Tensor,
) -> torch.Tensor:
    """An inner tensor of a shard, sharded as the quantized tensor ``whole`` is.

    Raises:
        ShapeError: the shards of the tensor are no shards of the inner tensor.
    """
    begin = _begin(name, whole)
    rows, first = sharded_rows(name, inner, data, local.shape, whole.shape, begin)
    # Transposed inner tensors have the rows in their second dimension.
    dim = int(inner.transposed)
    shape = (*data.shape[:dim], rows, *data.shape[dim + 1 :])
    tensor, begin_of_data = _sharded(name, whole, data, shape, dim)
    if data.numel() and begin_of_data[dim] != first:
        raise ShapeError(
            f"the shards of {name!r} are no shards of {inner.argument!r}",
            expected="as many blocks on each rank but the last",
        )
    return tensor


def _sharded(
    name: str, whole: Private, local: torch.Tensor, shape: tuple[int, ...], dim: int = 0
) -> tuple[torch.Tensor, _Sizes]:
    """A DTensor that is sharded along ``dim`` as the DTensor ``whole`` is by rows; and where this
    rank's shard begins."""
    placements = whole.placements
    if dim:
        placements = [type(p)(dim) if p.is_shard() else p for p in placements]
    tensor: torch.Tensor = type(whole).from_local(
        local.detach(),
        whole.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    return tensor, _begin(name, tensor)


def _begin(name: str, tensor: Private) -> _Sizes:
    """The offsets of this rank's shard in a DTensor."""
    expected = "shards and replicas, as of a DTensor, over a mesh with all ranks"
    with translated(f"{name!r} cannot be saved in shards", expected, to=UsageError):
        (box,) = tensor.__create_chunk_list__()
        partial = any(placement.is_partial() for placement in tensor.placements)
        if partial or tuple(box.sizes) != tuple(tensor.to_local().shape):
            raise ValueError(f"{tensor.placements} make no single box of it on this rank")
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
    count = inner.by_rows(tensor).shape[0]
    expected = row_of(inner, shape, local[0])
    if count != expected:
        raise ShapeError(f"{inner.argument!r} of {name!r} has {count} rows", expected=str(expected))
    return row_of(inner, shape, shape[0]), row_of(inner, shape, offsets[0])
