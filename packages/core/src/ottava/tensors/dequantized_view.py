"""``DequantizedView``: the values of a view that blocks do not allow, to read and not to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ottava.errors import UsageError
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
# By the op: whether its results share the memory of an argument, and the places of arguments that
# it writes.
_KINDS: dict[Any, tuple[bool, tuple[tuple[int, str], ...]]] = {}


def _kind_of(op: Any) -> tuple[bool, tuple[tuple[int, str], ...]]:
    kind = _KINDS.get(op)
    if kind is None:
        kind = _KINDS[op] = _kind_by_schema(op) or _kind_by_name(op)
    return kind


def _kind_by_schema(op: Any) -> tuple[bool, tuple[tuple[int, str], ...]] | None:
    aliases = aliases_of(op)
    if aliases is None:
        return None
    written = tuple((place, name) for place, name, is_write in aliases if is_write)
    return bool(aliases) and not written, written


def _kind_by_name(op: Any) -> tuple[bool, tuple[tuple[int, str], ...]]:
    """As torch names operators: one that writes in place ends with an underscore."""
    name = op.name().rpartition("::")[2].partition(".")[0]
    return name in _VIEWS, ((0, "self"),) if name.endswith("_") else ()


class DequantizedView(torch.Tensor):
    """The dequantized values of a view of a quantized tensor whose data cannot be shared.

    Every op reads it as a plain tensor and gives plain ones; views of it are views of these values.
    What is written to it would not reach the quantized tensor, so a write is refused before
    anything changes.

    Args:
        values: the values.
        of: the class of the quantized tensor, for errors.

    Raises:
        UsageError: something is written to it.
    """

    _held: torch.Tensor
    _of: str

    @staticmethod
    def __new__(cls, values: torch.Tensor, of: str) -> DequantizedView:
        about = {
            "strides": values.stride(),
            "storage_offset": values.storage_offset(),
            "dtype": values.dtype,
        }
        made: DequantizedView = make_wrapper_subclass(
            cls, values.shape, **about, device=values.device, storage_size=0
        )
        made._held, made._of = values, of
        return made

    def __init__(self, values: torch.Tensor, of: str) -> None:
        pass  # __new__ did everything.

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if op.name().startswith("c10d::"):
            # Schemas of collectives do not say what they write.
            views: list[DequantizedView] = []
            tree_map(
                lambda leaf: views.append(leaf) if isinstance(leaf, DequantizedView) else None,
                (args, kwargs),
            )
            raise views[0]._refusal(op.name())
        is_view, written = _kind_of(op)
        for place, name in written:
            entries = args[place] if place < len(args) else kwargs.get(name)
            for entry in entries if isinstance(entries, (list, tuple)) else (entries,):
                if isinstance(entry, DequantizedView):
                    raise entry._refusal(op.name())
        result = op(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        if not is_view:
            return result
        of = next(arg._of for arg in args if isinstance(arg, DequantizedView))
        return tree_map(lambda r: dequantized_view(r, of), result)

    def _refusal(self, op: str) -> UsageError:
        name = op.removeprefix("aten::").partition(".")[0]
        does = "would write" if op.startswith("aten::") else "may write"
        what = f"{name} {does} to a view of a {self._of} that cannot share its data"
        expected = "a write to the whole tensor, or to a view of whole blocks"
        remedy = "assign with tensor[index] = values, or change a copy: view.dequantize()"
        return UsageError(what, expected=expected, remedy=remedy)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A plain copy of the values, in ``dtype`` (DTypeError if not of floats) or their own."""
        check_values_dtype(dtype)
        values = self.to(self.dtype if dtype is None else dtype)
        return values.clone() if isinstance(values, DequantizedView) else values

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_held"], self._of

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], of: Any, size: Any, stride: Any
    ) -> DequantizedView:
        return DequantizedView(inner["_held"], of)

    # -- what torch asks a tensor without dispatching: the values are what it is --

    def data_ptr(self) -> int:
        """The address of the values."""
        return self._held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the values."""
        return self._held.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array of its own memory."""
        return self._held.clone().numpy(force=force)

    def tolist(self) -> Any:
        """The values as numbers."""
        return self._held.tolist()

    def __format__(self, spec: str) -> str:
        return format(self._held, spec)

    def __array__(self, *args: Any) -> Any:
        return self._held.clone().__array__(*args)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._held.clone().__dlpack__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._held.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = self._held.clone().requires_grad_(self.requires_grad)
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DequantizedView({self._held!r}, of={self._of})"


def _plain(value: Any) -> Any:
    return value._held if isinstance(value, DequantizedView) else value


def dequantized_view(made: Any, of: str) -> Any:
    """``made`` as values that nobody writes to, if it is a plain tensor."""
    return DequantizedView(made, of) if type(made) is torch.Tensor else made


def as_dequantized_views(op: Any, result: Any, of: str) -> Any:
    """What ``op`` gave, where it is an op that gives views: :class:`DequantizedView` for each plain
    tensor.

    Code that is being compiled gets plain tensors, because a graph has views of its own.
    """
    plain = any(
        type(each) is torch.Tensor for each in (result if isinstance(result, list) else [result])
    )
    if not plain or torch.compiler.is_compiling() or not _kind_of(op)[0]:
        return result
    return tree_map(lambda made: dequantized_view(made, of), result)


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that a :class:`DequantizedView` holds; other tensors themselves."""
    return tensor._held if isinstance(tensor, DequantizedView) else tensor


__all__: Sequence[str] = ("DequantizedView", "as_dequantized_views", "plain_values")
