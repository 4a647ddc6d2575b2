"""foredraft train on a tiny model: what its log says of where a drafter comes from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    file = tmp_path / "answers.jsonl"
    lines = [
        {
            "messages": [{"role": "user", "content": "ab" * n}, {"role": "assistant", "content": "x"}],
            "token_ids": [3 + n, 4, 5, 6, 7, 8, 1],
        }
        for n in range(1, 9)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def log_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return found


def test_a_drafter_made_from_another_carries_its_log(
    foredraft: Run, model: Path, answers: Path, tmp_path: Path
) -> None:
    common = ["train", model, "--data", answers, "--dtype", "float32", "--evaluate-every", "1", "--held-out", "2"]
    common += ["--anchors", "2", "--warmup", "1", "--draft-tokens", "3"]
    first, second = tmp_path / "first", tmp_path / "second"
    shape = ["--method", "dflash", "--taps", "0,1", "--layers", "1", "--draft-vocab-size", "8"]
    status, _, err = foredraft(*common, *shape, "--steps", "2", "--output", first)
    assert status == 0, err
    assert log_of(first)["config"]["taps"] == [0, 1] and "before" not in log_of(first)["config"]
    status, _, err = foredraft(*common, "--method", "dspark", "--init", first, "--steps", "1", "--output", second)
    assert status == 0, err
    config = log_of(second)["config"]
    assert config["before"] == log_of(first)
    # Its shape is in the drafter, not in the options.
    assert "taps" not in config and "layers" not in config
    written = json.loads((second / "config.json").read_text())
    assert written["num_hidden_layers"] == 1 and written["draft_vocab_size"] == 8
