"""What spans processes."""

from ottava.distributed.amax import reduce_amax
from ottava.distributed.high_precision import HighPrecisionWeight
from ottava.distributed.sharded_models import gather_quantized
from ottava.distributed.weights import (
    MasterWeights,
    cast_master_weights_to_fp8,
    is_custom,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)

__all__ = [
    "HighPrecisionWeight",
    "MasterWeights",
    "cast_master_weights_to_fp8",
    "gather_quantized",
    "is_custom",
    "post_all_gather_processing",
    "quantize_master_weights",
    "reduce_amax",
    "replace_raw_data",
]
