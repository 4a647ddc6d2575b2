"""Random numbers that depend on nothing but (seed, position, token id, stream).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) has no state: it turns a
128-bit counter and a 64-bit key into four 32-bit words. With the token's place in the counter, a token's draw
is the same whatever else is computed beside it, which is what makes sampling with speculation equal to
sampling without.
"""

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.arange(10, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
# Arrays of this many tokens stay in the caches and below the size at which malloc asks the kernel for fresh
# pages, whose page faults would cost more than the arithmetic.
_SLICE = 8192


class Stream(IntEnum):
    """What a random number is used for; draws of different streams are independent."""

    TARGET = 0
    """Picking a token from the target's distribution; drafters share it, to pick the same token."""
    ACCEPT = 1
    """The accept-or-reject decision of the `rejection` rule."""
    RESIDUAL = 2
    """Picking the replacement of a rejected token."""


def philox4x32(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Ten rounds of Philox4x32 over counter [4, n] and key, all 32-bit words; returns [4, n] words."""
    # A round multiplies words 0 and 2, and both products' halves land in the other pair's place.
    multiplied, carried = counter[0::2].copy(), counter[1::2].copy()
    product = np.empty_like(multiplied)
    for round_key in (np.array(key, dtype=np.uint64)[:, None] + _WEYL) & _WORD:
        np.multiply(multiplied, _MULTIPLIERS, out=product)
        np.right_shift(product[::-1], _HALF, out=multiplied)
        # `carried` still has the upper half of the last product above its word; the mask removes it.
        multiplied ^= carried
        multiplied ^= round_key
        multiplied &= _WORD
        carried, product = product[::-1], carried
    words = np.empty_like(counter)
    words[0::2] = multiplied
    np.bitwise_and(carried, _WORD, out=words[1::2])
    return words


def uniform(seed: int, position: int, token_ids: ArrayLike, stream: Stream) -> NDArray[np.float64]:
    """One number in (0, 1), an odd multiple of 2**-33, for each token.

    seed: its low 64 bits are the key. position: of the token in its sequence, at least 0. token_ids: [n], at
    least 0; ascending is fastest. Returns [n].
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    drawn = np.empty(ids.shape)
    for start in range(0, ids.size, _SLICE):
        part = slice(start, start + _SLICE)
        drawn[part] = _words_of_tokens(key, position, ids[part], stream)
    drawn += 0.5
    drawn *= 2.0**-32
    return drawn


def _words_of_tokens(key: tuple[int, int], position: int, ids: NDArray[np.int64], stream: Stream) -> NDArray[np.uint64]:
    blocks, lanes = ids >> 2, ids & 3
    # One block serves four neighbouring tokens: over a whole vocabulary that is a quarter of the work.
    first, last = int(blocks.min()), int(blocks.max())
    dense = last - first < ids.size
    counter = np.empty((4, last - first + 1 if dense else ids.size), dtype=np.uint64)
    counter[0] = np.arange(first, last + 1) if dense else blocks
    counter[1:] = np.array([[position & 0xFFFFFFFF], [position >> 32], [stream]], dtype=np.uint64)
    words = philox4x32(counter, key)
    columns = blocks - first if dense else np.arange(ids.size)
    drawn: NDArray[np.uint64] = words[lanes, columns]
    return drawn


def gumbel(seed: int, position: int, token_ids: ArrayLike, stream: Stream) -> NDArray[np.float64]:
    """Standard Gumbel noise -log(-log(u)) of `uniform`'s u, with its arguments, in [GUMBEL_MIN, GUMBEL_MAX].

    argmax(log p + noise) is a draw from p (Gumbel-max trick; Maddison et al. 2014, arXiv 1411.0030).
    """
    return _gumbel_of(uniform(seed, position, token_ids, stream))


def _gumbel_of(u: NDArray[np.float64]) -> NDArray[np.float64]:
    np.log(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    return np.negative(u, out=u)


GUMBEL_MIN: Final = float(_gumbel_of(np.array([2.0**-33]))[0])
GUMBEL_MAX: Final = float(_gumbel_of(np.array([1 - 2.0**-33]))[0])
