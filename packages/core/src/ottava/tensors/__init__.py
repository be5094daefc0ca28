"""Quantizers, storages and quantized tensors."""

from ottava.tensors import float8_ops as _float8_ops  # noqa: F401  (fills the aten table)
from ottava.tensors import rows as _rows  # noqa: F401
from ottava.tensors.aten import implements
from ottava.tensors.blocks import GemmCache
from ottava.tensors.codes import as_codes
from ottava.tensors.float8 import Float8QuantizerBase, Float8Tensor, Float8TensorStorage
from ottava.tensors.float8_shards import PerTensorShards
from ottava.tensors.layout import columnwise_is_transpose, columnwise_layout
from ottava.tensors.quantizer import Quantizer, as_device
from ottava.tensors.saving import prepare_for_saving, restore_from_saved
from ottava.tensors.shards import ShardBatch, ShardJob, ShardOutput, shard_output
from ottava.tensors.storage import InnerTensor, QuantizedTensorStorage, StaticField, StorageSpec, check_values_dtype
from ottava.tensors.tensor import QuantizedTensor

__all__ = [
    "Float8QuantizerBase",
    "Float8Tensor",
    "Float8TensorStorage",
    "GemmCache",
    "InnerTensor",
    "PerTensorShards",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "ShardBatch",
    "ShardJob",
    "ShardOutput",
    "StaticField",
    "StorageSpec",
    "as_codes",
    "as_device",
    "check_values_dtype",
    "columnwise_is_transpose",
    "columnwise_layout",
    "implements",
    "prepare_for_saving",
    "restore_from_saved",
    "shard_output",
]
