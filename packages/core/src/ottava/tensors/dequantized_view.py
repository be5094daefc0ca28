"""``DequantizedView``: the values of a view that blocks do not allow, to read and not to write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, SupportsIndex

import torch

from ottava.errors import UsageError
from ottava.tensors.aten import AtenOp, arguments_at
from ottava.tensors.declaration import check_values_dtype
from ottava.torch_private import (
    aliases_of,
    disabled_torch_function,
    make_wrapper_subclass,
    tree_map,
)

# Names of ops that give views, for a torch that does not show schemas.
_VIEWS = frozenset(
    [
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "expand",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
    ]
)


class _Kind(NamedTuple):
    """What an operator does with the memory of its arguments.

    Attributes:
        is_view: whether its results share the memory of an argument.
        writes: position and name of the arguments that it writes to.
    """

    is_view: bool
    writes: Sequence[tuple[int, str]]


_KINDS: dict[AtenOp, _Kind] = {}


def _kind_of(op: AtenOp) -> _Kind:
    kind = _KINDS.get(op)
    if kind is None:
        kind = _KINDS[op] = _kind_by_schema(op) or _kind_by_name(op)
    return kind


def _kind_by_schema(op: AtenOp) -> _Kind | None:
    aliases = aliases_of(op)
    if aliases is None:
        return None
    writes = [(position, name) for position, name, is_write in aliases if is_write]
    return _Kind(bool(aliases) and not writes, writes)


def _kind_by_name(op: AtenOp) -> _Kind:
    """Told by the name of the operator, which ends with an underscore if it writes in place."""
    name = op.name().rpartition("::")[2].partition(".")[0]
    writes = [(0, "self")] if name.endswith("_") else []
    return _Kind(name in _VIEWS, writes)


class DequantizedView(torch.Tensor):
    """The dequantized values of a view of a quantized tensor whose data cannot be shared.

    Every op reads it as a plain tensor and gives plain ones; views of it are views of these values.
    A write to it would not reach the quantized tensor, so it is refused before anything changes.

    Args:
        values: the values.
        of: the class of the quantized tensor, for errors.

    Raises:
        UsageError: something is written to it.
    """

    _plain_tensor: torch.Tensor
    _of: str

    def __new__(cls, values: torch.Tensor, of: str) -> Self:
        view: Self = make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
            storage_size=0,
        )
        view._plain_tensor, view._of = values, of
        return view

    def __init__(self, values: torch.Tensor, of: str) -> None:
        pass  # __new__ did everything.

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        op: AtenOp,
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if op.name().startswith("c10d::"):
            # Schemas of collectives do not say what they write.
            raise _views_in((args, kwargs))[0]._refusal(op.name())
        kind = _kind_of(op)
        for argument in arguments_at(kind.writes, args, kwargs):
            if isinstance(argument, DequantizedView):
                raise argument._refusal(op.name())
        result = op(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        if not kind.is_view:
            return result
        of = next(argument._of for argument in args if isinstance(argument, DequantizedView))
        return tree_map(lambda leaf: _dequantized_view(leaf, of), result)

    def _refusal(self, op: str) -> UsageError:
        name = op.removeprefix("aten::").partition(".")[0]
        verb = "would write" if op.startswith("aten::") else "may write"
        return UsageError(
            f"{name} {verb} to a view of a {self._of} that cannot share its data",
            expected="a write to the whole tensor, or to a view of whole blocks",
            remedy="assign with tensor[index] = values, or change a copy: view.dequantize()",
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A plain copy of the values, in ``dtype`` (DTypeError if not of floats) or their own."""
        check_values_dtype(dtype)
        values = self.to(dtype or self.dtype)
        if isinstance(values, DequantizedView):
            # They have the dtype already.
            return values.clone()
        return values

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["_plain_tensor"], self._of

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], of: str, size: Sequence[int], stride: Sequence[int]
    ) -> DequantizedView:
        return DequantizedView(inner["_plain_tensor"], of)

    # -- methods that torch calls without dispatching --

    def data_ptr(self) -> int:
        """The address of the values."""
        return self._plain_tensor.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the values."""
        return self._plain_tensor.untyped_storage()

    # Arrays, lists and capsules have the types of other libraries, which torch gives as Any.

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array of its own memory."""
        return self._plain_tensor.clone().numpy(force=force)

    def tolist(self) -> list[Any]:
        """The values as numbers."""
        return self._plain_tensor.tolist()

    def __format__(self, spec: str) -> str:
        return format(self._plain_tensor, spec)

    def __array__(self, *args: Any) -> Any:
        return self._plain_tensor.clone().__array__(*args)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._plain_tensor.clone().__dlpack__(**kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self._plain_tensor.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        duplicate = memo[id(self)] = self._plain_tensor.clone().requires_grad_(self.requires_grad)
        return duplicate

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"DequantizedView({self._plain_tensor!r}, of={self._of})"


def _plain(argument: object) -> object:
    return argument._plain_tensor if isinstance(argument, DequantizedView) else argument


def _views_in(arguments: object) -> list[DequantizedView]:
    views: list[DequantizedView] = []

    def collect(leaf: object) -> None:
        if isinstance(leaf, DequantizedView):
            views.append(leaf)

    tree_map(collect, arguments)
    return views


def _dequantized_view(result: object, of: str) -> object:
    """A plain tensor as values that nobody writes to; other results themselves."""
    return DequantizedView(result, of) if type(result) is torch.Tensor else result


def as_dequantized_views(op: AtenOp, result: object, of: str) -> object:
    """The result of an operator that gives views: a :class:`DequantizedView` for each plain tensor.

    Results of other operators, and results in code that is being compiled, stay as they are: a
    graph has views of its own.
    """
    if torch.compiler.is_compiling() or not _kind_of(op).is_view:
        return result
    if isinstance(result, list):
        return [_dequantized_view(entry, of) for entry in result]
    return _dequantized_view(result, of)


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that a :class:`DequantizedView` holds; other tensors themselves."""
    return tensor._plain_tensor if isinstance(tensor, DequantizedView) else tensor


__all__: Sequence[str] = ("DequantizedView", "as_dequantized_views", "plain_values")
