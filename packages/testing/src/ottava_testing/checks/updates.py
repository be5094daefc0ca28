"""Checks of in-place writes to quantized tensors, as optimizers do them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ottava.gemm import gemm
from ottava.tensors import columnwise_layout
from ottava_testing.compare import close, plain, require, wide
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS, check

Write = Callable[[Any, torch.Tensor], Any]


def _set(w: Any, index: Any, value: Any) -> Any:
    w[index] = value
    return w


# In-place ops by name; each takes the tensor to write and another tensor of its shape.
_WRITES: dict[str, Write] = {
    "mul_": lambda w, other: w.mul_(-0.5),
    "mul_ (a tensor)": lambda w, other: w.mul_(other),
    "add_": lambda w, other: w.add_(other),
    "add_ (alpha)": lambda w, other: w.add_(other, alpha=-2.0),
    "sub_": lambda w, other: w.sub_(other),
    "div_": lambda w, other: w.div_(-3.0),
    "neg_": lambda w, other: w.neg_(),
    "copy_": lambda w, other: w.copy_(other),
    "copy_ (bfloat16)": lambda w, other: w.copy_(other.bfloat16()),
    "fill_": lambda w, other: w.fill_(1.5),
    "zero_": lambda w, other: w.zero_(),
    "lerp_": lambda w, other: w.lerp_(other, 0.75),
    "addcmul_": lambda w, other: w.addcmul_(other, other, value=2.0),
    "addcdiv_": lambda w, other: w.addcdiv_(other, torch.full_like(other, 0.5), value=-1.0),
    "mul_ (Scalar)": lambda w, other: torch.ops.aten.mul_.Scalar(w, -0.5),
    "pow_": lambda w, other: w.pow_(2),
    "abs_": lambda w, other: w.abs_(),
    "clamp_min_": lambda w, other: w.clamp_min_(0.2),
    "clamp_max_": lambda w, other: w.clamp_max_(-0.2),
    "clamp_": lambda w, other: w.clamp_(-0.1, 0.1),
    "masked_fill_": lambda w, other: w.masked_fill_(other > 0, 1.0),
    "uniform_": lambda w, other: w.uniform_(50.0, 51.0),
    "normal_": lambda w, other: w.normal_(mean=100.0),
    # The values are ten times as large, so that a write to the wrong place is far off.
    "w[1] = x": lambda w, other: _set(w, 1, other[0] * 10),
    "w[2:5] = x": lambda w, other: _set(w, slice(2, 5), other[:3] * 10),
    "w[:, 3] = x": lambda w, other: _set(w, (slice(None), 3), other[:, 0] * 10),
    "w[indices] = x": lambda w, other: _set(w, torch.tensor([7, 3]), other[:2] * 10),
    "index_put_": lambda w, other: w.index_put_((torch.tensor([7, 3]),), other[:2] * 10),
    "w[mask] = 1": lambda w, other: _set(w, other > 0, 1.0),
    "mul(out=)": lambda w, other: torch.mul(other, 2.0, out=w),
    "_foreach_mul_": lambda w, other: torch._foreach_mul_([w], -0.5),
    "_foreach_add_": lambda w, other: torch._foreach_add_([w], [other], alpha=2.0),
    "_foreach_sub_": lambda w, other: torch._foreach_sub_([w], [other]),
    "_foreach_lerp_": lambda w, other: torch._foreach_lerp_([w], [other], 0.75),
    "_foreach_addcmul_": lambda w, other: torch._foreach_addcmul_([w], [other], [other], 2.0),
    "_foreach_addcdiv_": lambda w, other: torch._foreach_addcdiv_(
        [w], [other], [torch.full_like(other, 0.5)], -1.0
    ),
    "_foreach_copy_": lambda w, other: torch._foreach_copy_([w], [other]),
    "*=": lambda w, other: w.__imul__(-0.5),
    "+=": lambda w, other: w.__iadd__(other),
}


# Optimizers call the _foreach_ ops. torch documents none of them, so a version may lack one.
for _name in [
    name for name in _WRITES if name.startswith("_foreach_") and not hasattr(torch, name)
]:
    del _WRITES[_name]


def _bound(subject: Subject) -> float:
    return min(0.5, 4 * subject.bound)


@check(
    "in-place-ops",
    "updates",
    "An in-place op changes the values, and returns the tensor itself",
    QUANTIZED_WEIGHTS,
)
def in_place_ops(subject: Subject) -> None:
    """No op is dropped, and aliases see its result."""
    other = wide(48, 40, seed=6)
    for name, write in _WRITES.items():
        parameter = torch.nn.Parameter(subject.weight(wide(48, 40)))
        cls = type(parameter).__name__
        before, expected = plain(parameter).clone(), plain(parameter).clone()
        alias = parameter.detach()
        with torch.no_grad():
            write(expected, other)
            returned = write(parameter, other)
        after = plain(parameter)
        require(
            not torch.equal(after, before),
            f"an in-place op ({name}) on a {cls} was dropped: the values did not change",
        )
        close(
            f"a {cls}, after the in-place op {name},",
            after,
            expected,
            _bound(subject),
            before=before,
        )
        title = f"an alias of a {cls}, after the in-place op {name},"
        close(title, plain(alias), expected, _bound(subject), before=before)
        itself = returned is parameter or name.startswith("_foreach")
        require(itself, f"the in-place op {name} on a {cls} returns something else")


@check(
    "copy-of-quantized",
    "updates",
    "copy_ takes quantized tensors, and plain tensors take copies of them",
    QUANTIZED_WEIGHTS,
)
def copy_of_quantized(subject: Subject) -> None:
    """Copies from a quantized tensor, to another one and to a plain one."""
    one, two = subject.weight(wide(48, 40)), subject.weight(wide(48, 40, seed=5))
    cls, before, expected = type(one).__name__, plain(one).clone(), plain(two).clone()
    one.copy_(two)
    close(
        f"a {cls}, after copy_ from another,", plain(one), expected, _bound(subject), before=before
    )
    one.copy_(wide(48, 40, seed=9))
    require(
        torch.equal(plain(two), expected),
        f"copy_ from one {cls} to another ties them: a later write reaches both",
    )
    target = torch.zeros(48, 40)
    target.copy_(two)
    close(f"a plain tensor, after copy_ from a {cls},", target, expected, 1e-6)


@check(
    "data-assignment",
    "updates",
    "Assigning .data takes over the values, quantized or not",
    QUANTIZED_WEIGHTS,
)
def data_assignment(subject: Subject) -> None:
    """Code that swaps weights assigns .data."""
    parameter: Any = torch.nn.Parameter(subject.weight(wide(48, 40)))
    cls = type(parameter).__name__
    for kind, value in (
        ("a plain tensor", wide(48, 40, seed=5)),
        ("another", subject.weight(wide(48, 40, seed=6))),
    ):
        before, expected = plain(parameter).clone(), plain(value).clone()
        parameter.data = value
        words = f"a {cls}, after its .data was set to {kind},"
        close(words, plain(parameter), expected, _bound(subject), before=before)
        require(type(parameter).__name__ == cls, f"{words} is a {type(parameter).__name__}")


_OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, foreach=False),
    "SGD(foreach=True)": lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.1, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.3, weight_decay=0.1, foreach=False),
    "AdamW(foreach=True)": lambda p: torch.optim.AdamW(p, lr=0.3, foreach=True),
    "SGD(fused=True)": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, fused=True),
    "AdamW(fused=True)": lambda p: torch.optim.AdamW(p, lr=0.3, weight_decay=0.1, fused=True),
}


@check(
    "optimizer-steps",
    "updates",
    "Optimizers step weights that are kept quantized",
    QUANTIZED_WEIGHTS,
)
def optimizer_steps(subject: Subject) -> None:
    """Steps on quantized weights are near the steps on the same values in high precision."""
    for name, make in _OPTIMIZERS.items():
        parameter: Any = torch.nn.Parameter(subject.weight(wide(48, 40)))
        reference = torch.nn.Parameter(plain(parameter).clone())
        try:
            theirs = make([reference])
        except RuntimeError:
            # This torch has no such fused optimizer for plain tensors either.
            continue
        mine = make([parameter])
        cls = type(parameter).__name__
        for step in range(2):
            grad = wide(48, 40, seed=20 + step)
            parameter.grad, reference.grad = grad.clone(), grad.clone()
            before = plain(parameter).clone()
            mine.step()
            theirs.step()
            require(
                not torch.equal(plain(parameter), before),
                f"a step of {name} on a {cls} was dropped: no value changed",
            )
        close(
            f"a {cls}, after two steps of {name},",
            plain(parameter),
            plain(reference),
            _bound(subject),
        )


@check(
    "nothing-stale",
    "updates",
    "After a write in place, products read the new values, in every direction",
    QUANTIZED_WEIGHTS,
)
def nothing_stale(subject: Subject) -> None:
    """Transposes, and all other data derived from old values, are computed again."""
    x, dy = wide(16, 40, seed=1), wide(16, 48, seed=2)
    for layout in ("shared", "transpose"):
        with columnwise_layout(layout), torch.no_grad():
            for name, write in _replacing(subject).items():
                weight: Any = torch.nn.Parameter(subject.weight(wide(48, 40)))
                cls = type(weight).__name__
                products = _products(subject, weight, x, dy)
                write(weight, wide(48, 40, seed=6))
                weight.rebuild_derived()
                expected = plain(weight).clone()
                for direction, product in _products(subject, weight, x, dy).items():
                    expected_product = x @ expected.t() if direction == "fprop" else dy @ expected
                    title = (
                        f"the {direction} product with a {cls}, after {name}, reads stale "
                        f"values: it"
                    )
                    bound, before = 4 * _bound(subject) / 3, products[direction]
                    close(title, product, expected_product, bound, before=before)


def _replacing(subject: Subject) -> dict[str, Write]:
    """Writes that change values so much that products of the old ones are far off."""

    def load(w: Any, other: torch.Tensor) -> None:
        holder = torch.nn.Module()
        holder.weight = w
        holder.load_state_dict({"weight": other})

    def step(w: Any, other: torch.Tensor) -> None:
        w.grad = other
        torch.optim.SGD([w], lr=2.0).step()

    names = ("mul_", "copy_", "add_", "lerp_", "fill_", "w[1] = x", "_foreach_copy_")
    return {name: _WRITES[name] for name in names if name in _WRITES} | {
        ".data = a plain tensor": lambda w, other: setattr(w, "data", other),
        ".data = another": lambda w, other: setattr(w, "data", subject.weight(other)),
        "quantize_": lambda w, other: w.quantize_(other),
        "load_state_dict": load,
        "an optimizer's step": step,
    }


def _products(
    subject: Subject, weight: Any, x: torch.Tensor, dy: torch.Tensor
) -> dict[str, torch.Tensor]:
    qx = subject.quantizer("input", internal=True, columnwise=False)(x)
    qdy = subject.quantizer("grad_output", internal=True, columnwise=False)(dy)
    return {
        "fprop": gemm(qx, weight, "fprop", out_dtype=torch.float32),
        "dgrad": gemm(qdy, weight, "dgrad", out_dtype=torch.float32),
    }
