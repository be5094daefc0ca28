"""What storages have in common whose one buffer of elements serves both usages."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ottava.errors import UsageError
from ottava.tensors import QuantizedTensorStorage, StaticField


class SharedElements(QuantizedTensorStorage):
    """A storage whose first inner tensor, in the order of rows, serves rows and columns; it says which it is for."""

    static_fields: ClassVar[tuple[StaticField, ...]] = (
        StaticField("_dtype", "dtype"),
        StaticField("_rowwise", "rowwise"),
        StaticField("_columnwise", "columnwise"),
    )
    rowwise_serves_columnwise = True

    _rowwise: bool
    _columnwise: bool

    def get_usages(self) -> dict[str, bool]:
        held = getattr(self, self.inner_tensors[0].attribute) is not None
        return {"rowwise": held and self._rowwise, "columnwise": held and self._columnwise}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a usage (False), ask for one (True), or leave it (None). The elements serve both, and stay.

        Raises:
            UsageError: it holds no data.
            OptionError: neither usage would be left.
        """
        self._held()
        self._rowwise, self._columnwise = self._requested_usages(rowwise_usage, columnwise_usage)

    def _held(self) -> torch.Tensor:
        held = getattr(self, self.inner_tensors[0].attribute)
        if held is None:
            raise UsageError(f"{type(self).__name__} holds no data", remedy="it was cleared or saved")
        return held  # type: ignore[no-any-return]

    def size(self, dim: int | None = None) -> Any:
        shape = self._held().shape
        return shape if dim is None else shape[dim]
