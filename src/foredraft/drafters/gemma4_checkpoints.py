"""Reading and writing Gemma 4 MTP drafters in the ``gemma4_assistant`` layout of transformers.

``text_config.model_type`` says what the layers are: gemma4_text in Google's checkpoints, llama or qwen3 in those of
foredraft, for targets of these families. The latter have three keys more: ``num_target_layers``, ``kv_layers``, and
``draft_vocab_size`` where the head predicts only a part of the vocabulary (with the tensor ``d2t``, as in EAGLE-3).
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.drafters.checkpoints import read_default_tokens, read_draft_vocab, rope_fields
from foredraft.drafters.gemma4_assistant import (
    FULL,
    SLIDING,
    Gemma4Attention,
    Gemma4Layer,
    Gemma4Shape,
    Gemma4Weights,
)
from foredraft.drafters.gemma4_mtp import GEMMA, Gemma4MTPConfig, Gemma4MTPWeights, check_target
from foredraft.drafters.storage import drafter_weights
from foredraft.errors import UserError
from foredraft.models.config import ModelConfig, RopeConfig, decoder_config, required, rope_config
from foredraft.models.configuration import read_configuration
from foredraft.models.layers import DecoderLayer, Weights, dense, load_tensor
from foredraft.models.loading import FAMILIES, tensor_names

ARCHITECTURE = "Gemma4AssistantForCausalLM"


def load_gemma4_mtp(
    folder: Path, dtype: torch.dtype, target: ModelConfig | None = None
) -> tuple[Gemma4MTPConfig, Gemma4MTPWeights]:
    """Read a drafter's folder.

    Tensors: ``pre_projection``, ``model.layers.i.*``, ``model.norm``, ``post_projection``, and the head: ``lm_head``
    or, tied, ``model.embed_tokens``. Without a head it is the target's own (not for layers of Gemma 4).
    target: checked against before any weight is read, so that a drafter of another model is named as such.
    """
    source = str(folder / "config.json")
    raw = read_configuration(folder / "config.json")
    if ARCHITECTURE not in (raw.get("architectures") or []):
        raise UserError(f"{source}: architectures is {raw.get('architectures')}, not a {ARCHITECTURE}")
    text = required(raw, "text_config", source)
    if not isinstance(text, dict):
        raise UserError(f"{source}: text_config must be an object, not {type(text).__name__}")
    kind = text.get("model_type")
    if kind != GEMMA and kind not in FAMILIES:
        raise UserError(
            f"{source}: text_config.model_type {kind!r} is not supported; known: {', '.join((GEMMA, *FAMILIES))}"
        )
    config = _gemma_config(raw, text, source) if kind == GEMMA else _own_config(raw, text, source)
    if target is not None:
        check_target(config, target)
    read, stored = drafter_weights(folder, dtype), tensor_names(folder)
    hidden, backbone = config.layers.hidden_size, config.backbone_hidden_size
    draft_vocab = read_draft_vocab(folder, raw, config.layers.vocab_size)
    head_rows = config.layers.vocab_size if draft_vocab is None else len(draft_vocab)
    heads = [name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in stored]
    if not heads and (config.gemma is not None or hidden != backbone):
        raise UserError(f"{folder} lacks the tensor lm_head.weight, and the target's head does not fit its hidden size")
    weights = Gemma4MTPWeights(
        pre_projection=load_tensor(read, "pre_projection.weight", hidden, 2 * backbone),
        layers=()
        if config.gemma is not None
        else tuple(_own_layer(read, f"model.layers.{i}.", config.layers) for i in range(config.layers.num_layers)),
        norm=load_tensor(read, "model.norm.weight", hidden),
        post_projection=load_tensor(read, "post_projection.weight", backbone, hidden),
        head=load_tensor(read, heads[0], head_rows, hidden) if heads else None,
        draft_vocab=draft_vocab,
        gemma=None if config.gemma is None else _gemma_weights(folder, read, config.layers, config.gemma, raw, source),
    )
    return config, weights


def save_gemma4_mtp(
    folder: Path, config: Gemma4MTPConfig, weights: Gemma4MTPWeights, extra: Mapping[str, Any] | None = None
) -> None:
    """Write a drafter whose layers are of the target's kind; ``extra`` is added to config.json."""
    if config.gemma is not None:
        raise ValueError("checkpoints with layers of Gemma 4 are read, not written")
    shape = config.layers
    tensors = {
        "pre_projection.weight": weights.pre_projection,
        "post_projection.weight": weights.post_projection,
        "model.norm.weight": weights.norm,
    }
    for index, layer in enumerate(weights.layers):
        tensors.update(_own_tensors(f"model.layers.{index}.", layer))
    if weights.head is not None:
        tensors["lm_head.weight"] = weights.head
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": config.backbone_hidden_size,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": False,
        "num_target_layers": config.num_target_layers,
        "kv_layers": list(config.kv_layers),
        "num_speculative_tokens": config.default_tokens,
        "dtype": str(weights.pre_projection.dtype).removeprefix("torch."),
        "text_config": {
            "model_type": "qwen3" if shape.qk_norm else "llama",
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": shape.rms_norm_eps,
            "max_position_embeddings": shape.max_position_embeddings,
            "attention_bias": False,
            "hidden_act": "silu",
            **rope_fields(shape.rope),
        },
    }
    if weights.draft_vocab is not None:
        raw["draft_vocab_size"] = len(weights.draft_vocab)
        tensors["d2t"] = (weights.draft_vocab - torch.arange(len(weights.draft_vocab))).int()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**raw, **(extra or {})}, indent=2) + "\n")
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _own_config(raw: Mapping[str, Any], text: Mapping[str, Any], source: str) -> Gemma4MTPConfig:
    shape = replace(FAMILIES[text["model_type"]](text, source), tie_word_embeddings=False)
    if shape.attention_bias or shape.mlp_bias:
        raise UserError(f"{source}: biases (attention_bias, mlp_bias) are not supported in a Gemma 4 MTP drafter")
    if raw.get("use_ordered_embeddings"):
        raise UserError(f"{source}: use_ordered_embeddings needs layers of Gemma 4 (text_config.model_type {GEMMA})")
    num_target_layers = int(required(raw, "num_target_layers", source))
    kv_layers = tuple(int(layer) for layer in required(raw, "kv_layers", source))
    if len(kv_layers) != shape.num_layers or any(not 0 <= layer < num_target_layers for layer in kv_layers):
        raise UserError(
            f"{source}: kv_layers is {list(kv_layers)}; it must name a target layer in 0..{num_target_layers - 1} for "
            f"each of {shape.num_layers} layers"
        )
    return Gemma4MTPConfig(
        layers=shape,
        backbone_hidden_size=int(required(raw, "backbone_hidden_size", source)),
        num_target_layers=num_target_layers,
        kv_layers=kv_layers,
        default_tokens=read_default_tokens({"num_speculative_tokens": Gemma4MTPConfig.default_tokens, **raw}, source),
    )


def _own_layer(weights: Weights, prefix: str, shape: ModelConfig) -> DecoderLayer[Tensor]:
    hidden, inner, rows = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim

    def read(name: str, *size: int) -> Tensor:
        return load_tensor(weights, f"{prefix}{name}.weight", *size)

    return DecoderLayer(
        input_norm=read("input_layernorm", hidden),
        qkv=read("self_attn.q_proj", rows, hidden),
        qkv_bias=None,
        q_norm=read("self_attn.q_norm", shape.head_dim) if shape.qk_norm else None,
        k_norm=None,
        out=read("self_attn.o_proj", hidden, rows),
        out_bias=None,
        post_norm=read("post_attention_layernorm", hidden),
        gate_up=torch.cat((read("mlp.gate_proj", inner, hidden), read("mlp.up_proj", inner, hidden))),
        gate_up_bias=None,
        down=read("mlp.down_proj", hidden, inner),
        down_bias=None,
    )


def _own_tensors(prefix: str, layer: DecoderLayer[Tensor]) -> dict[str, Tensor]:
    gate, up = layer.gate_up.chunk(2)
    named = {
        "input_layernorm": layer.input_norm,
        "self_attn.q_proj": layer.qkv,
        "self_attn.q_norm": layer.q_norm,
        "self_attn.o_proj": layer.out,
        "post_attention_layernorm": layer.post_norm,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.down,
    }
    return {f"{prefix}{name}.weight": tensor for name, tensor in named.items() if tensor is not None}


def _gemma_config(raw: Mapping[str, Any], text: Mapping[str, Any], source: str) -> Gemma4MTPConfig:
    # Settings that would change what the layers compute, and that no published assistant has.
    for name in ("attention_bias", "enable_moe_block", "use_double_wide_mlp", "hidden_size_per_layer_input"):
        if text.get(name):
            raise UserError(f"{source}: text_config.{name} is {text[name]!r}, which is not supported in a drafter")
    activation = text.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise UserError(f"{source}: hidden_activation {activation!r} is not supported, only 'gelu_pytorch_tanh'")
    plain = {name: value for name, value in text.items() if name != "rope_parameters"}
    shape = decoder_config(plain, source, architecture=GEMMA, qk_norm=True)
    kinds = tuple(required(text, "layer_types", source))
    if len(kinds) != shape.num_layers or not {*kinds} <= {FULL, SLIDING}:
        raise UserError(f"{source}: layer_types must name {FULL} or {SLIDING} for each of {shape.num_layers} layers")
    top, clusters = None, 0
    if raw.get("use_ordered_embeddings"):
        top, clusters = int(raw.get("centroid_intermediate_top_k", 32)), int(raw.get("num_centroids", 2048))
        if clusters < 1 or shape.vocab_size % clusters or not 1 <= top <= clusters:
            raise UserError(
                f"{source}: num_centroids is {clusters} and centroid_intermediate_top_k {top}; the first must divide "
                f"the vocabulary of {shape.vocab_size} and the second lie in 1..{clusters}"
            )
    softcap = text.get("final_logit_softcapping")
    return Gemma4MTPConfig(
        layers=shape,
        backbone_hidden_size=int(required(raw, "backbone_hidden_size", source)),
        num_target_layers=0,
        kv_layers=(),
        default_tokens=read_default_tokens({"num_speculative_tokens": Gemma4MTPConfig.default_tokens, **raw}, source),
        gemma=Gemma4Shape(
            kinds=kinds,
            attention={kind: _gemma_attention(text, kind, kinds.index(kind), source) for kind in sorted({*kinds})},
            top_centroids=top,
            softcap=None if softcap is None else float(softcap),
        ),
    )


def _gemma_attention(text: Mapping[str, Any], kind: str, first: int, source: str) -> Gemma4Attention:
    """first: index of the first layer of that kind."""
    head_dim = int(text.get("head_dim", 256))
    if kind == FULL:
        head_dim = int(text.get("global_head_dim") or head_dim)
    # How transformers writes it since 5.24.
    head_dim = int((text.get("per_layer_config") or {}).get(str(first), {}).get("head_dim", head_dim))
    rope, rotated = _gemma_rope(required(text, "rope_parameters", source), kind, source)
    window = int(required(text, "sliding_window", source)) if kind == SLIDING else None
    return Gemma4Attention(head_dim, rope, rotated, window)


def _gemma_rope(parameters: Mapping[str, Any], kind: str, source: str) -> tuple[RopeConfig, float]:
    """RoPE type "proportional" turns a share of the pairs, at the frequencies that they have in the whole head."""
    own = dict(required(parameters, kind, f"{source}: rope_parameters"))
    if own.get("rope_type") != "proportional":
        return rope_config({"rope_parameters": own}, source), 1.0
    share = float(own.pop("partial_rotary_factor", None) or 1.0)
    own["rope_type"] = "linear" if "factor" in own else "default"
    return rope_config({"rope_parameters": own}, source), share


def _gemma_weights(
    folder: Path, weights: Weights, shape: ModelConfig, gemma: Gemma4Shape, raw: Mapping[str, Any], source: str
) -> Gemma4Weights:
    layers = tuple(
        _gemma_layer(weights, f"model.layers.{index}.", shape, gemma.attention[kind].head_dim)
        for index, kind in enumerate(gemma.kinds)
    )
    if gemma.top_centroids is None:
        return Gemma4Weights(layers)
    count = int(raw.get("num_centroids", 2048))
    centroids = load_tensor(weights, "masked_embedding.centroids.weight", count, shape.hidden_size)
    order = dense(drafter_weights(folder, torch.int64)("masked_embedding.token_ordering"), torch.int64)
    if not torch.equal(order.sort().values, torch.arange(shape.vocab_size)):
        raise UserError(
            f"{folder}: masked_embedding.token_ordering does not name each of {shape.vocab_size} token ids once"
        )
    return Gemma4Weights(layers, centroids, order.view(count, -1))


def _gemma_layer(weights: Weights, prefix: str, shape: ModelConfig, head_dim: int) -> Gemma4Layer:
    hidden, inner, rows = shape.hidden_size, shape.intermediate_size, shape.num_heads * head_dim

    def read(name: str, *size: int) -> Tensor:
        return load_tensor(weights, f"{prefix}{name}", *size)

    return Gemma4Layer(
        input_norm=read("input_layernorm.weight", hidden),
        q=read("self_attn.q_proj.weight", rows, hidden),
        q_norm=read("self_attn.q_norm.weight", head_dim),
        out=read("self_attn.o_proj.weight", hidden, rows),
        post_attention_norm=read("post_attention_layernorm.weight", hidden),
        pre_mlp_norm=read("pre_feedforward_layernorm.weight", hidden),
        gate_up=torch.cat((read("mlp.gate_proj.weight", inner, hidden), read("mlp.up_proj.weight", inner, hidden))),
        down=read("mlp.down_proj.weight", hidden, inner),
        post_mlp_norm=read("post_feedforward_layernorm.weight", hidden),
        scalar=read("layer_scalar", 1),
    )
