"""Checks of the contract of quantizers: usages, outputs, copies, equality."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch

from ottava.errors import ShapeError
from ottava.recipes.role import QuantizerRole
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava_testing.compare import (
    CheckFailed,
    difference,
    inner_by_name,
    overlap,
    require,
    same,
    snapshot,
    tensors_in,
    wide,
)
from ottava_testing.subject import Subject
from ottava_testing.table import DETERMINISTIC, check

_USAGES = ((True, False), (False, True), (True, True))


@check("roles", "quantizers", "There is a quantizer for every role, whatever the layer is called")
def roles(subject: Subject) -> None:
    """Roles of every tensor type, with and without the name of a layer."""
    recipe = subject.recipe()
    for tensor_type in ("input", "weight", "output", "grad_output", "grad_input"):
        for role in (
            QuantizerRole("linear", tensor_type, "encoder.0"),
            QuantizerRole(tensor_type=tensor_type),
        ):
            result: object = recipe.quantizer(role)
            require(
                isinstance(result, Quantizer),
                f"{role} gets a {type(result).__name__} in place of a quantizer",
            )


@check("flags", "quantizers", "What the spec says of state and of kept weights is so")
def flags(subject: Subject) -> None:
    """The flags stateful and quantized_weights."""
    recipe, spec = subject.recipe(), subject.spec
    layer = subject.layer(8, 8)
    require(
        spec.stateful or not recipe.stateful,
        "the spec says stateful=False, and the recipe says stateful=True",
    )
    state = _state(layer).stateful
    require(
        state == spec.stateful,
        f"the spec says stateful={spec.stateful}, and a layer's state says stateful={state}",
    )
    if spec.quantized_weights:
        subject.weight(wide(8, 8))


def _state(layer: Any) -> Any:
    return layer._binding.state


@check(
    "deterministic-cast",
    "quantizers",
    "Quantizing the same tensor twice gives the same bytes",
    DETERMINISTIC,
)
def deterministic_cast(subject: Subject) -> None:
    """Quantizers round the same way every time, and read no memory that was not written."""
    for dtype in (torch.float32, torch.bfloat16):
        _twice(subject, wide(65, 130, seed=9, dtype=dtype))


def _twice(subject: Subject, values: torch.Tensor) -> None:
    for (words, quantizer), (_, fresh) in zip(
        subject.quantizers(), subject.quantizers(), strict=True
    ):
        first = quantizer(values)
        for way, other in (
            ("", quantizer),
            (" by an equal quantizer", fresh),
            (" by a copy", quantizer.copy()),
        ):
            for _ in range(2):
                wrong = difference(first, other(values.clone()))
                require(
                    wrong is None,
                    f"quantizing the same tensor twice{way} gives different bytes in {wrong!r}: "
                    f"the cast of {words} is not deterministic",
                )


@check(
    "usages",
    "quantizers",
    "set_usage decides which usages a result serves, and None leaves one as it is",
)
def usages(subject: Subject) -> None:
    """Quantizers obey set_usage."""
    for words, quantizer in subject.quantizers():
        quantizer.set_usage(columnwise=False)
        expected = {"rowwise": True, "columnwise": False}
        require(
            quantizer.get_usages() == expected, f"set_usage(columnwise=False) is ignored by {words}"
        )
        for rowwise, columnwise in _USAGES:
            quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
            storage = quantizer(wide(48, 40))
            requested = {"rowwise": rowwise, "columnwise": columnwise}
            call = f"set_usage(rowwise={rowwise}, columnwise={columnwise})"
            for name, is_requested in requested.items():
                served = storage.get_usages()[name]
                require(
                    served or not is_requested,
                    f"{call} is ignored by {words}: the result serves no {name} usage",
                )
            extra = _extra_usages(storage, rowwise, columnwise)
            require(
                not extra,
                f"{call} is ignored by {words}: the result holds {''.join(extra)} data all the "
                f"same",
            )


def _extra_usages(storage: QuantizedTensorStorage, rowwise: bool, columnwise: bool) -> set[str]:
    """The usages for which a result holds data although they were not requested.

    Rowwise data alone may serve a columnwise usage.
    """
    usages: set[str] = {
        inner.usage
        for inner in storage.inner_tensors
        if getattr(storage, inner.attribute) is not None
    }
    if not columnwise:
        return usages & {"columnwise"}
    if not rowwise and usages >= {"rowwise", "columnwise"}:
        return {"rowwise"}
    return set()


@check(
    "usages-agree",
    "quantizers",
    "The data for one usage is the same, whether the other one is asked for or not",
    DETERMINISTIC,
)
def usages_agree(subject: Subject) -> None:
    """Rowwise bytes do not depend on columnwise usage, nor the reverse."""
    for words, quantizer in subject.quantizers():
        values = wide(48, 40)
        both = inner_by_name(quantizer.with_usage(True, True)(values))
        for rowwise, columnwise in _USAGES[:2]:
            single = inner_by_name(quantizer.with_usage(rowwise, columnwise)(values))
            for name in set(single) & set(both):
                name_of = "rowwise" if rowwise else "columnwise"
                require(
                    same(single[name], both[name]),
                    f"{words} gives another {name!r} for the {name_of} usage alone than for both",
                )


@check(
    "out",
    "quantizers",
    "quantize(out=) writes what quantize gives into the memory of out, and returns it",
)
def out(subject: Subject) -> None:
    """The memory of out= is written, and its shape is checked."""
    for words, quantizer in subject.quantizers():
        first, second = wide(48, 40, seed=1), wide(48, 40, seed=2)
        target = quantizer(first)
        before = snapshot(target)
        memory = {name: tensor.data_ptr() for name, tensor in inner_by_name(target).items()}
        returned = quantizer.quantize(second, out=target)
        require(returned is target, f"out= is ignored by {words}: another object is returned")
        require(
            difference(target, before) is not None,
            f"out= is ignored by {words}: it still holds the old values",
        )
        if subject.spec.deterministic:
            wrong = difference(target, quantizer(second))
            require(wrong is None, f"{words} with out= writes another {wrong!r} than without")
        moved = [
            name
            for name, tensor in inner_by_name(target).items()
            if tensor.data_ptr() != memory.get(name)
        ]
        require(
            not moved,
            f"{words} with out= puts {moved} elsewhere, so that aliases of the tensor keep the "
            f"old values",
        )
        try:
            quantizer.quantize(wide(40, 48), out=target)
        except ShapeError:
            continue
        raise CheckFailed(f"{words} takes out= of another shape without a ShapeError")


@check("noop-flag", "quantizers", "An update with a noop_flag that holds 1 changes nothing")
def noop_flag(subject: Subject) -> None:
    """The quantizer and the storage obey noop_flag."""
    for words, quantizer in subject.quantizers():
        first, second = wide(48, 40, seed=1), wide(48, 40, seed=2) * 2
        target = quantizer(first)
        before = {**snapshot(target), **snapshot(tensors_in(quantizer))}
        quantizer.update_quantized(second, target, noop_flag=torch.ones(1))
        target.update_quantizer(quantizer)
        target.quantize_(second, noop_flag=torch.ones(1))
        after = {**snapshot(target), **snapshot(tensors_in(quantizer))}
        wrong = difference(before, after)
        require(
            wrong is None,
            f"noop_flag is ignored by {words}: an update with it set changed {wrong!r}",
        )
        quantizer.update_quantized(second, target, noop_flag=torch.zeros(1))
        require(
            difference(target, before) is not None,
            f"{words} does not update when noop_flag holds 0",
        )


@check(
    "make-empty",
    "quantizers",
    "make_empty gives a result of the shape, dtype and usages asked for, to be filled",
)
def make_empty(subject: Subject) -> None:
    """A result of make_empty, once it is filled, equals a result of quantize."""
    for words, quantizer in subject.quantizers():
        for shape, dtype in (
            ((48, 40), torch.bfloat16),
            ((3, 5, 7), torch.float32),
            ((0, 40), torch.float16),
        ):
            empty = quantizer.make_empty(shape, dtype=dtype)
            call = f"make_empty({shape}, dtype={dtype}) of {words}"
            require(tuple(empty.size()) == shape, f"{call} has shape {tuple(empty.size())}")
            require(empty.dtype == dtype, f"{call} has dtype {empty.dtype}")
            elsewhere = quantizer.make_empty(shape, dtype=dtype, device="meta")
            others = [
                name for name, tensor in inner_by_name(elsewhere).items() if not tensor.is_meta
            ]
            require(
                elsewhere.device.type == "meta" and tuple(elsewhere.size()) == shape,
                f"{call} with device='meta' is on {elsewhere.device}",
            )
            require(not others, f"{call} with device='meta' has {others} elsewhere")
            values = wide(*shape, dtype=dtype)
            quantizer.update_quantized(values, empty)
            fresh = quantizer(values)
            require(
                type(empty) is type(fresh),
                f"{call} is a {type(empty).__name__}, results are {type(fresh).__name__}",
            )
            if subject.spec.deterministic:
                wrong = difference(empty, fresh)
                require(wrong is None, f"{call}, filled, has another {wrong!r} than a result")


@check(
    "results-are-apart",
    "quantizers",
    "A result shares memory neither with what was quantized nor with another result",
)
def results_are_apart(subject: Subject) -> None:
    """Results share no buffer, and the input is only read."""
    for words, quantizer in subject.quantizers():
        first, second = wide(48, 40, seed=1), wide(48, 40, seed=2)
        untouched = first.clone()
        result = quantizer(first)
        require(same(first, untouched), f"{words} writes to the tensor that it quantizes")
        # Layers save bare storages for backward, and there autograd detects writes to the input.
        # Only tensors must not share its memory.
        for name, tensor in inner_by_name(result).items():
            require(
                quantizer.internal or not overlap(tensor, first),
                f"{words} gives {name!r} in the memory of the tensor that it quantizes",
            )
        before = snapshot(result)
        other = quantizer(second)
        wrong = difference(result, before)
        require(
            wrong is None,
            f"{words} overwrites an earlier result: its {wrong!r} changed in the second call",
        )
        for name, tensor in inner_by_name(result).items():
            # The scale of a stateful quantizer belongs to the quantizer and not to the result.
            shared = overlap(tensor, inner_by_name(other)[name])
            require(not shared, f"{words} gives two results that share the memory of {name!r}")


@check(
    "copy",
    "quantizers",
    "copy() gives a quantizer that can be set and used without changing the original",
)
def copied(subject: Subject) -> None:
    """Copies share nothing that changes, except the state of stateful recipes."""
    for words, quantizer in subject.quantizers():
        values = wide(48, 40, seed=1)
        clone = quantizer.copy()
        require(clone is not quantizer, f"copy() of {words} returns the quantizer itself")
        require(type(clone) is type(quantizer), f"copy() of {words} gives a {type(clone).__name__}")
        if subject.spec.deterministic:
            wrong = difference(clone(values), quantizer(values))
            require(wrong is None, f"copy() of {words} gives another {wrong!r}")
        settings = (quantizer.get_usages(), quantizer.internal, quantizer.optimize_for_gemm)
        clone.set_usage(rowwise=True, columnwise=False)
        clone.internal, clone.optimize_for_gemm = not clone.internal, True
        now = (quantizer.get_usages(), quantizer.internal, quantizer.optimize_for_gemm)
        require(now == settings, f"setting a copy of {words} changed the original")
        result = quantizer(values)
        before = snapshot(result)
        clone(wide(48, 40, seed=2))
        wrong = difference(result, before)
        require(
            wrong is None,
            f"using a copy of {words} overwrote {wrong!r} of a result of the original",
        )
        if not subject.keeps_state(quantizer):
            _shares_nothing_mutable(words, quantizer, clone)


def _is_shared(one: object, other: object) -> bool:
    """Whether two values are one mutable value."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return overlap(one, other)
    return one is other and isinstance(one, (list, dict, set, bytearray))


def _shares_nothing_mutable(words: str, one: Quantizer, other: Quantizer) -> None:
    for name, value in vars(one).items():
        require(
            not _is_shared(value, vars(other).get(name)),
            f"copy() of {words} shares the mutable {name!r} with the original: what one writes "
            f"there, the other reads",
        )


@check(
    "equality",
    "quantizers",
    "Quantizers with equal options are equal and hash equal, with other usages they differ",
)
def equality(subject: Subject) -> None:
    """Stateful quantizers compare by identity."""
    for (words, one), (_, other) in zip(subject.quantizers(), subject.quantizers(), strict=True):
        require(one == one and hash(one) == hash(one), f"{words} does not equal itself")
        if subject.keeps_state(one):
            require(
                {one: 1}.get(other) is None,
                f"{words} holds state, and equals another one with a state of its own",
            )
            continue
        for title, equal in (("one made with the same options", other), ("its copy()", one.copy())):
            require(
                one == equal,
                f"{words} does not equal {title}: does it hold state, or compare by identity?",
            )
            require(hash(one) == hash(equal), f"{words} equals {title}, but their hashes differ")
        require(one == copy.deepcopy(one), f"{words} does not equal its deep copy")
        changed = one.copy()
        changed.set_usage(columnwise=False)
        require(one != changed, f"{words} equals a copy that has other usages")
        other_kind = one.copy()
        other_kind.internal = not one.internal
        require(one != other_kind, f"{words} equals a copy with internal={other_kind.internal}")
    if subject.spec.deterministic:
        _unequal_results(subject)


def _unequal_results(subject: Subject) -> None:
    values = wide(48, 40, seed=1)
    results = [
        (words, q, q(values)) for words, q in subject.quantizers() if not subject.keeps_state(q)
    ]
    for (words, one, first), (others, two, second) in itertools.combinations(results, 2):
        wrong = difference(first, second)
        require(
            wrong is None or one != two,
            f"{words} equals {others}, which gives another {wrong!r} for a tensor",
        )


@check(
    "quantized-input",
    "quantizers",
    "What is quantized already is quantized by its values, and nothing else is taken",
)
def quantized_input(subject: Subject) -> None:
    """A quantizer takes quantized tensors, and refuses integers with a typed error."""
    for words, quantizer in subject.quantizers():
        storage: QuantizedTensorStorage = quantizer(wide(48, 40))
        again: Any = quantizer.quantize(storage)  # type: ignore[arg-type]
        require(
            isinstance(again, QuantizedTensorStorage),
            f"{words} gives a {type(again).__name__} for a quantized tensor",
        )
        require(
            tuple(again.size()) == (48, 40),
            f"{words} gives shape {tuple(again.size())} for a quantized tensor",
        )
        if quantizer.is_requantization_safe() and subject.spec.deterministic:
            wrong = difference(quantizer(wide(48, 40)), storage)
            require(
                wrong is None,
                f"{words} says that requantizing is safe, and gives another {wrong!r}",
            )
        try:
            quantizer(torch.ones(4, 4, dtype=torch.int32))
        except TypeError:
            continue
        raise CheckFailed(f"{words} takes a tensor of integers without a DTypeError")
