"""The decoder that the Llama-like families share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from foredraft.errors import UserError
from foredraft.models.batch import Batch, TargetOutput
from foredraft.models.cache import CacheStep, KVCache
from foredraft.models.config import ModelConfig
from foredraft.models.rope import RotaryTable, inverse_frequencies
from foredraft.ops import REFERENCE, Operations

Weights = Callable[[str], Tensor]
"""Looks a tensor up by its Hugging Face name; raises UserError when the checkpoint lacks it."""


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer; q, k, v and gate, up are stacked so that each is one matrix product."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> "DecoderLayer":
        """The same layer with ``function`` applied to every tensor."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(tensor) for name, tensor in tensors.items() if tensor is not None})

    def packed(self, ops: Operations) -> "DecoderLayer":
        """The same layer with its matrices in the form in which ``ops.linear`` is fastest."""
        return self.map(lambda tensor: ops.pack(tensor) if tensor.ndim == 2 else tensor)


def load_layer(weights: Weights, prefix: str, config: ModelConfig) -> DecoderLayer:
    """Read the layer whose tensor names begin with ``prefix`` (Hugging Face names)."""

    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def read(name: str, *shape: int) -> Tensor:
        return load_tensor(weights, prefix + name, *shape)

    def stacked(rows: Mapping[str, int], suffix: str, *columns: int) -> Tensor:
        return torch.cat([read(f"{name}.{suffix}", count, *columns) for name, count in rows.items()])

    qkv = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    return DecoderLayer(
        input_norm=read("input_layernorm.weight", hidden),
        qkv=stacked(qkv, "weight", hidden),
        qkv_bias=stacked(qkv, "bias") if config.attention_bias else None,
        q_norm=read("self_attn.q_norm.weight", head_dim) if config.qk_norm else None,
        k_norm=read("self_attn.k_norm.weight", head_dim) if config.qk_norm else None,
        out=read("self_attn.o_proj.weight", hidden, q_rows),
        out_bias=read("self_attn.o_proj.bias", hidden) if config.attention_bias else None,
        post_norm=read("post_attention_layernorm.weight", hidden),
        gate_up=stacked(gate_up, "weight", hidden),
        gate_up_bias=stacked(gate_up, "bias") if config.mlp_bias else None,
        down=read("mlp.down_proj.weight", hidden, inner),
        down_bias=read("mlp.down_proj.bias", hidden) if config.mlp_bias else None,
    )


def load_tensor(weights: Weights, name: str, *shape: int) -> Tensor:
    """The tensor ``name``; raises UserError when its shape is not the one that the configuration implies."""
    tensor = weights(name)
    if tensor.shape != shape:
        raise UserError(
            f"the tensor {name} has shape {tuple(tensor.shape)}, but the model's configuration implies {shape}"
        )
    return tensor


class DecoderModel:
    """A target: embeddings, decoder layers, final norm and head, written in the operations of ``ops``."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Operations = REFERENCE) -> None:
        self.config = config
        self.ops = ops
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embeddings = load_tensor(weights, "model.embed_tokens.weight", vocab, hidden)
        self.layers = [load_layer(weights, f"model.layers.{i}.", config).packed(ops) for i in range(config.num_layers)]
        self.final_norm = load_tensor(weights, "model.norm.weight", hidden)
        tied = config.tie_word_embeddings
        self.head = ops.pack(self.embeddings if tied else load_tensor(weights, "lm_head.weight", vocab, hidden))
        frequencies, factor = inverse_frequencies(config.rope, config.head_dim)
        self.rotary = RotaryTable(frequencies, factor, self.dtype, self.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.embeddings.dtype

    @property
    def device(self) -> torch.device:
        return self.embeddings.device

    def head_rows(self, token_ids: Tensor | None) -> Tensor:
        """The head's rows for ``token_ids``, all of them for None, as plain values [V or fewer, K]."""
        head = self.embeddings if self.config.tie_word_embeddings else self.ops.unpack(self.head)
        return head if token_ids is None else head[token_ids]

    def new_cache(self) -> KVCache:
        return KVCache(self.config, self.dtype, self.device)

    def forward(self, batch: Batch, cache: KVCache, taps: Sequence[int] = ()) -> TargetOutput:
        """Run a batch. ``taps``: 0-based layers whose output (the residual stream after them) is wanted.

        Writes keys and values beyond the committed length of each slot; the caller commits what it keeps.
        """
        step = cache.prepare(batch)
        angles = self.rotary(batch.positions, max(batch.ends))
        hidden = self.ops.embedding(batch.token_ids, self.embeddings)
        tapped = {}
        for index, layer in enumerate(self.layers):
            hidden = layer_forward(index, layer, hidden, angles, cache, step, self.config, self.ops)
            if index in taps:
                tapped[index] = hidden
        wanted = hidden if len(batch.logit_rows) == len(hidden) else hidden[batch.logit_rows]
        normed = self.ops.rms_norm(wanted, self.final_norm, self.config.rms_norm_eps)
        return TargetOutput(
            logits=self.ops.linear(normed, self.head, None),
            taps=torch.cat([tapped[index] for index in taps], dim=-1) if taps else None,
        )


def layer_forward(
    index: int,
    layer: DecoderLayer,
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    cache: KVCache,
    step: CacheStep,
    config: ModelConfig,
    ops: Operations,
) -> Tensor:
    """One decoder layer over the rows ``hidden [T, K]`` of a batch, through ``cache``."""
    queries, keys, values = project(layer, hidden, angles, config, ops)
    cache.write(index, step.rows, keys, values)
    mixed = ops.attention(queries, cache.keys[index], cache.values[index], step.attention)
    return finish_layer(layer, hidden, mixed, config, ops)


def project(
    layer: DecoderLayer,
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    config: ModelConfig,
    ops: Operations,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D], keys and values [T, G, D] of a layer's input, normed and rotated."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    normed = ops.rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
    qkv = ops.linear(normed, layer.qkv, layer.qkv_bias).view(len(hidden), -1, config.head_dim)
    values = qkv[:, heads + kv_heads :]
    if layer.q_norm is None or layer.k_norm is None:
        rotated = ops.rope(qkv[:, : heads + kv_heads], *angles)
        return rotated[:, :heads], rotated[:, heads:], values
    queries = ops.rms_norm(qkv[:, :heads], layer.q_norm, config.rms_norm_eps)
    keys = ops.rms_norm(qkv[:, heads : heads + kv_heads], layer.k_norm, config.rms_norm_eps)
    return ops.rope(queries, *angles), ops.rope(keys, *angles), values


def finish_layer(layer: DecoderLayer, hidden: Tensor, mixed: Tensor, config: ModelConfig, ops: Operations) -> Tensor:
    """Add a layer's attention output ``mixed [T, H, D]`` and its MLP to the residual stream."""
    hidden = hidden + ops.linear(mixed.reshape(len(hidden), -1), layer.out, layer.out_bias)
    normed = ops.rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
    gated = ops.silu_mul(ops.linear(normed, layer.gate_up, layer.gate_up_bias))
    return hidden + ops.linear(gated, layer.down, layer.down_bias)
