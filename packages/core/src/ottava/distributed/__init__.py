"""Weights of which every rank has a shard: FSDP2's hooks, and quantized weights from sharded master
weights."""

from ottava.collectives import all_reduce_max as reduce_amax
from ottava.distributed.high_precision_weight import HighPrecisionWeight, gather_quantized
from ottava.distributed.rules import GridShards, PerTensorShards, ShardBatch, ShardRule, rule_of
from ottava.distributed.shards import ShardJob, ShardOutput
from ottava.distributed.weights import (
    MasterWeights,
    cast_master_weights_to_fp8,
    is_custom,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)

__all__ = [
    "GridShards",
    "HighPrecisionWeight",
    "MasterWeights",
    "PerTensorShards",
    "ShardBatch",
    "ShardJob",
]
__all__ += ["ShardOutput", "ShardRule"]
__all__ += [
    "cast_master_weights_to_fp8",
    "gather_quantized",
    "is_custom",
    "post_all_gather_processing",
]
__all__ += ["quantize_master_weights", "reduce_amax", "replace_raw_data", "rule_of"]
