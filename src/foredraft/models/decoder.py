"""A stack of decoder layers in some implementation's operations, and the target built on it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from foredraft.models.batch import Batch, TargetOutput
from foredraft.models.cache import Cache, KVCache
from foredraft.models.config import ModelConfig
from foredraft.models.layers import (
    DecoderLayer,
    Weights,
    context_keys_values,
    dense,
    key_value_rows,
    layer_forward,
    load_layer,
    load_matrix,
    load_tensor,
    reading_layer_forward,
)
from foredraft.models.native import NativeDecoder, check_attention_input, check_committed
from foredraft.models.rope import RotaryTable, inverse_frequencies
from foredraft.ops import NATIVE, REFERENCE, Format, Matrix, Operations, Weight, native
from foredraft.ops.plan import Visibility, plan_attention
from foredraft.quantization.mxfp4 import MXFP4Tensor


class Decoder(Protocol):
    """A stack of decoder layers."""

    def new_cache(self) -> Cache: ...

    def forward(
        self, hidden: Tensor, batch: Batch, cache: Cache, taps: Sequence[int], attention_input: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """All layers over the rows ``hidden [T, K]``: their output, and of the layers ``taps`` (0-based) the outputs
        side by side, [T, len(taps) * K].

        attention_input: [T, W], from which the first layer computes queries, keys and values in place of
        RMSNorm(hidden); that layer's qkv has W columns.
        Writes keys and values beyond the committed length of each slot. May overwrite ``hidden``.
        """

    def inject(self, context: Tensor, batch: Batch, cache: Cache) -> None:
        """Write the keys and values that every layer computes from the same ``context [T, K]`` (DFlash)."""


def build_decoder(
    layers: Iterable[DecoderLayer[Weight]],
    config: ModelConfig,
    ops: Operations,
    dtype: torch.dtype,
    form: Format = "bf16",
    visibility: Sequence[Visibility] | None = None,
    kv_layers: Sequence[int] | None = None,
) -> Decoder:
    """The decoder of ``ops``. form: of its matrices. visibility: of each layer; causal without a window by default.

    kv_layers: for layers without keys and values of their own (qkv holds the query rows alone): layer i reads those of
    layer kv_layers[i] in the cache that ``forward`` gets, another decoder's with the same key/value heads. All
    positions that the rows see, their own included, must be committed there; nothing is written.
    """
    seen = tuple(visibility or [Visibility()] * config.num_layers)
    read = None if kv_layers is None else tuple(kv_layers)
    if ops is NATIVE:
        return NativeDecoder(layers, config, form, seen, read)
    return TorchDecoder(layers, config, ops, dtype, form, seen, read)


RunLayer: TypeAlias = Callable[[int, Tensor, Tensor | None], Tensor]
"""A layer by its index, over hidden [T, K] and perhaps an attention input [T, W]."""


class TorchDecoder:
    """Layer by layer in the operations of ``ops``; packed ``layers`` can be read for training."""

    def __init__(
        self,
        layers: Iterable[DecoderLayer[Weight]],
        config: ModelConfig,
        ops: Operations,
        dtype: torch.dtype,
        form: Format,
        visibility: tuple[Visibility, ...],
        kv_layers: tuple[int, ...] | None = None,
    ) -> None:
        self._config = config
        self._ops = ops
        self._dtype = dtype
        self._visibility = visibility
        self._kv_layers = kv_layers

        def pack(weight: Weight) -> Matrix:
            # What is MXFP4 already is not rounded again.
            return ops.pack(dense(weight, dtype), "bf16" if isinstance(weight, MXFP4Tensor) else form)

        self.layers = [layer.map_matrices(pack) for layer in layers]
        if kv_layers is not None and len(kv_layers) != len(self.layers):
            raise ValueError("kv_layers must name a layer for each layer")
        self.device = self.layers[0].input_norm.device
        frequencies, factor = inverse_frequencies(config.rope, config.head_dim)
        self.rotary = RotaryTable(frequencies, factor, dtype, self.device)
        self._context_kv: Tensor | None = None

    def new_cache(self) -> KVCache:
        assert self._kv_layers is None
        return KVCache(self._config, self._dtype, self.device)

    def forward(
        self, hidden: Tensor, batch: Batch, cache: Cache, taps: Sequence[int], attention_input: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(cache, KVCache)
        check_attention_input(attention_input, len(hidden), self.layers[0].qkv.shape[1], self._config.hidden_size)
        run = self._own_layers(batch, cache) if self._kv_layers is None else self._reading_layers(batch, cache)
        tapped = {}
        for index in range(len(self.layers)):
            hidden = run(index, hidden, attention_input if index == 0 else None)
            if index in taps:
                tapped[index] = hidden
        return hidden, torch.cat([tapped[index] for index in taps], dim=-1) if taps else None

    def _own_layers(self, batch: Batch, cache: KVCache) -> "RunLayer":
        steps = {seen: cache.prepare(batch, seen) for seen in set(self._visibility)}
        angles = self.rotary(batch.positions, max(batch.ends))

        def run(index: int, hidden: Tensor, attention_input: Tensor | None) -> Tensor:
            layer, step = self.layers[index], steps[self._visibility[index]]
            return layer_forward(index, layer, hidden, angles, cache, step, self._config, self._ops, attention_input)

        return run

    def _reading_layers(self, batch: Batch, cache: KVCache) -> "RunLayer":
        config, kv_layers = self._config, self._kv_layers
        assert kv_layers is not None
        check_committed(batch, cache)
        layers, *_, kv_heads, head_dim = cache.keys.shape
        if not all(0 <= layer < layers for layer in kv_layers):
            raise ValueError(f"the cache has layers 0 to {layers - 1}, kv_layers is {kv_layers}")
        if (kv_heads, head_dim) != (config.num_kv_heads, config.head_dim):
            raise ValueError(
                f"the cache has {kv_heads} key/value heads of {head_dim}, the layers {config.num_kv_heads} of "
                f"{config.head_dim}"
            )
        share = config.num_heads // kv_heads
        plans = {
            seen: plan_attention(
                batch.starts, batch.counts, batch.slots, share=share, visibility=seen, device=self.device
            )
            for seen in set(self._visibility)
        }
        angles = self.rotary(batch.positions, max(batch.ends))

        def run(index: int, hidden: Tensor, attention_input: Tensor | None) -> Tensor:
            layer, plan = self.layers[index], plans[self._visibility[index]]
            read = kv_layers[index]
            return reading_layer_forward(read, layer, hidden, angles, cache, plan, config, self._ops, attention_input)

        return run

    def inject(self, context: Tensor, batch: Batch, cache: Cache) -> None:
        assert isinstance(cache, KVCache) and self._kv_layers is None
        if self._context_kv is None:
            # The key and value rows of all layers, so that injection is one product.
            rows = [key_value_rows(layer.map_matrices(self._ops.unpack), self._config) for layer in self.layers]
            self._context_kv = self._ops.pack(torch.cat(rows), "bf16")
        cache.reserve(max(batch.slots) + 1, max(batch.ends))
        projected = self._ops.linear(context, self._context_kv, None)
        angles = self.rotary(batch.positions, max(batch.ends))
        where = cache.rows(batch.slots, batch.counts, batch.positions)
        for index, (layer, part) in enumerate(zip(self.layers, projected.chunk(len(self.layers), dim=-1), strict=True)):
            keys, values = context_keys_values(layer, part, angles, self._config, self._ops)
            cache.write(index, where, keys, values)


@dataclass(frozen=True)
class Precision:
    """The formats of a target's matrices. head: of the head and the embeddings."""

    layers: Format = "bf16"
    head: Format = "bf16"


class DecoderModel:
    """A target: embeddings, decoder layers, final norm and head, written in the operations of ``ops``."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Operations = REFERENCE,
        precision: Precision = Precision(),
    ) -> None:
        self.config = config
        self.ops = ops
        table = (config.vocab_size, config.hidden_size)
        embeddings = load_tensor(weights, "model.embed_tokens.weight", *table)
        self.dtype = embeddings.dtype
        self.device = embeddings.device
        self.embeddings = ops.pack(embeddings, precision.head) if ops is NATIVE else embeddings
        layers = (load_layer(weights, f"model.layers.{i}.", config) for i in range(config.num_layers))
        self.decoder = build_decoder(layers, config, ops, self.dtype, precision.layers)
        self.final_norm = load_tensor(weights, "model.norm.weight", config.hidden_size)
        if not config.tie_word_embeddings:
            head = load_matrix(weights, "lm_head.weight", *table)
            self.head = ops.pack(head if ops is NATIVE else dense(head, self.dtype), precision.head)
        else:
            self.head = self.embeddings if ops is NATIVE else ops.pack(embeddings, "bf16")
        if ops is NATIVE:
            del embeddings
            native.release_free_memory()

    def head_rows(self, token_ids: Tensor | None) -> Tensor:
        """The head's rows for ``token_ids``, all of them for None, as plain values [V or fewer, K]."""
        rows: Tensor = (
            self.embeddings
            if self.config.tie_word_embeddings and self.ops is not NATIVE
            else self.ops.unpack(self.head)
        )
        return rows if token_ids is None else rows[token_ids]

    def new_cache(self) -> Cache:
        return self.decoder.new_cache()

    def forward(self, batch: Batch, cache: Cache, taps: Sequence[int] = ()) -> TargetOutput:
        """Run a batch. ``taps``: 0-based layers whose output (the residual stream after them) is wanted.

        Writes keys and values beyond the committed length of each slot; the caller commits what it keeps.
        """
        hidden = self.ops.embedding(batch.token_ids, self.embeddings)
        hidden, tapped = self.decoder.forward(hidden, batch, cache, taps)
        # Not hidden[rows]: PyTorch would wake its own threads, which keep the processors from the kernels' threads.
        wanted = hidden if len(batch.logit_rows) == len(hidden) else hidden.index_select(0, batch.logit_rows)
        normed = self.ops.rms_norm(wanted, self.final_norm, self.config.rms_norm_eps)
        return TargetOutput(logits=self.ops.linear(normed, self.head, None), taps=tapped)
