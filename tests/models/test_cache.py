"""The cache: what a pass computes for a token depends on the committed tokens before it and on nothing else."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONFIG, TOKENS, tiny_model
from torch import Tensor

from foredraft.models.batch import flat_batch
from foredraft.models.cache import KVCache
from foredraft.models.decoder import DecoderModel

LENGTH = 40


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return tiny_model()


def random_tokens(seed: int, count: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(len(TOKENS)), k=count)


def whole(model: DecoderModel, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits and taps of all rows in one pass with nothing else beside them."""
    output = model.forward(flat_batch([tokens], [0], [0]), model.new_cache(), [0, 1])
    assert output.taps is not None
    return output.logits, output.taps


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 2, 7, 39])
def test_prefill_in_chunks_is_prefill_at_once(model: DecoderModel, chunk: int) -> None:
    tokens = random_tokens(0)
    logits, taps = whole(model, tokens)
    cache = model.new_cache()
    for start in range(0, LENGTH, chunk):
        part = slice(start, start + chunk)
        output = model.forward(flat_batch([tokens[part]], [start], [0]), cache, [0, 1])
        assert output.taps is not None
        assert_same(output.logits, logits[part])
        assert_same(output.taps, taps[part])


@pytest.mark.parametrize("slots", [(0, 1, 2, 3), (3, 1, 0, 2), (5, 9, 2, 0)])
@pytest.mark.parametrize("lengths", [(7, 7, 7, 7), (3, 12, 1, 30), (2, 2, 9, 2)])
def test_a_ragged_batch_is_each_sequence_alone(
    model: DecoderModel, lengths: tuple[int, ...], slots: tuple[int, ...]
) -> None:
    rows = [random_tokens(seed, length) for seed, length in enumerate(lengths)]
    logits = model.forward(flat_batch(rows, [0] * 4, slots), model.new_cache()).logits
    assert_same(logits, torch.cat([whole(model, own)[0] for own in rows]))


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_any_schedule_computes_what_each_sequence_alone_would(seed: int, passes: int) -> None:
    """Ragged passes over sequences that come and go; after the true tokens of a pass may come wrong ones, which are
    not committed: prefill chunks, decoding, verification, rollback, slots taken over, all mixed."""
    model = MODEL
    rng = random.Random(seed)
    cache = model.new_cache()
    running: dict[int, tuple[list[int], int]] = {}
    for _ in range(passes):
        for slot in range(4):
            if slot not in running and rng.random() < 0.5:
                running[slot] = (random_tokens(rng.randrange(100), rng.randint(3, LENGTH)), 0)
        slots = [slot for slot in running if rng.random() < 0.8]
        if not slots:
            continue
        rng.shuffle(slots)
        rows, starts, kept = [], [], []
        for slot in slots:
            tokens, done = running[slot]
            count = min(rng.choice([1, 1, 2, 5, 20]), len(tokens) - done)
            wrong = random_tokens(rng.randrange(100), rng.choice([0, 0, 1, 6]))
            rows.append(tokens[done : done + count] + wrong)
            starts.append(done)
            kept.append(count)
        output = model.forward(flat_batch(rows, starts, slots), cache)
        counts = [len(part) for part in rows]
        for slot, part, count in zip(slots, output.logits.split(counts), kept, strict=True):
            tokens, done = running[slot]
            assert_same(part[:count], whole(model, tokens)[0][done : done + count])
            cache.commit(slot, done + count)
            running[slot] = (tokens, done + count)
            if done + count == len(tokens):
                cache.release(slot)
                del running[slot]


MODEL = tiny_model()


@pytest.mark.parametrize("count", [1, 63, 64, 65, 66, 100])
def test_both_attention_paths_agree(count: int) -> None:
    """Up to 64 rows the products are written out, beyond that PyTorch's fused kernel runs."""
    tokens = random_tokens(3, 140)
    cache = MODEL.new_cache()
    MODEL.forward(flat_batch([tokens[:40]], [0], [0]), cache)
    together = MODEL.forward(flat_batch([tokens[40 : 40 + count]], [40], [0]), cache).logits
    alone = [MODEL.forward(flat_batch([tokens[at : at + 1]], [at], [0]), cache).logits for at in range(40, 40 + count)]
    assert_same(together, torch.cat(alone))


def test_growth_keeps_what_was_written(model: DecoderModel) -> None:
    """Beyond the first capacity of 256 positions, and to more slots than before."""
    long, short = random_tokens(1, 300), random_tokens(2, 20)
    logits, _ = whole(model, long)
    cache = model.new_cache()
    model.forward(flat_batch([short[:10]], [0], [1]), cache)
    assert_same(model.forward(flat_batch([long[:250]], [0], [0]), cache).logits, logits[:250])
    assert cache.keys.shape[:3] == (2, 2, 256)
    assert_same(model.forward(flat_batch([long[250:]], [250], [0]), cache).logits, logits[250:])
    other = model.forward(flat_batch([short[10:15], long[:30]], [10, 0], [1, 6]), cache).logits
    assert cache.keys.shape[:3] == (2, 7, 512)
    assert_same(other, torch.cat([whole(model, short)[0][10:15], logits[:30]]))


def test_a_slot_forgets_its_last_sequence(model: DecoderModel) -> None:
    first, second = random_tokens(4), random_tokens(5, 12)
    cache = model.new_cache()
    model.forward(flat_batch([first], [0], [0]), cache)
    cache.commit(0, LENGTH)
    assert cache.length(0) == LENGTH and cache.length(7) == 0
    cache.release(0)
    cache.release(0)
    assert cache.length(0) == 0
    assert_same(model.forward(flat_batch([second], [0], [0]), cache).logits, whole(model, second)[0])


def test_rows_lie_where_their_slot_and_position_say() -> None:
    cache = KVCache(CONFIG, torch.float64)
    cache.reserve(3, 10)
    capacity = cache.keys.shape[2]
    positions = torch.tensor([4, 5, 0, 1, 2, 9])
    expected = [2 * capacity + 4, 2 * capacity + 5, 0, 1, 2, capacity + 9]
    assert cache.rows([2, 0, 1], [2, 3, 1], positions).tolist() == expected
    assert cache.rows([2, 0, 1], [0, 3, 1], positions[2:]).tolist() == expected[2:]
    assert cache.rows([1], [1], positions[5:]).tolist() == [capacity + 9]
    values = torch.arange(6 * 2 * 6, dtype=torch.float64).view(6, 2, 6)
    cache.write(1, torch.tensor(expected), values, -values)
    assert torch.equal(cache.keys[1, 2, 4:6], values[:2]) and torch.equal(cache.values[1, 1, 9], -values[5])
    assert not cache.keys[0].any()


def test_storage_grows_by_doubling() -> None:
    cache = KVCache(replace(CONFIG, num_layers=1), torch.float32)
    shapes = []
    for slots, length in [(1, 1), (1, 256), (1, 257), (2, 5), (3, 5), (3, 2000)]:
        cache.reserve(slots, length)
        shapes.append(tuple(cache.values.shape[1:3]))
    assert shapes == [(1, 256), (1, 256), (1, 512), (2, 512), (4, 512), (4, 2000)]
