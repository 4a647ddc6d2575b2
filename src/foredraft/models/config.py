"""The shape of a decoder-only transformer, read from config.json or GGUF metadata."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.errors import UserError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base ``theta`` and, where the context was extended, how.

    kind: "default", "linear", "llama3" or "yarn". The other fields carry the names of ``rope_parameters`` in
    a Hugging Face config.json; each kind uses those it needs.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-like decoder. ``qk_norm``: RMSNorm of each head's query and key (Qwen3)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def required(config: Mapping[str, Any], key: str, source: str) -> Any:
    """The value of ``key``, or a UserError that names the file."""
    if config.get(key) is None:
        raise UserError(f"{source} has no `{key}`; it is not a complete model configuration")
    return config[key]


def decoder_config(config: Mapping[str, Any], source: str, *, architecture: str, qk_norm: bool) -> ModelConfig:
    """What Llama-like families share of a Hugging Face config.json. ``source`` names the file in errors."""
    hidden = int(required(config, "hidden_size", source))
    heads = int(required(config, "num_attention_heads", source))
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"{source}: hidden_act {activation!r} is not supported, only 'silu'")
    if config.get("use_sliding_window"):
        raise UserError(f"{source}: use_sliding_window is not supported for {architecture}")
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(required(config, "vocab_size", source)),
        hidden_size=hidden,
        intermediate_size=int(required(config, "intermediate_size", source)),
        num_layers=int(required(config, "num_hidden_layers", source)),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
        rope=rope_config(config, source),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=qk_norm,
    )


def rope_config(config: Mapping[str, Any], source: str) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before it)."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UserError(f"{source}: RoPE type {kind!r} is not supported; known: default, linear, llama3, yarn")
    if (scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError(f"{source}: partial_rotary_factor is not supported, every dimension must be rotated")
    if kind != "default" and scaling.get("factor") is None:
        raise UserError(f"{source}: RoPE type {kind!r} needs `factor`")
    names = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    given = {
        name: float(scaling[name]) for name in (*names, "mscale", "mscale_all_dim") if scaling.get(name) is not None
    }
    name = "original_max_position_embeddings"
    original = config.get(name) or scaling.get(name) or config.get("max_position_embeddings", 0)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(scaling.get("factor") or 1.0),
        original_max_position_embeddings=int(original),
        truncate=bool(scaling.get("truncate", True)),
        **given,
    )
