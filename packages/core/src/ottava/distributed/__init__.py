"""Weights of which every rank has a shard.

Two ways lead to a quantized weight, and one rule serves both: the bytes and scales are those that
quantizing the whole weight at once would give.

- An optimizer has sharded master weights, as ZeRO does, and writes the quantized weights after each
  step: ``master_weights``, with the checks of ``checked_weights``. It moves the bytes of the
  weights into its own buffers: ``raw_data``.
- FSDP2 gathers a weight in each pass. A quantized weight sends its bytes: ``hooks``. A weight in
  high precision is quantized shard by shard before it is sent: ``high_precision_weight`` and
  ``quantized_on_gather``.

Both quantize shards in ``batches``, by the ``rules`` of their quantizers. The unit of a batch is
the job of ``shards``: one shard, and where its data and scales go. ``agreement`` compares the ranks
before the first gather, ``layers`` asks a layer for its recipe, and ``fsdp2`` alone reads what is
private in FSDP2.
"""

from ottava.collectives import all_reduce_max as reduce_amax
from ottava.distributed.high_precision_weight import HighPrecisionWeight, gather_quantized
from ottava.distributed.master_weights import (
    MasterWeights,
    cast_master_weights_to_fp8,
    is_custom,
    quantize_master_weights,
)
from ottava.distributed.raw_data import post_all_gather_processing, replace_raw_data
from ottava.distributed.rules import GridShards, ShardRule, rule_of
from ottava.distributed.shards import ShardBatch, ShardJob, ShardOutput

__all__ = [
    "GridShards",
    "HighPrecisionWeight",
    "MasterWeights",
    "ShardBatch",
    "ShardJob",
    "ShardOutput",
    "ShardRule",
    "cast_master_weights_to_fp8",
    "gather_quantized",
    "is_custom",
    "post_all_gather_processing",
    "quantize_master_weights",
    "reduce_amax",
    "replace_raw_data",
    "rule_of",
]
