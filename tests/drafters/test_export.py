"""Exported drafters: names and shapes as vLLM's and llama.cpp's loaders want them, and what is refused.

The expected names and shapes were read from vLLM 0.32 (llama_eagle3.py, qwen3_dflash.py, qwen3_dspark.py) and from
llama.cpp (src/models/eagle3.cpp, dflash.cpp).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file, save_file
from tiny import (
    CONFIG,
    MASK,
    dflash_json,
    dflash_tensors,
    model_tensors,
    random_tensor,
    save_tokenizer,
    tiny_model,
    write_dflash,
)
from torch import Tensor
from typer.testing import CliRunner

from foredraft.cli.main import app
from foredraft.drafters.checkpoints import load_dflash, load_dspark
from foredraft.drafters.dflash import DFlashConfig, DFlashWeights
from foredraft.drafters.dspark import DSparkConfig, DSparkWeights, MarkovWeights
from foredraft.drafters.eagle3 import Eagle3Config, Eagle3Weights
from foredraft.drafters.export import (
    LAYOUTS,
    Portable,
    load_portable,
    portable_dflash,
    portable_dspark,
    portable_eagle3,
    write_portable,
)
from foredraft.drafters.export_gguf import write_gguf
from foredraft.drafters.sequential_checkpoints import load_eagle3
from foredraft.errors import UserError
from foredraft.models.config import RopeConfig
from foredraft.models.configuration import read_json
from foredraft.models.layers import DecoderLayer

VOCAB = torch.tensor([0, 3, 4, 20, 31])
HIDDEN, INNER, HEADS, KV_HEADS, SIZE, RANK = 16, 20, 4, 2, 10, 6
SHAPE = replace(
    CONFIG,
    architecture="eagle3",
    intermediate_size=INNER,
    num_layers=1,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=SIZE,
    max_position_embeddings=64,
    rope=RopeConfig(theta=1000.0, original_max_position_embeddings=64),
)
TARGET = tiny_model(replace(CONFIG, num_layers=4))


SHAPE_OF_TARGET = {
    "intermediate_size": CONFIG.intermediate_size,
    "head_dim": CONFIG.head_dim,
    "max_position_embeddings": CONFIG.max_position_embeddings,
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return random_tensor(shape, torch.Generator().manual_seed(seed))


def dflash(tmp_path: Path, **changes: Any) -> tuple[DFlashConfig, DFlashWeights]:
    raw = dflash_json(TARGET.config, dflash_config={"mask_token_id": MASK, "target_layer_ids": [0, 2]}, **changes)
    config, weights = load_dflash(write_dflash(tmp_path / "raw", raw, dflash_tensors(raw)), torch.bfloat16)
    return config, replace(weights, draft_vocab=VOCAB)


def dspark(tmp_path: Path, **changes: Any) -> tuple[DSparkConfig, DSparkWeights]:
    config, backbone = dflash(tmp_path)
    weights = DSparkWeights(
        backbone=backbone,
        markov=MarkovWeights(random(CONFIG.vocab_size, RANK), random(len(VOCAB), RANK)),
        confidence=random(1, HIDDEN + RANK),
        confidence_bias=random(1),
    )
    return DSparkConfig(config, RANK, **changes), weights


def eagle3(*taps: int) -> tuple[Eagle3Config, Eagle3Weights]:
    rows = (HEADS + 2 * KV_HEADS) * SIZE
    layer = DecoderLayer(
        input_norm=random(HIDDEN),
        qkv=random(rows, 2 * HIDDEN, seed=1),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        out=random(HIDDEN, HEADS * SIZE, seed=2),
        out_bias=None,
        post_norm=random(HIDDEN, seed=3),
        gate_up=random(2 * INNER, HIDDEN, seed=4),
        gate_up_bias=None,
        down=random(HIDDEN, INNER, seed=5),
        down_bias=None,
    )
    config = Eagle3Config(SHAPE, taps, 4, default_tokens=5)
    fc = random(HIDDEN, len(taps) * HIDDEN, seed=6)
    return config, Eagle3Weights(fc, random(HIDDEN, seed=7), (layer,), random(HIDDEN, seed=8), None, VOCAB)


def portable(method: str, tmp_path: Path) -> Portable:
    if method == "dflash":
        return portable_dflash(*dflash(tmp_path), TARGET.head_rows)
    if method == "dspark":
        return portable_dspark(*dspark(tmp_path), TARGET.head_rows)
    return portable_eagle3(*eagle3(0, 1, 3), TARGET.head_rows)


def layer_shapes(prefix: str, columns: int, *, normed: bool) -> dict[str, list[int]]:
    """Of one layer, with ``columns`` inputs of the attention."""
    norms = {"self_attn.q_norm": [10], "self_attn.k_norm": [10]} if normed else {}
    shapes = {
        "input_layernorm": [16],
        "self_attn.q_proj": [40, columns],
        "self_attn.k_proj": [20, columns],
        "self_attn.v_proj": [20, columns],
        "self_attn.o_proj": [16, 40],
        "post_attention_layernorm": [16],
        "mlp.gate_proj": [20, 16],
        "mlp.up_proj": [20, 16],
        "mlp.down_proj": [16, 20],
        **norms,
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


VOCABULARY = {"lm_head.weight": [5, 16], "d2t": [5], "t2d": [32]}
DFLASH_BACKBONE = {
    "fc.weight": [16, 32],
    "hidden_norm.weight": [16],
    "norm.weight": [16],
    **layer_shapes("layers.0.", 16, normed=True),
    **layer_shapes("layers.1.", 16, normed=True),
}
DSPARK_HEADS = {
    "markov_head.markov_w1.weight": [32, 6],
    "markov_head.markov_w2.weight": [5, 6],
    "confidence_head.proj.weight": [1, 22],
    "confidence_head.proj.bias": [1],
}
EAGLE3 = {"fc.weight": [16, 48], "norm.weight": [16]}
EXPECTED = {
    ("dflash", "z-lab"): DFLASH_BACKBONE | VOCABULARY,
    ("dflash", "speculators"): DFLASH_BACKBONE | VOCABULARY,
    ("dspark", "deepspec"): DFLASH_BACKBONE | DSPARK_HEADS | VOCABULARY,
    ("dspark", "speculators"): DFLASH_BACKBONE | DSPARK_HEADS | VOCABULARY,
    ("eagle3", "specforge"): EAGLE3
    | layer_shapes("midlayer.", 32, normed=False)
    | {"midlayer.hidden_norm.weight": [16]}
    | VOCABULARY,
    ("eagle3", "speculators"): EAGLE3
    | layer_shapes("layers.0.", 32, normed=False)
    | {"layers.0.hidden_norm.weight": [16]}
    | VOCABULARY,
}


@pytest.mark.parametrize(("method", "layout"), EXPECTED)
def test_names_shapes_and_types(tmp_path: Path, method: str, layout: str) -> None:
    write_portable(portable(method, tmp_path), layout, tmp_path / "out", "some/target")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert CONFIG.vocab_size == 32
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == EXPECTED[method, layout]
    assert {stored.pop("d2t").dtype, stored.pop("t2d").dtype} == {torch.int64, torch.bool}
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


@pytest.mark.parametrize("method", LAYOUTS)
def test_the_head_is_the_targets_rows_and_the_maps_fit_it(tmp_path: Path, method: str) -> None:
    write_portable(portable(method, tmp_path), LAYOUTS[method][0], tmp_path / "out", "t")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert (stored["d2t"] + torch.arange(5)).tolist() == [0, 3, 4, 20, 31]
    assert stored["t2d"].nonzero().flatten().tolist() == [0, 3, 4, 20, 31]
    assert torch.equal(stored["lm_head.weight"], TARGET.head[[0, 3, 4, 20, 31]].to(torch.bfloat16))


def test_an_own_head_goes_before_the_targets(tmp_path: Path) -> None:
    config, weights = eagle3(0, 1, 3)
    own = random(len(VOCAB), HIDDEN, seed=11)
    for head, vocab in ((own, VOCAB), (random(CONFIG.vocab_size, HIDDEN), None)):
        exported = portable_eagle3(config, replace(weights, head=head, draft_vocab=vocab), TARGET.head_rows)
        assert exported.head is not None and torch.equal(exported.head, head.to(torch.bfloat16))


def test_a_full_vocabulary_shares_the_targets_head(tmp_path: Path) -> None:
    config, weights = dflash(tmp_path)
    whole = portable_dflash(config, replace(weights, draft_vocab=None), TARGET.head_rows)
    write_portable(whole, "z-lab", tmp_path / "out", "t")
    assert not set(VOCABULARY) & set(load_file(tmp_path / "out" / "model.safetensors"))
    assert read_json(tmp_path / "out" / "config.json")["draft_vocab_size"] == 32


def test_layer_ids_in_every_layout(tmp_path: Path) -> None:
    """Taps are the outputs of layers 0 and 2 (block drafters), and 0, 1 and 3."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for method, layout in EXPECTED:
        write_portable(portable(method, tmp_path), layout, tmp_path / "out", "t")
        found[method, layout] = read_json(tmp_path / "out" / "config.json")
    assert found["dflash", "z-lab"]["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
    assert found["dflash", "speculators"]["aux_hidden_state_layer_ids"] == [1, 3]
    assert found["dspark", "deepspec"]["target_layer_ids"] == [0, 2]
    assert found["dspark", "deepspec"]["mask_token_id"] == MASK
    assert found["dspark", "speculators"]["aux_hidden_state_layer_ids"] == [1, 3]
    assert found["eagle3", "specforge"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert found["eagle3", "specforge"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert found["eagle3", "speculators"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]


def test_configs_say_what_vllm_reads(tmp_path: Path) -> None:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for method, layout in EXPECTED:
        write_portable(portable(method, tmp_path), layout, tmp_path / "out", "some/target")
        found[method, layout] = read_json(tmp_path / "out" / "config.json")
    architectures = {("dflash", "z-lab"): "DFlashDraftModel", ("dspark", "deepspec"): "Qwen3DSparkModel"}
    architectures["eagle3", "specforge"] = "LlamaForCausalLMEagle3"
    for key, name in architectures.items():
        assert found[key]["architectures"] == [name]
    for method in LAYOUTS:
        config = found[method, "speculators"]
        assert config["speculators_model_type"] == method
        assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
        tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        assert tokens == {"dflash": 7, "dspark": 7, "eagle3": 5}[method]
        assert config["draft_vocab_size"] == 5
        layers = config["transformer_layer_config"]
        assert layers["rope_parameters"] == {"rope_theta": 1000.0, "rope_type": "default"}
        assert layers["model_type"] == ("llama" if method == "eagle3" else "qwen3")
    assert found["dflash", "speculators"]["sample_from_anchor"] is False
    assert found["dspark", "speculators"]["sample_from_anchor"] is True
    assert found["dspark", "deepspec"]["markov_rank"] == RANK
    assert found["dspark", "deepspec"]["enable_confidence_head"] is True
    assert found["dspark", "deepspec"]["confidence_head_with_markov"] is True
    assert found["eagle3", "specforge"]["norm_before_residual"] is False


def test_our_loaders_read_the_usual_layouts_back(tmp_path: Path) -> None:
    write_portable(portable("dflash", tmp_path), "z-lab", tmp_path / "dflash", "t")
    config, weights = dflash(tmp_path)
    again = load_dflash(tmp_path / "dflash", torch.bfloat16, TARGET.config)
    assert again[0] == config
    assert torch.equal(again[1].fc, weights.fc.to(torch.bfloat16)) and again[1].draft_vocab is not None
    assert torch.equal(again[1].draft_vocab, VOCAB)

    write_portable(portable("dspark", tmp_path), "deepspec", tmp_path / "dspark", "t")
    dspark_config, dspark_weights = load_dspark(tmp_path / "dspark", torch.bfloat16, TARGET.config)
    assert dspark_config == dspark(tmp_path)[0]
    assert torch.equal(dspark_weights.markov.w2, dspark(tmp_path)[1].markov.w2.to(torch.bfloat16))

    write_portable(portable("eagle3", tmp_path), "specforge", tmp_path / "eagle3", "t")
    eagle3_config, eagle3_weights = load_eagle3(tmp_path / "eagle3", torch.bfloat16, TARGET.config)
    assert eagle3_config == eagle3(0, 1, 3)[0]
    assert torch.equal(eagle3_weights.layers[0].qkv, eagle3(0, 1, 3)[1].layers[0].qkv.to(torch.bfloat16))
    assert eagle3_weights.head is not None
    assert torch.equal(eagle3_weights.head, TARGET.head[VOCAB].to(torch.bfloat16))


def test_taps_are_sorted_and_the_columns_of_fc_with_them() -> None:
    """vLLM concatenates the taps in ascending order; fc must still multiply the same tap with the same columns."""
    config, weights = eagle3(3, 0, 1)
    exported = portable_eagle3(config, weights, TARGET.head_rows)
    taps = {index: random(HIDDEN, seed=20 + index).bfloat16().double() for index in config.target_layer_ids}
    fc = weights.fc.bfloat16().double()
    ours = fc @ torch.cat([taps[index] for index in config.target_layer_ids])
    theirs = exported.tensors["fc.weight"].double() @ torch.cat([taps[index] for index in exported.taps])
    assert exported.taps == (0, 1, 3)
    torch.testing.assert_close(theirs, ours)


def test_what_other_engines_cannot_run_is_refused(tmp_path: Path) -> None:
    config, weights = dspark(tmp_path, markov_kind="gated")
    with pytest.raises(UserError, match="gated Markov head cannot be exported"):
        portable_dspark(config, weights, TARGET.head_rows)
    with pytest.raises(UserError, match="names a layer twice"):
        portable_eagle3(*eagle3(1, 1, 3), TARGET.head_rows)
    with pytest.raises(UserError, match="'mtp' cannot be exported"):
        load_portable("mtp", tmp_path, TARGET)
    mixed = replace(dflash(tmp_path)[0], windows=(None, 5), causal_windows=True)
    exported = portable_dflash(mixed, dflash(tmp_path)[1], TARGET.head_rows)
    with pytest.raises(UserError, match="mixes both"):
        write_portable(exported, "speculators", tmp_path / "out", "t")


# GGUF


def target_gguf(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a"] * 32)
    writer.add_uint32("llama.block_count", 4)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


LAYER_GGUF = {"attn_norm": [16], "attn_output": [40, 16], "ffn_norm": [16]}
MLP_GGUF = {"ffn_gate": [16, 20], "ffn_up": [16, 20], "ffn_down": [20, 16]}


def gguf_layer(index: int, columns: int, *, normed: bool) -> dict[str, list[int]]:
    attention = {"attn_q": [columns, 40], "attn_k": [columns, 20], "attn_v": [columns, 20]}
    norms = {"attn_q_norm": [10], "attn_k_norm": [10]} if normed else {"attn_norm_2": [16]}
    return {f"blk.{index}.{n}.weight": s for n, s in (LAYER_GGUF | MLP_GGUF | attention | norms).items()}


GGUF_HEAD = {"output_norm.weight": [16], "output.weight": [16, 5], "d2t": [5]}
GGUF_BACKBONE = (
    {"fc.weight": [32, 16], "enc.output_norm.weight": [16]}
    | gguf_layer(0, 16, normed=True)
    | gguf_layer(1, 16, normed=True)
    | GGUF_HEAD
)
GGUF_EXPECTED = {
    "dflash": GGUF_BACKBONE,
    "dspark": GGUF_BACKBONE
    | {"markov_w1.weight": [6, 32], "markov_w2.weight": [6, 5], "conf_proj.weight": [22, 1], "conf_proj.bias": [1]},
    "eagle3": {"fc.weight": [48, 16]} | gguf_layer(0, 32, normed=False) | GGUF_HEAD,
}


@pytest.mark.parametrize("method", LAYOUTS)
def test_gguf_names_shapes_and_keys(tmp_path: Path, method: str) -> None:
    write_gguf(portable(method, tmp_path), target_gguf(tmp_path / "t.gguf"), tmp_path / "d.gguf")
    reader = GGUFReader(tmp_path / "d.gguf")
    assert {t.name: [int(n) for n in t.shape] for t in reader.tensors} == GGUF_EXPECTED[method]
    keys = {name: field.contents() for name, field in reader.fields.items()}
    arch = keys["general.architecture"]
    assert arch == ("eagle3" if method == "eagle3" else "dflash")
    assert keys[f"{arch}.target_layers"] == ([1, 2, 4] if method == "eagle3" else [1, 3])
    assert keys["tokenizer.ggml.tokens"] == ["a"] * 32 and "llama.block_count" not in keys
    assert keys[f"{arch}.block_count"] == (1 if method == "eagle3" else 2)
    expected: dict[str, Any] = {
        "dflash": {"dflash.block_size": 6, "tokenizer.ggml.mask_token_id": MASK},
        "dspark": {"dflash.sample_from_anchor": True, "dflash.has_confidence_head": True},
        "eagle3": {"eagle3.target_hidden_size": 16, "eagle3.norm_before_residual": False},
    }[method]
    assert {name: keys[name] for name in expected} == expected
    d2t = next(t for t in reader.tensors if t.name == "d2t")
    assert d2t.data.tolist() == [0, 3, 4, 20, 31]


def test_gguf_reorders_rotated_rows_of_eagle3_only(tmp_path: Path) -> None:
    """llama.cpp rotates adjacent rows of a head there; we rotate row i with row i + half."""
    write_gguf(portable("eagle3", tmp_path), target_gguf(tmp_path / "t.gguf"), tmp_path / "d.gguf")
    tensors = {t.name: t for t in GGUFReader(tmp_path / "d.gguf").tensors}
    qkv = eagle3(0, 1, 3)[1].layers[0].qkv.bfloat16()

    def rows(name: str) -> Tensor:
        return torch.from_numpy(tensors[name].data.copy()).view(torch.bfloat16)

    order = [head * 10 + half * 5 + pair for head in range(4) for pair in range(5) for half in range(2)]
    assert torch.equal(rows("blk.0.attn_q.weight"), qkv[:40][order])
    assert torch.equal(rows("blk.0.attn_k.weight"), qkv[40:60][order[:20]])
    assert torch.equal(rows("blk.0.attn_v.weight"), qkv[60:])
    write_gguf(portable("dflash", tmp_path), target_gguf(tmp_path / "t.gguf"), tmp_path / "d.gguf")
    tensors = {t.name: t for t in GGUFReader(tmp_path / "d.gguf").tensors}
    assert torch.equal(rows("blk.1.attn_q.weight"), dflash(tmp_path)[1].layers[1].qkv[:40].bfloat16())


def test_gguf_refuses_what_llama_cpp_cannot_run(tmp_path: Path) -> None:
    target = target_gguf(tmp_path / "t.gguf")
    two = portable_eagle3(*eagle3(0, 3), TARGET.head_rows)
    with pytest.raises(UserError, match="3 taps, this one has 2"):
        write_gguf(two, target, tmp_path / "d.gguf")
    windowed = replace(portable("dflash", tmp_path), windows={"use_sliding_window": True})
    with pytest.raises(UserError, match="sliding-window"):
        write_gguf(windowed, target, tmp_path / "d.gguf")
    scaled = replace(portable("dflash", tmp_path), shape=replace(SHAPE, rope=RopeConfig(kind="yarn")))
    with pytest.raises(UserError, match="yarn RoPE"):
        write_gguf(scaled, target, tmp_path / "d.gguf")


def test_a_confidence_head_without_the_markov_embedding_stays_out_of_gguf(tmp_path: Path) -> None:
    config, weights = dspark(tmp_path, confidence_with_markov=False)
    exported = portable_dspark(config, replace(weights, confidence=random(1, HIDDEN)), TARGET.head_rows)
    write_gguf(exported, target_gguf(tmp_path / "t.gguf"), tmp_path / "d.gguf")
    reader = GGUFReader(tmp_path / "d.gguf")
    assert not any("conf_proj" in t.name for t in reader.tensors)
    assert reader.fields["dflash.has_confidence_head"].contents() is False


# The command


def test_the_command(tmp_path: Path) -> None:
    """Of a drafter's folder for a target in a folder, both tiny."""
    target, raw = tmp_path / "target", dflash_json(CONFIG)
    save_tokenizer(target)
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": CONFIG.num_layers}
    (target / "config.json").write_text(json.dumps({**dflash_json(CONFIG, **fields), **SHAPE_OF_TARGET}))
    save_file(model_tensors(CONFIG), target / "model.safetensors")
    write_dflash(tmp_path / "drafter", raw, dflash_tensors(raw))
    given = ["export", str(target), "--method", "dflash", "--drafter", str(tmp_path / "drafter")]
    result = CliRunner().invoke(app, [*given, "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "z-lab layout" in result.stderr and "vllm serve TARGET --speculative-config" in result.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["block_size"] == raw["block_size"]
