"""Checks of quantized values: accuracy, shapes, strides, dtypes, special values."""

from __future__ import annotations

import math
from typing import Any

import torch

from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava_testing.compare import close, inner_by_name, normal, plain, require, wide
from ottava_testing.subject import ROLES, Subject
from ottava_testing.table import BLOCKS, DETERMINISTIC, FAKE_QUANTIZES, STATELESS, check

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_RAGGED = ((), (1,), (7,), (33, 65), (2, 3, 32), (129, 2), (1, 1), (5, 1, 3, 17))
_EMPTY = ((0,), (0, 16), (16, 0), (2, 0, 8), (0, 0))


def _loose(subject: Subject) -> float:
    """A wider bound, for so few values that a format may fit them badly."""
    return min(0.5, max(4 * subject.bound, 0.2))


@check(
    "accuracy",
    "values",
    "Quantized and dequantized, normally distributed values are within relative_error",
)
def accuracy(subject: Subject) -> None:
    """Every role with every usage."""
    for rowwise, columnwise in ((True, False), (False, True), (True, True)):
        for words, quantizer in subject.quantizers(rowwise=rowwise, columnwise=columnwise):
            for dtype in (torch.float32, torch.bfloat16):
                values = normal(64, 96, seed=1, dtype=dtype)
                actual = plain(quantizer(values))
                title = (
                    f"what {words} gives, rowwise={rowwise} and columnwise={columnwise}, "
                    f"dequantized,"
                )
                close(title, actual, values, subject.bound)


@check(
    "shapes", "values", "Tensors of any shape are quantized, ragged ones too, and keep their shape"
)
def shapes(subject: Subject) -> None:
    """No shape is padded or refused."""
    for words, quantizer in subject.quantizers():
        for shape in _RAGGED:
            _shape(
                f"a tensor of shape {shape} quantized by {words}",
                quantizer,
                normal(*shape, seed=5) + 2,
                subject,
            )


@check("empty-shapes", "values", "Tensors without elements are quantized and dequantized")
def empty_shapes(subject: Subject) -> None:
    """Sizes of 0 in any dimension."""
    for words, quantizer in subject.quantizers():
        for shape in _EMPTY:
            title = f"an empty tensor of shape {shape} quantized by {words}"
            try:
                _shape(title, quantizer, torch.zeros(shape), subject)
            except (RuntimeError, IndexError, ZeroDivisionError) as error:
                require(
                    False, f"{title} fails: {type(error).__name__}: {str(error).splitlines()[0]}"
                )


def _shape(title: str, quantizer: Quantizer, values: torch.Tensor, subject: Subject) -> None:
    storage: QuantizedTensorStorage = quantizer(values)
    require(
        tuple(storage.size()) == tuple(values.shape), f"{title} has shape {tuple(storage.size())}"
    )
    require(storage.numel() == values.numel(), f"{title} has {storage.numel()} elements")
    close(f"{title}, dequantized,", plain(storage), values, _loose(subject))


def _layouts() -> dict[str, torch.Tensor]:
    base = wide(48, 80, seed=4)
    return {
        "a transposed tensor": base.t(),
        "every second column": base[:, ::2],
        "every third row": base[::3],
        "a slice with an offset": base[5:40, 7:71],
        "an expanded row": base[:1].expand(16, 80),
        "a permuted tensor": base.view(4, 12, 80).permute(2, 0, 1),
    }


@check(
    "non-contiguous",
    "values",
    "Tensors that are not contiguous give what contiguous ones of their values give",
)
def non_contiguous(subject: Subject) -> None:
    """Quantizers read inputs by their strides."""
    for words, quantizer in subject.quantizers():
        for layout, values in _layouts().items():
            actual, expected = quantizer(values), quantizer(values.contiguous())
            title = f"{layout} (not contiguous) is misread by {words}: it"
            close(
                title,
                plain(actual),
                plain(expected),
                0.0 if subject.spec.deterministic else subject.bound,
            )


@check("dtypes", "values", "float32, bfloat16 and float16 are taken, and kept as the nominal dtype")
def dtypes(subject: Subject) -> None:
    """The nominal dtype, the argument dtype=, and dequantize(dtype)."""
    for words, quantizer in subject.quantizers():
        for dtype in _DTYPES:
            storage = quantizer(wide(24, 40, dtype=dtype))
            require(
                storage.dtype == dtype,
                f"a {dtype} tensor quantized by {words} has the nominal dtype {storage.dtype}",
            )
            values_dtype = plain(storage).dtype
            require(
                values_dtype == dtype,
                f"a {dtype} tensor quantized by {words} dequantizes to {values_dtype}",
            )
            for other_dtype in _DTYPES:
                values = storage.dequantize(other_dtype)
                cls = type(storage).__name__
                require(
                    values.dtype == other_dtype,
                    f"dequantize({other_dtype}) of a {cls} ignores dtype and gives {values.dtype}",
                )
                close(
                    f"dequantize({other_dtype}) of a {cls}", values.detach(), plain(storage), 0.01
                )
            as_bfloat16 = quantizer.quantize(wide(24, 40, dtype=dtype), dtype=torch.bfloat16)
            require(
                as_bfloat16.dtype == torch.bfloat16,
                f"quantize(dtype=torch.bfloat16) by {words} gives {as_bfloat16.dtype}",
            )


@check("zeros", "values", "Zeros stay zeros, whole tensors of them and single ones")
def zeros(subject: Subject) -> None:
    """A block of zeros gets a scale that keeps it zero."""
    for words, quantizer in subject.quantizers():
        actual = plain(quantizer(torch.zeros(40, 48)))
        require(
            not bool(actual.any()),
            f"zeros quantized by {words} dequantize to {float(actual.abs().max()):.3g}",
        )
        mixed = wide(40, 48)
        mixed[3], mixed[:, 5] = 0.0, -0.0
        actual = plain(quantizer(mixed))
        require(
            not bool(actual[3].any()) and not bool(actual[:, 5].any()),
            f"{words} makes something else of single zeros",
        )


@check("tiny-values", "values", "Subnormal values stay finite and small")
def tiny_values(subject: Subject) -> None:
    """The scale of very small values is finite."""
    for words, quantizer in subject.quantizers():
        for magnitude in (1e-30, 1e-38, 1e-40, 1e-45):
            values = normal(40, 48).clamp(-4, 4) * magnitude
            actual = plain(quantizer(values))
            largest = float(values.abs().max())
            title = f"values of magnitude {magnitude} quantized by {words} dequantize to"
            require(bool(torch.isfinite(actual).all()), f"{title} NaN or inf")
            largest_actual = float(actual.abs().max())
            require(
                largest_actual <= max(2 * largest, 1e-37),
                f"{title} {largest_actual:.3g} at most, in place of {largest:.3g}",
            )


@check("large-values", "values", "The largest values stay near what they are", STATELESS)
def large_values(subject: Subject) -> None:
    """The scale of very large values is not zero."""
    for words, quantizer in subject.quantizers():
        for magnitude in (1e20, 3e38):
            signs = (normal(40, 48).clamp(-1, 1) + 2).sign()
            values = signs * magnitude * normal(40, 48, seed=1).clamp(-1, 1)
            actual = plain(quantizer(values * 0.9))
            close(
                f"values up to {magnitude} quantized by {words}",
                actual,
                values * 0.9,
                _loose(subject),
            )


@check(
    "special-values",
    "values",
    "NaN and infinities raise nothing, are not hidden, and leave other rows alone where those "
    "have scales of their own",
)
def special_values(subject: Subject) -> None:
    """Tensors with one element that is not finite, and with no finite element."""
    for words, quantizer in subject.quantizers():
        for special in (math.nan, math.inf, -math.inf):
            values = normal(64, 96)
            values[1, 2] = special
            actual = plain(quantizer(values))
            value = float(actual[1, 2])
            title = f"{special} quantized by {words} dequantizes to {value:.3g}"
            require(_shows(value, special), f"{title}, which hides it")
            everything = plain(quantizer(torch.full((64, 96), special)))
            require(
                tuple(everything.shape) == (64, 96),
                f"a tensor of {special} quantized by {words} has another shape",
            )
    rows = (subject.spec.block_size or (None, None))[0]
    if rows is not None:
        _other_rows(subject, rows)


def _shows(value: float, special: float) -> bool:
    """Whether a dequantized value shows that the original was ``special``: NaN or infinite."""
    if math.isnan(value):
        return True
    if math.isnan(special):
        return math.isinf(value)
    return value * special > 0


def _other_rows(subject: Subject, rows: int) -> None:
    values = normal(4 * rows + 3, 96)
    for internal in (True, False):
        quantizer = subject.quantizer("input", internal=internal, columnwise=False)
        clean = plain(quantizer(values))[rows:]
        for special in (math.nan, math.inf, -math.inf):
            changed = values.clone()
            changed[0, 2] = special
            others = plain(quantizer(changed))[rows:]
            title = (
                f"one {special} among what the quantizer of 'input' with internal={internal} "
                f"quantizes"
            )
            require(
                bool(torch.isfinite(others).all()),
                f"{title} makes NaN or inf of rows in other blocks",
            )
            alone = torch.equal(others, clean) or not subject.spec.deterministic
            require(alone, f"{title} changes rows in other blocks")


@check("blocks", "values", "A value changes the scale of its own block only", BLOCKS, DETERMINISTIC)
def blocks(subject: Subject) -> None:
    """The spec's block_size, for inputs."""
    # None means that all rows, or all columns, share a scale.
    rows, columns = subject.spec.block_size or (None, None)
    values = wide(4 * (rows or 8) + 3, 3 * max(columns or 8, 8) + 5)
    changed = values.clone()
    changed[0, 0] = 1e4
    for internal in (True, False):
        quantizer = subject.quantizer("input", internal=internal, columnwise=False)
        before, after = (plain(quantizer(v)) for v in (values, changed))
        title = (
            f"block_size={subject.spec.block_size} in the spec is not so: a value in the first "
            f"block changed"
        )
        require(rows is None or torch.equal(before[rows:], after[rows:]), f"{title} rows of others")
        apart = columns is None or torch.equal(before[:, columns:], after[:, columns:])
        require(apart, f"{title} columns of others")


@check(
    "fake-quantization",
    "values",
    "fake_quantizer serves the formats that the spec lists",
    FAKE_QUANTIZES,
)
def fake_quantization(subject: Subject) -> None:
    """Values that are fake-quantized to each format, in each dtype."""
    recipe = subject.recipe()
    for name in subject.spec.fake_quant_formats:
        quantizer = recipe.fake_quantizer(name)
        require(
            isinstance(quantizer, Quantizer),
            f"fake_quantizer({name!r}) gives a {type(quantizer).__name__}",
        )
        for dtype in _DTYPES:
            values = normal(33, 65, dtype=dtype)
            quantize: Any = quantizer
            result = plain(quantize(values)).to(dtype)
            close(
                f"{dtype} values fake-quantized by {name}", result, values, max(subject.bound, 0.1)
            )


@check(
    "quantizing-on-meta",
    "values",
    "A tensor on the meta device gives a result of the same layout there",
    STATELESS,
)
def quantizing_on_meta(subject: Subject) -> None:
    """Models on the meta device are made without memory."""
    for role in ROLES:
        quantizer = subject.quantizer(role)
        real, on_meta = quantizer(wide(48, 40)), quantizer(wide(48, 40).to("meta"))
        title = f"the quantizer of {role!r} on the meta device"
        for name, tensor in inner_by_name(real).items():
            other = inner_by_name(on_meta).get(name)
            require(other is not None and other.is_meta, f"{title} gives no {name!r} there")
            assert other is not None
            require(
                other.shape == tensor.shape, f"{title} gives {name!r} of shape {tuple(other.shape)}"
            )
            require(other.dtype == tensor.dtype, f"{title} gives {name!r} of {other.dtype}")
