"""Figures from timings made up by hand, and the file they go to."""

import json
from pathlib import Path

import pytest

from foredraft.benchmark.results import (
    Answer,
    Condition,
    Difference,
    Measurement,
    Percentiles,
    Run,
    check_output,
    first_difference,
    percentiles_ms,
    summarize,
    write_results,
)
from foredraft.benchmark.table import best_lines, results_table
from foredraft.engine.sequence import Acceptance
from foredraft.errors import UserError

# DESIGN.md, "What others script against".
CONTRACT = [
    *("model", "quantization", "method", "num_speculative_tokens", "dataset", "concurrency", "num_prompts"),
    *("output_tokens", "seconds", "output_tokens_per_second", "ttft_ms", "tpot_ms", "rounds"),
    *("acceptance_length", "acceptance_rate_per_position", "speedup", "identical_to_plain"),
]


def condition(
    method: str = "dflash", n: int = 3, dataset: str = "gsm8k", concurrency: int = 1, quantization: str = "none"
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


def test_file_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text("something older")
    run = summarize(condition(), PLAIN, PLAIN)
    write_results(path, {"processor": "x"}, [run])
    content = json.loads(path.read_text())
    assert list(content) == ["environment", "runs"]
    assert content["environment"] == {"processor": "x"}
    (written,) = content["runs"]
    assert set(CONTRACT) <= set(written)
    assert {"dataset_source", "acceptance_rule", "num_different", "turns"} <= set(written)
    assert set(written["ttft_ms"]) == set(written["tpot_ms"]) == {"p50", "p95"}
    assert written["model"] == "tiny"
    assert written["speedup"] == 1.0
    assert written["identical_to_plain"] is True
    assert [entry.name for entry in tmp_path.iterdir()] == ["bench.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text("old")
    bad = summarize(condition(), Measurement(float("nan"), PLAIN.conversations), None)
    with pytest.raises(ValueError, match="JSON compliant"):
        write_results(path, {}, [bad])
    assert path.read_text() == "old"


def test_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    check_output(tmp_path / "new.json")
    with pytest.raises(UserError, match="is a folder"):
        check_output(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        check_output(tmp_path / "nowhere" / "new.json")


def fast(n: int, seconds: float, dataset: str = "gsm8k", concurrency: int = 1) -> Run:
    own = Measurement(seconds, PLAIN.conversations, PLAIN.acceptance)
    return summarize(condition("dflash" if n else "none", n, dataset, concurrency), own, PLAIN)


def test_best_n_is_told_where_several_were_tried() -> None:
    runs = [fast(0, 4), fast(3, 2), fast(5, 1), fast(7, 2.5), fast(3, 2, "mbpp"), fast(5, 3, "mbpp")]
    assert list(best_lines(runs)) == ["Best N of dflash at concurrency 1: gsm8k 5 (4.00x), mbpp 3 (2.00x)"]
    assert list(best_lines([fast(0, 4), fast(5, 1), fast(0, 4, "mbpp"), fast(5, 1, "mbpp")])) == []
    apart = [fast(3, 2), fast(5, 1), fast(3, 1, concurrency=8), fast(5, 2, concurrency=8)]
    assert list(best_lines(apart)) == [
        "Best N of dflash at concurrency 1: gsm8k 5 (4.00x)",
        "Best N of dflash at concurrency 8: gsm8k 3 (4.00x)",
    ]


def test_weights_are_told_apart_where_some_are_quantised() -> None:
    runs = [
        summarize(condition(n=n, quantization=quantization), Measurement(seconds, PLAIN.conversations), PLAIN)
        for quantization, n, seconds in (("none", 2, 2.0), ("none", 3, 1.0), ("mxfp4", 2, 0.5), ("mxfp4", 3, 1.0))
    ]
    assert list(best_lines(runs)) == [
        "Best N of dflash at concurrency 1: gsm8k 3 (4.00x)",
        "Best N of dflash on mxfp4 at concurrency 1: gsm8k 2 (8.00x)",
    ]
    columns = {str(column.header): list(column.cells) for column in results_table(runs).columns}
    assert columns["weights"] == ["none", "none", "mxfp4", "mxfp4"]
    assert "weights" not in [column.header for column in results_table(runs[:2]).columns]


def test_table_has_a_row_for_each_run() -> None:
    differing = Measurement(1.0, [(answer(5), answer(8)), (answer(1, 2, 3, 4),)], Acceptance(4, 10, [4, 4], [3, 1]))
    table = results_table([fast(0, 4), summarize(condition(n=2), differing, PLAIN)])
    cells = [list(column.cells) for column in table.columns]
    assert list(zip(*cells, strict=True)) == [
        ("gsm8k*", "none", "-", "1", "2.0", "1.00x", "1.00", "-", "yes"),
        ("gsm8k*", "dflash", "2", "1", "6.0", "3.00x", "2.50", "75 25", "no: 1/2"),
    ]
    assert table.caption is not None
