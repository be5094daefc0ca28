"""What spans processes."""

from ottava.distributed.amax import reduce_amax

__all__ = ["reduce_amax"]
