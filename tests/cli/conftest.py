"""A command line in this process, and a tiny model's folder to run it on."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tiny import CONFIG, model_tensors, save_tokenizer

from foredraft.cli.main import main


@pytest.fixture
def foredraft(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Run a command line; returns (exit status, standard output, standard error)."""

    def run(*arguments: object, stdin: str = "") -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["foredraft", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with random weights."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    save_file(model_tensors(CONFIG), folder / "model.safetensors")
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "max_position_embeddings": CONFIG.max_position_embeddings,
        "rope_theta": CONFIG.rope.theta,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
