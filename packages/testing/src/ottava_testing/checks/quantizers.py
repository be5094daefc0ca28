"""Checks of the contract of quantizers: usages, outputs, copies, equality."""

from __future__ import annotations

import copy as copying
import itertools
from functools import partial
from typing import Any

import torch

from ottava.errors import ShapeError
from ottava.recipes.role import QuantizerRole
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava_testing import table
from ottava_testing.compare import (
    CheckFailed,
    difference,
    inner_by_name,
    overlap,
    require,
    require_same,
    same,
    snapshot,
    tensors_in,
    wide,
)
from ottava_testing.subject import Subject
from ottava_testing.table import DETERMINISTIC

check = partial(table.check, "quantizers")
_USAGES = ((True, False), (False, True), (True, True))


@check()
def roles(subject: Subject) -> None:
    """There is a quantizer for every role, whatever the layer is called."""
    recipe = subject.recipe()
    for kind in ("input", "weight", "output", "grad_output", "grad_input"):
        for role in (QuantizerRole("linear", kind, "encoder.0"), QuantizerRole(tensor_type=kind)):
            result: object = recipe.quantizer(role)
            words = f"{role} gets a {type(result).__name__} in place of a quantizer"
            require(isinstance(result, Quantizer), words)


@check()
def flags(subject: Subject) -> None:
    """What the spec says of state and of kept weights is so."""
    stateful, recipe = subject.spec.stateful, subject.recipe()
    words = f"the spec says stateful={stateful}"
    require(stateful or not recipe.stateful, f"{words}, and the recipe says stateful=True")
    state = subject.layer(8, 8)._binding.state
    layer_is_stateful = state is not None and state.stateful
    words = f"{words}, and a layer's state says stateful={layer_is_stateful}"
    require(layer_is_stateful == stateful, words)
    if subject.spec.quantized_weights:
        subject.weight(wide(8, 8))


@check(DETERMINISTIC)
def deterministic_cast(subject: Subject) -> None:
    """Quantizing the same tensor twice gives the same bytes."""
    for dtype in (torch.float32, torch.bfloat16):
        values = wide(65, 130, seed=9, dtype=dtype)
        pairs = zip(subject.quantizers(), subject.quantizers(), strict=True)
        for (title, quantizer), (_, fresh) in pairs:
            first = quantizer(values)
            ways = {"": quantizer, " by an equal one": fresh, " by a copy": quantizer.copy()}
            for way, other in ways.items():
                for _ in range(2):
                    words = f"{title}: quantizing the same tensor twice{way} gives"
                    require_same(words, first, other(values.clone()))


@check(over=Subject.quantizers)
def usages(subject: Subject, quantizer: Quantizer) -> None:
    """set_usage decides which usages a result serves, and None leaves one as it is."""
    quantizer.set_usage(columnwise=False)
    expected = {"rowwise": True, "columnwise": False}
    require(quantizer.get_usages() == expected, "set_usage(columnwise=False) is ignored")
    for rowwise, columnwise in _USAGES:
        call = f"set_usage(rowwise={rowwise}, columnwise={columnwise}) is ignored"
        quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
        storage = quantizer(wide(48, 40))
        for name, is_requested in (("rowwise", rowwise), ("columnwise", columnwise)):
            served = storage.get_usages()[name]
            require(served or not is_requested, f"{call}: the result serves no {name} usage")
        extra = _extra_usages(storage, rowwise, columnwise)
        require(not extra, f"{call}: the result holds {''.join(extra)} data all the same")


def _extra_usages(storage: QuantizedTensorStorage, rowwise: bool, columnwise: bool) -> set[str]:
    """The usages for which a result holds data although they were not requested.

    Rowwise data alone may serve a columnwise usage.
    """
    names = inner_by_name(storage)
    usages_with_data: set[str] = {
        inner.usage for inner in storage.inner_tensors if inner.attribute in names
    }
    if not columnwise:
        return usages_with_data & {"columnwise"}
    return {"rowwise"} if not rowwise and usages_with_data >= {"rowwise", "columnwise"} else set()


@check(DETERMINISTIC, over=Subject.quantizers)
def usages_agree(subject: Subject, quantizer: Quantizer) -> None:
    """The data for one usage is the same, whether the other one is asked for or not."""
    values = wide(48, 40)
    both = inner_by_name(quantizer.with_usage(True, True)(values))
    for name_of, usage in (("rowwise", _USAGES[0]), ("columnwise", _USAGES[1])):
        single = inner_by_name(quantizer.with_usage(*usage)(values))
        for name in set(single) & set(both):
            words = f"another {name!r} for the {name_of} usage alone than for both"
            require(same(single[name], both[name]), words)


@check(over=Subject.quantizers)
def out(subject: Subject, quantizer: Quantizer) -> None:
    """quantize(out=) writes what quantize gives into the memory of out, and returns it."""
    target = quantizer(wide(48, 40, seed=1))
    before, memory = snapshot(target), inner_by_name(target)
    places = {name: tensor.data_ptr() for name, tensor in memory.items()}
    values = wide(48, 40, seed=2)
    returned = quantizer.quantize(values, out=target)
    require(returned is target, "out= is ignored: another object is returned")
    require(difference(target, before), "out= is ignored: it still holds the old values")
    if subject.spec.deterministic:
        require_same("out= gets, unlike a new result,", target, quantizer(values))
    for name, tensor in inner_by_name(target).items():
        words = f"out= puts {name!r} elsewhere, so that aliases of the tensor keep the old values"
        require(tensor.data_ptr() == places.get(name), words)
    try:
        quantizer.quantize(wide(40, 48), out=target)
    except ShapeError:
        return
    raise CheckFailed("out= of another shape is taken without a ShapeError")


@check(over=Subject.quantizers)
def noop_flag(subject: Subject, quantizer: Quantizer) -> None:
    """An update with a noop_flag that holds 1 changes nothing."""
    target, values = quantizer(wide(48, 40, seed=1)), wide(48, 40, seed=2) * 2
    before = snapshot(target) | snapshot(tensors_in(quantizer))
    quantizer.update_quantized(values, target, noop_flag=torch.ones(1))
    target.update_quantizer(quantizer)
    target.quantize_(values, noop_flag=torch.ones(1))
    after = snapshot(target) | snapshot(tensors_in(quantizer))
    require_same("noop_flag is ignored: an update with it set leaves", before, after)
    quantizer.update_quantized(values, target, noop_flag=torch.zeros(1))
    require(difference(target, before), "nothing is updated when noop_flag holds 0")


@check(over=Subject.quantizers)
def make_empty(subject: Subject, quantizer: Quantizer) -> None:
    """make_empty gives a result of the shape, dtype and usages asked for, to be filled."""
    for shape, dtype in (
        ((48, 40), torch.bfloat16),
        ((3, 5, 7), torch.float32),
        ((0, 40), torch.float16),
    ):
        call = f"make_empty({shape}, dtype={dtype}"
        empty = quantizer.make_empty(shape, dtype=dtype)
        require(tuple(empty.size()) == shape, f"{call}) has shape {tuple(empty.size())}")
        require(empty.dtype == dtype, f"{call}) has dtype {empty.dtype}")
        meta = quantizer.make_empty(shape, dtype=dtype, device="meta")
        require(meta.device.type == "meta", f"{call}, device='meta') is on {meta.device}")
        require(tuple(meta.size()) == shape, f"{call}, device='meta') has another shape")
        elsewhere = [name for name, tensor in inner_by_name(meta).items() if not tensor.is_meta]
        require(not elsewhere, f"{call}, device='meta') has {elsewhere} elsewhere")
        values = wide(*shape, dtype=dtype)
        quantizer.update_quantized(values, empty)
        fresh = quantizer(values)
        kinds = f"a {type(empty).__name__}, and results are {type(fresh).__name__}"
        require(type(empty) is type(fresh), f"{call}) is {kinds}")
        if subject.spec.deterministic:
            require_same(f"{call}), filled, is no result, which has", empty, fresh)


@check(over=Subject.quantizers)
def results_are_apart(subject: Subject, quantizer: Quantizer) -> None:
    """A result shares memory neither with what was quantized nor with another result."""
    values = wide(48, 40, seed=1)
    untouched = values.clone()
    result = quantizer(values)
    require(same(values, untouched), "it writes to the tensor that it quantizes")
    tensors, before = inner_by_name(result), snapshot(result)
    # Layers save bare storages for backward, and there autograd detects writes to the input. Only
    # tensors must not share its memory.
    for name, tensor in tensors.items():
        shared = overlap(tensor, values) and not quantizer.internal
        require(not shared, f"{name!r} lies in the memory of the tensor that was quantized")
    other = inner_by_name(quantizer(wide(48, 40, seed=2)))
    require_same("a second call overwrites an earlier result: then that has", result, before)
    for name, tensor in tensors.items():
        # The scale of a stateful quantizer belongs to the quantizer and not to the result.
        require(not overlap(tensor, other[name]), f"two results share the memory of {name!r}")


@check(over=Subject.quantizers)
def copy(subject: Subject, quantizer: Quantizer) -> None:
    """copy() gives a quantizer that can be set and used without changing the original."""
    values = wide(48, 40, seed=1)
    clone = quantizer.copy()
    require(clone is not quantizer, "copy() returns the quantizer itself")
    require(type(clone) is type(quantizer), f"copy() gives a {type(clone).__name__}")
    if subject.spec.deterministic:
        require_same("copy() quantizes otherwise, with", clone(values), quantizer(values))
    settings = (quantizer.get_usages(), quantizer.internal, quantizer.optimize_for_gemm)
    clone.set_usage(rowwise=True, columnwise=False)
    clone.internal, clone.optimize_for_gemm = not clone.internal, True
    now = (quantizer.get_usages(), quantizer.internal, quantizer.optimize_for_gemm)
    require(now == settings, "setting a copy changed the original")
    result = quantizer(values)
    before = snapshot(result)
    clone(wide(48, 40, seed=2))
    require_same("using a copy overwrote a result of the original, which has", result, before)
    if subject.keeps_state(quantizer):
        return
    theirs = vars(clone)
    for name, value in vars(quantizer).items():
        words = f"copy() shares the mutable {name!r}: what one writes there, the other reads"
        require(not _is_shared(value, theirs.get(name)), words)


def _is_shared(one: object, other: object) -> bool:
    """Whether two values are one mutable value."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return overlap(one, other)
    return one is other and isinstance(one, (list, dict, set, bytearray))


@check()
def equality(subject: Subject) -> None:
    """Quantizers with equal options are equal and hash equal, with other usages they differ."""
    for (title, one), (_, other) in zip(subject.quantizers(), subject.quantizers(), strict=True):
        require(one == one and hash(one) == hash(one), f"{title} does not equal itself")
        if subject.keeps_state(one):
            words = f"{title} holds state, and equals another one with a state of its own"
            require({one: 1}.get(other) is None, words)
            continue
        for what, equal in (("one made with the same options", other), ("its copy()", one.copy())):
            words = f"{title} does not equal {what}: does it hold state, or compare by identity?"
            require(one == equal, words)
            words = f"{title} equals {what}, but their hashes differ"
            require(hash(one) == hash(equal), words)
        require(one == copying.deepcopy(one), f"{title} does not equal its deep copy")
        usage, kind = one.copy(), one.copy()
        usage.set_usage(columnwise=False)
        kind.internal = not one.internal
        require(one != usage, f"{title} equals a copy that has other usages")
        require(one != kind, f"{title} equals a copy with internal={kind.internal}")
    if subject.spec.deterministic:
        _unequal_results(subject)


def _unequal_results(subject: Subject) -> None:
    values = wide(48, 40, seed=1)
    results = [
        (title, quantizer, quantizer(values))
        for title, quantizer in subject.quantizers()
        if not subject.keeps_state(quantizer)
    ]
    for (title, one, first), (name, two, second) in itertools.combinations(results, 2):
        if one == two:
            require_same(f"{title} equals {name}, and for a tensor they give", first, second)


@check(over=Subject.quantizers)
def quantized_input(subject: Subject, quantizer: Quantizer) -> None:
    """What is quantized already is quantized by its values, and nothing else is taken."""
    storage: Any = quantizer(wide(48, 40))
    again: Any = quantizer.quantize(storage)
    kind = type(again).__name__
    require(isinstance(again, QuantizedTensorStorage), f"a quantized tensor gives a {kind}")
    shape = tuple(again.size())
    require(shape == (48, 40), f"a quantized tensor gives shape {shape}")
    if quantizer.is_requantization_safe() and subject.spec.deterministic:
        words = "it says that requantizing is safe, and then gives"
        require_same(words, quantizer(wide(48, 40)), storage)
    try:
        quantizer(torch.ones(4, 4, dtype=torch.int32))
    except TypeError:
        return
    raise CheckFailed("it takes a tensor of integers without a DTypeError")
