"""The contract of storages: flattening, copies, devices, usages, in-place updates."""

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
    held,
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
    """Everything that can be asked of it."""
    for words, made, values in subject.quantized():
        require(
            tuple(made.shape) == (48, 40) and made.size(1) == 40,
            f"{words} has shape {tuple(made.shape)}",
        )
        require(made.numel() == 48 * 40, f"{words} has {made.numel()} elements")
        require(made.dtype == values.dtype, f"{words} has dtype {made.dtype}")
        require(made.device == torch.device("cpu"), f"{words} is on {made.device}")
        expected = sum(t.numel() * t.element_size() for t in held(made).values())
        require(
            made.nbytes == expected,
            f"nbytes of {words} is {made.nbytes}, its inner tensors have {expected}",
        )
        repr(made)
        made.clear()
        require(not held(made), f"clear() of {words} leaves {sorted(held(made))}")
        repr(made)


@check("flatten", "storages", "What a storage is made of, declared once, makes an equal one")
def flatten(subject: Subject) -> None:
    """flatten_storage and get_metadata lose nothing; the spec is a constant."""
    for words, made, _ in subject.quantized():
        tensors, spec = made.flatten_storage()
        try:
            hash(spec)
        except TypeError as error:
            raise CheckFailed(
                f"a static field of {words} cannot be hashed, so it is no constant: {error}"
            ) from error
        values = plain(made)
        for how, built in (
            ("flattened", spec.build(tensors)),
            ("from its metadata", type(made)(**_arguments(made))),
        ):
            require(
                type(built) is type(made),
                f"{words}, built again {how}, is a {type(built).__name__}",
            )
            wrong = difference(built, made)
            require(wrong is None, f"{words}, built again {how}, has another {wrong!r}")
            other = plain(built)
            equal = (
                other.shape == values.shape and other.dtype == values.dtype and same(other, values)
            )
            lost = sorted(set(tensors_in(made)) - set(held(made)))
            require(
                equal,
                f"{words}, built again {how}, has other values: what is not declared is lost "
                f"{lost or ''}",
            )


def _arguments(made: QuantizedTensorStorage) -> dict[str, Any]:
    more = (
        {"shape": tuple(made.size()), "dtype": made.dtype}
        if isinstance(made, QuantizedTensor)
        else {}
    )
    return made.get_metadata() | more


@check(
    "save-and-restore", "storages", "A storage gives its tensors up for saving and takes them back"
)
def save_and_restore(subject: Subject) -> None:
    """Its own methods, and the functions for many, in any mix."""
    for words, made, _ in subject.quantized():
        expected, values = snapshot(made), plain(made).clone()
        tensors, stripped = made.prepare_for_saving()
        require(not held(made), f"prepare_for_saving() of {words} keeps {sorted(held(made))}")
        rest = stripped.restore_from_saved([*tensors, torch.ones(3)])
        require(
            len(rest) == 1,
            f"restore_from_saved() of {words} leaves {len(rest)} tensors in place of 1",
        )
        wrong = difference(made, expected)
        require(wrong is None, f"{words}, saved and restored, has another {wrong!r}")
        extra = torch.arange(4.0)
        flat, objects = prepare_for_saving(None, made, extra, made)
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
    for words, made, _ in subject.quantized():
        for way, function in _COPIES.items():
            if isinstance(made, QuantizedTensor) or way in ("clone_storage()", "copy.deepcopy()"):
                _copied(words, way, made, function(made))


def _copied(words: str, way: str, made: Any, copied: Any) -> None:
    cls = type(made).__name__
    require(type(copied) is type(made), f"{way} of a {cls} gives a {type(copied).__name__}")
    wrong = difference(copied, made)
    require(wrong is None, f"{way} of a {cls} has another {wrong!r}: {words}")
    require(copied.dtype == made.dtype, f"{way} of a {cls} has dtype {copied.dtype}")
    mine, theirs = tensors_in(made), tensors_in(copied)
    values = plain(made).clone()
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
            same(plain(made), values),
            f"{way} of a {cls} is no copy: writing to its {name!r} changed the original",
        )
    quantizer, other = made._quantizer, copied._quantizer
    if quantizer is not None:
        require(
            quantizer is not other,
            f"{way} of a {cls} shares its quantizer, whose usages can be set",
        )


@check("device-moves", "storages", "Moved to another device, all of a storage is there")
def device_moves(subject: Subject) -> None:
    """The meta device, and a GPU where there is one."""
    devices = ["meta", *(["cuda"] if torch.cuda.is_available() else [])]
    for words, made, _ in subject.quantized():
        for device in devices:
            moves: dict[str, Any] = {
                "apply_to_inner": made.apply_to_inner(lambda t, d=device: t.to(d))
            }
            if isinstance(made, QuantizedTensor):
                moves[f"to({device!r})"] = made.to(device)
            for way, moved in moves.items():
                _moved(f"{way} of {words}", made, moved, device)


def _moved(what: str, made: QuantizedTensorStorage, moved: Any, device: str) -> None:
    require(type(moved) is type(made), f"{what} gives a {type(moved).__name__}")
    require(moved.device.type == device, f"{what} is on {moved.device}")
    require(
        set(held(moved)) == set(held(made)),
        f"{what} loses {sorted(set(held(made)) ^ set(held(moved)))}",
    )
    for name, tensor in tensors_in(moved).items():
        require(tensor.device.type == device, f"{what} leaves {name!r} on {tensor.device}")
    require(tuple(moved.size()) == tuple(made.size()), f"{what} has shape {tuple(moved.size())}")
    if device != "meta":
        wrong = difference(moved.apply_to_inner(lambda t: t.to("cpu")), made)
        require(wrong is None, f"{what} and back changes {wrong!r}")
        close(what, plain(moved).cpu(), plain(made), 1e-6)


@check(
    "dropping-usages",
    "storages",
    "update_usage drops the data of a usage and keeps that of the other",
)
def dropping_usages(subject: Subject) -> None:
    """What is left serves its usage; what is gone is refused."""
    for words, made, _ in subject.quantized():
        for keep, drop in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
            part = made.clone_storage()
            expected, own, size = _product(subject, part, keep), _held_for(part, keep), part.nbytes
            part.update_usage(**{f"{drop}_usage": False})
            require(
                part.get_usages()[keep],
                f"update_usage({drop}_usage=False) of {words} loses the {keep} usage",
            )
            what = f"the product of the {keep} data of {words}, once the {drop} data is dropped,"
            close(
                what,
                _product(subject, part, keep),
                expected,
                0.0 if subject.spec.deterministic else subject.bound,
            )
            # Where one copy of the data serves both usages there is none to drop.
            left = _held_for(part, drop) if own else []
            require(
                not left,
                f"update_usage({drop}_usage=False) of {words} does nothing: {left} is held all "
                f"the same",
            )
            require(
                part.nbytes <= size, f"update_usage({drop}_usage=False) of {words} makes it larger"
            )
            if part.get_usages()[drop]:
                continue
            try:
                part.update_usage(**{f"{drop}_usage": True})
            except UsageError:
                continue
            require(
                part.get_usages()[drop],
                f"update_usage({drop}_usage=True) of {words} neither makes it nor refuses",
            )


def _held_for(storage: QuantizedTensorStorage, usage: str) -> list[str]:
    kept = held(storage)
    return [t.attribute for t in storage.inner_tensors if t.usage == usage and t.attribute in kept]


def _product(subject: Subject, operand: QuantizedTensorStorage, usage: str) -> torch.Tensor:
    """With another operand, by a product that reads the usage."""
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
    """Nothing of the old values is left."""
    for words, made, old in subject.quantized():
        quantizer = made._quantizer
        require(
            quantizer is not None,
            f"{words} does not keep its quantizer, so that it cannot be written in place",
        )
        assert quantizer is not None
        other = quantizer(wide(48, 40, seed=8, dtype=old.dtype) * 2)
        alias = made.detach() if isinstance(made, QuantizedTensor) else made
        made.copy_from_storage(other)
        wrong = difference(made, other)
        require(wrong is None, f"copy_from_storage() into {words} leaves another {wrong!r}")
        close(f"an alias of {words}, after copy_from_storage(),", plain(alias), plain(other), 0.0)
        values = wide(48, 40, seed=9, dtype=old.dtype)
        before = plain(made).clone()
        require(made.quantize_(values) is made, f"quantize_() of {words} returns another object")
        bound = min(0.5, 4 * subject.bound)
        close(f"{words}, after quantize_(),", plain(made), values, bound, before=before)
        for usage in ("rowwise", "columnwise"):
            what = (
                f"the product that reads the {usage} data of {words}, after quantize_(), reads "
                f"stale values: it"
            )
            other = wide(16, 40 if usage == "rowwise" else 48, seed=1)
            wanted = other @ (
                plain(made).float().t() if usage == "rowwise" else plain(made).float()
            )
            close(what, _product(subject, made, usage), wanted, 4 * bound / 3)
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
    """No copy, no gradient."""
    for way in ("detach()", ".data"):
        made: Any = torch.nn.Parameter(subject.weight(wide(48, 40)))
        cls = type(made).__name__
        alias = made.detach() if way == "detach()" else made.data
        require(type(alias) is type(made), f"{way} of a {cls} gives a {type(alias).__name__}")
        require(not alias.requires_grad, f"{way} of a {cls} requires a gradient")
        for name, tensor in held(made).items():
            require(
                overlap(tensor, held(alias)[name]),
                f"{way} of a {cls} copies {name!r}: writes do not reach the original",
            )
        before, values = plain(made).clone(), wide(48, 40, seed=2)
        alias.copy_(values)
        error = relative(plain(made), values)
        require(
            error <= min(0.5, 4 * subject.bound),
            f"a write to {way} of a {cls} does not reach the original",
        )
        require(
            not torch.equal(before, plain(made)),
            f"a write to {way} of a {cls} does not reach the original",
        )
