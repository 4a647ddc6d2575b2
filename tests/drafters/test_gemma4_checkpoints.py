"""The gemma4_assistant layout: what is written is read back, and what cannot run is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CONFIG, random_tensor
from torch import Tensor

from foredraft.drafters.gemma4_assistant import FULL, SLIDING
from foredraft.drafters.gemma4_checkpoints import load_gemma4_mtp, save_gemma4_mtp
from foredraft.drafters.gemma4_mtp import Gemma4MTPConfig, Gemma4MTPWeights
from foredraft.drafters.storage import compact
from foredraft.drafters.weights import map_tensors, named_tensors
from foredraft.errors import UserError
from foredraft.models.config import RopeConfig
from foredraft.models.layers import DecoderLayer

TARGET = replace(CONFIG, num_layers=5, hidden_size=64, rope=RopeConfig(theta=5000.0, kind="linear", factor=4.0))
VOCABULARY = torch.tensor([0, 3, 4, 11, 31])


def random_drafter(qk_norm: bool, own_head: bool, draft_vocab: bool) -> tuple[Gemma4MTPConfig, Gemma4MTPWeights]:
    """Of TARGET: two layers, of the target's hidden size where it uses the target's head."""
    hidden = 32 if own_head else TARGET.hidden_size
    shape = replace(TARGET, num_layers=2, hidden_size=hidden, num_heads=8, intermediate_size=40, qk_norm=qk_norm)
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return random_tensor(size, generator)

    layers = tuple(
        DecoderLayer(
            input_norm=random(hidden),
            qkv=random(48, hidden),
            qkv_bias=None,
            q_norm=random(6) if qk_norm else None,
            k_norm=None,
            out=random(hidden, 48),
            out_bias=None,
            post_norm=random(hidden),
            gate_up=random(80, hidden),
            gate_up_bias=None,
            down=random(hidden, 40),
            down_bias=None,
        )
        for _ in range(2)
    )
    rows = len(VOCABULARY) if draft_vocab else TARGET.vocab_size
    weights = Gemma4MTPWeights(
        pre_projection=random(hidden, 2 * TARGET.hidden_size),
        layers=layers,
        norm=random(hidden),
        post_projection=random(TARGET.hidden_size, hidden),
        head=random(rows, hidden) if own_head else None,
        draft_vocab=VOCABULARY if draft_vocab else None,
    )
    return Gemma4MTPConfig(shape, TARGET.hidden_size, TARGET.num_layers, (4, 2), default_tokens=5), weights


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("draft_vocab", [False, True])
def test_written_drafters_are_read_back(tmp_path: Path, qk_norm: bool, own_head: bool, draft_vocab: bool) -> None:
    config, weights = random_drafter(qk_norm, own_head, draft_vocab)
    save_gemma4_mtp(tmp_path, config, weights, {"note": "extra"})
    found, read = load_gemma4_mtp(tmp_path, torch.float64, TARGET)
    assert found.kv_layers == (4, 2) and found.default_tokens == 5 and found.gemma is None and read.gemma is None
    assert (found.backbone_hidden_size, found.num_target_layers) == (64, 5)
    same = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "qk_norm")
    assert [getattr(found.layers, name) for name in same] == [getattr(config.layers, name) for name in same]
    assert (found.layers.rope.theta, found.layers.rope.kind, found.layers.rope.factor) == (5000.0, "linear", 4.0)
    expected = dict(named_tensors(weights))
    assert {name: tensor.shape for name, tensor in named_tensors(read)} == {k: v.shape for k, v in expected.items()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in named_tensors(read))
    assert (read.draft_vocab is None) == (not draft_vocab)
    if draft_vocab:
        assert read.draft_vocab is not None and read.draft_vocab.tolist() == VOCABULARY.tolist()
    assert json.loads((tmp_path / "config.json").read_text())["note"] == "extra"
    kept = {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} | ({"q_norm"} if qk_norm else set())
    names = {name.split(".")[-2] for name in load_file(tmp_path / "model.safetensors") if ".layers.0." in name}
    assert names == kept | {"input_layernorm", "post_attention_layernorm"}


def test_stored_in_eight_bits(tmp_path: Path) -> None:
    config, weights = random_drafter(True, False, True)
    save_gemma4_mtp(tmp_path / "plain", config, map_tensors(weights, torch.Tensor.bfloat16))
    compact(tmp_path / "plain", tmp_path / "small")
    _, expected = load_gemma4_mtp(tmp_path / "plain", torch.bfloat16, TARGET)
    _, found = load_gemma4_mtp(tmp_path / "small", torch.bfloat16, TARGET)
    pairs = zip(named_tensors(expected), named_tensors(found), strict=True)
    for (name, plain), (_, small) in pairs:
        torch.testing.assert_close(small, plain, rtol=0, atol=float(plain.abs().max()) / 120, msg=name)


def gemma_json() -> dict[str, Any]:
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 64,
        "use_ordered_embeddings": True,
        "num_centroids": 8,
        "centroid_intermediate_top_k": 3,
        "text_config": {
            "model_type": "gemma4_text",
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "global_head_dim": 10,
            "rms_norm_eps": 1e-5,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 512,
            "final_logit_softcapping": 30.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    }


def gemma_tensors() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (16, 128),
        "post_projection.weight": (64, 16),
        "model.norm.weight": (16,),
        "model.embed_tokens.weight": (32, 16),
        "masked_embedding.centroids.weight": (8, 16),
    }
    for index, size in enumerate((6, 10)):
        own: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (4 * size, 16),
            "self_attn.q_norm.weight": (size,),
            "self_attn.o_proj.weight": (16, 4 * size),
            "mlp.gate_proj.weight": (20, 16),
            "mlp.up_proj.weight": (20, 16),
            "mlp.down_proj.weight": (16, 20),
            "layer_scalar": (1,),
        }
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            own[f"{norm}_layernorm.weight"] = (16,)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in own.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: random_tensor(shape, generator) for name, shape in shapes.items()}
    return tensors | {"masked_embedding.token_ordering": torch.arange(32).flip(0)}


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("per_layer", [False, True])
def test_layers_of_gemma_4(tmp_path: Path, per_layer: bool) -> None:
    """The head size of full layers stands in ``global_head_dim``, or by layer as transformers writes it now."""
    raw = gemma_json()
    if per_layer:
        del raw["text_config"]["global_head_dim"]
        raw["text_config"]["per_layer_config"] = {"1": {"head_dim": 10}}
    config, weights = load_gemma4_mtp(write(tmp_path, raw, gemma_tensors()), torch.float64)
    shape = config.gemma
    assert shape is not None and weights.gemma is not None and not weights.layers
    assert shape.kinds == (SLIDING, FULL) and shape.softcap == 30.0 and shape.top_centroids == 3
    full, sliding = shape.attention[FULL], shape.attention[SLIDING]
    assert (full.head_dim, full.rope.theta, full.rotated, full.window) == (10, 1e6, 0.25, None)
    assert (sliding.head_dim, sliding.rope.theta, sliding.rotated, sliding.window) == (6, 1e4, 1.0, 512)
    assert weights.gemma.clusters is not None and weights.gemma.clusters.tolist()[0] == [31, 30, 29, 28]
    assert weights.head is not None and weights.head.shape == (32, 16) and config.layers.rms_norm_eps == 1e-5
    with pytest.raises(ValueError, match="read, not written"):
        save_gemma4_mtp(tmp_path / "copy", config, weights)


def test_a_gemma_drafter_needs_a_gemma_target(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="made for a Gemma 4 target, but this one's model type is llama"):
        load_gemma4_mtp(write(tmp_path, gemma_json(), gemma_tensors()), torch.float64, TARGET)


def text(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["text_config"].update(changes)


def top(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (top(architectures=["DFlashDraftModel"]), "not a Gemma4AssistantForCausalLM"),
        (top(text_config=[]), "has no `text_config`|expected an object"),
        (text(model_type="gemma3_text"), "text_config.model_type 'gemma3_text' is not supported; known: gemma4_text"),
        (text(enable_moe_block=True), "text_config.enable_moe_block is True"),
        (text(hidden_size_per_layer_input=256), "text_config.hidden_size_per_layer_input is 256"),
        (text(hidden_activation="silu"), "hidden_activation 'silu'"),
        (text(layer_types=["full_attention"]), "layer_types must name"),
        (text(rope_parameters={"full_attention": {}}), "rope_parameters has no `sliding_attention`"),
        (top(num_centroids=7), "num_centroids is 7 and centroid_intermediate_top_k 3"),
        (top(centroid_intermediate_top_k=9), "centroid_intermediate_top_k 9"),
        (top(num_speculative_tokens=0), "num_speculative_tokens is 0"),
    ],
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    raw = gemma_json()
    change(raw)
    with pytest.raises(UserError, match=message):
        load_gemma4_mtp(write(tmp_path, raw, gemma_tensors()), torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (top(kv_layers=[4]), "kv_layers is \\[4\\]; it must name a target layer in 0..4 for each of 2 layers"),
        (top(kv_layers=[4, 5]), "kv_layers is \\[4, 5\\]"),
        (top(num_target_layers=None), "has no `num_target_layers`"),
        (top(use_ordered_embeddings=True), "use_ordered_embeddings needs layers of Gemma 4"),
        (text(attention_bias=True), "biases"),
    ],
)
def test_what_own_layers_cannot_be(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    save_gemma4_mtp(tmp_path, *random_drafter(False, False, False))
    raw = json.loads((tmp_path / "config.json").read_text())
    change(raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=message):
        load_gemma4_mtp(tmp_path, torch.float64, TARGET)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tensors = gemma_tensors()
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(UserError, match=r"lacks the tensor lm_head\.weight"):
        load_gemma4_mtp(write(tmp_path, gemma_json(), tensors), torch.float64)
    tensors = gemma_tensors() | {"masked_embedding.token_ordering": torch.zeros(32, dtype=torch.int64)}
    with pytest.raises(UserError, match="token_ordering does not name each of 32 token ids once"):
        load_gemma4_mtp(write(tmp_path, gemma_json(), tensors), torch.float64)
    tensors = gemma_tensors() | {"post_projection.weight": torch.zeros(60, 16)}
    with pytest.raises(UserError, match=r"post_projection\.weight has shape"):
        load_gemma4_mtp(write(tmp_path, gemma_json(), tensors), torch.float64)
