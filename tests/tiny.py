"""Tiny random models that tests share: float64, so that two ways to compute a value differ by rounding only."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from foredraft.models.config import ModelConfig, RopeConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.loading import Target
from foredraft.tokenizer import Tokenizer

BOS, EOS, MASK = 0, 1, 2
# Byte-level: G with a dot above is a space; the last five are single bytes of é and €.
TOKENS = [
    *("<bos>", "<eos>", "<mask>"),
    *"abcdefghijklmnop",
    *("Ġ", ".", "!", "ab", "bc", "cab", "Ġa", "dd"),
    *("Ã", "©", "â", "Ĥ", "¬"),
]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}!{% endif %}"

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=len(TOKENS),
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rms_norm_eps=1e-6,
    max_position_embeddings=48,
    rope=RopeConfig(theta=100.0),
    tie_word_embeddings=False,
)


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors by their Hugging Face name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes


def random_tensor(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norm weights around 1, matrices that keep the size of what they multiply."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return 1 + 0.3 * values if len(shape) == 1 else values * 1.5 / shape[1] ** 0.5


def model_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (config.hidden_size,), "lm_head.weight": table}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_shapes(config).items()}
    tensors = {name: random_tensor(shape, generator) for name, shape in shapes.items()}
    return tensors | {"model.embed_tokens.weight": torch.randn(table, generator=generator, dtype=torch.float64)}


def tiny_model(config: ModelConfig = CONFIG, seed: int = 0) -> DecoderModel:
    return DecoderModel(config, model_tensors(config, seed).__getitem__)


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(_backend(), special_tokens={"eos_token": EOS}, eos_token_ids=[EOS], chat_template=CHAT_TEMPLATE)


def tiny_target(seed: int = 0, **changes: Any) -> Target:
    return Target("tiny", tiny_model(replace(CONFIG, **changes), seed), tiny_tokenizer())


def save_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _backend().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS[:3]])
    return backend


def dflash_json(target: ModelConfig = CONFIG, **changes: Any) -> dict[str, Any]:
    """config.json of a DFlash drafter in the z-lab layout, for a target of that shape."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, target.num_layers - 1]},
        "num_target_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "rope_theta": 1000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **changes,
    }


def dflash_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors by the z-lab layout's names."""
    generator = torch.Generator().manual_seed(seed)
    hidden = raw["hidden_size"]
    shape = replace(
        CONFIG,
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        qk_norm=True,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, hidden * len(raw["dflash_config"]["target_layer_ids"])),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(raw["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}": own for name, own in layer_shapes(shape).items()}
    return {name: random_tensor(own, generator) for name, own in shapes.items()}


def dspark_json(target: ModelConfig = CONFIG, **changes: Any) -> dict[str, Any]:
    """config.json of a DSpark drafter in DeepSpec's layout, for a target of that shape."""
    raw = dflash_json(target) | {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": MASK,
        "target_layer_ids": [0, target.num_layers - 1],
        "markov_rank": 5,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    del raw["dflash_config"]
    return raw | changes


def dspark_tensors(raw: dict[str, Any], own_tables: bool = False, seed: int = 1) -> dict[str, Tensor]:
    """Random tensors by DeepSpec's names; the Markov head is strong enough to decide."""
    generator = torch.Generator().manual_seed(seed)
    hidden, rank, vocab = raw["hidden_size"], raw["markov_rank"], raw["vocab_size"]
    draft = raw.get("draft_vocab_size", vocab)
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (draft, rank),
    }
    if raw["markov_head_type"] == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if raw["markov_head_type"] == "rnn":
        columns = 2 * rank + hidden
        shapes |= {"markov_head.joint_proj.weight": (3 * rank, columns), "markov_head.joint_proj.bias": (3 * rank,)}
    if raw["enable_confidence_head"]:
        columns = hidden + (rank if raw["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, columns), "confidence_head.proj.bias": (1,)}
    if own_tables:
        shapes |= {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (draft, hidden)}
    tensors = dflash_tensors(raw | {"dflash_config": {"target_layer_ids": raw["target_layer_ids"]}}, seed)
    tensors |= {name: random_tensor(shape, generator) for name, shape in shapes.items()}
    tensors["markov_head.markov_w1.weight"] = 3 * tensors["markov_head.markov_w1.weight"]
    return tensors


def write_dflash(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder
