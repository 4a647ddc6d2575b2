import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from foredraft.ops.noise import GUMBEL_MAX, GUMBEL_MIN, Stream, gumbel, philox4x32, uniform

# Random123, tests/kat_vectors, the lines "philox4x32 10": counter, key, expected words.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]
VOCABULARY = np.arange(49_152)


def scalar_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The definition in Salmon et al. 2011, section 3.2, one block at a time in Python integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        product_a, product_c = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (product_c >> 32) ^ b ^ k, product_c & 0xFFFFFFFF
        c, d = (product_a >> 32) ^ d ^ m, product_a & 0xFFFFFFFF
        k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_known_answers_of_random123(line: str) -> None:
    words = [int(word, 16) for word in line.split()]
    counter = np.array([words[:4]] * 3, dtype=np.uint64).T
    answers = philox4x32(counter, (words[4], words[5]))
    assert answers.T.tolist() == [words[6:]] * 3
    assert scalar_philox((words[0], words[1], words[2], words[3]), (words[4], words[5])) == tuple(words[6:])


@settings(deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**63 - 1),
    token_id=st.integers(0, 2**33),
    stream=st.sampled_from(Stream),
)
def test_uniform_is_one_word_of_the_tokens_block(seed: int, position: int, token_id: int, stream: Stream) -> None:
    counter = (token_id // 4, position % 2**32, position >> 32, int(stream))
    word = scalar_philox(counter, (seed % 2**32, seed % 2**64 >> 32))[token_id % 4]
    assert uniform(seed, position, [token_id], stream).tolist() == [(word + 0.5) / 2**32]


@pytest.mark.parametrize("draw", [uniform, gumbel])
def test_a_tokens_draw_does_not_depend_on_the_others(draw: type(uniform)) -> None:  # type: ignore[valid-type]
    everything = draw(5, 17, VOCABULARY, Stream.TARGET)
    rng = np.random.default_rng(0)
    subsets: list[NDArray[np.int64]] = [
        np.array([], dtype=np.int64),
        np.array([49_151]),
        np.array([3, 3, 0]),
        np.arange(1_001, 30_002),
        rng.permutation(VOCABULARY),
        *(np.sort(rng.choice(VOCABULARY, size, replace=False)) for size in (7, 300, 9_000, 30_000)),
    ]
    for subset in subsets:
        assert np.array_equal(draw(5, 17, subset, Stream.TARGET), everything[subset])


def test_uniform_is_uniform() -> None:
    u = np.concatenate([uniform(1, position, VOCABULARY, Stream.TARGET) for position in range(4)])
    assert u.min() > 0 and u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 0.001


def test_gumbel_is_gumbel() -> None:
    g = np.concatenate([gumbel(1, position, VOCABULARY, Stream.TARGET) for position in range(4)])
    standard_error = math.pi / math.sqrt(6 * g.size)
    assert abs(g.mean() - np.euler_gamma) < 4 * standard_error
    assert abs(g.var() - math.pi**2 / 6) < 0.03
    assert stats.kstest(g, "gumbel_r").pvalue > 0.001


def test_every_coordinate_makes_an_independent_draw() -> None:
    base = uniform(1, 1, VOCABULARY, Stream.TARGET)
    others = [
        uniform(2, 1, VOCABULARY, Stream.TARGET),
        uniform(1 + 2**32, 1, VOCABULARY, Stream.TARGET),
        uniform(1, 2, VOCABULARY, Stream.TARGET),
        uniform(1, 1 + 2**32, VOCABULARY, Stream.TARGET),
        uniform(1, 1, VOCABULARY, Stream.ACCEPT),
        uniform(1, 1, VOCABULARY, Stream.RESIDUAL),
        np.roll(base, 1),
        np.roll(base, 4),
    ]
    for other in others:
        cells, _, _ = np.histogram2d(base, other, bins=16, range=[[0, 1], [0, 1]])
        assert stats.chisquare(cells.ravel()).pvalue > 0.001


def test_bounds() -> None:
    assert math.isclose(GUMBEL_MIN, -math.log(33 * math.log(2)), rel_tol=1e-12)
    assert math.isclose(GUMBEL_MAX, -math.log(-math.log1p(-(2.0**-33))), rel_tol=1e-12)
