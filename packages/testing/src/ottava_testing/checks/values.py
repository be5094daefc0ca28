"""Checks of quantized values: accuracy, shapes, strides, dtypes, special values."""

from __future__ import annotations

import math
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from ottava.contract import Interpretation
from ottava.contract.steps import USAGES, Usage, steps_of, takes_scale
from ottava.gemm import side_of, stored_tensors
from ottava.kernels import fixed_seed
from ottava.tensors import Quantizer
from ottava_testing import table
from ottava_testing.compare import (
    CheckFailed,
    close,
    first_line,
    inner_by_name,
    normal,
    plain,
    relative,
    require,
    require_same,
    wide,
)
from ottava_testing.subject import ROLES, Subject
from ottava_testing.table import BLOCKS, DETERMINISTIC, FAKE_QUANTIZES, STATELESS

check = partial(table.check, "values")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_RAGGED = ((), (1,), (7,), (33, 65), (2, 3, 32), (129, 2), (1, 1), (5, 1, 3, 17))
#: Of random words.
_SEED = 1234
_EMPTY = ((0,), (0, 16), (16, 0), (2, 0, 8), (0, 0))


@check()
def accuracy(subject: Subject) -> None:
    """Quantized and dequantized, normally distributed values are within relative_error."""
    for rowwise, columnwise in ((True, False), (False, True), (True, True)):
        for title, quantizer in subject.quantizers(rowwise=rowwise, columnwise=columnwise):
            words = f"what {title} gives, rowwise={rowwise} and columnwise={columnwise},"
            for dtype in (torch.float32, torch.bfloat16):
                values = normal(64, 96, seed=1, dtype=dtype)
                close(f"{words} dequantized,", quantizer(values), values, subject.bound)


@check(over=Subject.quantizers)
def shapes(subject: Subject, quantizer: Quantizer) -> None:
    """Tensors of any shape are quantized, ragged ones too, and keep their shape."""
    for shape in _RAGGED:
        _keeps_shape(f"a tensor of shape {shape}", quantizer, normal(*shape, seed=5) + 2, subject)


@check(over=Subject.quantizers)
def empty_shapes(subject: Subject, quantizer: Quantizer) -> None:
    """Tensors without elements are quantized and dequantized."""
    for shape in _EMPTY:
        title = f"an empty tensor of shape {shape}"
        try:
            _keeps_shape(title, quantizer, torch.zeros(shape), subject)
        except (RuntimeError, IndexError, ZeroDivisionError) as error:
            text = f"{title} fails: {type(error).__name__}: {first_line(error)}"
            raise CheckFailed(text) from error


def _keeps_shape(title: str, quantizer: Quantizer, values: torch.Tensor, subject: Subject) -> None:
    storage = quantizer(values)
    shape = tuple(storage.size())
    require(shape == tuple(values.shape), f"{title}, quantized, has shape {shape}")
    require(storage.numel() == values.numel(), f"{title} has {storage.numel()} elements")
    # So few values may fit a format badly.
    close(f"{title}, quantized and dequantized,", storage, values, max(subject.loose, 0.2))


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


@check(over=Subject.quantizers)
def non_contiguous(subject: Subject, quantizer: Quantizer) -> None:
    """Tensors that are not contiguous give what contiguous ones of their values give."""
    bound = 0.0 if subject.spec.deterministic else subject.bound
    for layout, values in _layouts().items():
        title = f"{layout} (not contiguous) is misread: it"
        close(title, quantizer(values), quantizer(values.contiguous()), bound)


@check(over=Subject.quantizers)
def dtypes(subject: Subject, quantizer: Quantizer) -> None:
    """float32, bfloat16 and float16 are taken, and kept as the nominal dtype."""
    for dtype in _DTYPES:
        values = wide(24, 40, dtype=dtype)
        storage = quantizer(values)
        require(storage.dtype == dtype, f"a {dtype} tensor gets the dtype {storage.dtype}")
        expected = plain(storage)
        require(expected.dtype == dtype, f"a {dtype} tensor dequantizes to {expected.dtype}")
        for other in _DTYPES:
            actual = storage.dequantize(other)
            call = f"dequantize({other}) of a {type(storage).__name__}"
            require(actual.dtype == other, f"{call} ignores dtype and gives {actual.dtype}")
            close(call, actual, expected, 0.01)
        nominal = quantizer.quantize(values, dtype=torch.bfloat16).dtype
        require(nominal == torch.bfloat16, f"quantize(dtype=torch.bfloat16) gives {nominal}")


@check(over=Subject.quantizers)
def zeros(subject: Subject, quantizer: Quantizer) -> None:
    """Zeros stay zeros, whole tensors of them and single ones."""
    actual = plain(quantizer(torch.zeros(40, 48)))
    require(not actual.any(), f"zeros dequantize to {float(actual.abs().max()):.3g}")
    mixed = wide(40, 48)
    mixed[3], mixed[:, 5] = 0.0, -0.0
    actual = plain(quantizer(mixed))
    require(not actual[3].any() and not actual[:, 5].any(), "single zeros do not stay zeros")


@check(over=Subject.quantizers)
def tiny_values(subject: Subject, quantizer: Quantizer) -> None:
    """Subnormal values stay finite and small."""
    for magnitude in (1e-30, 1e-38, 1e-40, 1e-45):
        values = normal(40, 48).clamp(-4, 4) * magnitude
        actual = plain(quantizer(values))
        title = f"values of magnitude {magnitude} dequantize to"
        require(torch.isfinite(actual).all(), f"{title} NaN or inf")
        largest, expected = float(actual.abs().max()), float(values.abs().max())
        words = f"{title} {largest:.3g} at most, in place of {expected:.3g}"
        require(largest <= max(2 * expected, 1e-37), words)


@check(STATELESS, over=Subject.quantizers)
def large_values(subject: Subject, quantizer: Quantizer) -> None:
    """The largest values stay near what they are."""
    for magnitude in (1e20, 3e38):
        signs = (normal(40, 48).clamp(-1, 1) + 2).sign()
        values = signs * magnitude * normal(40, 48, seed=1).clamp(-1, 1) * 0.9
        close(f"values up to {magnitude}", quantizer(values), values, max(subject.loose, 0.2))


@check()
def special_values(subject: Subject) -> None:
    """NaN and infinities raise nothing, are not hidden, and leave other rows alone where those
    have scales of their own.

    A format without NaN has a number in its place. Infinities set a second level of scales, which
    other rows share.
    """
    for title, quantizer in subject.quantizers():
        for special in (math.nan, math.inf, -math.inf):
            values = normal(64, 96)
            values[1, 2] = special
            value = float(plain(quantizer(values))[1, 2])
            words = f"{title}: {special} dequantizes to {value:.3g}, which hides it"
            is_free = math.isnan(special) and not subject.spec.shows_nan
            require(is_free or _shows(value, special), words)
            shape = tuple(plain(quantizer(torch.full((64, 96), special))).shape)
            require(shape == (64, 96), f"{title}: a tensor of {special} gets shape {shape}")
    rows = (subject.spec.block_size or (None, None))[0]
    for internal in (True, False) if rows is not None else ():
        _other_rows(subject, subject.quantizer(internal=internal, columnwise=False), rows or 0)


def _shows(value: float, special: float) -> bool:
    """Whether a dequantized value shows that the original was ``special``: NaN or infinite."""
    if math.isnan(value):
        return True
    return math.isinf(value) if math.isnan(special) else value * special > 0


def _other_rows(subject: Subject, quantizer: Quantizer, rows: int) -> None:
    values = normal(4 * rows + 3, 96)
    clean = plain(quantizer(values))[rows:]
    for special in (math.nan, math.inf, -math.inf):
        changed = values.clone()
        changed[0, 2] = special
        others = plain(quantizer(changed))[rows:]
        title = f"one {special} in an input quantized with internal={quantizer.internal}"
        words = f"{title} makes NaN or inf of rows in other blocks"
        require(torch.isfinite(others).all(), words)
        is_free = math.isinf(special) and subject.spec.second_level
        is_same = torch.equal(others, clean) or not subject.spec.deterministic
        require(is_free or is_same, f"{title} changes rows in other blocks")


@check(BLOCKS, DETERMINISTIC)
def blocks(subject: Subject) -> None:
    """A value changes the scale of its own block only.

    With a second level of scales other blocks may be rounded otherwise, but stay near their values.
    """
    # None means that all rows, or all columns, share a scale.
    rows, columns = subject.spec.block_size or (None, None)
    values = wide(4 * (rows or 8) + 3, 3 * max(columns or 8, 8) + 5)
    changed = values.clone()
    changed[0, 0] = 1e4
    start = f"block_size={subject.spec.block_size} in the spec is not so"
    for internal in (True, False):
        quantizer = subject.quantizer(internal=internal, columnwise=False)
        before, after = (plain(quantizer(v)) for v in (values, changed))
        words = f"{start}: a value in the first block changed"
        for name, size, dim in (("rows", rows, 0), ("columns", columns, 1)):
            if size is None:
                continue
            one, other = (t.narrow(dim, size, t.shape[dim] - size) for t in (before, after))
            is_same = torch.equal(one, other)
            if subject.spec.second_level:
                is_same = relative(other, one) <= subject.loose
            require(is_same, f"{words} {name} of others")


@check(FAKE_QUANTIZES)
def fake_quantization(subject: Subject) -> None:
    """fake_quantizer serves the formats that the spec lists."""
    recipe = subject.recipe()
    for name in subject.spec.fake_quant_formats:
        quantizer: Any = recipe.fake_quantizer(name)
        words = f"fake_quantizer({name!r}) gives a {type(quantizer).__name__}"
        require(isinstance(quantizer, Quantizer), words)
        for dtype in _DTYPES:
            values = normal(33, 65, dtype=dtype)
            title = f"{dtype} values fake-quantized to {name}"
            close(title, quantizer(values), values, max(subject.bound, 0.1))


@check(STATELESS)
def quantizing_on_meta(subject: Subject) -> None:
    """A tensor on the meta device gives a result of the same layout there."""
    for role in ROLES:
        quantizer = subject.quantizer(role)
        on_meta = inner_by_name(quantizer(wide(48, 40).to("meta")))
        title = f"the quantizer of {role!r} on the meta device gives"
        for name, expected in inner_by_name(quantizer(wide(48, 40))).items():
            actual = on_meta.get(name)
            require(actual is not None and actual.is_meta, f"{title} no {name!r} there")
            for what in ("shape", "dtype"):
                words = f"{title} {name!r} of another {what}"
                require(getattr(actual, what) == getattr(expected, what), words)


@check(over=Subject.quantizers)
def contract(subject: Subject, quantizer: Quantizer) -> None:
    """The bytes are those of the quantizer's contract, if that states every choice."""
    if not quantizer.contract.is_stated:
        return
    for values in (wide(65, 130), wide(48, 40, dtype=torch.bfloat16), _special_rows()):
        with fixed_seed(_SEED):
            result = quantizer(values)
        for usage in USAGES:
            if side_of(result, usage == "columnwise") is None:
                continue
            stored = stored_tensors(result, usage)
            for name, expected in _by_contract(quantizer, usage, values).items():
                words = f"the {usage} {name} are not those of the contract:"
                require_same(words, stored[name].reshape(-1), expected.reshape(-1))


def _by_contract(quantizer: Quantizer, usage: Usage, values: torch.Tensor) -> dict[str, Any]:
    """What the contract of a quantizer stores of a matrix."""
    scale = None
    if takes_scale(steps_of(quantizer.contract, usage)):
        # It may be an attribute or a property.
        scale = float(attrgetter("scale")(quantizer))
    return Interpretation(quantizer.contract, usage, values, seed=_SEED, scale=scale).parts


def _special_rows() -> torch.Tensor:
    """A matrix with zeros, large and small values, and rows with one infinity or NaN each."""
    values = wide(64, 64, seed=1)
    values[0] = 0.0
    values[1], values[2] = -values[1] * 2.0**100, values[2] * 2.0**-140
    for row, special in enumerate((math.inf, -math.inf, math.nan), start=3):
        values[row, row] = special
    return values
