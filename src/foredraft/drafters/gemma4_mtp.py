"""Gemma 4 MTP: a small decoder without keys and values of its own, which reads the target's KV cache.

A step takes [embedding of the last token; hidden state]: the target's at the last position that it has run, then the
drafter's own, projected back. The position stays that of the first step, and nothing is written to a cache.

The layers are either the target's kind (Llama, Qwen3), and then run wherever the target does, or those of Google's
``gemma4_assistant`` checkpoints (``gemma4_assistant.py``). The hidden state is the target's after its final norm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.base import DraftRequest, Proposal, Stop
from foredraft.drafters.calibration import Calibration
from foredraft.drafters.fitting import FORM, check_equal, draft_head, fitted
from foredraft.drafters.gemma4_assistant import Gemma4Decoder, Gemma4Shape, Gemma4Weights, gemma4_logits
from foredraft.drafters.picking import Draft, DraftVocabulary, pick
from foredraft.errors import UserError
from foredraft.models.batch import Batch, flat_batch
from foredraft.models.cache import Cache
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel, build_decoder
from foredraft.models.layers import DecoderLayer
from foredraft.models.rope import inverse_frequencies
from foredraft.ops import REFERENCE, Operations

GEMMA = "gemma4_text"
"""Model type of a Gemma 4 target, and of the layers of its drafter."""


@dataclass(frozen=True)
class Gemma4MTPConfig:
    """layers: shape of the drafter's decoder (hidden size h). backbone_hidden_size: the target's, H.
    kv_layers: for each drafter layer the target layer whose keys and values it reads.

    gemma: what layers of Gemma 4 have beyond ``layers``, None for layers of the target's kind. With it kv_layers is
    empty, since the target knows its last layer of each kind, and num_target_layers is 0, which is not in the file.
    """

    layers: ModelConfig
    backbone_hidden_size: int
    num_target_layers: int
    kv_layers: tuple[int, ...]
    default_tokens: int = 3
    max_tokens: int = 15
    gemma: Gemma4Shape | None = None


@dataclass(frozen=True)
class Gemma4MTPWeights:
    """pre_projection: [h, 2 * H], of [embedding; hidden state]. layers: qkv holds the query rows alone.
    norm: [h]. post_projection: [H, h]. head: [Vd, h], None for the target's own rows (then h = H).
    draft_vocab: [Vd], None for all. gemma: layers of Gemma 4, with ``layers`` empty."""

    pre_projection: Tensor
    layers: tuple[DecoderLayer[Tensor], ...]
    norm: Tensor
    post_projection: Tensor
    head: Tensor | None = None
    draft_vocab: Tensor | None = None
    gemma: Gemma4Weights | None = None


class _OwnLayers:
    """Layers of the target's kind. The row stands at the last position that the target has run, p - 1, and so sees
    just what a row of the target would there."""

    def __init__(
        self, config: Gemma4MTPConfig, weights: Gemma4MTPWeights, target: DecoderModel, ops: Operations
    ) -> None:
        self._ops, self._device = ops, target.device
        self._decoder = build_decoder(
            weights.layers, config.layers, ops, target.dtype, FORM, kv_layers=config.kv_layers
        )
        self._head = draft_head(weights.head, weights.draft_vocab, target, ops)

    def embedded(self, embedding: Tensor) -> Tensor:
        return embedding

    def forward(self, hidden: Tensor, requests: Sequence[DraftRequest], cache: Any) -> Tensor:
        # The decoder gets no token ids to look up; the anchors stand in for them.
        batch = flat_batch(
            [[request.anchor] for request in requests],
            [request.position - 1 for request in requests],
            [request.slot for request in requests],
            device=self._device,
        )
        return self._decoder.forward(hidden, batch, cache, ())[0]

    def logits(self, normed: Tensor) -> Tensor:
        return self._ops.linear(normed, self._head, None)


class _GemmaLayers:
    """Layers of a ``gemma4_assistant`` checkpoint, as transformers drives them (its candidate generator for a single
    position): the row stands at the anchor, position p, and sees the p positions before it. vLLM counts one less.
    Gemma multiplies its embeddings by sqrt(H), rounded to the model's dtype."""

    def __init__(self, config: Gemma4MTPConfig, weights: Gemma4MTPWeights, target: DecoderModel) -> None:
        assert config.gemma is not None and weights.gemma is not None and weights.head is not None
        self._shape, self._weights, self._head = config.gemma, weights.gemma, weights.head
        self._decoder = Gemma4Decoder(config.gemma, weights.gemma.layers, config.layers.rms_norm_eps)
        self._scale = torch.tensor(math.sqrt(config.backbone_hidden_size), dtype=target.dtype, device=target.device)

    def embedded(self, embedding: Tensor) -> Tensor:
        return embedding * self._scale

    def forward(self, hidden: Tensor, requests: Sequence[DraftRequest], cache: Any) -> Tensor:
        slots, lengths = [request.slot for request in requests], [request.position for request in requests]
        return self._decoder.forward(hidden, slots, lengths, cache)

    def logits(self, normed: Tensor) -> Tensor:
        return gemma4_logits(normed, self._head, self._shape, self._weights)


class Gemma4MTPDrafter:
    """Runs a Gemma 4 MTP drafter beside its target. Of each sequence it keeps the target's last hidden state only.

    ops: by default the target's, and PyTorch's for layers of Gemma 4. The native kernels run a drafter in 8 bits.
    ``attach`` must have been called before the first proposal: for layers of the target's kind with the target's
    cache, for layers of Gemma 4 with one that is a ``SharedCache``.
    """

    reads_target_cache = True
    caches: tuple[Cache, ...] = ()
    lookahead = False

    def __init__(
        self,
        config: Gemma4MTPConfig,
        weights: Gemma4MTPWeights,
        target: DecoderModel,
        ops: Operations | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        check_target(config, target.config)
        self.config = config
        self.taps: tuple[int, ...] = (target.config.num_layers - 1,)
        self.max_tokens = config.max_tokens
        self.default_tokens = min(config.default_tokens, config.max_tokens)
        self.calibration = calibration
        self._ops = ops = REFERENCE if config.gemma is not None else ops or target.ops
        weights = fitted(weights, target)
        self._layers = (
            _OwnLayers(config, weights, target, ops) if config.gemma is None else _GemmaLayers(config, weights, target)
        )
        self._pre, self._post = ops.pack(weights.pre_projection, FORM), ops.pack(weights.post_projection, FORM)
        self._norm, self._eps = weights.norm, config.layers.rms_norm_eps
        vocab = weights.draft_vocab
        self._vocab = DraftVocabulary(None if vocab is None else vocab.to(target.device), target.config.vocab_size)
        self._embeddings, self._device = target.embeddings, target.device
        self._target_norm, self._target_eps = target.final_norm, target.config.rms_norm_eps
        self._cache: Any = None
        self._lengths: dict[int, int] = {}
        self._hidden: dict[int, Tensor] = {}

    def attach(self, cache: Any) -> None:
        """Read the target's keys and values from ``cache``."""
        self._cache = cache

    def adopt(self, slot: int, tokens: Sequence[int]) -> None:
        """Nothing: all it needs is the hidden state of the last position, which is run in any case."""

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        """Keep the hidden state of the last committed row of each sequence."""
        assert taps is not None
        slots: list[int] = []
        last: list[int] = []
        first = 0
        for slot, start, count, kept in zip(batch.slots, batch.starts, batch.counts, accepted, strict=True):
            if kept:
                slots.append(slot)
                last.append(first + kept - 1)
                self._lengths[slot] = start + kept
            first += count
        if slots:
            rows = taps.index_select(0, torch.tensor(last, device=taps.device))
            hidden = self._ops.rms_norm(rows, self._target_norm, self._target_eps)
            self._hidden.update(zip(slots, hidden, strict=True))

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        """Up to ``max_tokens`` tokens one after the other, fewer for a sequence of which ``stop`` says so."""
        if self._cache is None:
            raise RuntimeError("the drafter reads the target's cache: call attach(cache) first")
        for request in requests:
            seen = self._lengths.get(request.slot, 0)
            if seen != request.position or not seen:
                raise RuntimeError(
                    f"slot {request.slot}: the drafter has seen {seen} positions, the anchor stands at "
                    f"{request.position}"
                )
        count = min(max_tokens, self.max_tokens)
        drafts = [Draft() for _ in requests]
        running = list(range(len(requests)))
        tokens = [request.anchor for request in requests]
        hidden = torch.stack([self._hidden[request.slot] for request in requests])
        for k in range(1, count + 1):
            normed = self._step(tokens, hidden, [requests[index] for index in running])
            logits = self._layers.logits(normed)
            picked = pick(logits, [(requests[index], k) for index in running], self._vocab, self._ops)
            going: list[int] = []
            for row, index in enumerate(running):
                confidence = drafts[index].add(picked, row, picked.confidences[row], self.calibration)
                if stop is None or not stop(index, confidence, k):
                    going.append(row)
            if k == count or not going:
                break
            if len(going) < len(running):
                normed = normed.index_select(0, torch.tensor(going, device=self._device))
            running = [running[row] for row in going]
            tokens = [drafts[index].token_ids[-1] for index in running]
            hidden = self._ops.linear(normed, self._post, None)
        return [draft.proposal() for draft in drafts]

    def release(self, slot: int) -> None:
        self._lengths.pop(slot, None)
        self._hidden.pop(slot, None)

    def _step(self, tokens: Sequence[int], hidden: Tensor, requests: Sequence[DraftRequest]) -> Tensor:
        """The normed output [R, h] for the last tokens and hidden states [R, H] of ``requests``."""
        token_ids = torch.tensor(tokens, device=self._device)
        embedded = self._layers.embedded(self._ops.embedding(token_ids, self._embeddings))
        joined = self._ops.linear(torch.cat((embedded, hidden), dim=-1), self._pre, None)
        return self._ops.rms_norm(self._layers.forward(joined, requests, self._cache), self._norm, self._eps)


def check_target(config: Gemma4MTPConfig, target: ModelConfig) -> None:
    """Raise UserError unless the drafter was made for a target of this shape."""
    pairs = [
        ("hidden size", config.backbone_hidden_size, target.hidden_size),
        ("vocabulary size", config.layers.vocab_size, target.vocab_size),
    ]
    if config.gemma is None:
        pairs += [
            ("number of target layers", config.num_target_layers, target.num_layers),
            ("number of key/value heads", config.layers.num_kv_heads, target.num_kv_heads),
            ("head size", config.layers.head_dim, target.head_dim),
        ]
    check_equal(pairs)
    if config.gemma is not None:
        if target.architecture != GEMMA:
            raise UserError(
                f"the drafter was made for a Gemma 4 target, but this one's model type is {target.architecture}"
            )
    elif _rotation(config.layers) != _rotation(target):
        raise UserError("the drafter was made for another target: its RoPE is not the target's, whose keys it reads")


def _rotation(config: ModelConfig) -> tuple[list[float], float]:
    """What the queries of a drafter must share with the keys that they read."""
    frequencies, factor = inverse_frequencies(config.rope, config.head_dim)
    return frequencies.tolist(), factor
