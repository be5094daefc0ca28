"""Values for checks, comparisons, and the messages about defects."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import ottava
from ottava.errors import text_of
from ottava.tensors import QuantizedTensorStorage

# Folders of code that is not the recipe's. Where a traceback leads through them, the last line of
# the recipe's own code says more.
_FOREIGN = tuple(
    str(Path(file).parent) for file in (str(torch.__file__), str(ottava.__file__), __file__)
)


class CheckFailed(AssertionError):
    """A recipe does not pass a check; the message names the defect."""


def require(truth: bool, defect: str) -> None:
    """Check a condition.

    Raises:
        CheckFailed: ``truth`` is false; ``defect`` is the message.
    """
    if not truth:
        raise CheckFailed(defect)


def describe(error: BaseException) -> str:
    """An exception in one line, with the place that raised it.

    That is the innermost line of the recipe's own code, or of any code if the recipe has none in
    the traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*_FOREIGN, "<"))]
    lines = text_of(error).splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}"
    if not frames:
        return text
    frame = (own or frames)[-1]
    return f"{text}, raised at {frame.filename}:{frame.lineno} in {frame.name}()"


# -- tensors to check with --


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed values of shape ``shape``, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of many magnitudes and shape ``shape``, so that rows of a matrix differ in scale."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random)
    magnitudes = torch.exp(torch.randn(shape, generator=random))
    return (values * magnitudes).to(dtype)


# -- bytes --


def plain(value: Any) -> torch.Tensor:
    """The values of a quantized or a plain tensor in its nominal dtype, detached from the graph."""
    with torch.no_grad():
        is_quantized = isinstance(value, QuantizedTensorStorage)
        tensor: torch.Tensor = value.dequantize() if is_quantized else value
        return tensor.detach()


def inner_by_name(storage: QuantizedTensorStorage) -> dict[str, torch.Tensor]:
    """The inner tensors that a storage holds, by the names of their attributes."""
    pairs = zip(storage.inner_tensors, storage.inner_list(), strict=True)
    return {inner.attribute: tensor for inner, tensor in pairs if tensor is not None}


def tensors_in(thing: Any) -> dict[str, torch.Tensor]:
    """Every plain tensor that is an attribute of an object, inner tensors included, by name."""
    tensors = {
        name: value for name, value in vars(thing).items() if isinstance(value, torch.Tensor)
    }
    if isinstance(thing, QuantizedTensorStorage):
        tensors |= inner_by_name(thing)
    return {
        name: value
        for name, value in tensors.items()
        if not isinstance(value, QuantizedTensorStorage)
    }


def snapshot(
    tensors: QuantizedTensorStorage | Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Copies of tensors, or of the inner tensors of a storage, by name."""
    return {name: plain(tensor).clone() for name, tensor in _by_name(tensors).items()}


def _by_name(
    tensors: QuantizedTensorStorage | Mapping[str, torch.Tensor],
) -> Mapping[str, torch.Tensor]:
    if isinstance(tensors, QuantizedTensorStorage):
        return inner_by_name(tensors)
    return tensors


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes.

    NaN therefore equals the same NaN, and 0 differs from -0.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    mine, theirs = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(mine, theirs)


def difference(one: Any, other: Any) -> str | None:
    """The name of the first inner tensor in which two storages or snapshots differ.

    None where they are equal.
    """
    mine, theirs = _by_name(one), _by_name(other)
    if set(mine) != set(theirs):
        return str(sorted(set(mine) ^ set(theirs))[0])
    differing = [str(name) for name in mine if not same(mine[name], theirs[name])]
    return differing[0] if differing else None


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors share their memory."""
    if one.is_meta or other.is_meta or not one.numel() or not other.numel():
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def flip(tensor: torch.Tensor) -> None:
    """Overwrite a plain tensor of any dtype with values that differ from its own."""
    with torch.no_grad():
        if tensor.is_floating_point() and tensor.element_size() > 1:
            tensor.copy_(tensor.float() * -3 + 1)
        elif tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            data = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            data.bitwise_xor_(0x15)


# -- values --


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error ``‖actual - expected‖ / ‖expected‖`` in the Frobenius norm."""
    reference = expected.detach().double()
    if not reference.numel():
        return 0.0
    error = torch.linalg.vector_norm(actual.detach().double() - reference)
    return float(error / torch.linalg.vector_norm(reference).clamp(min=1e-300))


def _transposed(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    if actual.dim() != 2 or expected.dim() != 2 or actual.numel() != expected.numel():
        return False
    wrong = [
        expected.t(),
        expected.t().reshape(expected.shape),
        expected.reshape(expected.shape[::-1]).t(),
    ]
    return any(w.shape == actual.shape and relative(actual, w) <= bound for w in wrong)


def explain(
    actual: torch.Tensor,
    expected: torch.Tensor,
    bound: float,
    *,
    before: torch.Tensor | None = None,
) -> str:
    """A description of what is wrong with ``actual``.

    It continues a sentence whose subject is the name of the tensor. ``bound`` is the relative error
    that is allowed, and ``before`` are old values that should have changed.
    """
    near = max(bound, 1e-6)
    if _transposed(actual, expected, near):
        return "holds the values of its transpose: wrong transpose"
    if actual.shape != expected.shape:
        return f"has shape {tuple(actual.shape)} in place of {tuple(expected.shape)}"
    if not bool(torch.isfinite(actual).all()) and bool(torch.isfinite(expected).all()):
        return "holds NaN or inf"
    if before is not None and before.shape == actual.shape and relative(actual, before) <= 1e-6:
        return "did not change"
    if actual.numel() and not bool(actual.any()):
        return "is all zeros"
    one, other = actual.detach().double().reshape(-1), expected.detach().double().reshape(-1)
    factor = float(one @ other / (other @ other).clamp(min=1e-300))
    if abs(factor - 1) > near and relative(one, factor * other) <= near:
        return f"is {factor:.3g} times what it should be"
    if relative(one.sort().values, other.sort().values) <= 1e-5:
        return "holds the right values in a wrong order"
    return f"is off by {relative(actual, expected):.3g} of its norm, where {bound:.3g} is allowed"


def close(
    title: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    bound: float,
    *,
    before: torch.Tensor | None = None,
) -> None:
    """Compare values in the Frobenius norm.

    Args:
        title: the name of ``actual`` in messages.
        actual: the values to check.
        expected: the values that they should be near.
        bound: the largest ``‖actual - expected‖ / ‖expected‖`` that is allowed.
        before: the values of ``actual`` before an operation that had to change them.

    Raises:
        CheckFailed: the shapes differ, or the values differ by more than ``bound``.
    """
    error = relative(actual, expected) if actual.shape == expected.shape else float("inf")
    if not error <= bound:
        raise CheckFailed(f"{title} {explain(actual, expected, bound, before=before)}")


def require_same(defect: str, ones: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
    """Compare lists of tensors byte by byte.

    Raises:
        CheckFailed: a pair differs; the message is ``defect`` with the size of the difference.
    """
    for one, other in zip(ones, others, strict=True):
        mine, theirs = plain(one), plain(other)
        if same(mine, theirs):
            continue
        size = "another shape"
        if mine.shape == theirs.shape:
            size = f"off by {relative(mine, theirs):.3g} of its norm"
        raise CheckFailed(f"{defect} ({size})")
