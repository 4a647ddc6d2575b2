"""Workload files, where they come from, and what is wrong with them."""

import json
from pathlib import Path

import pytest

from foredraft.benchmark import workloads
from foredraft.benchmark.workloads import (
    BUNDLED,
    NAMES,
    load_workload,
    load_workloads,
    read_conversations,
    request_seed,
)
from foredraft.errors import UserError

EVALUATION = Path(__file__).parents[3] / "shared/data/eval"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workloads, "_hub_is_reachable", lambda: False)
    monkeypatch.setattr(workloads, "hf_hub_download", _not_cached)


def _not_cached(*_: object, **options: object) -> str:
    assert options["local_files_only"] is True
    raise workloads.EntryNotFoundError("not in the cache")


def write(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
    return path


def test_data_dir_gives_the_first_prompts_with_all_their_turns(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines, not for JSON Lines.
    write(
        tmp_path / "mt-bench.jsonl", {"turns": ["a\u2028b", "c"], "category": "x"}, {"turns": ["d"]}, {"turns": ["e"]}
    )
    workload = load_workload("mt-bench", tmp_path, 2)
    assert workload.source == "data-dir"
    assert workload.conversations == (("a\u2028b", "c"), ("d",))
    assert workload.notes == ()


def test_fewer_prompts_than_asked_are_all_used_and_said(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k.jsonl", {"turns": ["a"]}, {"turns": ["b"]})
    write(tmp_path / "mbpp.jsonl", {"turns": ["c"]}, {"turns": ["d"]})
    loaded = load_workloads(["gsm8k", "mbpp", "gsm8k"], tmp_path, 5)
    assert [len(workload.conversations) for workload in loaded] == [2, 2]
    (note,) = workloads.notes(loaded)
    assert note == "gsm8k, mbpp: 5 prompts were asked for, 2 are all there are"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"turns": ["a"]}\n{"turns": ["b"]\n', "line 2 is not valid JSON"),
        ('{"turns": ["a"]}\n\n{"prompt": "b"}\n', "line 3: expected a JSON object with `turns`"),
        ('["a"]\n', "line 1: expected a JSON object"),
        ('{"turns": "a"}\n', "line 1: `turns` must be a list"),
        ('{"turns": []}\n', "line 1: `turns` must be a list of at least one string"),
        ('{"turns": ["a", ""]}\n', "line 1: `turns` must"),
        ('{"turns": ["a", 3]}\n', "line 1: `turns` must"),
        ("\n", "holds no prompts"),
    ],
)
def test_malformed_files_are_named_with_the_line(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        load_workload("gsm8k", tmp_path, 1)
    assert str(path) in str(error.value)
    assert complaint in str(error.value)


def test_unknown_names_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'gsm9k' is not known; known: gsm8k, "):
        load_workload("gsm9k", tmp_path, 1)
    with pytest.raises(UserError, match=r"humaneval.jsonl does not exist"):
        load_workload("humaneval", tmp_path, 1)
    (tmp_path / "mbpp.jsonl").write_bytes(b'{"turns": ["\xff"]}')
    with pytest.raises(UserError, match="UTF-8"):
        load_workload("mbpp", tmp_path, 1)


@pytest.mark.usefixtures("offline")
def test_without_the_hub_our_own_prompts_are_used_and_named_so() -> None:
    loaded = load_workloads(NAMES, None, 3)
    assert {workload.source for workload in loaded} == {"bundled"}
    assert all(len(workload.conversations) == 3 for workload in loaded)
    told = list(workloads.notes(loaded))
    assert len(told) == 2
    assert told[0].startswith("gsm8k: the Hub has the public set as parquet only")
    assert told[1].startswith("math500, humaneval, mbpp, mt-bench: the Hugging Face Hub is out of reach")


@pytest.mark.parametrize("name", NAMES)
def test_bundled_prompts_are_sound_and_not_the_public_ones(name: str) -> None:
    own = read_conversations(BUNDLED / f"{name}.jsonl")
    assert len(set(own)) == len(own) >= 8
    assert all(len(turns) == (2 if name == "mt-bench" else 1) for turns in own)
    if not EVALUATION.is_dir():
        pytest.skip("the evaluation data is not here")
    public = read_conversations(EVALUATION / f"{name}.jsonl")
    assert not set(own) & set(public)
    assert [len(turns) for turns in public[:1]] == [len(own[0])]


# One record of each Hub file, in the fields that the file has there.
HUB_RECORDS = {
    "math500": lambda text: {"problem": text.removesuffix(workloads._reasoned("")[0]), "answer": "1"},
    "humaneval": lambda text: {
        "task_id": "Python/0",
        "prompt": text.partition("```python\n")[2].removesuffix("\n```"),
    },
    "mbpp": lambda text: {"task_id": 11, "prompt": text, "code": "pass"},
    "mt-bench": lambda text: {"question_id": 81, "turns": [text]},
}


@pytest.mark.parametrize("name", HUB_RECORDS)
def test_hub_records_get_the_framing_of_the_workload_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the workload files hold is the reference; it is taken apart by hand above."""
    if not EVALUATION.is_dir():
        pytest.skip("the evaluation data is not here")
    expected = read_conversations(EVALUATION / f"{name}.jsonl")[0][:1]
    record = HUB_RECORDS[name](expected[0])
    monkeypatch.setattr(workloads, "_hub_is_reachable", lambda: True)

    def download(repository: str, path: str, **options: object) -> str:
        assert options["repo_type"] == "dataset"
        file = tmp_path / Path(path).name
        if file.suffix == ".json":
            train = {"task_id": 602, "prompt": "not of the test split"}
            file.write_text(json.dumps([record, train]))
        else:
            write(file, record)
        return str(file)

    monkeypatch.setattr(workloads, "hf_hub_download", download)
    workload = load_workload(name, None, 5)
    assert workload.source == "hub"
    assert workload.conversations == (expected,)


def test_seeds_differ_by_all_that_they_are_of_and_stay_the_same() -> None:
    places = [
        (seed, name, prompt, turn) for seed in (0, 1) for name in NAMES for prompt in range(20) for turn in (0, 1)
    ]
    seeds = {place: request_seed(*place) for place in places}
    assert len(set(seeds.values())) == len(places)
    assert all(0 <= seed < 2**31 for seed in seeds.values())
    # blake2b("0:gsm8k:0:0", 4 bytes), little endian, without its lowest bit, by coreutils' b2sum -l 32.
    assert seeds[0, "gsm8k", 0, 0] == 1009019111
