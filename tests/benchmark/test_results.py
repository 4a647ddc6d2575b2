"""Figures from timings made up by hand, and the tables they go to."""

from dataclasses import replace
from typing import Any

import pytest

from foredraft.benchmark.results import (
    Answer,
    Condition,
    Difference,
    Measurement,
    Percentiles,
    PhaseTimes,
    Run,
    first_difference,
    percentiles_ms,
    summarize,
)
from foredraft.benchmark.table import results_table, standings_tables
from foredraft.engine.sequence import Acceptance


def condition(
    method: str = "dflash", n: Any = 3, dataset: str = "gsm8k", concurrency: int = 1, quantization: str = "none"
) -> Condition:
    return Condition(
        model="tiny",
        dtype="float64",
        quantization=quantization,
        method=method,
        drafter=None,
        num_speculative_tokens=n,
        acceptance_rule="exact",
        dataset=dataset,
        dataset_source="bundled",
        concurrency=concurrency,
        max_tokens=8,
        temperature=0.0,
        seed=0,
    )


def answer(*token_ids: int, ttft: float = 0.1, decode_seconds: float = 0.0) -> Answer:
    return Answer(len(token_ids), ttft, decode_seconds, token_ids)


PLAIN = Measurement(
    seconds=4.0,
    conversations=[
        (answer(5, 6, 7, ttft=0.25, decode_seconds=1.0), answer(8, ttft=0.5)),
        (answer(1, 2, 3, 4, ttft=0.125, decode_seconds=0.75),),
    ],
    acceptance=Acceptance(rounds=5, committed=5),
)


def test_figures_of_a_run() -> None:
    drafted = Measurement(
        seconds=1.5,
        conversations=PLAIN.conversations,
        acceptance=Acceptance(rounds=4, committed=10, proposed=[4, 4, 2], kept=[3, 2, 1]),
    )
    run = summarize(condition(), drafted, PLAIN)
    assert (run.num_prompts, run.turns, run.output_tokens, run.seconds) == (2, 3, 8, 1.5)
    assert run.output_tokens_per_second == pytest.approx(8 / 1.5)
    # Time to first token 125, 250, 500 ms; per token after it 1000/2 and 750/3 ms, none for the one-token answer.
    assert run.ttft_ms.p50 == pytest.approx(250)
    assert run.ttft_ms.p95 == pytest.approx(250 + 0.9 * 250)
    assert run.tpot_ms.p50 == pytest.approx((500 + 250) / 2)
    assert run.tpot_ms.p95 == pytest.approx(250 + 0.95 * 250)
    assert run.speedup == pytest.approx((8 / 1.5) / (8 / 4))
    assert (run.rounds, run.acceptance_length) == (4, 2.5)
    assert run.acceptance_rate_per_position == [0.75, 0.5, 0.5]
    assert (run.identical_to_plain, run.num_different, run.differences) == (True, 0, [])


def test_speedup_compares_speeds_not_times() -> None:
    """Where answers differ in length, half the time for half the tokens is no gain."""
    shorter = Measurement(2.0, [(answer(5, 6), answer(8)), (answer(1),)], Acceptance())
    assert summarize(condition(), shorter, PLAIN).speedup == pytest.approx(1.0)


def test_differences_name_prompt_turn_and_token() -> None:
    other = Measurement(
        seconds=4.0,
        conversations=[
            (answer(5, 6, 9), answer(0)),  # the second turn answers another conversation: not a second difference
            (answer(1, 2, 3),),
        ],
        acceptance=Acceptance(),
    )
    run = summarize(condition(), other, PLAIN)
    assert run.identical_to_plain is False
    assert run.num_different == 2
    assert run.differences == [Difference(0, 0, 2), Difference(1, 0, 3)]


@pytest.mark.parametrize(
    ("expected", "found", "index"),
    [((1, 2, 3), (1, 9, 3), 1), ((1, 2), (1, 2, 3), 2), ((1, 2, 3), (1, 2), 2), ((), (1,), 0), ((0,), (), 0)],
)
def test_first_difference(expected: tuple[int, ...], found: tuple[int, ...], index: int) -> None:
    assert first_difference(expected, found) == index


def test_what_cannot_be_had_is_null() -> None:
    remote = Measurement(2.0, [(Answer(1, 0.1, 0.0),)], acceptance=None)
    run = summarize(condition("server"), remote, plain=None)
    assert run.tpot_ms == Percentiles(None, None)
    unknown = ("rounds", "acceptance_length", "acceptance_rate_per_position", "speedup", "identical_to_plain")
    assert [run.as_json()[key] for key in unknown] == [None] * 5
    assert percentiles_ms([]) == Percentiles(None, None)


def test_rejection_is_compared_with_plain_decoding_at_temperature_0_only() -> None:
    other = Measurement(4.0, [(answer(5, 6, 9), answer(8)), (answer(1, 2, 3, 4),)], Acceptance())
    for temperature, expected in ((0.0, False), (1.0, None)):
        how = replace(condition(), acceptance_rule="rejection", temperature=temperature)
        run = summarize(how, other, PLAIN)
        assert run.identical_to_plain is expected
        assert (run.num_different, run.speedup) == (None if expected is None else 1, pytest.approx(1.0))


def test_phases_are_totals_of_all_steps_and_medians_of_rounds() -> None:
    times = PhaseTimes()
    times.note({"draft": 0.0, "verify": 0.5, "observe": 0.25}, prefill=True)
    for draft, verify, observe in ((0.001, 0.004, 0.001), (0.002, 0.007, 0.001), (0.009, 0.013, 0.002)):
        times.note({"draft": draft, "verify": verify, "observe": observe}, prefill=False)
    run = summarize(condition(), replace(PLAIN, times=times), PLAIN)
    assert (run.draft_seconds, run.verify_seconds, run.observe_seconds) == pytest.approx((0.012, 0.524, 0.254))
    assert (run.draft_ms, run.verify_ms, run.observe_ms) == pytest.approx((2.0, 7.0, 1.0))
    assert run.draft_share == pytest.approx((0.012 + 0.004) / 0.040)
    nothing = summarize(condition(), replace(PLAIN, times=PhaseTimes()), PLAIN)
    assert (nothing.draft_seconds, nothing.draft_ms, nothing.draft_share) == (0.0, None, None)


def fast(n: int, seconds: float, dataset: str = "gsm8k", concurrency: int = 1) -> Run:
    own = Measurement(seconds, PLAIN.conversations, PLAIN.acceptance)
    return summarize(condition("dflash" if n else "none", n, dataset, concurrency), own, PLAIN)


def test_the_fastest_n_and_the_winner_are_told_where_several_were_tried() -> None:
    runs = [
        fast(0, 4),
        fast(3, 2),
        fast(5, 1),
        fast(7, 2.5),
        fast(0, 4, "mbpp"),
        fast(3, 2, "mbpp"),
        fast(5, 3, "mbpp"),
    ]
    ((heading, table),) = standings_tables(runs)
    cells = [list(column.cells) for column in table.columns]
    # Over both, N = 3 is 2 twice, N = 5 the root of 4 x 4/3.
    assert list(zip(*cells, strict=True)) == [
        ("dflash", "4.00x\nN 5, τ 1.00", "2.00x\nN 3, τ 1.00", "2.31x\nN 5, τ 1.00"),
        ("winner", "dflash\nN 5", "dflash\nN 3", "dflash\nN 5"),
    ]
    assert [column.header for column in table.columns] == ["method", "gsm8k", "mbpp", "overall"]
    assert heading == "Fastest N of each method: tiny, float64, concurrency 1"
    assert list(standings_tables([fast(0, 4), fast(5, 1), fast(0, 4, "mbpp"), fast(5, 1, "mbpp")])) == []
    apart = [fast(0, 4, concurrency=c) for c in (1, 8)] + [fast(n, 5, concurrency=c) for n in (3, 5) for c in (1, 8)]
    tables = list(standings_tables(apart))
    assert ["concurrency 8" in heading for heading, _ in tables] == [False, True]
    assert list(tables[0][1].columns[1].cells)[-1] == "none"


def test_weights_are_told_apart_where_some_are_quantised() -> None:
    runs = [
        summarize(condition(n=n, quantization=quantization), Measurement(seconds, PLAIN.conversations), PLAIN)
        for quantization, n, seconds in (("none", 2, 2.0), ("none", 3, 1.0), ("mxfp4", 2, 0.5), ("mxfp4", 3, 1.0))
    ]
    columns = {str(column.header): list(column.cells) for column in results_table(runs).columns}
    assert columns["weights"] == ["none", "none", "mxfp4", "mxfp4"]
    assert {"weights", "rule", "ms draft+verify+observe"}.isdisjoint(
        column.header for column in results_table(runs[:2]).columns
    )


def test_rules_and_phases_have_columns_where_there_are_any() -> None:
    times = PhaseTimes()
    times.note({"draft": 0.001, "verify": 0.004, "observe": 0.0005}, prefill=False)
    how = replace(condition(n="auto"), acceptance_rule="rejection")
    runs = [fast(0, 4), summarize(how, replace(PLAIN, times=times), PLAIN)]
    columns = {str(column.header): list(column.cells) for column in results_table(runs).columns}
    assert columns["rule"] == ["exact", "rejection"]
    assert columns["N"] == ["-", "auto"]
    assert columns["ms draft+verify+observe"] == ["-+-+-", "1.00+4.00+0.50"]


def test_table_has_a_row_for_each_run() -> None:
    differing = Measurement(1.0, [(answer(5), answer(8)), (answer(1, 2, 3, 4),)], Acceptance(4, 10, [4, 4], [3, 1]))
    table = results_table([fast(0, 4), summarize(condition(n=2), differing, PLAIN)])
    cells = [list(column.cells) for column in table.columns]
    assert list(zip(*cells, strict=True)) == [
        ("gsm8k*", "none", "-", "1", "2.0", "1.00x", "1.00", "-", "yes"),
        ("gsm8k*", "dflash", "2", "1", "6.0", "3.00x", "2.50", "75 25", "no: 1/2"),
    ]
    assert table.caption is not None
