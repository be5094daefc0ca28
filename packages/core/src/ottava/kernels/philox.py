"""Random numbers that depend on a seed and on a place alone: Philox4x32-10 in plain PyTorch.

The generator is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3" (2011). The number of an element does not depend on the order in which elements are computed, so
any number of threads, any device and any shard have the same one.
"""

import torch

from ottava.kernels.checks import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: _Words, key: tuple[Tensor, Tensor]) -> _Words:
    """Four random words of 32 bits for each counter of four words and each key of two, as int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of the product of two words."""
    # The product of 64 bits wraps around in int64, and has the right bits.
    product = a * b
    return product >> 32 & _MASK, product & _MASK


def random_words(seed: Tensor, places: Tensor, stream: int) -> Tensor:
    """A random number from 0 to 2^32 - 1 for each place, int64, of the shape of ``places``.

    Place ``p`` has word ``p % 4`` of the block with the counter ``(p // 4, stream)``: 64 bits of
    the first, then 64 of the second. The key is the seed.

    Args:
        seed: one int64, whose 64 bits are the key.
        places: int64, not negative.
        stream: another number gives other, independent words.
    """
    blocks = places >> 2
    zeros = torch.zeros_like(blocks)
    counter = blocks & _MASK, blocks >> 32, zeros + stream, zeros
    key = seed.reshape(()) & _MASK, (seed.reshape(()) >> 32) & _MASK
    words = torch.stack(philox(counter, key), dim=-1)
    return words.gather(-1, (places & 3).unsqueeze(-1)).squeeze(-1)
