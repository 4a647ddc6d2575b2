"""The file of a benchmark: what is written is read again, and what is wrong is named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.benchmark.results import Condition, Difference, Percentiles, Run
from foredraft.benchmark.results_file import Results, check_output, read_results, write_results
from foredraft.errors import UserError

# DESIGN.md, "What others script against".
CONTRACT = [
    *("model", "quantization", "method", "num_speculative_tokens", "dataset", "concurrency", "num_prompts"),
    *("output_tokens", "seconds", "output_tokens_per_second", "ttft_ms", "tpot_ms", "rounds"),
    *("acceptance_length", "acceptance_rate_per_position", "speedup", "identical_to_plain"),
]


RUN = Run(
    condition=Condition(
        model="tiny",
        dtype="float64",
        quantization="none",
        method="dflash",
        drafter=None,
        num_speculative_tokens=3,
        acceptance_rule="exact",
        dataset="gsm8k",
        dataset_source="bundled",
        concurrency=1,
        max_tokens=8,
        temperature=0.0,
        seed=0,
    ),
    num_prompts=2,
    turns=3,
    output_tokens=8,
    seconds=4.0,
    output_tokens_per_second=2.0,
    ttft_ms=Percentiles(250.0, 475.0),
    tpot_ms=Percentiles(None, None),
    rounds=5,
    acceptance_length=1.5,
    acceptance_rate_per_position=[0.5, 0.25, 0.0],
    speedup=2.0,
    identical_to_plain=True,
    num_different=0,
    differences=[],
)


def test_file_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text("something older")
    write_results(path, Results({"processor": "x"}, [RUN], "foredraft bench tiny"))
    content = json.loads(path.read_text())
    assert list(content) == ["command", "environment", "runs", "standings"]
    assert content["command"] == "foredraft bench tiny"
    assert content["environment"] == {"processor": "x"}
    (written,) = content["runs"]
    assert set(CONTRACT) <= set(written)
    assert {"dataset_source", "acceptance_rule", "num_different", "turns", "draft_ms", "verify_seconds"} <= set(written)
    assert set(written["ttft_ms"]) == set(written["tpot_ms"]) == {"p50", "p95"}
    assert written["model"] == "tiny"
    assert written["speedup"] == 2.0
    assert written["identical_to_plain"] is True
    assert [entry.name for entry in tmp_path.iterdir()] == ["bench.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_results(path, Results({}, [replace(RUN, seconds=float("nan"))]))
    assert path.read_text() == "old"


def test_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    check_output(tmp_path / "new.json")
    with pytest.raises(UserError, match="is a folder"):
        check_output(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        check_output(tmp_path / "nowhere" / "new.json")


def test_standings_are_flat_records(tmp_path: Path) -> None:
    mbpp = replace(RUN, condition=replace(RUN.condition, dataset="mbpp"), speedup=8.0)
    write_results(tmp_path / "f.json", Results({}, [RUN, mbpp]))
    found = json.loads((tmp_path / "f.json").read_text())["standings"]
    assert [(each["dataset"], each["method"], each["num_speculative_tokens"]) for each in found] == [
        ("gsm8k", "dflash", 3),
        ("mbpp", "dflash", 3),
        (None, "dflash", 3),
    ]
    assert [each["speedup"] for each in found] == pytest.approx([2, 8, 4])
    assert {"model", "quantization", "concurrency", "acceptance_rule", "winner"} <= set(found[0])


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    auto = replace(
        RUN,
        condition=replace(RUN.condition, num_speculative_tokens="auto", base_url="http://x"),
        acceptance_rate_per_position=None,
        differences=[Difference(0, 1, 2)],
        draft_ms=0.5,
    )
    results = Results({"threads": 2, "versions": {"torch": "2"}}, [RUN, auto], "foredraft bench")
    write_results(tmp_path / "f.json", results)
    assert read_results(tmp_path / "f.json") == results


def test_older_and_richer_files_are_read(tmp_path: Path) -> None:
    content = RUN.as_json() | {"something": "new", "speedup": 2}
    for later in ("draft_ms", "verify_seconds", "draft_share", "base_url"):
        del content[later]
    (tmp_path / "f.json").write_text(json.dumps({"environment": {}, "runs": [content]}))
    assert read_results(tmp_path / "f.json") == Results({}, [RUN], None)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"speedup": "fast"}, "f.json, run 1: speedup is 'fast', expected a number or null"),
        ({"rounds": True}, "run 1: rounds is True, expected an integer or null"),
        (
            {"num_speculative_tokens": "most"},
            "num_speculative_tokens is 'most', expected an integer or \"auto\" or null",
        ),
        ({"dataset": None}, "run 1: dataset is None, expected a string"),
        ({"ttft_ms": 3}, "run 1: ttft_ms is 3, expected a JSON object"),
        ({"ttft_ms": {"p50": "x"}}, "run 1: ttft_ms: p50 is 'x', expected a number or null"),
        (
            {"acceptance_rate_per_position": [0.5, None]},
            r"acceptance_rate_per_position \[1\] is None, expected a number",
        ),
        ({"seconds": float("nan")}, "NaN is not a number of JSON"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    (tmp_path / "f.json").write_text(json.dumps({"environment": {}, "runs": [RUN.as_json() | changes]}))
    with pytest.raises(UserError, match=complaint):
        read_results(tmp_path / "f.json")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot be read"),
        ("[]", "needs `runs`"),
        ('{"runs": []}', "at least one"),
        ('{"runs": [3]}', "run 1 is 3, expected a JSON object"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str | None, complaint: str) -> None:
    if text is not None:
        (tmp_path / "f.json").write_text(text)
    with pytest.raises(UserError, match=complaint):
        read_results(tmp_path / "f.json")
