"""The engine around the contract: distributions under `rejection`, counts, seeds, taps, slots, refusals."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from scripted import PlainDecoder, ScriptedDrafter
from tiny import CONFIG, TOKENS, tiny_model
from torch import Tensor

from foredraft.config import AcceptanceRule, EngineConfig, NumSpeculativeTokens
from foredraft.drafters.base import Drafter, DraftRequest, Proposal, Stop
from foredraft.drafters.calibration import Calibration
from foredraft.drafters.picking import Draft, DraftVocabulary, pick
from foredraft.engine.costs import CostCurve, DraftCost, FixedCosts
from foredraft.engine.engine import Engine
from foredraft.engine.sequence import Sequence as Running
from foredraft.errors import UserError
from foredraft.models.batch import Batch, flat_batch
from foredraft.models.loading import Target
from foredraft.ops import REFERENCE
from foredraft.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def engine_for(target: Target, drafter: Drafter | None = None, count: int = 3, **settings: Any) -> Engine:
    return Engine(
        target.model,
        EngineConfig(**settings),
        eos_token_ids=target.tokenizer.eos_token_ids,
        tokenizer=target.tokenizer,
        drafter=drafter,
        num_speculative_tokens=count if drafter else 0,
    )


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def answer(target: Target, prompt: Sequence[int], params: SamplingParams, **settings: Any) -> list[Running]:
    engine = engine_for(target, **settings)
    sequences = engine.add(prompt, params)
    finish(engine)
    return sequences


# The distribution of what comes out

SMALL = tiny_model(replace(CONFIG, vocab_size=6), seed=5)
PROMPT = [1, 4]
TEMPERATURE, TOP_K = 0.9, 5
TRIALS = 2500


def next_token(tokens: Sequence[int]) -> NDArray[np.float64]:
    """The target's distribution after ``tokens``: temperature, then the most likely TOP_K."""
    logits = SMALL.forward(flat_batch([tokens], [0], [0], [1]), SMALL.new_cache()).logits[0] / TEMPERATURE
    kept = torch.where(logits >= logits.topk(TOP_K).values[-1], logits, -torch.inf)
    return torch.softmax(kept, -1).numpy()


def joint_distribution(length: int) -> NDArray[np.float64]:
    """[6] * length: probability of every continuation of PROMPT."""
    joint = np.zeros((6,) * length)
    for tokens in product(range(6), repeat=length - 1):
        before = [next_token([*PROMPT, *tokens[:k]])[token] for k, token in enumerate(tokens)]
        joint[tokens] = np.prod(before) * next_token([*PROMPT, *tokens])
    return joint


class SamplingDrafter:
    """Draws from a distribution of its own after every token; or, greedy, takes a token that the target may hate."""

    taps = ()
    max_tokens = 2
    default_tokens = 2
    calibration: Calibration | None = None

    def __init__(self, greedy: bool) -> None:
        self._greedy = greedy
        self._rng = np.random.default_rng(8)
        self._tables = np.random.default_rng(9).dirichlet(np.ones(6), size=(6, 2))
        self._tables[:, :, 3] = 0
        self._tables /= self._tables.sum(-1, keepdims=True)

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        assert taps is None

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        return [self._proposal(self._tables[request.anchor, :max_tokens]) for request in requests]

    def _proposal(self, q: NDArray[np.float64]) -> Proposal:
        if self._greedy:
            return Proposal(tuple(q.argmax(-1).tolist()))
        drawn = tuple(int(self._rng.choice(6, p=row)) for row in q)
        return Proposal(drawn, torch.from_numpy(q).log())

    def release(self, slot: int) -> None:
        pass


class TableDrafter(SamplingDrafter):
    """Token by token, with the engine's noise, from what a table says after the token before: confidences of later
    tokens depend on earlier draws. Token 3 is not in its vocabulary."""

    def __init__(self) -> None:
        super().__init__(False)
        ids = torch.tensor([0, 1, 2, 4, 5])
        self._vocabulary = DraftVocabulary(ids, 6)
        self._logits = torch.from_numpy(self._tables[:, :, ids.numpy()]).log()

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        drafts = [Draft() for _ in requests]
        going = list(range(len(requests)))
        for k in range(1, max_tokens + 1):
            before = [[requests[index].anchor, *drafts[index].token_ids][-1] for index in going]
            rows = [(requests[index], k) for index in going]
            picked = pick(self._logits[before, k - 1], rows, self._vocabulary, REFERENCE)
            own = [drafts[index].add(picked, row, picked.confidences[row], None) for row, index in enumerate(going)]
            going = [i for i, confidence in zip(going, own, strict=True) if stop is None or not stop(i, confidence, k)]
            if not going:
                break
        return [draft.proposal() for draft in drafts]


# A token is worth verifying where it is kept in some 6 of 100 rounds, which for the second ones is now and then.
SELECTIVE = FixedCosts(CostCurve((1, 2), (1.02, 1.04)), DraftCost(0.001, 0.0001))
DRAFTERS: dict[str, tuple[Callable[[], Drafter], NumSpeculativeTokens]] = {
    "greedy": (lambda: SamplingDrafter(True), 2),
    "independent": (lambda: SamplingDrafter(False), 2),
    "reduced": (TableDrafter, 2),
    "auto": (TableDrafter, "auto"),
}


@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize("rule", get_args(AcceptanceRule))
def test_output_follows_the_targets_distribution(rule: AcceptanceRule, method: str) -> None:
    """The first token is sampled plainly, two more are proposed, and with luck a bonus token follows."""
    drafter, length = DRAFTERS[method]
    engine = Engine(
        SMALL,
        # Where prompts run beside all that is decoded, as with 64 answers of 4 tokens, following does not pay.
        EngineConfig(max_num_seqs=2 if length == "auto" else 64, seed=2),
        drafter=drafter(),
        num_speculative_tokens=length,
        acceptance_rule=rule,
        costs=SELECTIVE,
    )
    params = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, max_tokens=4)
    sequences = [engine.add(PROMPT, params)[0] for _ in range(TRIALS)]
    finish(engine)
    counts = np.zeros((6,) * 4)
    for sequence in sequences:
        counts[tuple(sequence.output)] += 1
    expected = joint_distribution(4) * TRIALS
    for others in ((2, 3), (0, 3), (0, 1)):
        observed, wanted = counts.sum(others).ravel(), expected.sum(others).ravel()
        assert observed[wanted == 0].sum() == 0
        rare = (wanted < 5) & (wanted > 0)
        observed = np.append(observed[wanted >= 5], observed[rare].sum() + 1e-9)
        wanted = np.append(wanted[wanted >= 5], wanted[rare].sum() + 1e-9)
        assert stats.chisquare(observed, wanted).pvalue > 0.001
    # All of it went through the rule: drafts were kept at every position, and not always.
    total = sequences[0].acceptance
    for sequence in sequences[1:]:
        total.add(sequence.acceptance)
    assert len(total.kept) == 2 and all(0 < kept < made for kept, made in zip(total.kept, total.proposed, strict=True))
    if length == "auto":
        assert 0.05 * TRIALS < total.proposed[1] < 0.9 * TRIALS


def test_log_probabilities_are_cut_with_their_tokens() -> None:
    """A drafter that proposes more than there is room for, with probabilities to match."""

    class Long(SamplingDrafter):
        def propose(
            self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None
        ) -> list[Proposal]:
            return [self._proposal(self._tables[request.anchor, [0, 1, 0, 1]]) for request in requests]

    engine = Engine(SMALL, EngineConfig(), drafter=Long(False), num_speculative_tokens=2, acceptance_rule="rejection")
    sequence = engine.add(PROMPT, SamplingParams(seed=3, max_tokens=9))[0]
    finish(engine)
    assert sequence.num_output == 9 and len(sequence.acceptance.proposed) == 2


# What is counted


def future_of(target: Target, prompt: list[int], params: SamplingParams, seed: int = 0) -> list[int]:
    return [*prompt, *PlainDecoder(target)(prompt, params, seed, 48).token_ids]


def scripted_rounds(future: list[int], rounds: Sequence[str]) -> ScriptedDrafter:
    """Each round as one letter a token: r for the right one, w for another."""
    turns = iter(rounds)

    def script(tokens: list[int], count: int) -> list[int]:
        letters = next(turns)
        right = future[len(tokens) : len(tokens) + len(letters)]
        return [token if letter == "r" else token ^ 1 for token, letter in zip(right, letters, strict=True)]

    return ScriptedDrafter(script)


def test_acceptance_is_counted_by_hand(target: Target) -> None:
    drafter = scripted_rounds(future_of(target, [3, 4], GREEDY), ["rrr", "www", "rwr", "", "rrr"])
    engine = engine_for(target, drafter)
    sequence = engine.add([3, 4], GREEDY)[0]
    finish(engine)
    counted = sequence.acceptance
    # Tokens per round: 4, 1, 2, 1, and 3 where only two drafts had room; the first token is the prompt's.
    assert sequence.num_output == 12 and (counted.rounds, counted.committed) == (5, 11)
    assert counted.proposed == [4, 4, 3] and counted.kept == [3, 2, 1]
    assert counted.length == pytest.approx(11 / 5) and counted.rates == pytest.approx([3 / 4, 2 / 4, 1 / 3])
    assert sequence.origins == [0, *(1, 2, 3, 0), 0, *(1, 0), 0, *(1, 2, 0)]


def test_a_stop_inside_a_run_ends_its_round(target: Target) -> None:
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=12, ignore_eos=True)
    future = future_of(target, [3, 4], params, 2)
    assert future[4] not in future[2:4]
    drafter = scripted_rounds(future, ["rrr"])
    engine = engine_for(target, drafter)
    sequence = engine.add([3, 4], replace(params, stop_token_ids=[future[4]]))[0]
    finish(engine)
    assert sequence.tokens == future[:5] and sequence.origins == [0, 1, 2]
    counted = sequence.acceptance
    assert (counted.rounds, counted.committed, counted.proposed, counted.kept) == (1, 2, [1, 1, 1], [1, 1, 0])


def test_plain_decoding_has_acceptance_length_one(target: Target) -> None:
    counted = answer(target, [3, 4], GREEDY)[0].acceptance
    assert (counted.rounds, counted.committed, counted.proposed, counted.length) == (11, 11, [], 1.0)


def test_a_round_is_one_pass_for_all(target: Target) -> None:
    """Two sequences with perfect drafts need as many passes as one: prefill, and three rounds of four tokens."""
    futures = [future_of(target, prompt, GREEDY) for prompt in ([3, 4], [9, 9, 9])]
    drafter = ScriptedDrafter(
        lambda tokens, count: next(f for f in futures if f[: len(tokens)] == tokens)[len(tokens) : len(tokens) + count]
    )
    engine = engine_for(target, drafter)
    sequences = [engine.add(future[:size], GREEDY)[0] for future, size in zip(futures, (2, 3), strict=True)]
    steps = []
    while engine.has_work:
        steps.append([sequences.index(sequence) for sequence in engine.step()])
    assert steps == [[0, 1]] * 4


# What the drafter is given


def test_the_drafter_sees_the_taps_of_what_was_committed(target: Target) -> None:
    rng = random.Random(0)
    futures = [future_of(target, prompt, GREEDY) for prompt in ([3, 4, 5, 6], [9, 9, 9], [20])]

    def half_right(tokens: list[int], count: int) -> list[int]:
        future = next(f for f in futures if f[: len(tokens)] == tokens)
        right = future[len(tokens) : len(tokens) + rng.randint(0, count)]
        return [*right, *rng.choices(range(len(TOKENS)), k=count - len(right))]

    drafter = ScriptedDrafter(half_right)
    engine = engine_for(target, drafter, max_num_batched_tokens=3, max_num_seqs=2)
    for future in futures:
        engine.add(future[: len(future) - 12], GREEDY)
    finish(engine)
    assert len(drafter.finished) == 3
    for tokens, features in drafter.finished:
        assert any(future[: len(tokens)] == tokens for future in futures) and len(tokens) > 4
        batch = flat_batch([tokens], [0], [0])
        taps = target.model.forward(batch, target.model.new_cache(), (1, 0)).taps
        assert taps is not None
        torch.testing.assert_close(torch.stack(features), taps, rtol=0, atol=1e-12)


def test_no_proposal_is_asked_for_where_none_can_be_used(target: Target) -> None:
    drafter = ScriptedDrafter(lambda tokens, count: [])
    engine = engine_for(target, drafter)
    engine.add([3, 4], replace(GREEDY, max_tokens=1))
    engine.add([5, 6], replace(GREEDY, max_tokens=2))
    finish(engine)
    assert drafter.asked == []
    engine.add([5, 6], replace(GREEDY, max_tokens=5))
    finish(engine)
    # Room for 4, 3, 2, 1 more tokens: one of each round's is the target's own.
    assert drafter.asked == [3, 2, 1]


# Seeds


def test_seeds(target: Target) -> None:
    free = SamplingParams(max_tokens=20, ignore_eos=True)

    def outputs(engine: Engine, *params: SamplingParams) -> list[list[int]]:
        sequences = [sequence for each in params for sequence in engine.add([3], each)]
        finish(engine)
        return [sequence.output for sequence in sequences]

    seeded = replace(free, seed=7)
    first, second, third = outputs(engine_for(target), free, free, seeded)
    assert first != second
    assert [first, second] == outputs(engine_for(target), free, free)
    assert [first, second] != outputs(engine_for(target, seed=1), free, free)
    # A seed of its own makes a request independent of its place, and sample 1 of n is the only one of one.
    samples = outputs(engine_for(target, seed=9), replace(seeded, n=3))
    assert samples[0] == third and len({tuple(sample) for sample in samples}) == 3


# Slots and cancelling


def test_an_aborted_sequence_gives_its_slot_back(target: Target) -> None:
    engine = engine_for(target, max_num_seqs=1)
    running, waiting = (engine.add([3, 4], GREEDY)[0] for _ in range(2))
    engine.step()
    engine.abort(running)
    assert (running.finish_reason, running.num_output) == ("abort", 1)
    engine.abort(waiting)
    assert waiting.finish_reason == "abort" and not engine.has_work
    last = engine.add([3, 4], GREEDY)[0]
    finish(engine)
    assert last.output == future_of(target, [3, 4], GREEDY)[2:]
    engine.abort(last)
    assert last.finish_reason == "length"


# What is refused


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "the prompt is empty"),
        ([3] * 20, GREEDY, "the prompt has 20 tokens, but this model takes at most 20 tokens, .*shorten the prompt"),
        ([3, 32], GREEDY, "a token id outside the vocabulary, 0 to 31"),
        ([-1], GREEDY, "outside the vocabulary"),
        ([3], SamplingParams(logit_bias={32: 1.0}), "logit_bias names token 32"),
        ([3], SamplingParams(stop_token_ids=[40]), "stop_token_ids names token 40"),
    ],
)
def test_a_request_that_cannot_run(target: Target, prompt: list[int], params: SamplingParams, message: str) -> None:
    engine = engine_for(target, max_model_len=20)
    with pytest.raises(UserError, match=message):
        engine.add(prompt, params)
    assert not engine.has_work


def test_the_longest_prompt_that_fits(target: Target) -> None:
    sequence = answer(target, [3] * 19, replace(GREEDY, max_tokens=None), max_model_len=20)[0]
    assert sequence.num_output == 1 and sequence.finish_reason == "length"


def test_limits_beyond_the_model_and_the_drafter(target: Target) -> None:
    with pytest.raises(UserError, match="max_model_len is 49, but the model's limit is 48"):
        engine_for(target, max_model_len=49)
    with pytest.raises(UserError, match="num_speculative_tokens is 9, but this drafter proposes 1 to 8 tokens"):
        engine_for(target, ScriptedDrafter(lambda tokens, count: []), 9)
