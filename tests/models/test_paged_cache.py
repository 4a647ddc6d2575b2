"""Pages of the native cache: who owns which, and how much memory they take."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.models.cache import PagedCache
from foredraft.ops import native

MISSING = native.unavailable()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

PAGE = 64


def small_cache() -> PagedCache:
    return PagedCache(layers=2, kv_heads=1, head_dim=6)


def test_a_page_holds_64_positions() -> None:
    assert native.library().PAGE_POSITIONS == PAGE
    cache = small_cache()
    for end, pages in [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2), (129, 3), (1000, 16)]:
        assert cache.pages([0], [end]).shape == (1, pages)


def test_pages_come_as_the_library_takes_them() -> None:
    table = small_cache().pages([3, 1], [70, 1])
    assert table.dtype == np.int32 and table.flags.c_contiguous and table.shape == (2, 2)
    assert len({table[0, 0], table[0, 1], table[1, 0]}) == 3


def test_a_slot_without_rows_owns_nothing() -> None:
    cache = small_cache()
    assert cache.pages([5], [0]).shape == (1, 0)
    assert cache.pages([0, 7], [1, 0]).shape == (2, 1)
    assert cache.pages([], []).shape == (0, 0)


def test_lengths() -> None:
    cache = small_cache()
    assert cache.length(4) == 0
    cache.commit(4, 100)
    cache.commit(4, 90)
    assert cache.length(4) == 90 and cache.length(0) == 0
    cache.release(4)
    cache.release(4)
    assert cache.length(4) == 0


def test_released_pages_are_used_again() -> None:
    cache = small_cache()
    first = cache.pages([0], [300])
    pages = cache.pool.pages
    for slot in range(20):
        cache.release(slot)
        assert sorted(cache.pages([slot + 1], [300])[0]) == sorted(first[0])
    assert cache.pool.pages == pages == 8


def test_a_page_takes_keys_and_values_of_all_layers_and_heads() -> None:
    """In bfloat16, the head size rounded up to 16."""
    cache = PagedCache(layers=3, kv_heads=2, head_dim=20)
    cache.pages([0], [1])
    assert cache.pool.page_bytes == 3 * 2 * 2 * 2 * PAGE * 32
    assert cache.pool.nbytes == cache.pool.pages * cache.pool.page_bytes


def test_the_table_of_pages_stays_small() -> None:
    """Slots that come one by one, as an engine takes them."""
    cache = small_cache()
    tracemalloc.start()
    for slot in range(14):
        cache.pages([slot], [1])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_a_head_size_that_is_odd() -> None:
    with pytest.raises(ValueError, match="even"):
        PagedCache(layers=1, kv_heads=1, head_dim=7)


steps = st.lists(
    st.tuples(st.sampled_from(["grow", "grow", "grow", "release"]), st.integers(0, 11), st.integers(0, 500)),
    min_size=1,
    max_size=60,
)


@settings(max_examples=100)
@given(steps, st.randoms(use_true_random=False))
def test_pages_belong_to_one_slot_and_stay_with_it(steps: list[tuple[str, int, int]], rng: object) -> None:
    cache = small_cache()
    owned: dict[int, list[int]] = {}
    most = 0
    for action, slot, more in steps:
        if action == "release":
            cache.release(slot)
            owned.pop(slot, None)
            continue
        slots = list({slot, *owned})
        rng.shuffle(slots)  # type: ignore[attr-defined]
        ends = [more if own == slot else 0 for own in slots]
        table = cache.pages(slots, ends)
        for own, end, row in zip(slots, ends, table.tolist(), strict=True):
            before = owned.get(own, [])
            count = max(len(before), -(-end // PAGE))
            assert row[: len(before)] == before
            owned[own] = row[:count]
        assert table.shape[1] == max(len(pages) for pages in owned.values())
        everyone = [page for pages in owned.values() for page in pages]
        assert len(set(everyone)) == len(everyone)
        most = max(most, len(everyone))
        assert all(0 <= page < cache.pool.pages for page in everyone)
        # Eight pages come at a time; none is taken while released ones are left.
        assert cache.pool.pages == -(-most // 8) * 8
