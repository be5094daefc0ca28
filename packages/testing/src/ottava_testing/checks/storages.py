"""Checks of the contract of storages: flattening, copies, devices, usages, in-place updates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ottava.errors import UsageError
from ottava.gemm import gemm
from ottava.tensors import (
    QuantizedTensor,
    QuantizedTensorStorage,
    prepare_for_saving,
    restore_from_saved,
)
from ottava_testing.compare import (
    CheckFailed,
    close,
    difference,
    flip,
    inner_by_name,
    overlap,
    plain,
    relative,
    require,
    same,
    snapshot,
    tensors_in,
    wide,
)
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS, check


@check("description", "storages", "A storage tells its shape, dtype, device and bytes, and prints")
def description(subject: Subject) -> None:
    """Shape, number of elements, dtype, device, bytes and repr of a storage."""
    for words, storage, values in subject.quantized():
        require(
            tuple(storage.shape) == (48, 40) and storage.size(1) == 40,
            f"{words} has shape {tuple(storage.shape)}",
        )
        require(storage.numel() == 48 * 40, f"{words} has {storage.numel()} elements")
        require(storage.dtype == values.dtype, f"{words} has dtype {storage.dtype}")
        require(storage.device == torch.device("cpu"), f"{words} is on {storage.device}")
        expected = sum(t.numel() * t.element_size() for t in inner_by_name(storage).values())
        require(
            storage.nbytes == expected,
            f"nbytes of {words} is {storage.nbytes}, its inner tensors have {expected}",
        )
        repr(storage)
        storage.clear()
        require(
            not inner_by_name(storage),
            f"clear() of {words} leaves {sorted(inner_by_name(storage))}",
        )
        repr(storage)


@check("flatten", "storages", "What a storage is made of, declared once, makes an equal one")
def flatten(subject: Subject) -> None:
    """flatten_storage and get_metadata lose nothing, and the spec is hashable."""
    for words, storage, _ in subject.quantized():
        tensors, spec = storage.flatten_storage()
        try:
            hash(spec)
        except TypeError as error:
            raise CheckFailed(
                f"a static field of {words} cannot be hashed, so it is no constant: {error}"
            ) from error
        values = plain(storage)
        for how, rebuilt in (
            ("flattened", spec.build(tensors)),
            ("from its metadata", type(storage)(**_arguments(storage))),
        ):
            require(
                type(rebuilt) is type(storage),
                f"{words}, built again {how}, is a {type(rebuilt).__name__}",
            )
            wrong = difference(rebuilt, storage)
            require(wrong is None, f"{words}, built again {how}, has another {wrong!r}")
            other = plain(rebuilt)
            equal = (
                other.shape == values.shape and other.dtype == values.dtype and same(other, values)
            )
            lost = sorted(set(tensors_in(storage)) - set(inner_by_name(storage)))
            require(
                equal,
                f"{words}, built again {how}, has other values: what is not declared is lost "
                f"{lost or ''}",
            )


def _arguments(storage: QuantizedTensorStorage) -> dict[str, Any]:
    arguments = storage.get_metadata()
    if isinstance(storage, QuantizedTensor):
        arguments |= {"shape": tuple(storage.size()), "dtype": storage.dtype}
    return arguments


@check(
    "save-and-restore", "storages", "A storage gives its tensors up for saving and takes them back"
)
def save_and_restore(subject: Subject) -> None:
    """The methods of a storage, and the functions for lists that mix storages with others."""
    for words, storage, _ in subject.quantized():
        expected, values = snapshot(storage), plain(storage).clone()
        tensors, stripped = storage.prepare_for_saving()
        require(
            not inner_by_name(storage),
            f"prepare_for_saving() of {words} keeps {sorted(inner_by_name(storage))}",
        )
        rest = stripped.restore_from_saved([*tensors, torch.ones(3)])
        require(
            len(rest) == 1,
            f"restore_from_saved() of {words} leaves {len(rest)} tensors in place of 1",
        )
        wrong = difference(storage, expected)
        require(wrong is None, f"{words}, saved and restored, has another {wrong!r}")
        extra = torch.arange(4.0)
        flat, objects = prepare_for_saving(None, storage, extra, storage)
        nothing, one, plainly, two = restore_from_saved(flat, objects)
        require(nothing is None and plainly is extra, f"saving {words} among others loses those")
        for restored in (one, two):
            wrong = difference(restored, expected)
            require(wrong is None, f"{words}, saved among others, has another {wrong!r}")
            require(same(plain(restored), values), f"{words}, saved among others, has other values")


_COPIES: dict[str, Callable[[Any], Any]] = {
    "clone_storage()": lambda t: t.clone_storage(),
    "copy.deepcopy()": copy.deepcopy,
    "clone()": lambda t: t.clone(),
    "to(copy=True)": lambda t: t.to(t.dtype, copy=True),
}


@check(
    "clone-shares-nothing",
    "storages",
    "A copy is equal and shares no memory: writing to one does not reach the other",
)
def clone_shares_nothing(subject: Subject) -> None:
    """Every way of copying."""
    for words, storage, _ in subject.quantized():
        for way, function in _COPIES.items():
            if isinstance(storage, QuantizedTensor) or way in (
                "clone_storage()",
                "copy.deepcopy()",
            ):
                _check_copy(words, way, storage, function(storage))


def _check_copy(words: str, way: str, original: Any, clone: Any) -> None:
    cls = type(original).__name__
    require(type(clone) is type(original), f"{way} of a {cls} gives a {type(clone).__name__}")
    wrong = difference(clone, original)
    require(wrong is None, f"{way} of a {cls} has another {wrong!r}: {words}")
    require(clone.dtype == original.dtype, f"{way} of a {cls} has dtype {clone.dtype}")
    mine, theirs = tensors_in(original), tensors_in(clone)
    values = plain(original).clone()
    for name in sorted(set(mine) & set(theirs)):
        before = mine[name].clone()
        if not overlap(mine[name], theirs[name]):
            continue
        flip(theirs[name])
        changed = not same(before, mine[name])
        raise CheckFailed(
            f"{way} of a {cls} shares memory: writing to the clone's {name!r} "
            + (f"changed the original's {name!r}" if changed else "may change the original")
        )
    for name, tensor in theirs.items():
        flip(tensor)
        require(
            same(plain(original), values),
            f"{way} of a {cls} is no copy: writing to its {name!r} changed the original",
        )
    quantizer, other = original._quantizer, clone._quantizer
    if quantizer is not None:
        require(
            quantizer is not other,
            f"{way} of a {cls} shares its quantizer, whose usages can be set",
        )


@check("device-moves", "storages", "Moved to another device, all of a storage is there")
def device_moves(subject: Subject) -> None:
    """Moves to the meta device, and to a GPU if there is one."""
    devices = ["meta"]
    if torch.cuda.is_available():
        devices.append("cuda")
    for words, storage, _ in subject.quantized():
        for device in devices:
            moves: dict[str, Any] = {
                "apply_to_inner": storage.apply_to_inner(lambda t, d=device: t.to(d))
            }
            if isinstance(storage, QuantizedTensor):
                moves[f"to({device!r})"] = storage.to(device)
            for way, moved in moves.items():
                _check_move(f"{way} of {words}", storage, moved, device)


def _check_move(title: str, original: QuantizedTensorStorage, moved: Any, device: str) -> None:
    require(type(moved) is type(original), f"{title} gives a {type(moved).__name__}")
    require(moved.device.type == device, f"{title} is on {moved.device}")
    require(
        set(inner_by_name(moved)) == set(inner_by_name(original)),
        f"{title} loses {sorted(set(inner_by_name(original)) ^ set(inner_by_name(moved)))}",
    )
    for name, tensor in tensors_in(moved).items():
        require(tensor.device.type == device, f"{title} leaves {name!r} on {tensor.device}")
    require(
        tuple(moved.size()) == tuple(original.size()), f"{title} has shape {tuple(moved.size())}"
    )
    if device != "meta":
        wrong = difference(moved.apply_to_inner(lambda t: t.to("cpu")), original)
        require(wrong is None, f"{title} and back changes {wrong!r}")
        close(title, plain(moved).cpu(), plain(original), 1e-6)


@check(
    "dropping-usages",
    "storages",
    "update_usage drops the data of a usage and keeps that of the other",
)
def dropping_usages(subject: Subject) -> None:
    """The remaining data serves its usage, and a dropped usage is refused or made again."""
    for words, original, _ in subject.quantized():
        for keep, drop in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
            storage = original.clone_storage()
            expected = _product(subject, storage, keep)
            own = _held_for(storage, keep)
            size = storage.nbytes
            storage.update_usage(**{f"{drop}_usage": False})
            require(
                storage.get_usages()[keep],
                f"update_usage({drop}_usage=False) of {words} loses the {keep} usage",
            )
            title = f"the product of the {keep} data of {words}, once the {drop} data is dropped,"
            close(
                title,
                _product(subject, storage, keep),
                expected,
                0.0 if subject.spec.deterministic else subject.bound,
            )
            # If one copy of the data serves both usages, there is nothing to drop.
            rest = _held_for(storage, drop) if own else []
            require(
                not rest,
                f"update_usage({drop}_usage=False) of {words} does nothing: {rest} is held all "
                f"the same",
            )
            require(
                storage.nbytes <= size,
                f"update_usage({drop}_usage=False) of {words} makes it larger",
            )
            if storage.get_usages()[drop]:
                continue
            try:
                storage.update_usage(**{f"{drop}_usage": True})
            except UsageError:
                continue
            require(
                storage.get_usages()[drop],
                f"update_usage({drop}_usage=True) of {words} neither makes it nor refuses",
            )


def _held_for(storage: QuantizedTensorStorage, usage: str) -> list[str]:
    tensors = inner_by_name(storage)
    return [
        t.attribute for t in storage.inner_tensors if t.usage == usage and t.attribute in tensors
    ]


def _product(subject: Subject, operand: QuantizedTensorStorage, usage: str) -> torch.Tensor:
    """The product of another operand with this one that reads this one's ``usage``."""
    columnwise = usage == "columnwise"
    other = subject.quantizer(
        "grad_output" if columnwise else "input", internal=True, columnwise=False
    )
    rows = other(wide(16, 48 if columnwise else 40, seed=1))
    return gemm(rows, operand, "dgrad" if columnwise else "fprop", out_dtype=torch.float32)


@check(
    "copying-in-place",
    "storages",
    "copy_from_storage and quantize_ write all of a storage, and aliases see it",
)
def copying_in_place(subject: Subject) -> None:
    """No data of the old values remains."""
    for words, storage, old in subject.quantized():
        quantizer = storage._quantizer
        require(
            quantizer is not None,
            f"{words} does not keep its quantizer, so that it cannot be written in place",
        )
        assert quantizer is not None
        other = quantizer(wide(48, 40, seed=8, dtype=old.dtype) * 2)
        alias = storage.detach() if isinstance(storage, QuantizedTensor) else storage
        storage.copy_from_storage(other)
        wrong = difference(storage, other)
        require(wrong is None, f"copy_from_storage() into {words} leaves another {wrong!r}")
        close(f"an alias of {words}, after copy_from_storage(),", plain(alias), plain(other), 0.0)
        values = wide(48, 40, seed=9, dtype=old.dtype)
        before = plain(storage).clone()
        require(
            storage.quantize_(values) is storage, f"quantize_() of {words} returns another object"
        )
        bound = min(0.5, 4 * subject.bound)
        close(f"{words}, after quantize_(),", plain(storage), values, bound, before=before)
        for usage in ("rowwise", "columnwise"):
            title = (
                f"the product that reads the {usage} data of {words}, after quantize_(), reads "
                f"stale values: it"
            )
            matrix = plain(storage).float()
            if usage == "rowwise":
                matrix = matrix.t()
            product = wide(16, len(matrix), seed=1) @ matrix
            close(title, _product(subject, storage, usage), product, 4 * bound / 3)
        close(
            f"an alias of {words}, after quantize_(),", plain(alias), values, bound, before=before
        )


@check(
    "detach-is-an-alias",
    "storages",
    "detach() and .data alias the data: writes to either reach both",
    QUANTIZED_WEIGHTS,
)
def detach_is_an_alias(subject: Subject) -> None:
    """Both ways give an alias that requires no gradient."""
    for way in ("detach()", ".data"):
        parameter: Any = torch.nn.Parameter(subject.weight(wide(48, 40)))
        cls = type(parameter).__name__
        alias = parameter.detach() if way == "detach()" else parameter.data
        require(type(alias) is type(parameter), f"{way} of a {cls} gives a {type(alias).__name__}")
        require(not alias.requires_grad, f"{way} of a {cls} requires a gradient")
        for name, tensor in inner_by_name(parameter).items():
            require(
                overlap(tensor, inner_by_name(alias)[name]),
                f"{way} of a {cls} copies {name!r}: writes do not reach the original",
            )
        before, values = plain(parameter).clone(), wide(48, 40, seed=2)
        alias.copy_(values)
        error = relative(plain(parameter), values)
        require(
            error <= min(0.5, 4 * subject.bound),
            f"a write to {way} of a {cls} does not reach the original",
        )
        require(
            not torch.equal(before, plain(parameter)),
            f"a write to {way} of a {cls} does not reach the original",
        )
