"""Checks of the contract of storages: flattening, copies, devices, usages, in-place updates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ottava.errors import UsageError
from ottava.gemm import gemm
from ottava.tensors import QuantizedTensor, Quantizer, prepare_for_saving, restore_from_saved
from ottava_testing import table
from ottava_testing.checks.products import USAGES
from ottava_testing.compare import (
    CheckFailed,
    close,
    flip,
    inner_by_name,
    overlap,
    plain,
    require,
    require_same,
    same,
    snapshot,
    tensors_in,
    wide,
)
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS

check = partial(table.check, "storages")


@check(over=Subject.quantizers)
def description(subject: Subject, quantizer: Quantizer) -> None:
    """A storage tells its shape, dtype, device and bytes, and prints."""
    for dtype in (torch.float32, torch.bfloat16):
        storage = quantizer(wide(48, 40, dtype=dtype))
        shape = tuple(storage.shape)
        require(shape == (48, 40) and storage.size(1) == 40, f"the shape is {shape}")
        require(storage.numel() == 48 * 40, f"the storage has {storage.numel()} elements")
        require(storage.dtype == dtype, f"the dtype is {storage.dtype}")
        require(storage.device == torch.device("cpu"), f"the storage is on {storage.device}")
        size = sum(t.numel() * t.element_size() for t in inner_by_name(storage).values())
        words = f"nbytes is {storage.nbytes}, and the inner tensors have {size}"
        require(storage.nbytes == size, words)
        repr(storage)
        storage.clear()
        require(not inner_by_name(storage), f"clear() leaves {sorted(inner_by_name(storage))}")
        repr(storage)


@check(over=Subject.storages)
def flatten(subject: Subject, storage: Any) -> None:
    """What a storage is made of, declared once, makes an equal one."""
    tensors, spec = storage.flatten_storage()
    try:
        hash(spec)
    except TypeError as error:
        text = f"a static field cannot be hashed, so it is no constant: {error}"
        raise CheckFailed(text) from error
    arguments = storage.get_metadata()
    if isinstance(storage, QuantizedTensor):
        arguments |= {"shape": tuple(storage.size()), "dtype": storage.dtype}
    lost = sorted(set(tensors_in(storage)) - set(inner_by_name(storage)))
    for how, rebuilt in (
        ("flattened", spec.build(tensors)),
        ("from its metadata", type(storage)(**arguments)),
    ):
        kind = type(rebuilt)
        require(kind is type(storage), f"built again {how} it is a {kind.__name__}")
        require_same(f"built again {how} it has", rebuilt, storage)
        words = f"built again {how} it has other values: what is not declared is lost {lost or ''}"
        require(same(plain(rebuilt), plain(storage)), words)


@check(over=Subject.storages)
def save_and_restore(subject: Subject, storage: Any) -> None:
    """A storage gives its tensors up for saving and takes them back."""
    expected, values = snapshot(storage), plain(storage).clone()
    tensors, stripped = storage.prepare_for_saving()
    remaining = sorted(inner_by_name(storage))
    require(not remaining, f"prepare_for_saving() keeps {remaining}")
    rest = stripped.restore_from_saved([*tensors, torch.ones(3)])
    require(len(rest) == 1, f"restore_from_saved() leaves {len(rest)} tensors in place of 1")
    require_same("saved and restored, it has", storage, expected)
    extra = torch.arange(4.0)
    flat, objects = prepare_for_saving(None, storage, extra, storage)
    nothing, one, between, two = restore_from_saved(flat, objects)
    require(nothing is None and between is extra, "what is saved beside it is lost")
    for restored in (one, two):
        require_same("saved among others, it has", restored, expected)
        require_same("saved among others, it has", plain(restored), values)


Way = Callable[[Any], Any]
_COPIES: dict[str, Way] = {
    "clone_storage()": lambda t: t.clone_storage(),
    "copy.deepcopy()": copy.deepcopy,
}
_COPIES_OF_TENSORS: dict[str, Way] = {
    "clone()": lambda t: t.clone(),
    "to(copy=True)": lambda t: t.to(t.dtype, copy=True),
}


@check(over=Subject.storages)
def clone_shares_nothing(subject: Subject, storage: Any) -> None:
    """A copy is equal and shares no memory: writing to one does not reach the other."""
    ways = _COPIES | (_COPIES_OF_TENSORS if isinstance(storage, QuantizedTensor) else {})
    for way, function in ways.items():
        _is_copy(way, storage, function(storage))


def _is_copy(way: str, original: Any, clone: Any) -> None:
    require(type(clone) is type(original), f"{way} gives a {type(clone).__name__}")
    require_same(f"{way} has", clone, original)
    require(clone.dtype == original.dtype, f"{way} has dtype {clone.dtype}")
    values, mine = plain(original).clone(), tensors_in(original)
    for name, tensor in tensors_in(clone).items():
        before = mine[name].clone() if name in mine else None
        shared = before is not None and overlap(mine[name], tensor)
        flip(tensor)
        if shared:
            changed = not same(before, mine[name])  # type: ignore[arg-type]
            words = f"changed the original's {name!r}" if changed else "may change the original"
            raise CheckFailed(f"{way} shares memory: writing to the clone's {name!r} {words}")
        words = f"{way} is no copy: writing to its {name!r} changed the original"
        require(same(plain(original), values), words)
    shared = original._quantizer is not None and original._quantizer is clone._quantizer
    require(not shared, f"{way} shares its quantizer, whose usages can be set")


@check(over=Subject.storages)
def device_moves(subject: Subject, storage: Any) -> None:
    """Moved to another device, all of a storage is there."""
    names = set(inner_by_name(storage))
    for device in ("meta", "cuda") if torch.cuda.is_available() else ("meta",):
        moves = {"apply_to_inner": storage.apply_to_inner(lambda t, d=device: t.to(d))}
        if isinstance(storage, QuantizedTensor):
            moves["to"] = storage.to(device)
        for way, moved in moves.items():
            title = f"moved to {device} by {way}"
            require(type(moved) is type(storage), f"{title} it is a {type(moved).__name__}")
            require(moved.device.type == device, f"{title} it is on {moved.device}")
            require(tuple(moved.size()) == (48, 40), f"{title} its shape is {tuple(moved.size())}")
            lost = sorted(names ^ set(inner_by_name(moved)))
            require(not lost, f"{title} it loses {lost}")
            for name, tensor in tensors_in(moved).items():
                require(tensor.device.type == device, f"{title} it leaves {name!r} on the CPU")
            if device != "meta":
                back = moved.apply_to_inner(lambda t: t.to("cpu"))
                require_same(f"{title} and back it has", back, storage)
                close(f"{title} it", plain(moved).cpu(), storage, 1e-6)


@check(over=Subject.storages)
def dropping_usages(subject: Subject, original: Any) -> None:
    """update_usage drops the data of a usage and keeps that of the other."""
    for keep, drop in (USAGES, USAGES[::-1]):
        storage = original.clone_storage()
        expected, size = _product(storage, keep), storage.nbytes
        is_separate = bool(_held_for(storage, keep))
        storage.update_usage(**{f"{drop}_usage": False})
        call = f"update_usage({drop}_usage=False)"
        require(storage.get_usages()[keep], f"{call} loses the {keep} usage")
        title = f"the product of the {keep} data, once the {drop} data is dropped,"
        subject.agree(title, _product(storage, keep), expected)
        # If one copy of the data serves both usages, there is nothing to drop.
        rest = _held_for(storage, drop) if is_separate else []
        require(not rest, f"{call} does nothing: {rest} is held all the same")
        require(storage.nbytes <= size, f"{call} makes it larger")
        if storage.get_usages()[drop]:
            continue
        try:
            storage.update_usage(**{f"{drop}_usage": True})
        except UsageError:
            continue
        words = f"update_usage({drop}_usage=True) neither makes it nor refuses"
        require(storage.get_usages()[drop], words)


def _held_for(storage: Any, usage: str) -> list[str]:
    names = inner_by_name(storage)
    return [t.attribute for t in storage.inner_tensors if t.usage == usage and t.attribute in names]


def _product(operand: Any, usage: str) -> torch.Tensor:
    """The product of another operand with this one that reads this one's ``usage``.

    The other one is quantized alike, because a recipe may rotate the operands of one product.
    """
    is_columnwise = usage == "columnwise"
    values = wide(16, 48, seed=1).t() if is_columnwise else wide(16, 40, seed=1)
    other = operand._quantizer.with_usage(not is_columnwise, is_columnwise)(values.contiguous())
    return gemm(other, operand, "wgrad" if is_columnwise else "fprop", out_dtype=torch.float32)


@check(over=Subject.storages)
def copying_in_place(subject: Subject, storage: Any) -> None:
    """copy_from_storage and quantize_ write all of a storage, and aliases see it."""
    quantizer, dtype, bound = storage._quantizer, storage.dtype, subject.loose
    require(quantizer is not None, "it has no quantizer, so that it cannot be written in place")
    alias = storage.detach() if isinstance(storage, QuantizedTensor) else storage
    other = quantizer(wide(48, 40, seed=8, dtype=dtype) * 2)
    storage.copy_from_storage(other)
    require_same("copy_from_storage() leaves", storage, other)
    close("an alias, after copy_from_storage(),", alias, other, 0.0)
    values, before = wide(48, 40, seed=9, dtype=dtype), plain(storage).clone()
    require(storage.quantize_(values) is storage, "quantize_() returns another object")
    close("it, after quantize_(),", storage, values, bound, before=before)
    close("an alias, after quantize_(),", alias, values, bound, before=before)
    matrix = plain(storage).float()
    for usage, factor in (("rowwise", matrix.t()), ("columnwise", matrix)):
        title = (
            f"the product that reads the {usage} data, after quantize_(), reads stale values: it"
        )
        expected = wide(16, len(factor), seed=1) @ factor
        close(title, _product(storage, usage), expected, 4 * bound / 3)


@check(QUANTIZED_WEIGHTS, over=Subject.weights)
def detach_is_an_alias(subject: Subject, make: Callable[[], Any]) -> None:
    """detach() and .data alias the data: writes to either reach both."""
    for way in ("detach()", ".data"):
        parameter = make()
        alias = parameter.detach() if way == "detach()" else parameter.data
        require(type(alias) is type(parameter), f"{way} gives a {type(alias).__name__}")
        require(not alias.requires_grad, f"{way} requires a gradient")
        theirs = inner_by_name(alias)
        for name, tensor in inner_by_name(parameter).items():
            words = f"{way} copies {name!r}: writes do not reach the original"
            require(overlap(tensor, theirs[name]), words)
        before, values = plain(parameter).clone(), wide(48, 40, seed=2)
        alias.copy_(values)
        close(f"it, after a write to {way},", parameter, values, subject.loose, before=before)
