"""Random numbers that depend on nothing but (seed, position, token id, stream), and draws by them.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) has no state: it turns a
128-bit counter and a 64-bit key into four 32-bit words. With the token's place in the counter, a token's draw
is the same whatever else is computed beside it, which is what makes sampling with speculation equal to
sampling without.
"""

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foredraft.ops import native

Row: TypeAlias = NDArray[np.floating[Any]]

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.arange(10, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
# Arrays of this many tokens stay in the caches and below the size at which malloc asks the kernel for fresh
# pages, whose page faults would cost more than the arithmetic.
_SLICE = 8192
# In `gumbel_argmax`: more candidates than this are worth a first look at those this close to the top.
_MANY = 1024
_FIRST_LOOK = 8.0


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


def draw(scores: Row, seed: int, position: int, stream: Stream, token_ids: NDArray[np.int64] | None = None) -> int:
    """A draw from softmax(scores) as `gumbel_argmax` makes it by `gumbel`: an index into ``scores [n]``.

    token_ids: [n], ascending, whose noise the scores get; 0 to n - 1 by default. Raises `RuntimeError` if the scores
    have no finite maximum.
    """
    if scores.dtype == np.float32 and native.unavailable() is None:
        winner = native.gumbel_argmax(scores, seed, position, stream, token_ids)
        require_finite(0.0 if winner >= 0 else math.nan)
        return winner

    def noise(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return gumbel(seed, position, rows if token_ids is None else token_ids[rows], stream)

    return gumbel_argmax(scores, noise)


def gumbel_argmax(scores: Row, noise: Callable[[NDArray[np.int64]], NDArray[np.float64]]) -> int:
    """argmax(scores + noise), of equals the lowest id: with Gumbel noise a draw from softmax(scores).

    scores: [V], -inf where filtered. noise: from token ids to their noise, within [GUMBEL_MIN, GUMBEL_MAX];
    asked only about tokens that the bounds leave a chance, which does not change the result.
    Raises `RuntimeError` if the scores have no finite maximum.
    """
    top = float(scores.max())
    require_finite(top)
    candidates = np.flatnonzero(scores >= _least_winning_score(top + GUMBEL_MIN))
    if candidates.size > _MANY:
        leaders = np.flatnonzero(scores >= top - _FIRST_LOOK)
        best = float((scores[leaders] + noise(leaders)).max())
        candidates = np.flatnonzero(scores >= _least_winning_score(best))
    return int(candidates[(scores[candidates] + noise(candidates)).argmax()])


def log_softmax(scores: Row) -> NDArray[np.float64]:
    """Normalised log-probabilities [V] of scores [V] in float64, in an order of summation set by V."""
    shifted = scores.astype(np.float64)
    shifted -= shifted.max()
    shifted -= math.log(np.exp(shifted).sum())
    return shifted


class NotFinite(RuntimeError):
    """Logits that nothing can be sampled from."""


def require_finite(maximum: float | Row) -> None:
    """Raise NotFinite unless all of these highest scores are finite."""
    if not np.isfinite(maximum).all():
        raise NotFinite("no token can be sampled: the highest logit is NaN or infinite, or every token is excluded")


def _least_winning_score(noisy_score: float) -> float:
    """The score below which no noise reaches `noisy_score`; the last term covers rounding, float32's too."""
    return noisy_score - GUMBEL_MAX - 1e-6 * (abs(noisy_score) + GUMBEL_MAX)
