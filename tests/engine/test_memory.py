"""A limit on the memory for keys and values: sequences wait, leave and come back, or take over what others computed,
and not a token changes; a drafter that took over is one freshly primed."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native_exactness import MAX_LEN, Request, serve
from test_native_methods import (
    CHEAP_DRAFTS,
    NATIVE_ONLY,
    VARIANTS,
    Folders,
    Leaning,
    alone,
    check,
    engine_of,
    target_of,
)
from test_native_methods import folders as folders
from tiny import EOS, TOKENS

from foredraft.config import EngineConfig, NumSpeculativeTokens
from foredraft.engine.costs import CostCurve, DraftCost, FixedCosts
from foredraft.engine.engine import Engine
from foredraft.engine.memory import Paged
from foredraft.errors import UserError
from foredraft.models.cache import PagedCache
from foredraft.sampling_params import SamplingParams

PAGE = 64
SOME = ["none", "mtp", "gemma4_mtp", "eagle3-reduced", "dflash", "dspark-rnn", "ngram"]


def page_bytes(drafter: Leaning | None, target: Any) -> int:
    caches = [target.model.new_cache(), *(drafter.caches if drafter else ())]
    return sum(cache.page_bytes for cache in caches if isinstance(cache, PagedCache))


def conversations(seed: int, count: int) -> list[Request]:
    """Requests of which many begin alike, across one page or two."""
    rng = random.Random(seed)
    beginnings = [rng.choices(range(3, len(TOKENS)), k=length) for length in (64, 70, 128, 130)]
    found = []
    for index in range(count):
        own = rng.choices(range(3, len(TOKENS)), k=rng.choice([0, 1, 5]))
        prompt = [*rng.choice(beginnings), *own][: MAX_LEN - 20]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]), seed=index, max_tokens=rng.randint(3, 20), ignore_eos=True, logprobs=-1
        )
        found.append(Request(prompt, params, arrives=rng.randint(0, 12)))
    return found


def memory_of(engine: Engine) -> Paged:
    assert isinstance(engine.memory, Paged)
    return engine.memory


def assert_all_pages_are_back(engine: Engine, limit: int) -> None:
    table = memory_of(engine).table
    assert table.use.used == 0 and table.available == limit


def growing(seed: int) -> list[Request]:
    """Requests of a page each, all of which grow into a third one."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.8, max_tokens=85, ignore_eos=True, logprobs=-1)
    return [
        Request(rng.choices(range(3, len(TOKENS)), k=rng.randint(50, 60)), replace(params, seed=index))
        for index in range(5)
    ]


def serve_all(
    folders: Folders, variant: str, requests: list[Request], pages: int, count: NumSpeculativeTokens
) -> Engine:
    """Each as if alone, whatever happens to it, and every proposal that of a drafter freshly primed."""
    target, expected = target_of("none"), alone("none", requests)
    futures = [[*request.prompt, *own.token_ids] for request, own in zip(requests, expected, strict=True)]
    drafter = None if variant == "none" else Leaning(variant, folders, target, futures, share=0.7, compare=True)
    limits: dict[str, Any] = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 70,
        "kv_cache_memory_bytes": pages * page_bytes(drafter, target),
    }
    if drafter is None:
        engine = Engine(target.model, EngineConfig(max_model_len=MAX_LEN, **limits), eos_token_ids=[EOS])
    else:
        engine = engine_of(target, drafter, count, CHEAP_DRAFTS, **limits)
    check(serve(engine, requests), requests, expected, "none")
    if drafter is not None:
        assert not drafter.seen and (drafter.compared > 10 or variant == "ngram")
    assert_all_pages_are_back(engine, pages)
    return engine


@NATIVE_ONLY
@pytest.mark.parametrize("variant", SOME)
def test_pages_taken_over_change_nothing(folders: Folders, variant: str) -> None:
    engine = serve_all(folders, variant, conversations(len(variant), 14), pages=12, count=5)
    assert memory_of(engine).hits >= 128


@NATIVE_ONLY
@pytest.mark.parametrize("variant", ["none", "dflash", "mtp"])
def test_what_several_begin_with_is_computed_once(folders: Folders, variant: str) -> None:
    """Though they come at the same time."""
    rng = random.Random(3)
    prompt = rng.choices(range(3, len(TOKENS)), k=140)
    params = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True, logprobs=-1)
    requests = [Request([*prompt, 3 + index], replace(params, seed=index)) for index in range(5)]
    engine = serve_all(folders, variant, requests, pages=20, count=5)
    lag = 64 if variant == "mtp" else 0
    assert memory_of(engine).hits == 4 * (128 - lag)


@NATIVE_ONLY
def test_what_the_drafter_does_not_follow_is_not_waited_for(folders: Folders) -> None:
    """Its pages are of no use to those that it follows: the first of them is."""
    rng = random.Random(4)
    prompt = rng.choices(range(3, len(TOKENS)), k=140)
    params = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True, logprobs=-1)
    requests = [Request([*prompt, 3 + index], replace(params, seed=index), speculates=index > 0) for index in range(5)]
    assert memory_of(serve_all(folders, "dflash", requests, pages=20, count=5)).hits == 3 * 128


@NATIVE_ONLY
@pytest.mark.parametrize("variant", SOME)
def test_sequences_sent_away_come_back_unchanged(folders: Folders, variant: str) -> None:
    engine = serve_all(folders, variant, growing(len(variant)), pages=4, count="auto")
    assert engine.scheduler.preemptions


@NATIVE_ONLY
@pytest.mark.parametrize("pages", [None, 20])
@pytest.mark.parametrize("variant", ["mtp", "gemma4_mtp", "eagle3-reduced", "dflash"])
def test_a_sequence_without_speculation_catches_up_when_the_load_falls(
    folders: Folders, variant: str, pages: int | None
) -> None:
    """Four at once do not pay; the one that is left then does, and not a token changes."""
    costs = FixedCosts(CostCurve((1, 2, 4, 8, 200), (1.0, 1.01, 2.0, 20.0, 20.5)), DraftCost(0.01, 0.01))
    rng = random.Random(5)
    params = SamplingParams(temperature=0.8, ignore_eos=True, logprobs=-1)
    requests = [
        Request(rng.choices(range(3, len(TOKENS)), k=20), replace(params, seed=index, max_tokens=length))
        for index, length in enumerate((130, 10, 12, 14))
    ]
    target, expected = target_of("none"), alone("none", requests)
    futures = [[*request.prompt, *own.token_ids] for request, own in zip(requests, expected, strict=True)]
    drafter = Leaning(variant, folders, target, futures, share=0.7, compare=True)
    size = pages and pages * page_bytes(drafter, target)
    engine = engine_of(target, drafter, "auto", costs, max_num_seqs=4, kv_cache_memory_bytes=size)
    served = serve(engine, requests)
    check(served, requests, expected, "none")
    assert engine.scheduler.catch_ups == 1 and not engine.scheduler.preemptions
    assert served[0].followed and not any(each.followed for each in served[1:])
    assert drafter.compared > 5 and sum(engine.speculation.kept) > 5
    if pages:
        assert_all_pages_are_back(engine, pages)


@NATIVE_ONLY
@settings(max_examples=25)
@given(
    variant=st.sampled_from(sorted(VARIANTS)),
    seed=st.integers(0, 10**6),
    pages=st.integers(3, 10),
    rows=st.sampled_from([1, 7, 64, 512]),
    beside=st.sampled_from([None, 1, 16]),
    reuse=st.booleans(),
    aborted=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 30)), max_size=3),
)
def test_whatever_the_memory(
    folders: Folders,
    variant: str,
    seed: int,
    pages: int,
    rows: int,
    beside: int | None,
    reuse: bool,
    aborted: Sequence[tuple[int, int]],
) -> None:
    target, requests = target_of("none"), conversations(seed, 8)
    for index, step in aborted:
        own = requests[index]
        requests[index] = Request(own.prompt, own.params, own.arrives, own.arrives + step)
    expected = alone("none", requests)
    futures = [[*request.prompt, *own.token_ids] for request, own in zip(requests, expected, strict=True)]
    drafter = Leaning(variant, folders, target, futures, share=0.7)
    engine = engine_of(
        target,
        drafter,
        5,
        max_num_seqs=5,
        max_num_batched_tokens=rows,
        prefill_beside_decode=beside,
        kv_cache_memory_bytes=pages * page_bytes(drafter, target),
        enable_prefix_caching=reuse,
    )
    served = serve(engine, requests)
    check(served, requests, expected, "none")
    assert reuse or not memory_of(engine).hits
    assert_all_pages_are_back(engine, pages)


@NATIVE_ONLY
def test_a_later_turn_skips_what_was_computed() -> None:
    """The answer's pages count too, and the last token is always run."""
    target = target_of("none")
    size = 10 * page_bytes(None, target)
    engine = Engine(
        target.model,
        EngineConfig(max_model_len=200, kv_cache_memory_bytes=size, max_num_batched_tokens=512),
        eos_token_ids=[EOS],
    )
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = [3 + index % 20 for index in range(100)]
    first = engine.add(prompt, params)[0]
    while engine.has_work:
        engine.step()
    # 140 tokens, of which the last was never run.
    second = engine.add([*first.tokens, 5], params)[0]
    engine.step()
    assert second.reused == 128 and memory_of(engine).hits == 128
    engine.abort(second)
    again = engine.add(first.tokens[:128], params)[0]
    engine.step()
    assert again.reused == 64
    assert memory_of(engine).queries == 100 + 141 + 128


@NATIVE_ONLY
def test_a_limit_that_one_sequence_does_not_fit_in() -> None:
    target = target_of("none")
    one = page_bytes(None, target)
    with pytest.raises(UserError, match=r"one sequence of 160 tokens takes \d+ bytes.*lower max_model_len"):
        Engine(target.model, EngineConfig(max_model_len=MAX_LEN, kv_cache_memory_bytes=2 * one))
    assert Engine(target.model, EngineConfig(kv_cache_memory_bytes=2 * one)).max_model_len == 2 * PAGE


def test_a_limit_needs_the_native_kernels() -> None:
    with pytest.raises(UserError, match="kv_cache_memory_bytes needs the native kernels"):
        Engine(target_of("pytorch").model, EngineConfig(kv_cache_memory_bytes=10**6))
