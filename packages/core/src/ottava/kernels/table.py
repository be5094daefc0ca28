"""The table of kernels: each operation once, with its schema and the tensors that it returns.

Every backend (``reference``, ``cpu``, ``cuda``) has a function with the name of each row (see
:class:`ottava.kernels.backends.Backend`). That function only writes into contiguous outputs:
``name(*arguments, outputs)``. Outputs are a tensor, or a sequence with None for each result that
the caller does not ask for. Last arguments that the outputs already express, such as ``rowwise`` or
a dtype, are not passed to backends.

From the rows this module makes the operators ``ottava::name`` with their fake implementations, so
that ``torch.compile(fullgraph=True)`` traces them. They are defined with the low-level ``Library``
interface, because its calls cost a few microseconds less. Where dispatch is not observed
(:mod:`ottava.kernels.direct`), a call goes to the backend without the operator.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.flop_counter import register_flop_formula

from ottava.kernels.backends import backend_module
from ottava.kernels.checks import Outputs
from ottava.kernels.direct import is_direct
from ottava.layout import Layout
from ottava.torch_private import graph_task_id

LIBRARY = torch.library.Library("ottava", "DEF")
Tensor = torch.Tensor
#: A size of a tensor, which may be symbolic in a graph.
Size = int | torch.SymInt
#: The results of a row with several of them; None for each that the caller does not ask for.
Results = tuple[Tensor | None, ...]
_Result = TypeVar("_Result")

_DATA, _FLOATS = torch.uint8, torch.float32
_ABSENT = None, None
# Device -> a float32 scalar. torch.empty_like of it is a microsecond faster than torch.empty.
_scalars: dict[torch.device, Tensor] = {}


def define(
    schema: str, function: Callable[..., _Result], fake: Callable[..., _Result]
) -> Callable[..., _Result]:
    """Define an operator, with a fake implementation for tensors that have no values."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ottava::{name}", fake, lib=LIBRARY)
    operator: Callable[..., _Result] = getattr(torch.ops.ottava, name)
    return operator


def _argument_types(schema: str) -> dict[str, str]:
    """Name -> type of each argument in a schema, ``"name(type name, …) -> …"``."""
    arguments = schema.partition("(")[2].partition(") -> ")[0]
    pairs = [argument.rpartition(" ") for argument in arguments.split(", ")]
    return {name: kind for kind, _, name in pairs}


# -- allocation of the results, whose values the backend writes, from the arguments of a call --


def _scalar(x: Tensor) -> Tensor:
    if type(x) is not Tensor:
        return x.new_empty((), dtype=_FLOATS)
    template = _scalars.get(x.device)
    if template is not None:
        return torch.empty_like(template)
    scalar = torch.empty((), dtype=_FLOATS, device=x.device)
    # A tensor from the capture of a CUDA graph would keep the graph's memory alive.
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        _scalars[x.device] = torch.empty_like(scalar)
    return scalar


def _new(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype = _DATA) -> Tensor:
    # torch.empty takes half the time of new_empty, which subclasses need.
    if type(x) is Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)
    return x.new_empty(shape, dtype=dtype)


def _transpose(x: Tensor) -> Tensor:
    shape = x.shape
    return _new(x, (shape[-1], *shape[:-1]))


def _values(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _data(x: Tensor, *options: Any) -> tuple[Tensor | None, Tensor | None]:
    """Data of the shape of ``x``, and its transpose.

    The last two options of a row that casts, ``rowwise`` and ``transposed``, ask for them.
    """
    *_, rowwise, transposed = options
    data = transpose = None
    if rowwise:
        data = torch.empty_like(x, dtype=_DATA, memory_format=torch.contiguous_format)
    if transposed:
        transpose = _transpose(x)
    return data, transpose


def _scale_from_amax(
    amax: Tensor, fp8_dtype: torch.dtype, epsilon: float, force_pow_2: bool
) -> Results:
    return amax.new_empty(amax.shape), amax.new_empty(amax.shape)


def _quantize(x: Tensor, *options: Any) -> Results:
    return *_data(x, *options), _scalar(x), _scalar(x), _scalar(x)


def _quantize_for_layer(x: Tensor, *options: Any) -> Results:
    """A layer reads neither the scale nor the amax."""
    return *_data(x, *options), None, _scalar(x), None


def _cast_amax(x: Tensor, *options: Any) -> Results:
    return *_data(x, *options), _scalar(x)


class _DirectionShapes(NamedTuple):
    """The shapes of data, scales and amaxes of one direction, and the dtype of stored scales.

    The shape of amaxes is None for a layout without a second level.
    """

    data: tuple[int, ...]
    scales: tuple[int, int]
    scale_dtype: torch.dtype
    amaxes: tuple[int, ...] | None


@functools.lru_cache(maxsize=4096)
def _grid_shapes(text: str, shape: torch.Size) -> tuple[_DirectionShapes, _DirectionShapes]:
    """The shapes for rowwise and for columnwise data of a tensor of this shape."""
    layout = Layout.of(text)
    rows, columns = (
        _DirectionShapes(
            layout.data_shape(shape, columnwise),
            layout.scale_shape(shape, columnwise),
            layout.stored_scale,
            layout.amax_shape(shape, columnwise),
        )
        for columnwise in (False, True)
    )
    return rows, columns


def _direction(x: Tensor, shapes: _DirectionShapes) -> tuple[Tensor, Tensor]:
    return _new(x, shapes.data), _new(x, shapes.scales, shapes.scale_dtype)


def _shapes_of(x: Tensor, text: str) -> tuple[_DirectionShapes, _DirectionShapes]:
    if type(x) is Tensor:
        return _grid_shapes(text, x.shape)
    # Symbolic sizes of a graph cannot be keys of the cache.
    return _grid_shapes.__wrapped__(text, x.shape)


def _grid_quantize(x: Tensor, text: str, rowwise: bool, columnwise: bool) -> Results:
    shapes = _shapes_of(x, text)
    rows: Results = _ABSENT
    columns: Results = _ABSENT
    if rowwise:
        rows = _direction(x, shapes[0])
    if columnwise:
        columns = _direction(x, shapes[1])
    return *rows, *columns


def _grid_quantize_levels(
    x: Tensor, seed: Tensor | None, first_row: int, text: str, rowwise: bool, columnwise: bool
) -> Results:
    results: list[Tensor | None] = []
    for shapes, is_requested in zip(_shapes_of(x, text), (rowwise, columnwise), strict=True):
        if not is_requested:
            results += None, None, None
            continue
        results += _direction(x, shapes)
        results.append(None if shapes.amaxes is None else _new(x, shapes.amaxes, _FLOATS))
    return tuple(results)


def _grid_scales(amax: Tensor, text: str, dtype: torch.dtype) -> Results:
    stored = Layout.of(text).stored_scale
    scale = None
    if stored is _FLOATS:
        scale = _values(amax, _FLOATS)
    return scale, _values(amax, stored)


def _decoded_shape(data: Tensor, text: str) -> tuple[int, ...]:
    """The shape of the values of stored data.

    If elements share bytes, each byte of the last dimension has two.
    """
    shape = tuple(data.shape)
    if Layout.of(text).elements_per_byte == 1:
        return shape
    return *shape[:-1], 2 * shape[-1]


def _grid_decode(
    data: Tensor, scales: Tensor | None, text: str, columnwise: bool, dtype: torch.dtype
) -> Tensor:
    return data.new_empty(_decoded_shape(data, text), dtype=dtype)


def _grid_decode_levels(
    data: Tensor, scales: Tensor, amax: Tensor, text: str, columnwise: bool, dtype: torch.dtype
) -> Tensor:
    return data.new_empty(_decoded_shape(data, text), dtype=dtype)


def _with_empty(results: Outputs) -> tuple[Tensor, ...]:
    """The results with an empty tensor in place of each None, which operators cannot return."""
    some = next(result for result in results if result is not None)
    return tuple(
        [some.new_empty((0,), dtype=_DATA) if result is None else result for result in results]
    )


# -- the rows --


class Operation:
    """A row of the table.

    Attributes:
        name: the name of the operator and of the functions of the backends.
        arguments: the names of the operator's arguments. Tensors come first, and the first of them
            is never None.
        outputs: a function that allocates the results from the arguments.

    Args:
        schema: the operator's schema.
        outputs: the attribute.
        implied: the number of last arguments that backends do not get, because the outputs express
            them.
    """

    def __init__(
        self, schema: str, outputs: Callable[..., Tensor | Results], *, implied: int = 0
    ) -> None:
        types = _argument_types(schema)
        self.name = schema.partition("(")[0]
        self.arguments = tuple(types)
        self.outputs = outputs
        self._backend_arguments = len(types) - implied
        self._tensors = sum(kind.startswith("Tensor") for kind in types.values())

    def into(self, outputs: Outputs, *arguments: Any) -> None:
        """Write the results into ``outputs``, except where they are None.

        Nothing is checked or traced.
        """
        self._write(outputs, arguments)

    def _write(self, outputs: Tensor | Outputs, arguments: tuple[Any, ...]) -> None:
        """Let the backend of the first tensor write the results."""
        kernel = getattr(backend_module(arguments[0].device.type), self.name)
        kernel(*arguments[: self._backend_arguments], outputs)


class TensorOperation(Operation):
    """A row whose result is one tensor."""

    def __init__(self, schema: str, outputs: Callable[..., Tensor], *, implied: int = 0) -> None:
        super().__init__(schema, outputs, implied=implied)
        self._allocate = outputs
        self._operator = define(schema, self._direct, outputs)

    def __call__(self, *arguments: Any) -> Tensor:
        """The result. Nothing is checked."""
        if is_direct(*arguments[: self._tensors]):
            return self._direct(*arguments)
        return self._operator(*arguments)

    def into(self, outputs: Outputs, *arguments: Any) -> None:
        """Write the result into the only output. Nothing is checked or traced."""
        (output,) = outputs
        if output is not None:
            self._write(output, arguments)

    def _direct(self, *arguments: Any) -> Tensor:
        result = self._allocate(*arguments)
        self._write(result, arguments)
        return result


class TupleOperation(Operation):
    """A row with several results.

    Args:
        schema, outputs, implied: as for every :class:`Operation`.
        layer_outputs: allocates only the results that layers read; ``outputs`` by default.
    """

    def __init__(
        self,
        schema: str,
        outputs: Callable[..., Results],
        *,
        implied: int = 0,
        layer_outputs: Callable[..., Results] | None = None,
    ) -> None:
        super().__init__(schema, outputs, implied=implied)
        self._allocate = outputs
        self._allocate_for_layer = layer_outputs or outputs
        self._operator = define(schema, self._direct, self._fake)

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The results; an empty tensor for each that the caller does not ask for.

        Nothing is checked.
        """
        if is_direct(*arguments[: self._tensors]):
            return self._direct(*arguments)
        return self._operator(*arguments)

    def for_layer(self, *arguments: Any) -> Outputs:
        """The results that a layer reads; the others are None or any tensor.

        Nothing is checked.
        """
        if not is_direct(*arguments[: self._tensors]):
            return self._operator(*arguments)
        results = self._allocate_for_layer(*arguments)
        self._write(results, arguments)
        return results

    def _direct(self, *arguments: Any) -> tuple[Tensor, ...]:
        results = self._allocate(*arguments)
        self._write(results, arguments)
        return _with_empty(results)

    def _fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        return _with_empty(self._allocate(*arguments))


amax = TensorOperation("amax(Tensor x) -> Tensor", _scalar)
scale_from_amax = TupleOperation(
    "scale_from_amax(Tensor amax, ScalarType fp8_dtype, float epsilon, bool force_pow_2) -> "
    "(Tensor, Tensor)",
    _scale_from_amax,
)
quantize = TupleOperation(
    "quantize(Tensor x, ScalarType fp8_dtype, float epsilon, bool force_pow_2, bool rowwise, bool "
    "transposed) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize,
    implied=2,
    layer_outputs=_quantize_for_layer,
)
cast_amax = TupleOperation(
    "cast_amax(Tensor x, Tensor scale, Tensor(a!)? amax, Tensor(b!)? saturated, ScalarType "
    "fp8_dtype, bool rowwise, bool transposed) -> (Tensor, Tensor, Tensor)",
    _cast_amax,
    implied=2,
)
transpose = TensorOperation("transpose(Tensor data) -> Tensor", _transpose)
# Schemas have no type for a layout, so operators take its text.
grid_scales = TupleOperation(
    "grid_scales(Tensor amax, str layout, ScalarType dtype) -> (Tensor, Tensor)", _grid_scales
)
grid_quantize = TupleOperation(
    "grid_quantize(Tensor x, str layout, bool rowwise, bool columnwise) -> (Tensor, Tensor, "
    "Tensor, Tensor)",
    _grid_quantize,
    implied=2,
)
grid_decode = TensorOperation(
    "grid_decode(Tensor data, Tensor? scales, str layout, bool columnwise, ScalarType dtype) -> "
    "Tensor",
    _grid_decode,
    implied=1,
)
# The same for layouts with a second level of scales, or with stochastic rounding, which takes a
# seed, and the row of the whole tensor that is the first one of x.
grid_quantize_levels = TupleOperation(
    "grid_quantize_levels(Tensor x, Tensor? seed, SymInt first_row, str layout, bool rowwise, bool "
    "columnwise) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _grid_quantize_levels,
    implied=2,
)
grid_decode_levels = TensorOperation(
    "grid_decode_levels(Tensor data, Tensor scales, Tensor amax, str layout, bool columnwise, "
    "ScalarType dtype) -> Tensor",
    _grid_decode_levels,
    implied=1,
)
#: Name -> row.
OPERATIONS = {row.name: row for row in list(globals().values()) if isinstance(row, Operation)}


# -- operators that are no rows --


def define_product(
    schema: str,
    function: Callable[..., Tensor],
    sizes: Callable[..., tuple[Size, Size, Size]],
) -> Callable[..., Tensor]:
    """Define the operator of a product, with a fake implementation and a formula for its FLOPs.

    Args:
        schema: of the operator, with two operands first, and an argument ``out_dtype``.
        function: computes the product from the arguments of the schema.
        sizes: rows, columns and the summed size of the product, from the shapes of both operands
            and the other arguments.
    """
    dtype_index = [*_argument_types(schema)].index("out_dtype")

    def fake(*arguments: Any) -> Tensor:
        a, b, *rest = arguments
        rows, columns, _ = sizes(a.shape, b.shape, *rest)
        result: Tensor = a.new_empty((rows, columns), dtype=arguments[dtype_index])
        return result

    def flops(*arguments: object, **_: object) -> int:
        rows, columns, inner = sizes(*arguments)
        # A multiply-add counts as two, as in torch's formulas.
        return int(2 * rows * columns * inner)

    operator = define(schema, function, fake)
    register_flop_formula(operator)(flops)
    return operator


# Operators hide a sum and a rounding from the compiler, because compiled code sums in another
# order, and leaves out the rounding of a value that it does not store.


def _sum_eagerly(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.sum(0, dtype=dtype)


def _fake_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1:], dtype=dtype)


_sum_rows = define(
    "sum_rows(Tensor x, ScalarType dtype) -> Tensor",
    _sum_eagerly,
    _fake_sum,
)
_rounded = define("rounded(Tensor x) -> Tensor", torch.clone, torch.empty_like)


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.sum(0, dtype=dtype)`` with eager code's order of additions, for compiled code."""
    return _sum_rows(x, dtype)


def rounded(x: Tensor) -> Tensor:
    """``x`` rounded to its dtype, in compiled code too.

    Compiled code gets a copy, unless the dtype is float32; eager code gets ``x``.
    """
    if torch.compiler.is_compiling() and x.dtype != _FLOATS:
        return _rounded(x)
    return x


def _write_scales(
    scales: list[Tensor],
    histories: list[Tensor],
    maxima: list[float],
    most_recent: bool,
    last: Tensor | None,
) -> None:
    # No step begins in a backward pass. The test is here, because compiled code cannot tell, and
    # activation checkpointing runs it again there.
    if scales and graph_task_id() == -1:
        backend = backend_module(scales[0].device.type)
        backend.update_scales(scales, histories, maxima, most_recent, last)


_update_scales = define(
    "update_scales(Tensor(a!)[] scales, Tensor(b!)[] histories, float[] maxima, bool most_recent, "
    "Tensor? last) -> ()",
    _write_scales,
    lambda *_: None,
)


def update_scales(
    scales: list[Tensor],
    histories: list[Tensor],
    maxima: list[float],
    most_recent: bool,
    last: Tensor | None,
) -> None:
    """Update many tensors in place, as :func:`ottava.kernels.update_scales`, without checks."""
    if is_direct(*scales, *histories, last):
        _write_scales(scales, histories, maxima, most_recent, last)
    else:
        _update_scales(scales, histories, maxima, most_recent, last)
