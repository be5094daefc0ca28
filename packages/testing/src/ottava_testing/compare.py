"""Values for checks, comparisons, and the messages about defects."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


def require(truth: object, defect: str) -> None:
    """Check a condition.

    Raises:
        CheckFailed: ``truth`` is false; ``defect`` is the message.
    """
    if not truth:
        raise CheckFailed(defect)


@contextmanager
def about(title: str) -> Iterator[None]:
    """Begin the messages of failures in this block with ``title``."""
    try:
        yield
    except CheckFailed as error:
        raise CheckFailed(f"{title}: {error}") from error.__cause__


def describe(error: BaseException) -> str:
    """An exception in one line, with the place that raised it.

    That is the innermost line of the recipe's own code, or of any code if the recipe has none in
    the traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*_FOREIGN, "<"))]
    text = f"{type(error).__name__}: {first_line(error)}"
    if not frames:
        return text
    frame = (own or frames)[-1]
    return f"{text}, raised at {frame.filename}:{frame.lineno} in {frame.name}()"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    return (text_of(error).splitlines() or [""])[0]


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
    tensors = dict(vars(thing))
    if isinstance(thing, QuantizedTensorStorage):
        tensors |= inner_by_name(thing)
    return {
        name: value
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, QuantizedTensorStorage)
    }


def parts(thing: Any) -> dict[Any, torch.Tensor]:
    """The plain tensors that comparisons of bytes see, by name.

    These are the inner tensors of a storage, and the values of a plain tensor or of each of a list.
    """
    if isinstance(thing, QuantizedTensorStorage):
        return inner_by_name(thing)
    if isinstance(thing, torch.Tensor):
        return {"": thing}
    if isinstance(thing, Mapping):
        return dict(thing)
    return {number: plain(tensor) for number, tensor in enumerate(thing)}


def snapshot(thing: Any) -> dict[Any, torch.Tensor]:
    """Copies of :func:`parts`."""
    return {name: tensor.detach().clone() for name, tensor in parts(thing).items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes.

    NaN therefore equals the same NaN, and 0 differs from -0.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    mine, theirs = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(mine, theirs)


def difference(one: Any, other: Any) -> str | None:
    """Words for the first difference in the bytes of :func:`parts`; None where there is none."""
    mine, theirs = parts(one), parts(other)
    if set(mine) != set(theirs):
        return f"another {min(map(str, set(mine) ^ set(theirs)))!r}"
    for name, tensor in mine.items():
        if same(tensor, theirs[name]):
            continue
        if isinstance(name, str) and name:
            return f"another {name!r}"
        if tensor.shape != theirs[name].shape:
            return f"another shape, {tuple(tensor.shape)}"
        return f"other values (off by {relative(tensor, theirs[name]):.3g} of their norm)"
    return None


def require_same(title: str, one: Any, other: Any) -> None:
    """Compare byte by byte, as :func:`difference`.

    Raises:
        CheckFailed: they differ; the message is ``title`` and what differs.
    """
    words = difference(one, other)
    require(words is None, f"{title} {words}")


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


def _is_transposed(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    if actual.dim() != 2 or expected.dim() != 2 or actual.numel() != expected.numel():
        return False
    transpose = expected.t()
    wrong = [transpose, transpose.reshape(expected.shape), expected.reshape(transpose.shape).t()]
    return any(w.shape == actual.shape and relative(actual, w) <= bound for w in wrong)


def explain(
    actual: torch.Tensor, expected: torch.Tensor, bound: float, before: torch.Tensor | None = None
) -> str:
    """A description of what is wrong with ``actual``.

    It continues a sentence whose subject is the name of the tensor. ``bound`` is the relative error
    that is allowed, and ``before`` are old values that should have changed.
    """
    near = max(bound, 1e-6)
    if _is_transposed(actual, expected, near):
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
    actual: Any,
    expected: Any,
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
    actual, expected = plain(actual), plain(expected)
    error = relative(actual, expected) if actual.shape == expected.shape else float("inf")
    if not error <= bound:
        raise CheckFailed(f"{title} {explain(actual, expected, bound, before)}")
