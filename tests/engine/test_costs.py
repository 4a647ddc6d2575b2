"""Cost curves by hand, and measuring that leaves no trace."""

import logging
import math
import random
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scripted import PlainDecoder, ScriptedDrafter
from tiny import tiny_target

from foredraft.config import EngineConfig
from foredraft.engine.costs import CostCurve, DraftCost, FixedCosts, LiveCosts, measure, smoothed
from foredraft.engine.engine import Engine
from foredraft.sampling_params import SamplingParams

TARGET = tiny_target()


def test_a_curve_goes_through_its_points_and_on_from_the_last() -> None:
    curve = CostCurve.through({8: 6.0, 1: 4.0, 2: 4.5})
    assert [curve(rows) for rows in (1, 2, 5, 8, 12)] == pytest.approx([4.0, 4.5, 5.25, 6.0, 7.0])


def test_a_pass_costs_at_least_what_a_smaller_one_does() -> None:
    assert CostCurve.through({1: 4.0, 2: 3.0, 4: 5.0}).seconds == (4.0, 4.0, 5.0)
    assert CostCurve.through({1: 4.0})(30) == 4.0


@given(st.dictionaries(st.integers(1, 40), st.floats(0.001, 10), min_size=1, max_size=6))
def test_a_curve_never_falls(measured: dict[int, float]) -> None:
    curve = CostCurve.through(measured)
    values = [curve(rows) for rows in range(1, 60)]
    assert all(after >= before - 1e-12 for before, after in pairwise(values))


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (1, 5), (8, 1), (8, 5)])
def test_drafting_costs_are_a_plane_of_their_corners(sequences: int, tokens: int) -> None:
    def true(count: int, length: int) -> float:
        return 3 + 0.5 * (count - 1) + length * (0.2 + 0.03 * (count - 1))

    cost = DraftCost.through(true, sequences, tokens)
    for count in {1, sequences}:
        for length in {1, tokens}:
            assert cost(count, length) == pytest.approx(true(count, length))
    assert cost.step(1) == pytest.approx(0.2 if tokens > 1 else 0)


def test_small_dents_of_a_curve_are_smoothed_and_steps_are_not() -> None:
    rng = random.Random(1)

    def times(seconds: float) -> list[float]:
        return [seconds * math.exp(rng.gauss(0, 0.03)) for _ in range(9)]

    straight = {rows: 6 + 0.1 * rows for rows in (1, 2, 3, 4, 6, 8)}
    trials = [
        (smoothed(found), found) for found in ({rows: times(straight[rows]) for rows in straight} for _ in range(50))
    ]
    errors = [fmean(abs(smooth[rows] - straight[rows]) for rows in straight) for smooth, _ in trials]
    raw = [fmean(abs(median(found[rows]) - straight[rows]) for rows in straight) for _, found in trials]
    assert fmean(errors) < 0.75 * fmean(raw)
    stepped = smoothed({rows: times(6 if rows < 4 else 9) for rows in (1, 2, 3, 4, 5, 6)})
    assert all(stepped[rows] == pytest.approx(6 if rows < 4 else 9, rel=0.07) for rows in stepped)
    assert smoothed({1: [2.0], 4: [3.0]}) == {1: 2.0, 4: 3.0}


def live() -> LiveCosts:
    return LiveCosts(FixedCosts(CostCurve.through({1: 4.0, 2: 4.4, 4: 5.0, 8: 7.0}), DraftCost(0.2, 0.5, 0.1, 0.05)))


def test_a_draft_costs_its_steps() -> None:
    # Fixed 0.2 + 2 * 0.1; steps of three, two and one sequence.
    assert live().draft.of([3, 1, 2]) == pytest.approx(0.4 + 0.6 + 0.55 + 0.5)
    assert live().draft.of([0]) == pytest.approx(0.2)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_costs_follow_a_machine_that_changes(factor: float) -> None:
    costs, rng = live(), random.Random(2)
    true = live()

    def seen(seconds: float) -> float:
        # One time in fifty the process pauses.
        return factor * seconds * math.exp(rng.gauss(0, 0.1)) + (100 if rng.random() < 0.02 else 0)

    for index in range(400):
        rows = (1, 2, 3, 4)[index % 4]
        costs.verified(rows, seen(true.verify(rows)))
        costs.drafted([rows], seen(true.draft.of([rows])))
    for rows in (1, 2, 3, 4):
        assert costs.verify(rows) == pytest.approx(factor * true.verify(rows), rel=0.1)
    # A size that did not occur changes with the others.
    assert costs.verify(8) == pytest.approx(factor * true.verify(8), rel=0.15)
    assert costs.draft(2, 3) == pytest.approx(factor * true.draft(2, 3), rel=0.1)


def test_memory_that_slows_down_alone() -> None:
    """Further rows add what they did before, which decides how many tokens are worth verifying."""
    costs, rng = live(), random.Random(3)
    true = live().verify
    for index in range(600):
        rows = (1, 2, 3, 4)[index % 4]
        costs.verified(rows, (true(rows) + 0.5 * true(1)) * math.exp(rng.gauss(0, 0.1)))
    assert costs.verify(1) == pytest.approx(1.5 * true(1), rel=0.1)
    added = costs.verify(4) - costs.verify(1)
    assert added == pytest.approx(true(4) - true(1), rel=0.3)


def test_one_size_that_is_dearer_than_measured() -> None:
    costs = live()
    for rows in (1, 4) * 300:
        costs.verified(rows, {1: 4.0, 4: 7.5}[rows])
    assert costs.verify(1) == pytest.approx(4.0, rel=0.03) and costs.verify(4) == pytest.approx(7.5, rel=0.03)
    assert costs.verify(8) >= costs.verify(4)


def test_the_rest_of_rounds_is_followed_by_sequence() -> None:
    live = LiveCosts(FixedCosts(CostCurve((1, 8), (1.0, 2.0)), DraftCost(0.1, 0.01)))
    live.rested(4, 0.4)
    assert live.rest == pytest.approx(0.1)
    for _ in range(300):
        live.rested(2, 0.4)
    assert live.rest == pytest.approx(0.2, rel=0.01)
    live.rested(1, 3600.0)
    assert live.rest < 0.22


def test_a_pass_larger_than_any_measured_becomes_a_point() -> None:
    costs = live()
    costs.verified(100, 20.0)
    costs.verified(100, 20.0)
    assert costs.verify(100) == pytest.approx(20.0) and costs.verify.rows[-1] == 100
    assert costs.verify(8) == pytest.approx(7.0)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1e6)), max_size=30))
@example([(1, 5e-324)])
def test_no_times_break_the_costs(times: list[tuple[int, float]]) -> None:
    costs = live()
    for rows, seconds in times:
        costs.verified(rows, seconds)
        costs.drafted([rows, 1], seconds)
    values = [costs.verify(rows) for rows in range(1, 60)]
    assert all(0 < before <= after * (1 + 1e-12) for before, after in pairwise(values)) and math.isfinite(values[-1])
    assert 0 < costs.draft(2, 5) < math.inf


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_measuring_leaves_no_trace(max_num_seqs: int, caplog: pytest.LogCaptureFixture) -> None:
    cache = TARGET.model.new_cache()
    drafter = ScriptedDrafter(lambda tokens, count: [3] * count)
    with caplog.at_level(logging.INFO, "foredraft"):
        costs = measure(TARGET.model, cache, drafter, 28, max_num_seqs, 4)
    assert costs.verify.rows[:2] == (1, 2) and costs.verify.seconds[0] > 0 and 5 in costs.verify.rows
    assert costs.draft(1, 4) >= 0 and "measured costs in" in caplog.text
    assert not drafter.seen and all(cache.length(slot) == 0 for slot in range(max_num_seqs))


def ngrams(tokens: list[int], count: int) -> list[int]:
    return (tokens * count)[:count]


@pytest.mark.parametrize("script", [ngrams, lambda tokens, count: []])
def test_an_engine_that_measures_for_itself(script: Callable[[list[int], int], list[int]]) -> None:
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=12, ignore_eos=True)
    engine = Engine(
        TARGET.model,
        EngineConfig(max_model_len=28, max_num_seqs=2),
        tokenizer=TARGET.tokenizer,
        drafter=ScriptedDrafter(script),
        num_speculative_tokens="auto",
    )
    sequences = [engine.add([3, 4, 5, 3, 4, 5], params)[0] for _ in range(3)]
    while engine.has_work:
        engine.step()
    expected = PlainDecoder(TARGET)([3, 4, 5, 3, 4, 5], params, 4, 28).token_ids
    assert [sequence.output for sequence in sequences] == [expected] * 3
    assert all(sequence.acceptance.committed == 11 for sequence in sequences)
