"""Calls a function on the inputs of golden vectors, and reads what it returns."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ottava.cli.references import ANYTHING
from ottava.contract.numbers import middles, with_neighbours
from ottava.contract.steps import Steps, Usage, takes_scale
from ottava.errors import DTypeError, UsageError, text_of
from ottava.gemm import Operand, stored_tensors
from ottava.kernels import fixed_seed
from ottava.tensors import QuantizedTensorStorage, Quantizer
from ottava_verify.contracts import Named
from ottava_verify.inputs import DTYPES, inputs_of, outliers
from ottava_verify.search import Case
from ottava_verify.stored import INVERSE, Stored, of_parts
from ottava_verify.vectors import SCALE, SEED

Tensor = torch.Tensor
_EXPECTED = (
    "(data, scales), (data, scales, amax), a mapping with 'data' and 'scales', or a quantized "
    "tensor of Ottava"
)
#: Names in mappings. Those of a second level say what it is.
_DATA = ("data", "qdata", "q", "weight", "weight_packed", "codes")
_SCALES = ("scales", "scale", "scale_inv", "block_scales", "weight_scale", "weight_scale_inv")
_LEVELS: Mapping[str, tuple[str, ...]] = {
    "amax": ("amax",),
    "global_amax": ("amax",),
    "global_scale": (),
    "per_tensor_scale": INVERSE,
    "weight_scale_2": INVERSE,
    "global_scale_inv": INVERSE,
    "weight_global_scale": ("whole/amax",),
}


#: Kernels may refuse matrices whose sides are no multiples of it.
_WHOLE = 128
_SCALED = 16
# Ties of the elements are nearly ties of values with these factors.
_FACTORS = (1, 1.1, 1.3, 1.7)
# The range of magnitudes of usual inputs.
_LEAST, _LARGEST = 2.0**-20, 2.0**20


@dataclass(frozen=True)
class Input:
    """A matrix that a function is called with, and the scale or the seed that it gets besides.

    ``is_usual`` as of :class:`~ottava_verify.search.Case`.
    """

    name: str
    x: Tensor
    scale: float | None = SCALE
    seed: int | None = SEED
    is_usual: bool = True

    @property
    def may_be_refused(self) -> bool:
        """Whether a kernel for whole blocks may refuse it."""
        return any(size % _WHOLE or not size for size in self.x.shape)


def golden_inputs(named: Named) -> Iterator[Input]:
    """The inputs of golden vectors for a contract, and usual ones of whole blocks: most functions
    do something of their own with NaN and infinities, which would hide everything else."""
    steps = named.steps
    golden = inputs_of([steps])
    for name, dtype in DTYPES.items():
        yield Input(f"usual/{name}", _usual(outliers(128, 256, seed=4, dtype=dtype)))
    yield Input("usual/every", _usual(golden["bfloat16/every"]))
    if None in steps.amax.block:
        # A matrix has few scales then, and one of them alone tells little.
        x = outliers(128, 128, seed=5)
        for i in range(_SCALED):
            yield Input(f"usual/scaled_{i}", _usual(x * (1 + i / _SCALED)))
    if steps.second_level is not None:
        for factor in _FACTORS:
            yield Input(f"usual/scales_times_{factor}", _usual(_ties_of_scales(steps, factor)))
    for name, x in golden.items():
        if "ties" in name:
            for factor in _FACTORS:
                yield Input(f"usual/{name}_times_{factor}", _usual(x * factor))
    for name, x in golden.items():
        yield Input(name, x, is_usual=False)


def _ties_of_scales(steps: Steps, factor: float) -> Tensor:
    """Blocks whose scales in a byte are nearly halfway between two numbers, by their amaxes."""
    level = steps.second_level
    assert level is not None
    ties = middles(steps.scale.format) * level.maximum
    amaxes = with_neighbours(ties).flatten().repeat(6)[:2048].view(128, 16, 1)
    shares = torch.linspace(1.0, 0.1, 16)
    # The first block has the amax of the whole, for which the scale of the second level is 1.
    amaxes[0, 0] = level.bound * level.maximum
    return ((amaxes * factor) * shares).reshape(128, 256)


def _usual(x: Tensor) -> Tensor:
    """A matrix with 1 in the place of what is not usual."""
    magnitudes = x.float().abs()
    return torch.where((magnitudes >= _LEAST) & (magnitudes <= _LARGEST), x, 1.0)


def cases_of(
    function: Callable[..., Any], inputs: Iterable[Input], named: Named, *, as_numpy: bool
) -> tuple[list[Case], dict[str, str], bool]:
    """What a function makes of inputs; the errors of those on which it fails, by input; and whether
    one of these is a matrix that no kernel may refuse."""
    cases, errors, fails = [], {}, False
    for item in inputs:
        try:
            stored = read(_called(function, item, named, as_numpy=as_numpy), named.usage)
        except ANYTHING as error:
            errors[item.name] = f"{type(error).__name__}: {text_of(error)}"
            fails |= not item.may_be_refused
            continue
        cases.append(Case(item.name, item.x, stored, item.scale, item.seed, is_usual=item.is_usual))
    return cases, errors, fails


def _called(function: Callable[..., Any], item: Input, named: Named, *, as_numpy: bool) -> Any:
    """What a function returns for an input. A quantizer takes no seed, but draws one.

    Raises:
        UsageError: a quantizer is to take a scale from outside, which is a part of it.
    """
    needs_scale = takes_scale(named.steps)
    x: Any = item.x.clone()
    if as_numpy:
        # numpy has no bfloat16, so that it gets these numbers as float32.
        x = (x.float() if x.dtype == torch.bfloat16 else x).numpy()
    if not isinstance(function, Quantizer):
        scale = [item.scale] if needs_scale else []
        seed = [item.seed] if named.steps.random is not None else []
        return function(x, *scale, *seed)
    if needs_scale:
        raise UsageError(
            f"a {type(function).__name__} has a scale of its own",
            expected="a function of the matrix and the scale",
            remedy="give a function that makes a quantizer with the scale, and calls it",
        )
    with fixed_seed(item.seed or 0):
        return function(x)


def read(result: Any, usage: Usage) -> Stored:
    """The bytes in what a function returned.

    Raises:
        DTypeError: it is none of the forms that are read.
    """
    if isinstance(result, QuantizedTensorStorage | Operand):
        return of_parts(stored_tensors(result, usage))
    if isinstance(result, Mapping):
        return _of_mapping(result)
    if isinstance(result, tuple | list) and len(result) in (2, 3):
        data, scales, *more = (_tensor(part) for part in result if part is not None)
        return Stored.of(data, scales, more[0] if more else None, ("amax",))
    raise DTypeError(f"the function returned a {type(result).__name__}", expected=_EXPECTED)


def _of_mapping(result: Mapping[str, Any]) -> Stored:
    data = [name for name in _DATA if name in result]
    scales = [name for name in _SCALES if name in result]
    if not data or not scales:
        raise DTypeError(f"the function returned {sorted(result)}", expected=_EXPECTED)
    parts = _tensor(result[data[0]]), _tensor(result[scales[0]])
    for name, forms in _LEVELS.items():
        if name in result:
            return Stored.of(*parts, _tensor(result[name]), forms)
    return Stored.of(*parts)


def _tensor(value: Any) -> Tensor:
    """A tensor or an array as a tensor; of dtypes of eight bits that torch does not take, bytes."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, float | int):
        return torch.tensor(float(value))
    # Only functions of numpy need it.
    import numpy as np

    array = np.asarray(value)
    if array.dtype.kind not in "fiuV":
        raise DTypeError(f"the function returned a {type(value).__name__}", expected=_EXPECTED)
    if array.dtype.kind == "V" or array.dtype.name.startswith(("float8", "float4", "bfloat16")):
        if array.dtype.itemsize == 2:
            return torch.from_numpy(array.astype(np.float32))
        return torch.from_numpy(array.view(np.uint8).copy())
    return torch.from_numpy(array.copy())
