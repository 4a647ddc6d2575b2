"""The decoder that the Llama-like families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from foredraft.errors import UserError
from foredraft.models.cache import CacheStep, KVCache
from foredraft.models.config import ModelConfig
from foredraft.ops import Operations, Weight
from foredraft.ops.plan import AttentionPlan
from foredraft.ops.reference import attention
from foredraft.quantization.mxfp4 import MXFP4Tensor

Weights = Callable[[str], Weight]
"""Looks a tensor up by its Hugging Face name; raises UserError when the checkpoint lacks it."""

W = TypeVar("W", covariant=True)
V = TypeVar("V")

MATRICES = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True)
class DecoderLayer(Generic[W]):
    """Weights of one layer; q, k, v and gate, up are stacked so that each is one matrix product."""

    input_norm: Tensor
    qkv: W
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: W
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: W
    gate_up_bias: Tensor | None
    down: W
    down_bias: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> "DecoderLayer[W]":
        """The same layer with ``function`` applied to every tensor."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        changes: dict[str, Any] = {name: function(tensor) for name, tensor in tensors.items() if tensor is not None}
        return replace(self, **changes)

    def map_matrices(self, function: Callable[[W], V]) -> "DecoderLayer[V]":
        """The same layer with ``function`` applied to its four matrices."""
        changes: dict[str, Any] = {name: function(getattr(self, name)) for name in MATRICES}
        mapped: Any = replace(self, **changes)
        return cast(DecoderLayer[V], mapped)


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """What a weight stands for, in ``dtype``."""
    return weight.dequantize(dtype) if isinstance(weight, MXFP4Tensor) else weight.to(dtype)


def load_layer(weights: Weights, prefix: str, config: ModelConfig) -> DecoderLayer[Weight]:
    """Read the layer whose tensor names begin with ``prefix`` (Hugging Face names)."""

    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def matrix(name: str, *shape: int) -> Weight:
        return load_matrix(weights, prefix + name, *shape)

    def vector(name: str, size: int) -> Tensor:
        return load_tensor(weights, prefix + name, size)

    def matrices(rows: Mapping[str, int]) -> Weight:
        parts = [matrix(f"{name}.weight", count, hidden) for name, count in rows.items()]
        quantized = [part for part in parts if isinstance(part, MXFP4Tensor)]
        if len(quantized) == len(parts):
            return MXFP4Tensor.cat(quantized)
        plain = [part.dtype for part in parts if isinstance(part, Tensor)]
        return torch.cat([dense(part, plain[0]) for part in parts])

    def biases(rows: Mapping[str, int]) -> Tensor:
        return torch.cat([vector(f"{name}.bias", count) for name, count in rows.items()])

    qkv = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    return DecoderLayer(
        input_norm=vector("input_layernorm.weight", hidden),
        qkv=matrices(qkv),
        qkv_bias=biases(qkv) if config.attention_bias else None,
        q_norm=vector("self_attn.q_norm.weight", head_dim) if config.qk_norm else None,
        k_norm=vector("self_attn.k_norm.weight", head_dim) if config.qk_norm else None,
        out=matrix("self_attn.o_proj.weight", hidden, q_rows),
        out_bias=vector("self_attn.o_proj.bias", hidden) if config.attention_bias else None,
        post_norm=vector("post_attention_layernorm.weight", hidden),
        gate_up=matrices(gate_up),
        gate_up_bias=biases(gate_up) if config.mlp_bias else None,
        down=matrix("mlp.down_proj.weight", hidden, inner),
        down_bias=vector("mlp.down_proj.bias", hidden) if config.mlp_bias else None,
    )


def load_matrix(weights: Weights, name: str, *shape: int) -> Weight:
    """The tensor ``name``; raises UserError when its shape is not the one that the configuration implies."""
    weight = weights(name)
    if weight.shape != shape:
        raise UserError(
            f"the tensor {name} has shape {tuple(weight.shape)}, but the model's configuration implies {shape}"
        )
    return weight


def load_tensor(weights: Weights, name: str, *shape: int) -> Tensor:
    """The same for a tensor that MXFP4 is not for."""
    weight = load_matrix(weights, name, *shape)
    if isinstance(weight, MXFP4Tensor):
        raise UserError(f"{name} is MXFP4; only the matrices of decoder layers and the head may be")
    # A vector is kept as it is, and as a view of a memory-mapped file it would keep the whole file in memory.
    return weight.clone() if weight.ndim == 1 else weight


def layer_forward(
    index: int,
    layer: DecoderLayer[Tensor],
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    cache: KVCache,
    step: CacheStep,
    config: ModelConfig,
    ops: Operations,
    attention_input: Tensor | None = None,
) -> Tensor:
    """One decoder layer over the rows ``hidden [T, K]`` of a batch, through ``cache``. For ``attention_input`` see
    ``project``."""
    queries, keys, values = project(layer, hidden, angles, config, ops, attention_input)
    cache.write(index, step.rows, keys, values)
    mixed = attention(queries, cache.keys[index], cache.values[index], step.attention)
    return finish_layer(layer, hidden, mixed, config, ops)


def reading_layer_forward(
    kv_layer: int,
    layer: DecoderLayer[Tensor],
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    cache: KVCache,
    plan: AttentionPlan,
    config: ModelConfig,
    ops: Operations,
    attention_input: Tensor | None = None,
) -> Tensor:
    """The same for a layer without keys and values of its own: it reads those of layer ``kv_layer`` in ``cache``."""
    queries = project_queries(layer, hidden, angles, config, ops, attention_input)
    mixed = attention(queries, cache.keys[kv_layer], cache.values[kv_layer], plan)
    return finish_layer(layer, hidden, mixed, config, ops)


def project(
    layer: DecoderLayer[Tensor],
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    config: ModelConfig,
    ops: Operations,
    attention_input: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D], keys and values [T, G, D] of a layer's input, normed and rotated.

    attention_input: [T, W], what they are computed from in place of RMSNorm(hidden); qkv then has W columns.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = _qkv(layer, hidden, config, ops, attention_input)
    values = qkv[:, heads + kv_heads :]
    if layer.q_norm is None or layer.k_norm is None:
        rotated = ops.rope(qkv[:, : heads + kv_heads], *angles)
        return rotated[:, :heads], rotated[:, heads:], values
    queries = ops.rms_norm(qkv[:, :heads], layer.q_norm, config.rms_norm_eps)
    keys = ops.rms_norm(qkv[:, heads : heads + kv_heads], layer.k_norm, config.rms_norm_eps)
    return ops.rope(queries, *angles), ops.rope(keys, *angles), values


def project_queries(
    layer: DecoderLayer[Tensor],
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    config: ModelConfig,
    ops: Operations,
    attention_input: Tensor | None = None,
) -> Tensor:
    """``project`` for a layer whose qkv holds the query rows alone: [T, H, D]."""
    queries = _qkv(layer, hidden, config, ops, attention_input)
    if layer.q_norm is not None:
        queries = ops.rms_norm(queries, layer.q_norm, config.rms_norm_eps)
    return ops.rope(queries, *angles)


def _qkv(
    layer: DecoderLayer[Tensor], hidden: Tensor, config: ModelConfig, ops: Operations, attention_input: Tensor | None
) -> Tensor:
    """The heads of a layer's stacked product, [T, heads, D]."""
    if attention_input is None:
        attention_input = ops.rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
    return ops.linear(attention_input, layer.qkv, layer.qkv_bias).view(len(hidden), -1, config.head_dim)


def finish_layer(
    layer: DecoderLayer[Tensor], hidden: Tensor, mixed: Tensor, config: ModelConfig, ops: Operations
) -> Tensor:
    """Add a layer's attention output ``mixed [T, H, D]`` and its MLP to the residual stream."""
    hidden = hidden + ops.linear(mixed.reshape(len(hidden), -1), layer.out, layer.out_bias)
    normed = ops.rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
    gated = ops.silu_mul(ops.linear(normed, layer.gate_up, layer.gate_up_bias))
    return hidden + ops.linear(gated, layer.down, layer.down_bias)


def context_keys_values(
    layer: DecoderLayer[Tensor],
    projected: Tensor,
    angles: tuple[Tensor, Tensor],
    config: ModelConfig,
    ops: Operations,
) -> tuple[Tensor, Tensor]:
    """Keys (normed, rotated) and values [T, G, D] from ``projected [T, 2 * G * D]``, a layer's K and V of c."""
    both = projected.reshape(len(projected), 2 * config.num_kv_heads, config.head_dim)
    keys, values = both[:, : config.num_kv_heads], both[:, config.num_kv_heads :]
    assert layer.k_norm is not None
    return ops.rope(ops.rms_norm(keys, layer.k_norm, config.rms_norm_eps), *angles), values


def key_value_rows(layer: DecoderLayer[Tensor], config: ModelConfig) -> Tensor:
    """The K and V rows of a layer's stacked projection, [2 * G * D, K]."""
    return layer.qkv[config.num_heads * config.head_dim :]
