"""Drafter folders: the z-lab layout to the letter, round trips, and what is refused."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import dflash_json, dflash_tensors, dspark_json, dspark_tensors, write_dflash
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from foredraft.drafters.checkpoints import default_taps, load_dflash, load_dspark, save_dflash, save_dspark
from foredraft.drafters.dflash import DFlashConfig, DFlashWeights
from foredraft.drafters.weights import map_tensors, named_tensors
from foredraft.errors import UserError
from foredraft.models.config import RopeConfig

YARN = RopeConfig(theta=77.0, kind="yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.2)
LLAMA3 = RopeConfig(
    theta=88.0, kind="llama3", factor=8.0, original_max_position_embeddings=24, low_freq_factor=1.5, high_freq_factor=5
)


def loaded(folder: Path, raw: dict[str, Any] | None = None, **extra: Tensor) -> tuple[DFlashConfig, DFlashWeights]:
    raw = raw or dflash_json()
    return load_dflash(write_dflash(folder, raw, dflash_tensors(raw) | extra), torch.float64)


def all_tensors(weights: DFlashWeights) -> list[Tensor]:
    layers = [getattr(layer, field.name) for layer in weights.layers for field in fields(layer)]
    return [weights.fc, weights.context_norm, weights.norm, *(tensor for tensor in layers if tensor is not None)]


def test_saving_writes_the_names_and_shapes_that_were_read(tmp_path: Path) -> None:
    tensors = dflash_tensors(dflash_json())
    save_dflash(tmp_path / "again", *loaded(tmp_path / "given"), {"trained_on": 3})
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in saved.items()} == {n: t.shape for n, t in tensors.items()}
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())
    layer = {name.removeprefix("layers.1.") for name in saved if name.startswith("layers.1.")}
    assert layer == {
        *("input_layernorm.weight", "post_attention_layernorm.weight"),
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
    }
    assert set(saved) - {n for n in saved if n.startswith("layers.")} == {
        *("fc.weight", "hidden_norm.weight", "norm.weight")
    }
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["trained_on"] == 3 and config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == 6 and config["num_target_layers"] == 2
    assert config["dflash_config"] == {"mask_token_id": 2, "target_layer_ids": [0, 1]}
    assert config["dtype"] == "float64"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"windows": (None, 5)},
        {"windows": (5, 5), "causal_windows": True},
        {"block_size": 2, "target_layer_ids": (1, 1), "default_tokens": 1},
        {"layers": YARN},
        {"layers": LLAMA3},
        {"layers": RopeConfig(theta=5.0, kind="linear", factor=3.0, original_max_position_embeddings=64)},
    ],
)
def test_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    config, weights = loaded(tmp_path / "given")
    if "layers" in changes:
        changes = {"layers": replace(config.layers, rope=changes["layers"])}
    config = replace(config, **changes)
    save_dflash(tmp_path / "again", config, weights)
    config_again, weights_again = load_dflash(tmp_path / "again", torch.float64)
    assert config_again == config
    for found, expected in zip(all_tensors(weights_again), all_tensors(weights), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rope", [YARN, LLAMA3, RopeConfig(theta=5.0)])
def test_transformers_reads_the_config_as_meant(tmp_path: Path, rope: RopeConfig) -> None:
    """z-lab's own model builds on transformers' Qwen3Config."""
    config, weights = loaded(tmp_path / "given")
    config = replace(config, layers=replace(config.layers, rope=rope), windows=(7, None))
    save_dflash(tmp_path / "again", config, weights)
    theirs = Qwen3Config.from_pretrained(tmp_path / "again")
    assert theirs.sliding_window == 7 and theirs.layer_types == ["sliding_attention", "full_attention"]
    assert theirs.head_dim == 10 and theirs.num_key_value_heads == 2 and theirs.hidden_size == 16
    assert theirs.dflash_config["target_layer_ids"] == [0, 1] and theirs.is_causal is False
    assert theirs.rope_parameters["rope_theta"] == rope.theta
    assert theirs.rope_parameters["rope_type"] == rope.kind
    if rope.attention_factor:
        assert Qwen3RotaryEmbedding(theirs).attention_scaling == rope.attention_factor


def test_windows_of_two_sizes_cannot_be_written(tmp_path: Path) -> None:
    config, weights = loaded(tmp_path / "given")
    with pytest.raises(ValueError, match=r"one window size, not \[3, 4\]"):
        save_dflash(tmp_path / "again", replace(config, windows=(3, 4)), weights)


def test_a_draft_vocabulary_is_stored_as_offsets(tmp_path: Path) -> None:
    vocabulary = torch.tensor([0, 3, 4, 31])
    config, weights = loaded(tmp_path / "given")
    save_dflash(tmp_path / "again", config, replace(weights, draft_vocab=vocabulary))
    assert load_file(tmp_path / "again" / "model.safetensors")["d2t"].tolist() == [0, 2, 2, 28]
    assert json.loads((tmp_path / "again" / "config.json").read_text())["draft_vocab_size"] == 4
    again = load_dflash(tmp_path / "again", torch.bfloat16)[1].draft_vocab
    assert again is not None and torch.equal(again, vocabulary)


def test_bfloat16_is_stored_as_such(tmp_path: Path) -> None:
    config, weights = loaded(tmp_path / "given")
    save_dflash(tmp_path / "again", config, map_tensors(weights, lambda tensor: tensor.bfloat16()))
    assert {tensor.dtype for tensor in load_file(tmp_path / "again" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"


def test_fields_are_found_where_z_lab_looks(tmp_path: Path) -> None:
    """In dflash_config first, beside it otherwise."""
    inside = dflash_json(block_size=9)
    inside["dflash_config"]["block_size"] = 4
    assert loaded(tmp_path / "a", inside)[0].block_size == 4
    outside = dflash_json(mask_token_id=7, target_layer_ids=[1, 0], dflash_config={"target_layer_ids": [1, 0]})
    assert loaded(tmp_path / "b", outside)[0].mask_token_id == 7
    raw, tensors = dict(outside), dflash_tensors(outside)
    del raw["dflash_config"]
    config, _ = load_dflash(write_dflash(tmp_path / "c", raw, tensors), torch.float64)
    assert config.target_layer_ids == (1, 0) and config.mask_token_id == 7


def test_sliding_layers_are_causal_unless_told_otherwise(tmp_path: Path) -> None:
    kinds = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    config, _ = loaded(tmp_path / "a", dflash_json(**kinds))
    assert config.windows == (8, None) and config.causal_windows
    config, _ = loaded(tmp_path / "b", dflash_json(**kinds, is_causal=False))
    assert config.windows == (8, None) and not config.causal_windows
    assert not loaded(tmp_path / "c")[0].causal_windows


def test_default_taps_of_published_drafters() -> None:
    """z-lab's drafters of five layers for Qwen3-8B (36 layers) and a target of 52 name these layers themselves."""
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(52, 5) == (1, 13, 25, 37, 49)
    assert default_taps(36, 1) == (18,)


def test_taps_default_by_depth(tmp_path: Path) -> None:
    raw = dflash_json(num_target_layers=7, dflash_config={"mask_token_id": 2, "target_layer_ids": [1, 4]})
    tensors = dflash_tensors(raw)
    del raw["dflash_config"]["target_layer_ids"]
    assert load_dflash(write_dflash(tmp_path, raw, tensors), torch.float64)[0].target_layer_ids == (1, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, r"architectures is \['Qwen3ForCausalLM'\], not a DFlashDraftModel"),
        ({"architectures": None}, "architectures is None"),
        ({"block_size": 1}, "block_size is 1; it counts the anchor, so it must be 2 or more"),
        ({"block_size": None}, "has no `block_size`"),
        ({"num_target_layers": None}, "has no `num_target_layers`"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0, expected an integer of at least 1"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens is '4'"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 2]}}, r"\[0, 2\] must lie in 0\.\.1"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [-1, 1]}}, r"must lie in 0\.\.1"),
        ({"dflash_config": {"mask_token_id": 32, "target_layer_ids": [0, 1]}}, "mask_token_id is 32, not an id"),
        ({"dflash_config": {"mask_token_id": -1, "target_layer_ids": [0, 1]}}, "mask_token_id is -1"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id is None"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [0]}}, "fc.weight has shape"),
        ({"head_dim": 12}, "self_attn.q_proj.weight has shape"),
        ({"num_hidden_layers": 3}, "lacks the tensor layers.2.input_layernorm.weight"),
        ({"attention_bias": True}, "attention_bias"),
        ({"is_causal": True}, "is_causal is true"),
        ({"input_embedding_scale": 4.0}, "input_embedding_scale"),
        ({"layer_types": ["full_attention"]}, "layer_types must name"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types must name"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "need use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 8}, "need such layers"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic'"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_dflash(tmp_path, dflash_json() | changes, dflash_tensors(dflash_json()))
    with pytest.raises(UserError, match=message):
        load_dflash(folder, torch.float64)


@pytest.mark.parametrize(
    ("size", "offsets", "message"),
    [
        (4, [0, 0, 0, 29], "d2t does not map 4 draft ids into the vocabulary of 32"),
        (4, [-1, 0, 0, 0], "d2t does not map"),
        (4, [0, 0, 0], "d2t does not map"),
        (4, None, "lacks the tensor d2t"),
    ],
)
def test_a_draft_vocabulary_that_does_not_fit(
    tmp_path: Path, size: int, offsets: list[int] | None, message: str
) -> None:
    extra = {} if offsets is None else {"d2t": torch.tensor(offsets)}
    with pytest.raises(UserError, match=message):
        loaded(tmp_path, dflash_json(draft_vocab_size=size), **extra)


@pytest.mark.parametrize("name", ["fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"])
def test_a_missing_tensor(tmp_path: Path, name: str) -> None:
    tensors = dflash_tensors(dflash_json())
    del tensors[name]
    with pytest.raises(UserError, match=f"lacks the tensor {name}"):
        load_dflash(write_dflash(tmp_path, dflash_json(), tensors), torch.float64)


def test_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        load_dflash(tmp_path, torch.float64)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        load_dflash(tmp_path, torch.float64)
    (tmp_path / "config.json").write_text(json.dumps(dflash_json()))
    with pytest.raises(UserError, match=r"no \.safetensors files"):
        load_dflash(tmp_path, torch.float64)


DSPARKS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "rnn": {"markov_head_type": "rnn", "enable_confidence_head": False},
}


def write_dspark(folder: Path, raw: dict[str, Any], own_tables: bool = False, **extra: Tensor) -> Path:
    return write_dflash(folder, raw, dspark_tensors(raw, own_tables) | extra)


@pytest.mark.parametrize("own_tables", [False, True])
@pytest.mark.parametrize("name", DSPARKS)
def test_dspark_round_trip(tmp_path: Path, name: str, own_tables: bool) -> None:
    raw = dspark_json(**DSPARKS[name])
    tensors = dspark_tensors(raw, own_tables)
    config, weights = load_dspark(write_dspark(tmp_path / "given", raw, own_tables), torch.float64)
    assert config.markov_kind == name and config.markov_rank == 5
    assert config.confidence_with_markov is {"vanilla": True, "gated": False, "rnn": None}[name]
    assert (weights.head is None) is (weights.embeddings is None) is not own_tables
    save_dspark(tmp_path / "again", config, weights, {"trained_on": 3})
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert {key: tensor.shape for key, tensor in saved.items()} == {key: t.shape for key, t in tensors.items()}
    assert all(torch.equal(saved[key], tensor) for key, tensor in tensors.items())
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {key: written.get(key) for key in raw} == raw | {
        "confidence_head_with_markov": config.confidence_with_markov
    }
    assert written["trained_on"] == 3 and "dflash_config" not in written
    config_again, weights_again = load_dspark(tmp_path / "again", torch.float64)
    assert config_again == config
    expected = dict(named_tensors(weights))
    found = dict(named_tensors(weights_again))
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_dspark_with_a_draft_vocabulary(tmp_path: Path) -> None:
    raw = dspark_json(draft_vocab_size=4)
    folder = write_dspark(tmp_path / "given", raw, True, d2t=torch.tensor([0, 2, 2, 28]))
    config, weights = load_dspark(folder, torch.float64)
    assert weights.backbone.draft_vocab is not None and weights.backbone.draft_vocab.tolist() == [0, 3, 4, 31]
    assert weights.markov.w1.shape == (32, 5) and weights.markov.w2.shape == (4, 5)
    assert weights.head is not None and weights.head.shape == (4, 16)
    save_dspark(tmp_path / "again", config, weights)
    assert load_file(tmp_path / "again" / "model.safetensors")["d2t"].tolist() == [0, 2, 2, 28]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlashDraftModel"]}, r"architectures is \['DFlashDraftModel'\], not a Qwen3DSparkModel"),
        ({"block_size": 0}, "block_size is 0, expected an integer of at least 1"),
        ({"markov_rank": 0}, "markov_rank is 0; a drafter without a Markov head"),
        ({"markov_rank": None}, "has no `markov_rank`"),
        ({"markov_rank": 4, "enable_confidence_head": False}, r"markov_w1\.weight has shape \(32, 5\)"),
        ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm', expected one of vanilla, gated, rnn"),
        ({"markov_head_type": "gated"}, r"lacks the tensor markov_head\.gate_proj\.weight"),
        ({"markov_head_type": "rnn"}, r"lacks the tensor markov_head\.joint_proj\.weight"),
        ({"confidence_head_with_markov": False}, r"confidence_head\.proj\.weight has shape \(1, 21\)"),
        ({"sample_from_anchor": False}, "sample_from_anchor is false"),
        ({"mask_token_id": None}, "mask_token_id is None"),
        ({"target_layer_ids": [-1, 1]}, r"must lie in 0\.\.1"),
        ({"attention_bias": True}, "not supported in a DSpark drafter"),
    ],
)
def test_a_dspark_config_that_does_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_dflash(tmp_path, dspark_json() | changes, dspark_tensors(dspark_json()))
    with pytest.raises(UserError, match=message):
        load_dspark(folder, torch.float64)


def test_a_dspark_block_may_be_one_row(tmp_path: Path) -> None:
    config, _ = load_dspark(write_dspark(tmp_path, dspark_json(block_size=1)), torch.float64)
    assert config.backbone.block_size == 1
