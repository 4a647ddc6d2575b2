"""DFlash: block drafting with one denoising step and KV injection (arXiv 2602.06036).

Taps of the target at every committed position are fused into one context vector
c = RMSNorm(fc([tap_1; ...; tap_m])). In every drafter layer the keys and values of the context come from c;
the block [anchor, MASK, ..., MASK] attends to them and, in both directions, to itself. All mask rows are
predicted at once through the target's own head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.drafters.base import DraftRequest, Proposal
from foredraft.errors import UserError
from foredraft.models.batch import Batch, flat_batch
from foredraft.models.cache import KVCache
from foredraft.models.config import ModelConfig
from foredraft.models.layers import DecoderLayer, DecoderModel, layer_forward
from foredraft.models.rope import RotaryTable, inverse_frequencies
from foredraft.ops import REFERENCE, Operations


@dataclass(frozen=True)
class DFlashConfig:
    """A drafter's shape: ``layers`` describes its own decoder layers (Qwen3-style, ``qk_norm`` on).

    block_size counts the anchor. target_layer_ids: 0-based, by the layers' output. windows: sliding window of
    each drafter layer in positions, None where it sees everything. causal_windows: whether the layers with a
    window also see no later row of the block (z-lab's default for them). default_tokens: N unless the user says
    otherwise.
    """

    layers: ModelConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    windows: tuple[int | None, ...]
    causal_windows: bool = False
    default_tokens: int = 7


@dataclass(frozen=True)
class DFlashWeights:
    """fc: [K, m * K]. context_norm, norm: [K]. draft_vocab: [Vd] target ids the head predicts, None for all."""

    fc: Tensor
    context_norm: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    draft_vocab: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "DFlashWeights":
        """The same weights with ``function`` applied to every tensor that is trained."""
        return replace(
            self,
            fc=function(self.fc),
            context_norm=function(self.context_norm),
            layers=tuple(layer.map(function) for layer in self.layers),
            norm=function(self.norm),
        )


def context_features(weights: DFlashWeights, taps: Tensor, eps: float, ops: Operations) -> Tensor:
    """c = RMSNorm(fc(taps)): ``taps [T, m * K]`` to [T, K]."""
    return ops.rms_norm(ops.linear(taps, weights.fc, None), weights.context_norm, eps)


def context_keys_values(
    layer: DecoderLayer,
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


def key_value_rows(layer: DecoderLayer, config: ModelConfig) -> Tensor:
    """The K and V rows of a layer's stacked projection, [2 * G * D, K]."""
    return layer.qkv[config.num_heads * config.head_dim :]


class DFlashDrafter:
    """Runs a DFlash drafter beside its target; state is one KV cache that shares the target's slots."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: DFlashWeights,
        target: DecoderModel,
        ops: Operations = REFERENCE,
    ) -> None:
        check_target(config, target.config)
        self.config = config
        self.taps = config.target_layer_ids
        self.max_tokens = config.block_size - 1
        self.default_tokens = min(config.default_tokens, self.max_tokens)
        self._ops = ops
        weights = weights.map(lambda tensor: tensor.to(device=target.device, dtype=target.dtype))
        shape = config.layers
        self._context_kv = ops.pack(torch.cat([key_value_rows(layer, shape) for layer in weights.layers]))
        self._weights = replace(
            weights, fc=ops.pack(weights.fc), layers=tuple(layer.packed(ops) for layer in weights.layers)
        )
        self._embeddings = target.embeddings
        vocab = weights.draft_vocab
        self._draft_vocab = None if vocab is None else vocab.to(target.device)
        reduced = self._draft_vocab is not None
        self._head = ops.pack(target.head_rows(self._draft_vocab)) if reduced else target.head
        self._cache = KVCache(shape, target.dtype, target.device)
        frequencies, factor = inverse_frequencies(shape.rope, shape.head_dim)
        self._rotary = RotaryTable(frequencies, factor, target.dtype, target.device)

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        """KV injection: context keys and values of the committed rows, all layers in one product."""
        assert taps is not None
        if sum(accepted) < len(taps):
            kept: list[int] = []
            first = 0
            for count, keep in zip(batch.counts, accepted, strict=True):
                kept.extend(range(first, first + keep))
                first += count
            rows = torch.tensor(kept, device=taps.device)
            taps, positions = taps[rows], batch.positions[rows]
        else:
            positions = batch.positions
        ends = [start + keep for start, keep in zip(batch.starts, accepted, strict=True)]
        self._cache.reserve(max(batch.slots) + 1, max(ends))
        shape = self.config.layers
        context = context_features(self._weights, taps, shape.rms_norm_eps, self._ops)
        projected = self._ops.linear(context, self._context_kv, None)
        angles = self._rotary(positions, max(ends))
        where = self._cache.rows(batch.slots, accepted, positions)
        for index, (layer, part) in enumerate(
            zip(self._weights.layers, projected.chunk(shape.num_layers, dim=-1), strict=True)
        ):
            keys, values = context_keys_values(layer, part, angles, shape, self._ops)
            self._cache.write(index, where, keys, values)
        for slot, end in zip(batch.slots, ends, strict=True):
            self._cache.commit(slot, end)

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int) -> list[Proposal]:
        """One pass over [anchor, MASK x max_tokens] of every sequence; each mask row's best token."""
        for request in requests:
            if self._cache.length(request.slot) != request.position:
                raise RuntimeError(
                    f"slot {request.slot}: the drafter has seen {self._cache.length(request.slot)} positions, "
                    f"the anchor stands at {request.position}"
                )
        count = min(max_tokens, self.max_tokens)
        masks = [self.config.mask_token_id] * count
        batch = flat_batch(
            [[request.anchor, *masks] for request in requests],
            [request.position for request in requests],
            [request.slot for request in requests],
            [count] * len(requests),
            self._embeddings.device,
        )
        best = self._ops.linear(self._block(batch), self._head, None).argmax(dim=-1)
        if self._draft_vocab is not None:
            best = self._draft_vocab[best]
        return [Proposal(tuple(row)) for row in best.view(len(requests), count).tolist()]

    def release(self, slot: int) -> None:
        self._cache.release(slot)

    def _block(self, batch: Batch) -> Tensor:
        """Final normed hidden states of the block's mask rows."""
        shape = self.config.layers
        steps = {
            window: self._cache.prepare(batch, causal=window is not None and self.config.causal_windows, window=window)
            for window in set(self.config.windows)
        }
        angles = self._rotary(batch.positions, max(batch.ends))
        hidden = self._ops.embedding(batch.token_ids, self._embeddings)
        for index, layer in enumerate(self._weights.layers):
            step = steps[self.config.windows[index]]
            hidden = layer_forward(index, layer, hidden, angles, self._cache, step, shape, self._ops)
        return self._ops.rms_norm(hidden[batch.logit_rows], self._weights.norm, shape.rms_norm_eps)


def check_target(config: DFlashConfig, target: ModelConfig) -> None:
    """Raise UserError unless the drafter was made for a target of this shape."""
    pairs = (
        ("hidden size", config.layers.hidden_size, target.hidden_size),
        ("vocabulary size", config.layers.vocab_size, target.vocab_size),
        ("number of target layers", config.num_target_layers, target.num_layers),
    )
    for what, mine, theirs in pairs:
        if mine != theirs:
            raise UserError(f"the drafter was made for another target: its {what} is {mine}, the target's is {theirs}")
