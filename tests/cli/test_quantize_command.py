"""foredraft quantize: exit status, messages, and a folder that foredraft generate takes."""

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tiny import CONFIG, model_tensors, save_tokenizer

from foredraft.quantization import shards

Run = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    config = replace(CONFIG, hidden_size=64, intermediate_size=96, head_dim=16)
    folder = tmp_path / "source"
    save_tokenizer(folder)
    raw = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {name: tensor.bfloat16() for name, tensor in model_tensors(config).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


MATRICES = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 64 * 96 * 3)
OTHERS = 2 * 32 * 64 + 5 * 64


def test_it_says_what_it_wrote(foredraft: Run, source: Path, tmp_path: Path) -> None:
    status, out, err = foredraft("quantize", source, "--output", tmp_path / "out")
    assert (status, out) == (0, "")
    size, before = MATRICES * 17 // 32 + OTHERS * 2, 2 * (MATRICES + OTHERS)
    assert f"{size / 1e6:.1f} MB in 1 file, {size / before:.0%} of its size in bfloat16" in err
    assert "mean relative error of the 14 matrices" in err
    status, _, err = foredraft("quantize", source, "--output", tmp_path / "out")
    assert status == 0 and "1 of them kept from an earlier run" in err and "mean relative error" not in err


def test_json(foredraft: Run, source: Path, tmp_path: Path) -> None:
    command = ["quantize", source, "--json", "--layout", "compressed-tensors", "--rule", "ocp", "--quantize-head"]
    status, out, err = foredraft(*command, "--output", tmp_path / "out")
    record = json.loads(out)
    assert (status, err) == (0, "")
    error = record.pop("mean_relative_error")
    assert 0.08 < error < 0.15  # of normally distributed weights
    assert record == {
        "output": str(tmp_path / "out"),
        "layout": "compressed-tensors",
        "rule": "ocp",
        "shards": 1,
        "kept_shards": 0,
        "bytes": (MATRICES + 32 * 64) * 17 // 32 + (OTHERS - 32 * 64) * 2,
        "bfloat16_bytes": 2 * (MATRICES + OTHERS),
        "quantized_matrices": 15,
    }


@pytest.mark.parametrize("layout", ["quark", "compressed-tensors"])
def test_the_folder_generates(foredraft: Run, source: Path, tmp_path: Path, layout: str) -> None:
    foredraft("quantize", source, "--output", tmp_path / "out", "--layout", layout)
    command = ["generate", "-p", "abc", "--raw", "--max-tokens", "6", "--ignore-eos", "--json"]
    status, out, err = foredraft(*command[:1], tmp_path / "out", *command[1:])
    assert status == 0, err
    assert len(json.loads(out)["token_ids"]) == 6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layout", "gptq"], "the layout is 'gptq', expected one of quark, compressed-tensors"),
        (["--rule", "best"], "the scale rule is 'best', expected one of mse, ocp"),
    ],
)
def test_wrong_options_exit_2(foredraft: Run, source: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    status, out, err = foredraft("quantize", source, "--output", tmp_path / "out", *arguments)
    assert (status, out) == (2, "") and says in err


def test_no_model_and_no_output_exit_2(foredraft: Run, source: Path, tmp_path: Path) -> None:
    status, _, err = foredraft("quantize", "no-such-model", "--output", tmp_path / "out")
    assert status == 2 and "no model 'no-such-model'" in err
    status, _, err = foredraft("quantize", source)
    assert status == 2 and "--output" in err
    status, _, err = foredraft("quantize", source, "--output", source)
    assert status == 2 and "choose an empty folder" in err


def test_a_full_disk_exits_1(foredraft: Run, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards.os, "fsync", full)
    status, _, err = foredraft("quantize", source, "--output", tmp_path / "out")
    assert status == 1 and "No space left on device; run again" in err
    monkeypatch.undo()


def test_help_teaches_by_example(foredraft: Run) -> None:
    status, out, _ = foredraft("quantize", "--help")
    assert status == 0 and "foredraft quantize smollm2-135m --output" in " ".join(out.split())
