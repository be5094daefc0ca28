"""The table of kernels: each operation once, with its schema and what it returns.

A backend (``reference``, ``cpu``, ``cuda``) has a function of the same name for each row. It writes
into given outputs, which are contiguous, and does nothing else: ``name(*arguments, outputs)``,
without the trailing arguments that only say which outputs there are. ``outputs`` is a tensor, or a
sequence of them with None for what is not wanted. Allocations, the choice of the backend, and the
operators ``ottava::name`` with their fake implementations, so that
``torch.compile(fullgraph=True)`` sees through them, are made here from the rows. Operators are
defined with the low-level ``Library`` interface, whose calls cost a few microseconds; where nobody
would see an operator, the backend is called without one.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ottava.kernels.backends import backend_module
from ottava.kernels.checks import Outputs
from ottava.kernels.direct import is_direct
from ottava.layout import Layout
from ottava.torch_private import graph_task_id

LIBRARY = torch.library.Library("ottava", "DEF")
Tensor = torch.Tensor
_Outputs = Callable[..., Any]
_DATA, _FLOATS = torch.uint8, torch.float32
# For each device a float32 scalar to be like: sizes in a tuple take a microsecond longer than a
# tensor to be like.
_scalars: dict[torch.device, Tensor] = {}


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An operator, and what stands for it where there are no values."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ottava::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.ottava, name)


def _arguments(schema: str) -> dict[str, str]:
    """The types of an operator's arguments by their names, as its schema,
    ``"name(type name, …) -> …"``, has them."""
    written = schema.partition("(")[2].partition(") -> ")[0]
    pairs = [argument.rpartition(" ") for argument in written.split(", ")]
    return {name: kind for kind, _, name in pairs}


# What makes outputs, still to be written, from the arguments of a call.


def _scalar(x: Tensor, *_: Any) -> Tensor:
    if type(x) is not Tensor:
        return x.new_empty((), dtype=_FLOATS)
    if (known := _scalars.get(x.device)) is not None:
        return torch.empty_like(known)
    made = torch.empty((), dtype=_FLOATS, device=x.device)
    # What is made while a CUDA graph is captured belongs to the graph's memory, which it would
    # keep.
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        _scalars[x.device] = torch.empty_like(made)
    return made


def _new(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype = _DATA) -> Tensor:
    # For a tensor of memory torch.empty takes half the time.
    if type(x) is Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)
    return x.new_empty(shape, dtype=dtype)


def _transposed(x: Tensor, *_: Any) -> Tensor:
    shape = x.shape
    return _new(x, (shape[-1], *shape[:-1]))


def _values(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=arguments[-1])


def _quantized(x: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    rowwise, transposed = arguments[-2:]
    data = (
        torch.empty_like(x, dtype=_DATA, memory_format=torch.contiguous_format) if rowwise else None
    )
    return data, _transposed(x) if transposed else None, _scalar(x)


def _quantized_anew(
    x: Tensor, *arguments: Any, for_layer: bool = False
) -> tuple[Tensor | None, ...]:
    data, turned, scale_inv = _quantized(x, *arguments)
    return (
        data,
        turned,
        None if for_layer else _scalar(x),
        scale_inv,
        None if for_layer else _scalar(x),
    )


def _on_grid(x: Tensor, text: str, *wanted: bool) -> tuple[Tensor | None, ...]:
    # Sizes that a graph does not know yet are no key.
    shapes = (_shapes if type(x) is Tensor else _shapes.__wrapped__)(text, x.shape)
    made: list[Tensor | None] = []
    for asked, (data, scales, dtype) in zip(wanted, shapes, strict=True):
        made += [_new(x, data), _new(x, scales, dtype)] if asked else [None, None]
    return tuple(made)


@functools.lru_cache(maxsize=4096)
def _shapes(text: str, shape: torch.Size) -> list[tuple[Any, Any, torch.dtype]]:
    """The shapes of data and scales of both directions, and the dtype of the scales."""
    layout = Layout.of(text)
    sides = False, True
    return [
        (layout.data_shape(shape, side), layout.scale_shape(shape, side), layout.stored_scale)
        for side in sides
    ]


def _scales(amax: Tensor, text: str, *_: Any) -> tuple[Tensor | None, Tensor]:
    stored = Layout.of(text).stored_scale
    return (_values(amax, _FLOATS) if stored is _FLOATS else None), _values(amax, stored)


class Operation:
    """One row.

    Args:
        schema: of the operator; tensors come first, and the first of them is there always.
        outputs: makes the result, or a tuple of results with None for what is not wanted, of the
            arguments.
        asking: how many of the last arguments only say what is wanted: backends are not given them.
        for_layers: the same as ``outputs`` without what layers have no use for.
    """

    def __init__(
        self, schema: str, outputs: _Outputs, *, asking: int = 0, for_layers: _Outputs | None = None
    ) -> None:
        self.name = schema.partition("(")[0]
        self.outputs, self._for_layers = outputs, for_layers or outputs
        self._operator = _define(schema, self._written, self._fake)
        kinds = _arguments(schema)
        #: The names of the arguments.
        self.arguments = tuple(kinds)
        self._given = len(kinds) - asking
        self._single = schema.endswith("-> Tensor")
        # Tensors come first.
        self._tensors = sum(kind.startswith("Tensor") for kind in kinds.values())

    def __call__(self, *arguments: Any) -> Any:
        """The results: a tensor, or a tuple with empty tensors for what is not wanted. Nothing is
        checked."""
        return (
            self._written(*arguments)
            if is_direct(*arguments[: self._tensors])
            else self._operator(*arguments)
        )

    def for_layer(self, *arguments: Any) -> Any:
        """The results that a layer reads; None, or anything, for those that are not wanted. Nothing
        is checked."""
        if not is_direct(*arguments[: self._tensors]):
            return self._operator(*arguments)
        made = self._for_layers(*arguments)
        getattr(backend_module(arguments[0].device.type), self.name)(
            *arguments[: self._given], made
        )
        return made

    def into(self, outputs: Outputs, *arguments: Any) -> None:
        """Write the results into ``outputs``, None for what is not wanted. Nothing is checked, and
        nothing traced."""
        wanted = outputs[0] if self._single else outputs
        getattr(backend_module(arguments[0].device.type), self.name)(
            *arguments[: self._given], wanted
        )

    def _written(self, *arguments: Any) -> Any:
        made = self.outputs(*arguments)
        getattr(backend_module(arguments[0].device.type), self.name)(
            *arguments[: self._given], made
        )
        return made if self._single else _with_empty(made)

    def _fake(self, *arguments: Any) -> Any:
        made = self.outputs(*arguments)
        return made if self._single else _with_empty(made)


def _with_empty(made: Outputs) -> tuple[Tensor, ...]:
    """Operators return no None: what is not wanted is an empty tensor."""
    found = next(result for result in made if result is not None)
    return tuple(
        [found.new_empty((0,), dtype=_DATA) if result is None else result for result in made]
    )


amax = Operation("amax(Tensor x) -> Tensor", _scalar)
scale_from_amax = Operation(
    "scale_from_amax(Tensor amax, ScalarType fp8_dtype, float epsilon, bool force_pow_2) -> "
    "(Tensor, Tensor)",
    lambda amax, *_: (amax.new_empty(amax.shape), amax.new_empty(amax.shape)),
)
quantize = Operation(
    "quantize(Tensor x, ScalarType fp8_dtype, float epsilon, bool force_pow_2, bool rowwise, bool "
    "transposed)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantized_anew,
    asking=2,
    for_layers=functools.partial(_quantized_anew, for_layer=True),
)
cast_amax = Operation(
    "cast_amax(Tensor x, Tensor scale, Tensor(a!)? amax, Tensor(b!)? saturated, ScalarType "
    "fp8_dtype, bool rowwise,"
    " bool transposed) -> (Tensor, Tensor, Tensor)",
    _quantized,
    asking=2,
)
transpose = Operation("transpose(Tensor data) -> Tensor", _transposed)
# A layout travels as its text.
grid_scales = Operation(
    "grid_scales(Tensor amax, str layout, ScalarType dtype) -> (Tensor, Tensor)", _scales
)
grid_quantize = Operation(
    "grid_quantize(Tensor x, str layout, bool rowwise, bool columnwise) -> (Tensor, Tensor, "
    "Tensor, Tensor)",
    _on_grid,
    asking=2,
)
grid_decode = Operation(
    "grid_decode(Tensor data, Tensor? scales, str layout, bool columnwise, ScalarType dtype) -> "
    "Tensor",
    _values,
    asking=1,
)
#: Those that give tensors, by name.
OPERATIONS = {row.name: row for row in list(globals().values()) if isinstance(row, Operation)}


def define_product(
    schema: str, function: Callable[..., Tensor], sizes: Callable[..., tuple[Any, Any, Any]]
) -> Any:
    """The operator of a product, with what torch asks of one: a fake implementation, and how many
    operations it takes.

    Args:
        schema: with two operands first, and an argument ``out_dtype``.
        sizes: rows, columns and the reduced size of the product, from the operands' shapes and the
            other arguments.
    """

    def fake(*arguments: Any) -> Tensor:
        a, b, *rest = arguments
        return a.new_empty(sizes(a.shape, b.shape, *rest)[:2], dtype=arguments[dtype_at])  # type: ignore[no-any-return]

    def flops(*arguments: Any, **_: Any) -> int:
        rows, columns, inner = sizes(*arguments)
        # Two for each multiply-add, as torch counts its own products.
        return int(2 * rows * columns * inner)

    operator = _define(schema, function, fake)
    dtype_at = [*_arguments(schema)].index("out_dtype")
    register_flop_formula(operator)(flops)
    return operator


# What a compiler would compute otherwise than eager code does, if it saw through: it adds in
# another order, and leaves out the rounding of what it does not store.
_define(
    "sum_rows(Tensor x, ScalarType dtype) -> Tensor",
    lambda x, dtype: x.sum(0, dtype=dtype),
    lambda x, dtype: x.new_empty(x.shape[1:], dtype=dtype),
)
_define("rounded(Tensor x) -> Tensor", torch.clone, torch.empty_like)


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.sum(0, dtype=dtype)`` in compiled code."""
    return torch.ops.ottava.sum_rows(x, dtype)  # type: ignore[no-any-return]


def rounded(x: Tensor) -> Tensor:
    """``x`` as its dtype holds it, in compiled code too: a copy there, unless that is float32."""
    return (
        torch.ops.ottava.rounded(x) if torch.compiler.is_compiling() and x.dtype != _FLOATS else x
    )


def _update_scales(scales: list[Tensor], *rest: Any) -> None:
    # No step begins in a backward pass. Compiled code cannot tell, and is run again there by
    # activation checkpointing.
    if scales and graph_task_id() == -1:
        backend_module(scales[0].device.type).update_scales(scales, *rest)


_define(
    "update_scales(Tensor(a!)[] scales, Tensor(b!)[] histories, float[] maxima, bool most_recent, "
    "Tensor? last) -> ()",
    _update_scales,
    lambda *_: None,
)


def update_scales(scales: list[Tensor], histories: list[Tensor], *rest: Any) -> None:
    """As an :class:`Operation`, of many tensors in place:
    ``(scales, histories, maxima, most_recent, last)``."""
    direct = is_direct(*scales, *histories, rest[-1])
    (_update_scales if direct else torch.ops.ottava.update_scales)(scales, histories, *rest)
