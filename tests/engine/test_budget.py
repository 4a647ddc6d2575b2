"""The prefix scheduler against brute force, and what it leads to in simulated rounds."""

import math
import random
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters.base import Proposal, Stop
from foredraft.engine.budget import AutoBudget, FixedBudget, Offset, choose, learn
from foredraft.engine.costs import CostCurve, DraftCost, FixedCosts, LiveCosts

survivals = st.lists(
    st.lists(st.floats(0, 1), max_size=4).map(lambda values: sorted(values, reverse=True)), min_size=1, max_size=3
)


@st.composite
def costs(draw: st.DrawFn, convex: bool) -> list[float]:
    """Seconds of passes with 0, 1, ... rows, never falling."""
    steps = draw(st.lists(st.floats(0, 1), min_size=16, max_size=16))
    seconds, slope = [draw(st.floats(0.1, 3))], 0.0
    for step in steps:
        slope = slope + step if convex else step
        seconds.append(seconds[-1] + slope)
    return seconds


def rate(own: Sequence[Sequence[float]], lengths: Sequence[int], seconds: Sequence[float]) -> float:
    tau = len(own) + sum(sum(values[:length]) for values, length in zip(own, lengths, strict=True))
    return tau / seconds[len(own) + sum(lengths)]


def best_rate(own: Sequence[Sequence[float]], seconds: Sequence[float]) -> float:
    return max(rate(own, lengths, seconds) for lengths in product(*(range(len(values) + 1) for values in own)))


@settings(max_examples=200)
@given(survivals, costs(convex=False))
def test_looking_ahead_finds_the_best_of_all_choices(own: list[list[float]], seconds: list[float]) -> None:
    lengths = choose(own, seconds.__getitem__, look_ahead=True)
    assert rate(own, lengths, seconds) == pytest.approx(best_rate(own, seconds), rel=1e-9)


@settings(max_examples=200)
@given(survivals, costs(convex=True))
def test_the_early_stop_finds_it_where_costs_are_convex(own: list[list[float]], seconds: list[float]) -> None:
    assert rate(own, choose(own, seconds.__getitem__), seconds) == pytest.approx(best_rate(own, seconds), rel=1e-9)


@settings(max_examples=200)
@given(survivals, costs(convex=False), st.booleans())
def test_no_choice_is_expected_slower_than_plain_decoding(
    own: list[list[float]], seconds: list[float], look_ahead: bool
) -> None:
    lengths = choose(own, seconds.__getitem__, look_ahead)
    assert all(0 <= length <= len(values) for length, values in zip(lengths, own, strict=True))
    assert rate(own, lengths, seconds) >= rate(own, [0] * len(own), seconds)


@settings(max_examples=200)
@given(survivals, costs(convex=False), st.data())
def test_with_the_early_stop_no_token_hangs_on_what_comes_after_it(
    own: list[list[float]], seconds: list[float], data: st.DataObject
) -> None:
    """Change a sequence's survivals from token j + 1 on: whether tokens 1 to j are verified stays as it is."""
    r = data.draw(st.integers(0, len(own) - 1))
    j = data.draw(st.integers(0, len(own[r])))
    before = choose(own, seconds.__getitem__)
    limit = own[r][j - 1] if j else 1.0
    tail = data.draw(st.lists(st.floats(0, 1), max_size=4 - j))
    changed = [*own[:r], [*own[r][:j], *sorted((value * limit for value in tail), reverse=True)], *own[r + 1 :]]
    after = choose(changed, seconds.__getitem__)
    assert min(before[r], j) == min(after[r], j)


def test_choose_by_hand() -> None:
    # 2 / 2; 2.9 / 2.2; 3.7 / 2.4; 4.2 / 2.6 = 1.615; 4.3 / 2.8 = 1.536
    assert choose([[0.9, 0.5], [0.8, 0.1]], lambda rows: 2 + 0.2 * (rows - 2)) == [2, 1]
    assert choose([], lambda rows: 1.0) == []
    # A step in the cost that two tokens together are worth, but not one alone.
    step = [0, 1, 1.95, 1.95].__getitem__
    assert choose([[0.9, 0.8]], step) == [0] and choose([[0.9, 0.8]], step, look_ahead=True) == [2]


def test_offsets_learn_the_logit_of_a_rate() -> None:
    rng = random.Random(0)
    positions, own = Offset(1.0, 0.001), Offset(0.5, 0.001)
    for _ in range(4000):
        p = sigmoid(0.4 + positions.mean + own.mean)
        learn((positions, own), p, rng.random() < 0.9)
    assert sigmoid(0.4 + positions.mean + own.mean) == pytest.approx(0.9, abs=0.03)
    assert positions.variance < 0.1 and own.variance < 0.3


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# Simulated rounds: real decisions, made-up texts and seconds


class Text:
    """One sequence: every token is kept with a probability that varies around ``mean`` from token to token."""

    def __init__(self, mean: float, spread: float, seed: int) -> None:
        self.mean, self.spread, self.rng = mean, spread, random.Random(seed)
        self.prompt_length, self.reused, self.num_output, self.finish_reason = 10, 0, 10, "length"
        self.decoding, self.followed, self.room, self.draft_limit, self.slot = True, True, 10**6, 10**6, 0

    def draft(self, count: int, informed: bool) -> tuple[list[float], list[bool], Proposal]:
        p = [min(0.99, max(0.01, self.rng.gauss(self.mean, self.spread))) for _ in range(count)]
        kept = [self.rng.random() < value for value in p]
        return p, kept, Proposal((7,) * count, confidences=tuple(p) if informed else None)


def step_by_step(stop: Stop, confidences: Sequence[list[float]], planned: dict[int, int]) -> dict[int, int]:
    """Draft lengths of a drafter that takes one token of every sequence in turn."""
    lengths = dict.fromkeys(planned, 0)
    for k in range(1, max(planned.values()) + 1):
        for order, (index, limit) in enumerate(planned.items()):
            if lengths[index] == k - 1 < limit:
                lengths[index] = k
                if stop(order, confidences[order][k - 1], k):
                    planned = planned | {index: k}
    return lengths


def simulate(
    budget: Any,
    texts: Sequence[Text],
    costs: FixedCosts,
    rounds: int,
    sequential: bool,
    informed: bool,
    told: LiveCosts | None = None,
) -> float:
    """Tokens per second of model time, which ``told`` gets to know."""
    tokens, seconds = 0.0, 0.0
    work: Any = [SimpleNamespace(sequence=text, count=1) for text in texts]
    for _ in range(rounds):
        planned = budget.plan(work)
        drafts = {index: texts[index].draft(limit, informed) for index, limit in planned.items()}
        lengths = dict(planned)
        if sequential and budget.stop:
            lengths = step_by_step(budget.stop, [p for p, _, _ in drafts.values()], planned)
        proposals = [drafts[i][2].first(lengths[i]) if i in drafts else Proposal(()) for i in range(len(texts))]
        outcomes = [drafts[i][1] if i in drafts else [] for i in range(len(texts))]
        if planned:
            drafted = list(lengths.values()) if sequential else [max(planned.values())] * len(planned)
            seconds += costs.draft.of(drafted)
            if told:
                told.drafted(drafted, costs.draft.of(drafted))
            proposals = budget.trim(work, proposals)
        for text, proposal, kept in zip(texts, proposals, outcomes, strict=True):
            sent = len(proposal.token_ids)
            accepted = next((k for k in range(sent) if not kept[k]), sent)
            budget.record(text, accepted)
            tokens += accepted + 1
        rows = len(texts) + sum(len(proposal.token_ids) for proposal in proposals)
        seconds += costs.verify(rows)
        if told:
            told.verified(rows, costs.verify(rows))
    return tokens / seconds


PASSES = CostCurve.through({1: 4.4, 2: 4.5, 4: 4.7, 8: 5.4, 16: 8.0, 64: 26.0, 256: 100.0})
BLOCK = FixedCosts(PASSES, DraftCost(1.0, 0.02, 0.1, 0.02))
STEPS = FixedCosts(PASSES, DraftCost(0.1, 0.45, 0.02, 0.05))


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("informed", [False, True])
@pytest.mark.parametrize("mean", [0.05, 0.4, 0.65, 0.9])
@pytest.mark.parametrize("count", [1, 8])
def test_auto_is_as_good_as_the_best_fixed_length(count: int, mean: float, informed: bool, sequential: bool) -> None:
    costs = STEPS if sequential else BLOCK
    rounds = 3000 if count == 1 else 800

    def texts() -> list[Text]:
        return [Text(mean, 0.15, seed) for seed in range(count)]

    fixed = max(simulate(FixedBudget(n), texts(), costs, rounds, False, False) for n in range(8))
    auto = simulate(AutoBudget(costs, 7, look_ahead=True), texts(), costs, rounds, sequential, informed)
    assert auto > 0.97 * fixed


@pytest.mark.parametrize("sequential", [False, True])
def test_auto_beats_every_fixed_length_on_a_mix(sequential: bool) -> None:
    costs = STEPS if sequential else BLOCK

    def total(budgets: Sequence[Any]) -> float:
        """Texts one after the other, each of the same number of tokens: the harmonic mean counts."""
        rates = [
            simulate(budget, [Text(mean, 0.2, 3)], costs, 800, sequential, True)
            for budget, mean in zip(budgets, (0.15, 0.5, 0.95), strict=True)
        ]
        return 3 / sum(1 / rate for rate in rates)

    best = max(total([FixedBudget(n)] * 3) for n in range(1, 8))
    assert total([AutoBudget(costs, 7, look_ahead=True)] * 3) > 1.03 * best


def test_costs_that_turn_out_otherwise_are_noticed() -> None:
    """Measured in a moment when drafting took a fifth and large passes a half of what they take."""
    flattering = FixedCosts(
        CostCurve.through({1: 4.4, 2: 4.4, 4: 4.4, 8: 4.5}),
        DraftCost(*(value / 5 for value in (0.1, 0.45, 0.02, 0.05))),
    )
    dear = FixedCosts(CostCurve.through({1: 4.4, 2: 5.0, 4: 6.0, 8: 8.0}), STEPS.draft)
    fixed = max(simulate(FixedBudget(n), [Text(0.55, 0.15, 0)], dear, 3000, False, False) for n in range(8))

    def auto(costs: FixedCosts | LiveCosts, told: LiveCosts | None = None) -> float:
        budget = AutoBudget(costs, 7, look_ahead=True)
        return simulate(budget, [Text(0.55, 0.15, 0)], dear, 3000, True, True, told)

    assert auto(flattering) < 0.95 * fixed
    live = LiveCosts(flattering)
    assert auto(live, live) > 0.97 * fixed


def test_a_text_that_turns_predictable_is_noticed() -> None:
    budget = AutoBudget(STEPS, 7, look_ahead=True)
    text = Text(0.02, 0.01, 1)
    simulate(budget, [text], STEPS, 500, True, False)
    idle = simulate(budget, [text], STEPS, 300, True, False)
    assert idle > 0.97 / STEPS.verify(1)
    text.mean = 0.95
    simulate(budget, [text], STEPS, 700, True, False)
    assert simulate(budget, [text], STEPS, 300, True, False) > 1.5 / STEPS.verify(1)


def test_sequences_that_leave_are_forgotten() -> None:
    budget = AutoBudget(BLOCK, 7, look_ahead=True)
    texts = [Text(0.7, 0.1, seed) for seed in range(3)]
    simulate(budget, texts, BLOCK, 5, False, True)
    for text in texts:
        budget.forget(text)  # type: ignore[arg-type]
    assert not budget._beliefs


def test_following_counts_the_prompts_that_run_beside() -> None:
    """With 8 sequences a pass with drafts pays; but not where prompts run beside it most of the time."""
    curve = CostCurve((1, 16, 32, 256), (1.0, 1.1, 2.0, 30.0))
    cheap = FixedCosts(curve, DraftCost(0.1, 0.01))
    budget = AutoBudget(cheap, 4, look_ahead=True)
    assert budget.follows(1) and budget.follows(8)
    told = SimpleNamespace(prompt_length=240, reused=0, num_output=16, finish_reason="stop")
    for _ in range(200):
        budget.forget(told)  # type: ignore[arg-type]
    budget._take_in()
    assert budget.follows(1) and not budget.follows(8)
    told.reused = 240
    for _ in range(200):
        budget.forget(told)  # type: ignore[arg-type]
    budget._take_in()
    assert budget.follows(8)
    # How long answers are is not to be learned from clients that leave.
    gone = SimpleNamespace(prompt_length=240, reused=0, num_output=1, finish_reason="abort")
    for _ in range(200):
        budget.forget(gone)  # type: ignore[arg-type]
    budget._take_in()
    assert budget.follows(8)


def test_what_every_round_costs_besides_makes_longer_drafts_pay() -> None:
    cost = FixedCosts(CostCurve((1, 2), (1.3, 1.6)), DraftCost(0.0, 0.0))
    budget, survivals = AutoBudget(cost, 4, look_ahead=True), {0: [0.9, 0.5, 0.2, 0.1]}
    lengths = [budget._best_lengths(survivals, {0: 4}, 1, 0, besides)[0][0] for besides in (0.0, 5.0)]
    assert lengths == [2, 3]
