"""MXFP8 storages and tensors."""

from ottava_mxfp8.tensors.storage import MXFP8TensorStorage
from ottava_mxfp8.tensors.tensor import MXFP8Tensor

__all__ = ["MXFP8Tensor", "MXFP8TensorStorage"]
