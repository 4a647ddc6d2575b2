"""The contract with every method: tokens are those of each request alone, and in the midst of it all a drafter proposes
what one freshly primed would.

Random drafters are hardly ever right. So some of their tokens are replaced by those that will come.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Plain, PlainDecoder, some_costs
from sequential import (
    VOCABULARY,
    d2t,
    eagle3_json,
    eagle3_tensors,
    gemma4_json,
    gemma4_tensors,
    mtp_json,
    mtp_tensors,
    write,
)
from test_native_exactness import MAX_LEN, TINY, Request, a_request, limits, serve, tiny
from tiny import EOS, TOKENS, dflash_json, dflash_tensors, dspark_json, dspark_tensors, tiny_model, tiny_tokenizer
from torch import Tensor

from foredraft.config import AcceptanceRule, EngineConfig, NumSpeculativeTokens
from foredraft.drafters import METHODS
from foredraft.drafters.base import Drafter, DraftRequest, Proposal, ReadsTargetCache, Stop
from foredraft.drafters.calibration import Calibration
from foredraft.drafters.picking import Draft, DraftVocabulary, pick
from foredraft.engine.costs import CostCurve, DraftCost, FixedCosts
from foredraft.engine.engine import Engine
from foredraft.engine.sequence import Acceptance
from foredraft.engine.sequence import Sequence as Running
from foredraft.models.batch import Batch, flat_batch
from foredraft.models.cache import Cache
from foredraft.models.loading import Target
from foredraft.ops import native
from foredraft.sampling_params import SamplingParams

MISSING = native.unavailable()
NATIVE_ONLY = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
ON_NATIVE = [pytest.param(name, marks=NATIVE_ONLY) for name in ("none", "mxfp4")]
BACKENDS = [*ON_NATIVE, "pytorch"]
REDUCED = {"draft_vocab_size": len(VOCABULARY)}
WINDOWS = {
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "is_causal": False,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp": ("mtp", {"qk_norm": True}),
    "mtp-reduced": ("mtp", REDUCED),
    "gemma4_mtp": ("gemma4_mtp", {}),
    "gemma4_mtp-reduced": ("gemma4_mtp", {**REDUCED, "kv_layers": [0]}),
    "eagle3": ("eagle3", {"norm_before_residual": True}),
    "eagle3-reduced": ("eagle3", REDUCED),
    "dflash": ("dflash", WINDOWS),
    "dflash-reduced": ("dflash", REDUCED),
    "dspark-vanilla": ("dspark", {}),
    "dspark-gated-reduced": ("dspark", {**REDUCED, "markov_head_type": "gated"}),
    "dspark-rnn": ("dspark", {"markov_head_type": "rnn", **WINDOWS}),
    "ngram": ("ngram", {}),
}
MAKERS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., dict[str, Tensor]]]] = {
    "mtp": (mtp_json, mtp_tensors),
    "gemma4_mtp": (gemma4_json, gemma4_tensors),
    "eagle3": (eagle3_json, eagle3_tensors),
    "dflash": (dflash_json, dflash_tensors),
    "dspark": (dspark_json, dspark_tensors),
}
CHEAP_DRAFTS = FixedCosts(CostCurve((1, 40), (1.0, 1.1)), DraftCost(0.01, 0.01))

Folders = Mapping[str, Path | None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A random drafter of each variant for TINY; those with a part of the vocabulary are calibrated."""
    found: dict[str, Path | None] = {}
    for name, (method, changes) in VARIANTS.items():
        folder = None
        if method in MAKERS:
            config, tensors = MAKERS[method]
            raw = config(TINY, **changes)
            folder = write(tmp_path_factory.mktemp(name), raw, tensors(raw) | d2t(raw))
            if changes.items() >= REDUCED.items():
                Calibration((1.5, 0.7), (0.2, -0.1)).save(folder)
        found[name] = folder
    return found


@cache
def target_of(backend: str) -> Target:
    if backend == "pytorch":
        return Target("tiny", tiny_model(TINY), tiny_tokenizer())
    return tiny("mxfp4" if backend == "mxfp4" else "none")


@cache
def plain(backend: str) -> PlainDecoder:
    return PlainDecoder(target_of(backend))


def alone(backend: str, requests: Sequence[Request]) -> list[Plain]:
    with nullcontext() if backend == "pytorch" else native.threads(1):
        return [plain(backend)(r.prompt, r.params, r.seed, MAX_LEN) for r in requests]


class Leaning:
    """A drafter of which a ``share`` of the tokens is replaced by what ``futures``, whole sequences, say.

    compare: hold every proposal to that of another drafter, which sees the whole sequence at once.
    """

    reads_target_cache = True

    def __init__(
        self,
        variant: str,
        folders: Folders,
        target: Target,
        futures: Sequence[Sequence[int]],
        share: float,
        compare: bool = False,
    ) -> None:
        self._make: Callable[[], Drafter] = lambda: METHODS[VARIANTS[variant][0]](folders[variant], target)
        self._drafter = self._make()
        self._target = target
        self._futures = futures
        self._share = share
        self._compare = compare
        self._rng = random.Random(0)
        self._known = set(VOCABULARY if "reduced" in variant else range(len(TOKENS)))
        self.seen: dict[int, list[int]] = {}
        self.compared = 0
        self.taps, self.max_tokens = self._drafter.taps, self._drafter.max_tokens
        self.default_tokens, self.calibration = self._drafter.default_tokens, self._drafter.calibration
        self.caches, self.lookahead = self._drafter.caches, self._drafter.lookahead

    def adopt(self, slot: int, tokens: Sequence[int]) -> None:
        assert slot not in self.seen
        self.seen[slot] = list(tokens)
        self._drafter.adopt(slot, tokens)

    def attach(self, cache: Cache) -> None:
        if isinstance(self._drafter, ReadsTargetCache):
            self._drafter.attach(cache)

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        rows = torch.split(batch.token_ids, list(batch.counts))
        for slot, own, keep in zip(batch.slots, rows, accepted, strict=True):
            self.seen.setdefault(slot, []).extend(own[:keep].tolist())
        self._drafter.observe(batch, taps, accepted)

    def release(self, slot: int) -> None:
        self.seen.pop(slot, None)
        self._drafter.release(slot)

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        found = self._drafter.propose(requests, max_tokens, stop)
        leaning = []
        for request, proposal in zip(requests, found, strict=True):
            confidences = proposal.confidences or ()
            assert len(confidences) == len(proposal.token_ids) <= max_tokens
            assert self._known.issuperset(proposal.token_ids) and all(0 <= c <= 1 for c in confidences)
            if self._compare:
                self._compare_with_fresh(request, proposal, max_tokens)
            future = self._future([*self.seen[request.slot], request.anchor])
            tokens = [
                future[k] if k < len(future) and self._rng.random() < self._share else token
                for k, token in enumerate(proposal.token_ids)
            ]
            leaning.append(replace(proposal, token_ids=tuple(tokens)))
        return leaning

    def _future(self, tokens: list[int]) -> Sequence[int]:
        return next((own[len(tokens) :] for own in self._futures if list(own[: len(tokens)]) == tokens), ())

    def _compare_with_fresh(self, request: DraftRequest, found: Proposal, max_tokens: int) -> None:
        fresh, model, tokens = self._make(), self._target.model, self.seen[request.slot]
        cache = model.new_cache()
        if isinstance(fresh, ReadsTargetCache):
            fresh.attach(cache)
        batch = flat_batch([tokens], [0], [7])
        taps = model.forward(batch, cache, fresh.taps).taps
        cache.commit(7, len(tokens))
        fresh.observe(batch, taps, [len(tokens)])
        (expected,) = fresh.propose(
            [replace(request, slot=7)], max_tokens, lambda _, confidence, k: k >= len(found.token_ids)
        )
        self.compared += 1
        if model.dtype.itemsize == 2:
            assert found == expected
        else:
            assert found.token_ids == expected.token_ids
            assert found.confidences == pytest.approx(expected.confidences, abs=1e-9)


def engine_of(
    target: Target,
    drafter: Drafter,
    count: NumSpeculativeTokens,
    costs: FixedCosts | None = None,
    rule: AcceptanceRule = "exact",
    **settings: Any,
) -> Engine:
    return Engine(
        target.model,
        EngineConfig(max_model_len=MAX_LEN, **settings),
        eos_token_ids=[EOS],
        drafter=drafter,
        num_speculative_tokens=count if count == "auto" else min(count, drafter.max_tokens),
        acceptance_rule=rule,
        costs=costs,
    )


def check(served: Sequence[Running], requests: Sequence[Request], expected: Sequence[Plain], backend: str) -> None:
    for request, wanted, found in zip(requests, expected, served, strict=True):
        length = found.num_output
        if found.finish_reason == "abort":
            assert request.aborted is not None
        else:
            assert length == len(wanted.token_ids) and found.finish_reason == wanted.finish_reason
        assert found.output == wanted.token_ids[:length]
        if backend != "pytorch":
            assert found.logprobs == wanted.logprobs[:length]


@st.composite
def a_case(draw: st.DrawFn) -> dict[str, Any]:
    requests = []
    for request in draw(st.lists(a_request(), min_size=1, max_size=4)):
        params = replace(
            request.params,
            top_k=draw(st.sampled_from([0, 0, 5])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.05])),
            stop_token_ids=draw(st.sampled_from([None, None, [5, 9]])),
            min_tokens=draw(st.integers(0, request.params.max_tokens or 0)),
        )
        requests.append(replace(request, prompt=request.prompt[:70], params=params))
    return {
        "requests": requests,
        "limits": draw(limits),
        "count": draw(st.one_of(st.integers(1, 15), st.just("auto"))),
        "costs": draw(some_costs()),
        "share": draw(st.sampled_from([0.0, 0.5, 0.9])),
    }


def check_case(
    folders: Folders,
    backend: str,
    variant: str,
    requests: Sequence[Request],
    limits: Mapping[str, Any],
    count: NumSpeculativeTokens,
    costs: FixedCosts,
    share: float,
) -> None:
    target, expected = target_of(backend), alone(backend, requests)
    futures = [[*request.prompt, *own.token_ids] for request, own in zip(requests, expected, strict=True)]
    drafter = Leaning(variant, folders, target, futures, share)
    served = serve(engine_of(target, drafter, count, costs, **limits), requests)
    check(served, requests, expected, backend)
    assert not drafter.seen


@NATIVE_ONLY
@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=6)
@given(backend=st.sampled_from(["none", "mxfp4"]), case=a_case(), workers=st.sampled_from([1, 1, 1, 1, 2, 3]))
def test_each_request_is_as_if_alone(
    folders: Folders, variant: str, backend: str, case: dict[str, Any], workers: int
) -> None:
    with native.threads(workers):
        check_case(folders, backend, variant, **case)


@settings(max_examples=15)
@given(variant=st.sampled_from(sorted(VARIANTS)), case=a_case())
def test_each_request_is_as_if_alone_on_pytorch(folders: Folders, variant: str, case: dict[str, Any]) -> None:
    check_case(folders, "pytorch", variant, **case)


def mixed_requests(seed: int) -> list[Request]:
    """More than fit at once, that arrive one by one: repeating prompts, greedy and sampled, some across a page."""
    rng = random.Random(seed)
    found = []
    for index, length in enumerate((1, 2, 9, 33, 62, 5)):
        prompt = (rng.choices(range(3, len(TOKENS)), k=3) * length)[:length]
        params = SamplingParams(
            temperature=(0.0, 0.0, 0.8)[index % 3],
            seed=index,
            max_tokens=rng.randint(12, 24),
            ignore_eos=index % 2 == 0,
        )
        found.append(Request(prompt, params, arrives=index))
    return found


def acceptance_of(served: Sequence[Running]) -> Acceptance:
    found = Acceptance()
    for sequence in served:
        found.add(sequence.acceptance)
    return found


ROUNDS = [
    *(pytest.param(variant, "none", "auto", marks=NATIVE_ONLY) for variant in VARIANTS),
    *(pytest.param(variant, "mxfp4", 4, marks=NATIVE_ONLY) for variant in VARIANTS),
    *((variant, "pytorch", 4) for variant in ("mtp", "gemma4_mtp", "eagle3", "dflash", "dspark-rnn")),
]


@pytest.mark.parametrize(("variant", "backend", "count"), ROUNDS)
def test_a_drafter_amid_rounds_is_one_freshly_primed(
    folders: Folders, variant: str, backend: str, count: NumSpeculativeTokens
) -> None:
    """After kept and rejected tokens, chunks of prompts and slots used again, with others in the batch; on the native
    kernels bit for bit."""
    target, requests = target_of(backend), mixed_requests(len(variant))
    expected = alone(backend, requests)
    futures = [[*request.prompt, *own.token_ids] for request, own in zip(requests, expected, strict=True)]
    # Prompt lookup proposes seldom, where the text of a random model repeats.
    drafter = Leaning(variant, folders, target, futures, share=0.9 if variant == "ngram" else 0.6, compare=True)
    costs = CHEAP_DRAFTS if count == "auto" else None
    engine = engine_of(target, drafter, count, costs, max_num_seqs=3, max_num_batched_tokens=24)
    served = serve(engine, requests)
    check(served, requests, expected, backend)
    seen = acceptance_of(served)
    assert not drafter.seen and drafter.compared > 10
    assert sum(seen.kept) > 4 and sum(seen.proposed) - sum(seen.kept) > 4
    assert any(0 < kept < proposed for kept, proposed in zip(seen.kept[1:], seen.proposed[1:], strict=True))


@pytest.mark.parametrize("variant", ["mtp", "gemma4_mtp", "dflash", "dspark-rnn", "ngram"])
@pytest.mark.parametrize("backend", ON_NATIVE)
def test_measured_costs(folders: Folders, backend: str, variant: str) -> None:
    """Measuring runs target and drafter in slots that the requests then get."""
    target, requests = target_of(backend), mixed_requests(1)[:3]
    expected = alone(backend, requests)
    engine = engine_of(target, METHODS[VARIANTS[variant][0]](folders[variant], target), "auto")
    check(serve(engine, requests), requests, expected, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_lookup_is_right_where_text_repeats(folders: Folders, backend: str) -> None:
    """Its own tokens, none replaced."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=60, ignore_eos=True)
    requests = [Request([3, 4, 5] * 8, params), Request([7, 7, 7, 9], params), Request([20], params)]
    expected = alone(backend, requests)
    served = serve(engine_of(target_of(backend), METHODS["ngram"](None, target_of(backend)), 5), requests)
    check(served, requests, expected, backend)
    seen = acceptance_of(served)
    assert 0 < sum(seen.kept) < sum(seen.proposed)


class TargetAsDrafter:
    """Drafts by whole passes of the target itself, with the part ``ids`` of its vocabulary, all for None."""

    taps: tuple[int, ...] = ()
    max_tokens = default_tokens = 8
    calibration: Calibration | None = None

    def __init__(self, backend: str, ids: Sequence[int] | None = None) -> None:
        self._plain, self._ops = plain(backend), target_of(backend).model.ops
        self._ids = None if ids is None else torch.tensor(ids)
        self._seen: dict[int, list[int]] = {}

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        rows = torch.split(batch.token_ids, list(batch.counts))
        for slot, own, keep in zip(batch.slots, rows, accepted, strict=True):
            self._seen.setdefault(slot, []).extend(own[:keep].tolist())

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        return [self._propose(request, max_tokens) for request in requests]

    def _propose(self, request: DraftRequest, count: int) -> Proposal:
        draft, vocabulary = Draft(), DraftVocabulary(self._ids, len(TOKENS))
        for k in range(1, count + 1):
            logits = self._plain.logits([*self._seen[request.slot], request.anchor, *draft.token_ids])
            if self._ids is not None:
                logits = logits.index_select(1, self._ids)
            picked = pick(logits, [(request, k)], vocabulary, self._ops)
            draft.add(picked, 0, picked.confidences[0], None)
        return draft.proposal()

    def release(self, slot: int) -> None:
        self._seen.pop(slot, None)


SAMPLED = [
    *(pytest.param("none", temperature, marks=NATIVE_ONLY) for temperature in (0.6, 1.0, 1.5)),
    pytest.param("mxfp4", 1.0, marks=NATIVE_ONLY),
    ("pytorch", 1.0),
]


def sampled_requests(temperature: float) -> list[Request]:
    params = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)
    return [
        Request([3 + seed, 4, 5] * (1 + 10 * (seed % 3)), replace(params, seed=seed * 10**12 - 5), arrives=2 * seed)
        for seed in range(6)
    ]


@pytest.mark.parametrize("rule", ["exact", "rejection"])
@pytest.mark.parametrize(("backend", "temperature"), SAMPLED)
def test_a_drafter_that_is_the_target_is_always_right(backend: str, temperature: float, rule: AcceptanceRule) -> None:
    """Both draw by the same noise: the text is sampled, and yet every draft token is kept."""
    requests = sampled_requests(temperature)
    expected = alone(backend, requests)
    assert len({tuple(own.token_ids) for own in expected}) == len(requests)
    engine = engine_of(target_of(backend), TargetAsDrafter(backend), 4, rule=rule, max_num_seqs=3)
    served = serve(engine, requests)
    check(served, requests, expected, backend)
    seen = acceptance_of(served)
    assert seen.kept == seen.proposed and sum(seen.kept) > 80


@pytest.mark.parametrize(("backend", "temperature"), SAMPLED)
def test_with_a_part_of_the_vocabulary_it_is_right_up_to_the_first_token_outside(
    backend: str, temperature: float
) -> None:
    """The best noisy score of all is the best of the part, if it lies there."""
    ids = [token for token in range(len(TOKENS)) if token % 4]
    for request, own in zip(requests := sampled_requests(temperature), alone(backend, requests), strict=True):
        engine = engine_of(target_of(backend), TargetAsDrafter(backend, ids), 4)
        served = serve(engine, [replace(request, arrives=0)])
        check(served, [request], [own], backend)
        kept, at = Acceptance(), 1
        while at < len(own.token_ids):
            ahead = own.token_ids[at : at + 4]
            right = next((k for k, token in enumerate(ahead) if token not in ids), len(ahead))
            sent = min(4, len(own.token_ids) - at - 1)
            kept.record(sent, min(right, sent), min(right, sent) + 1)
            at += min(right, sent) + 1
        assert served[0].acceptance == kept
    assert any(token not in ids for own in alone(backend, requests) for token in own.token_ids)
