"""Quantizers, storages and quantized tensors."""

from ottava.tensors import tensor_ops as _tensor_ops  # noqa: F401  (fills the aten table)
from ottava.tensors.aten import implements
from ottava.tensors.declaration import (
    GemmCache,
    InnerTensor,
    StaticField,
    as_data,
    check_values_dtype,
)
from ottava.tensors.dequantized_view import DequantizedView
from ottava.tensors.float8 import (
    Float8QuantizerBase,
    Float8Tensor,
    Float8TensorStorage,
    columnwise_is_transpose,
    columnwise_layout,
)
from ottava.tensors.grid import GridTensorStorage
from ottava.tensors.grid_declaration import inner_tensors_of
from ottava.tensors.grid_quantizer import GridQuantizer
from ottava.tensors.grid_tensor import GridTensor
from ottava.tensors.packed import PackedTensor, PackedTensorStorage
from ottava.tensors.quantizer import Option, Quantizer, as_device
from ottava.tensors.saving import StorageSpec, prepare_for_saving, restore_from_saved
from ottava.tensors.storage import QuantizedTensorStorage
from ottava.tensors.tensor import QuantizedTensor

__all__ = [
    "DequantizedView",
    "Float8QuantizerBase",
    "Float8Tensor",
    "Float8TensorStorage",
    "GemmCache",
    "GridQuantizer",
    "GridTensor",
    "GridTensorStorage",
    "InnerTensor",
    "Option",
    "PackedTensor",
    "PackedTensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "StaticField",
    "StorageSpec",
    "as_data",
    "as_device",
    "check_values_dtype",
    "columnwise_is_transpose",
    "columnwise_layout",
    "implements",
    "inner_tensors_of",
    "prepare_for_saving",
    "restore_from_saved",
]
