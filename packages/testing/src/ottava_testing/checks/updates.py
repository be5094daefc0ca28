"""Checks of in-place writes to quantized tensors, as optimizers do them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ottava.gemm import gemm
from ottava.tensors import columnwise_layout
from ottava_testing import table
from ottava_testing.checks.products import LAYOUTS
from ottava_testing.compare import close, plain, require, wide
from ottava_testing.subject import Subject
from ottava_testing.table import QUANTIZED_WEIGHTS

check = partial(table.check, "updates", QUANTIZED_WEIGHTS, over=Subject.weights)
Make = Callable[..., Any]
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


@check()
def in_place_ops(subject: Subject, make: Make) -> None:
    """An in-place op changes the values, and returns the tensor itself."""
    other = wide(48, 40, seed=6)
    for name, write in _WRITES.items():
        parameter = make()
        before, expected = plain(parameter).clone(), plain(parameter).clone()
        alias = parameter.detach()
        with torch.no_grad():
            write(expected, other)
            returned = write(parameter, other)
        words = f"an in-place op ({name}) was dropped: the values did not change"
        require(not torch.equal(plain(parameter), before), words)
        for whose, tensor in (("it", parameter), ("an alias of it", alias)):
            title = f"{whose}, after the in-place op {name},"
            close(title, tensor, expected, subject.loose, before=before)
        is_itself = returned is parameter or name.startswith("_foreach")
        require(is_itself, f"the in-place op {name} returns something else")


@check()
def copy_of_quantized(subject: Subject, make: Make) -> None:
    """copy_ takes quantized tensors, and plain tensors take copies of them."""
    one, two = make().detach(), make(wide(48, 40, seed=5)).detach()
    before, expected = plain(one).clone(), plain(two).clone()
    one.copy_(two)
    close("it, after copy_ from another,", one, expected, subject.loose, before=before)
    one.copy_(wide(48, 40, seed=9))
    words = "copy_ from one to another ties them: a later write reaches both"
    require(torch.equal(plain(two), expected), words)
    target = torch.zeros(48, 40)
    target.copy_(two)
    close("a plain tensor, after copy_ from it,", target, expected, 1e-6)


@check()
def data_assignment(subject: Subject, make: Make) -> None:
    """Assigning .data takes over the values, quantized or not."""
    parameter = make()
    for kind, value in (
        ("a plain tensor", wide(48, 40, seed=5)),
        ("another", make(wide(48, 40, seed=6)).detach()),
    ):
        before, expected = plain(parameter).clone(), plain(value).clone()
        cls = type(parameter)
        parameter.data = value
        words = f"it, after its .data was set to {kind},"
        close(words, parameter, expected, subject.loose, before=before)
        require(type(parameter) is cls, f"{words} is a {type(parameter).__name__}")


_OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, foreach=False),
    "SGD(foreach=True)": lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.1, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.3, weight_decay=0.1, foreach=False),
    "AdamW(foreach=True)": lambda p: torch.optim.AdamW(p, lr=0.3, foreach=True),
    "SGD(fused=True)": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, fused=True),
    "AdamW(fused=True)": lambda p: torch.optim.AdamW(p, lr=0.3, weight_decay=0.1, fused=True),
}


@check()
def optimizer_steps(subject: Subject, make: Make) -> None:
    """Optimizers step weights that are kept quantized."""
    for name, optimizer in _OPTIMIZERS.items():
        parameter = make()
        reference = torch.nn.Parameter(plain(parameter).clone())
        try:
            theirs = optimizer([reference])
        except RuntimeError:
            # This torch has no such fused optimizer for plain tensors either.
            continue
        mine = optimizer([parameter])
        for step in range(2):
            grad = wide(48, 40, seed=20 + step)
            parameter.grad, reference.grad = grad.clone(), grad.clone()
            before = plain(parameter).clone()
            mine.step()
            theirs.step()
            words = f"a step of {name} was dropped: no value changed"
            require(not torch.equal(plain(parameter), before), words)
        close(f"it, after two steps of {name},", parameter, reference, subject.loose)


def _load(w: Any, other: torch.Tensor) -> None:
    holder = torch.nn.Module()
    holder.weight = w
    holder.load_state_dict({"weight": other})


def _step(w: Any, other: torch.Tensor) -> None:
    w.grad = other
    torch.optim.SGD([w], lr=2.0).step()


# Writes that change values so much that products of the old ones are far off.
_REPLACING: dict[str, Write] = {
    name: _WRITES[name]
    for name in ("mul_", "copy_", "add_", "lerp_", "fill_", "w[1] = x", "_foreach_copy_")
    if name in _WRITES
} | {
    ".data = a plain tensor": lambda w, other: setattr(w, "data", other),
    ".data = another": lambda w, other: setattr(w, "data", w._quantizer(other)),
    "quantize_": lambda w, other: w.quantize_(other),
    "load_state_dict": _load,
    "an optimizer's step": _step,
}


@check()
def nothing_stale(subject: Subject, make: Make) -> None:
    """After a write in place, products read the new values, in every direction."""
    x, dy = wide(16, 40, seed=1), wide(16, 48, seed=2)
    qx = subject.quantizer("input", internal=True, columnwise=False)(x)
    qdy = subject.quantizer("grad_output", internal=True, columnwise=False)(dy)

    def products(weight: Any) -> dict[str, torch.Tensor]:
        return {
            "fprop": gemm(qx, weight, "fprop", out_dtype=torch.float32),
            "dgrad": gemm(qdy, weight, "dgrad", out_dtype=torch.float32),
        }

    for layout in LAYOUTS:
        with columnwise_layout(layout), torch.no_grad():
            for name, write in _REPLACING.items():
                weight = make()
                before = products(weight)
                write(weight, wide(48, 40, seed=6))
                weight.rebuild_derived()
                values = plain(weight).clone()
                expected = {"fprop": x @ values.t(), "dgrad": dy @ values}
                for kind, product in products(weight).items():
                    title = f"the {kind} product, after {name}, reads stale values: it"
                    bound = 4 * subject.loose / 3
                    close(title, product, expected[kind], bound, before=before[kind])
