"""GGUF files that gguf's own writer makes; the row order of q and k is checked by SmolLM2's logits, and here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import CONFIG, TOKENS, model_tensors

from foredraft.errors import UserError
from foredraft.models.batch import flat_batch
from foredraft.models.config import ModelConfig, RopeConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.gguf import GGUFFile
from foredraft.models.loading import load_target

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def neighbours_paired(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to Llama's q and k: rows i and i + D/2 of a head become 2i and 2i + 1."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        for row in range(size):
            to = 2 * row if row < size // 2 else 2 * (row - size // 2) + 1
            out[head * size + to] = weight[head * size + row]
    return out


def write(
    file: Path, config: ModelConfig = CONFIG, *, leave_out: tuple[str, ...] = (), extra: dict[str, Any] | None = None
) -> Path:
    architecture = config.architecture
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b", "b c"])
    writer.add_eos_token_id(1)
    for name, value in (extra or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
        else:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in model_tensors(config).items():
        stem = name.removesuffix(".weight")
        values = tensor.float().numpy()
        if stem in OUTER:
            ours = OUTER[stem]
        else:
            _, _, index, rest = stem.split(".", 3)
            ours = f"blk.{index}.{LAYER[rest]}"
            if architecture == "llama" and rest.endswith(("q_proj", "k_proj")):
                heads = config.num_heads if rest.endswith("q_proj") else config.num_kv_heads
                values = neighbours_paired(values, heads)
        if ours not in leave_out:
            writer.add_tensor(f"{ours}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_file_loads_as_the_model_it_was_made_from(tmp_path: Path, architecture: str) -> None:
    config = replace(CONFIG, architecture=architecture, qk_norm=architecture == "qwen3")
    target = load_target(str(write(tmp_path / "tiny.gguf", config)), torch.float32)
    loaded = target.model.config
    assert replace(loaded, rope=config.rope, rms_norm_eps=1e-6) == config
    assert loaded.rms_norm_eps == pytest.approx(1e-6) and loaded.rope.theta == 100.0
    expected = DecoderModel(config, {n: t.float() for n, t in model_tensors(config).items()}.__getitem__)
    batch = flat_batch([[3, 4, 20, 7, 30, 3, 9]], [0], [0])
    logits = target.model.forward(batch, target.model.new_cache()).logits
    torch.testing.assert_close(logits, expected.forward(batch, expected.new_cache()).logits, rtol=0, atol=1e-5)
    assert target.tokenizer.decode([3, 4]) == "ab"


def test_tied_embeddings_are_those_without_an_output_tensor(tmp_path: Path) -> None:
    target = load_target(str(write(tmp_path / "tied.gguf", leave_out=("output",))), torch.float32)
    assert target.model.config.tie_word_embeddings
    assert torch.equal(target.model.head, model_tensors(CONFIG)["model.embed_tokens.weight"].float())


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, kind: str) -> None:
    extra: dict[str, Any] = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    rope = GGUFFile(write(tmp_path / "a.gguf", extra=extra)).config().rope
    assert rope == RopeConfig(theta=100.0, kind=kind, factor=4.0, original_max_position_embeddings=48)
    extra["llama.rope.scaling.original_context_length"] = 12
    assert GGUFFile(write(tmp_path / "b.gguf", extra=extra)).config().rope.original_max_position_embeddings == 12


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    """Against the quantiser's own step: Q8_0 has blocks of 32 with one scale each."""
    config = replace(CONFIG, hidden_size=64, intermediate_size=64)
    file = tmp_path / "q8.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    table = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    quantised = gguf.quantize(table, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GGUFFile(file).weights(config, torch.float32)("model.embed_tokens.weight").numpy()
    step = np.abs(table.reshape(32, 2, 32)).max(-1, keepdims=True) / 127
    assert (np.abs(found - table).reshape(32, 2, 32) <= 0.6 * step).all() and not np.array_equal(found, table)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all", b"GGUF\x03\0\0\0" + b"\xff" * 90])
def test_not_a_gguf_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(UserError, match="is not a readable GGUF file") as error:
        load_target(str(file))
    assert str(file) in str(error.value)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_a_file_cut_short(tmp_path: Path, share: float) -> None:
    whole = write(tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=r"cut\.gguf is not a readable GGUF file"):
        load_target(str(file))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported; known: none, linear, yarn"),
        ({"rope_freqs.weight": np.ones(3, dtype=np.float32)}, "rope_freqs.weight"),
        ({"blk.0.attn_q.bias": np.ones(24, dtype=np.float32)}, "biases"),
    ],
)
def test_a_file_that_asks_for_too_much(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_target(str(write(tmp_path / "tiny.gguf", extra=extra)))
    assert "tiny.gguf" in str(error.value)


def test_another_architecture(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tiny\.gguf: architecture 'gemma3' is not supported; known: llama, qwen3"):
        load_target(str(write(tmp_path / "tiny.gguf", replace(CONFIG, architecture="gemma3"))))


@pytest.mark.parametrize("name", ["token_embd", "blk.1.ffn_up", "output_norm"])
def test_a_missing_tensor(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"tiny\.gguf lacks the tensor {name}\.weight"):
        load_target(str(write(tmp_path / "tiny.gguf", leave_out=(name,))))


def test_missing_metadata(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"bare\.gguf: metadata lacks llama\.attention\.head_count"):
        load_target(str(tmp_path / "bare.gguf"))
