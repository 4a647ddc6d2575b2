"""Winners, best N and labels from runs made up by hand."""

from typing import Any

import pytest
from made_runs import made

from foredraft.benchmark.comparison import by_setting, draft_counts, series_labels, setting_labels, standings
from foredraft.benchmark.results import Run


def told(runs: list[Run]) -> list[tuple[Any, ...]]:
    return [
        (each.dataset, each.series.method, each.num_speculative_tokens, pytest.approx(each.speedup), each.winner)
        for each in standings(runs)
    ]


def test_the_fastest_n_by_workload_and_one_n_for_all() -> None:
    runs = [
        *(made("none", 0, 1.0, dataset) for dataset in ("gsm8k", "mbpp")),
        *(made("mtp", 3, speedup, dataset) for dataset, speedup in (("gsm8k", 2.0), ("mbpp", 2.0))),
        *(made("mtp", "auto", speedup, dataset) for dataset, speedup in (("gsm8k", 1.0), ("mbpp", 3.0))),
        *(made("dflash", 7, speedup, dataset) for dataset, speedup in (("gsm8k", 2.5), ("mbpp", 1.5))),
        made("dflash", 15, 9.0, "mbpp"),
    ]
    assert told(runs) == [
        ("gsm8k", "mtp", 3, 2.0, False),
        ("gsm8k", "dflash", 7, 2.5, True),
        ("mbpp", "mtp", "auto", 3.0, False),
        ("mbpp", "dflash", 15, 9.0, True),
        (None, "mtp", 3, 2.0, True),
        # N = 15 has not run on both; the root of 2.5 x 1.5.
        (None, "dflash", 7, 3.75**0.5, False),
    ]
    assert standings(runs)[-1].acceptance_length == 2.5


def test_plain_decoding_can_win() -> None:
    assert told([made("none", 0, 1.0), made("mtp", 3, 0.9), made("dflash", 3, 1.0)]) == [
        ("gsm8k", "mtp", 3, 0.9, False),
        ("gsm8k", "dflash", 3, 1.0, False),
    ]


def test_settings_are_apart_and_what_has_no_speedup_is_left_out() -> None:
    runs = [
        made("mtp", 3, 2.0),
        made("mtp", 3, 3.0, concurrency=8),
        made("mtp", 5, 1.5, quantization="mxfp4"),
        made("mtp", 5, None, model="other"),
        made("mtp", 5, 4.0, temperature=1.0),
    ]
    assert [(each[2], each[3], each[4]) for each in told(runs)] == [
        (3, 2.0, True),
        (3, 3.0, True),
        (5, 1.5, True),
        (5, 4.0, True),
    ]
    assert list(setting_labels(list(by_setting(runs))).values()) == [
        "tiny, bfloat16, concurrency 1, temperature 0",
        "tiny, bfloat16, concurrency 8, temperature 0",
        "tiny, mxfp4, concurrency 1, temperature 0",
        "other, bfloat16, concurrency 1, temperature 0",
        "tiny, bfloat16, concurrency 1, temperature 1",
    ]


def test_labels_say_what_tells_series_apart() -> None:
    assert list(series_labels([made("none", 0, 1.0), made("mtp", 3, 2.0), made("dflash", 3, 2.0)]).values()) == [
        "mtp",
        "dflash",
    ]
    runs = [
        made("mtp", 3, 2.0),
        made("mtp", 3, 2.0, acceptance_rule="rejection"),
        made("mtp", 3, 2.0, drafter="mine"),
    ]
    assert list(series_labels(runs).values()) == [
        "mtp (exact) (shipped drafter)",
        "mtp (rejection) (shipped drafter)",
        "mtp (exact) (mine)",
    ]


def test_draft_counts_are_in_order() -> None:
    runs = [made("mtp", n, 1.0) for n in (15, "auto", 3, 0, None, 3)]
    assert draft_counts(runs) == [3, 15, "auto"]
