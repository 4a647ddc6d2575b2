"""What the sequential drafters share: one decoder layer with its own cache that feeds on its own output.

The pair (F_i, t_{i+1}) stands at position i and predicts t_{i+2}; F_i is what a method makes of the target's taps at
position i. A round begins with every pair that is not in the cache yet, the anchor's last, in one pass; each further
step runs one row per sequence, (own output, last draft token). Those rows lie beyond the committed length of the
cache, so that the next round's true pairs overwrite them, whatever was accepted.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foredraft.drafters.base import DraftRequest, Proposal, Stop
from foredraft.drafters.calibration import Calibration
from foredraft.drafters.fitting import FORM, check_shape, draft_head
from foredraft.drafters.picking import Draft, DraftVocabulary, pick
from foredraft.models.batch import Batch, flat_batch
from foredraft.models.cache import Cache
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel, build_decoder
from foredraft.models.layers import DecoderLayer
from foredraft.ops import Operations

LONGEST_WAIT = 32
"""Rows of a sequence that may wait for its next proposal; beyond that they are run without one."""


@dataclass
class Waiting:
    """Committed rows of a sequence whose pairs are to be run: their tokens and F [1 or more, K] each.

    end: the position after the last of them. The last row stays when its pair has run, so that the same proposal can
    be asked for again.
    """

    end: int = 0
    tokens: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)

    @property
    def first(self) -> int:
        return self.end - len(self.tokens)

    def add(self, tokens: Sequence[int], features: Tensor, cached: int) -> None:
        if cached == self.end:
            self.tokens.clear()
            self.features.clear()
        self.end += len(tokens)
        self.tokens.extend(tokens)
        self.features.append(features)

    def keep_last(self) -> None:
        # A copy, since a view would keep the whole of a long prompt in memory.
        self.features[:] = [self.features[-1][-1:].clone()]
        del self.tokens[:-1]


class RecursiveConfig(Protocol):
    """What the configurations of these methods share."""

    @property
    def layers(self) -> ModelConfig: ...
    @property
    def num_target_layers(self) -> int: ...
    @property
    def default_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...


class RecursiveWeights(Protocol):
    """What their weights share."""

    @property
    def layers(self) -> tuple[DecoderLayer[Tensor], ...]: ...
    @property
    def draft_vocab(self) -> Tensor | None: ...


class RecursiveDrafter(ABC):
    """State of all sequences and the recursion over steps; a method says what a row is made of."""

    taps: tuple[int, ...]
    lookahead = True

    def __init__(
        self,
        config: RecursiveConfig,
        weights: RecursiveWeights,
        head: Tensor | None,
        target: DecoderModel,
        ops: Operations,
        calibration: Calibration | None,
    ) -> None:
        """weights: on the target's device and in its dtype. head: [Vd, K], None for the target's own rows."""
        check_shape(config.layers, config.num_target_layers, target.config)
        self.max_tokens = config.max_tokens
        self.default_tokens = min(config.default_tokens, config.max_tokens)
        self.calibration = calibration
        self._ops = ops
        self._device = target.device
        self._eps = config.layers.rms_norm_eps
        self._embeddings = target.embeddings
        self._decoder = build_decoder(weights.layers, config.layers, ops, target.dtype, FORM)
        self._cache = self._decoder.new_cache()
        self.caches: tuple[Cache, ...] = (self._cache,)
        self._waiting: dict[int, Waiting] = {}
        ids = weights.draft_vocab
        self._vocab = DraftVocabulary(ids, target.config.vocab_size)
        self._head = draft_head(head, ids, target, ops)

    @abstractmethod
    def _features(self, taps: Tensor) -> Tensor:
        """F [T, K] of the target's taps [T, m * K]."""

    @abstractmethod
    def _layer(self, batch: Batch, features: Tensor) -> Tensor:
        """The layer's output [T, K] for the pairs of ``features [T, K]`` and the batch's tokens."""

    @abstractmethod
    def _outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of the layer's output [R, K], what takes the place of F in the next step and what the head reads."""

    def adopt(self, slot: int, tokens: Sequence[int]) -> None:
        self._waiting[slot] = Waiting(len(tokens))

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        """Keep the tokens and F of the committed rows; run the pairs of sequences that have many."""
        assert taps is not None
        committed = batch.first_rows(accepted)
        if committed.rows is not None:
            taps = taps.index_select(0, committed.rows)
        part = committed.batch
        tokens = part.token_ids.tolist()
        first = 0
        many: list[int] = []
        split = torch.split(self._features(taps), list(part.counts))
        for slot, count, features in zip(part.slots, part.counts, split, strict=True):
            if count:
                waiting = self._waiting.setdefault(slot, Waiting())
                waiting.add(tokens[first : first + count], features, self._cache.length(slot))
                first += count
                if len(waiting.tokens) > LONGEST_WAIT:
                    many.append(slot)
        if many:
            self._run_waiting(many, [None] * len(many))

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        """Up to ``max_tokens`` tokens one after the other, fewer for a sequence of which ``stop`` says so."""
        for request in requests:
            end = self._waiting[request.slot].end if request.slot in self._waiting else 0
            if end != request.position or not end:
                raise RuntimeError(
                    f"slot {request.slot}: the drafter has seen {end} positions, the anchor stands at "
                    f"{request.position}"
                )
        count = min(max_tokens, self.max_tokens)
        drafts = [Draft() for _ in requests]
        running = list(range(len(requests)))
        hidden = self._run_waiting([request.slot for request in requests], [request.anchor for request in requests])
        for k in range(1, count + 1):
            features, normed = self._outputs(hidden)
            logits = self._ops.linear(normed, self._head, None)
            picked = pick(logits, [(requests[index], k) for index in running], self._vocab, self._ops)
            going: list[int] = []
            for row, index in enumerate(running):
                confidence = drafts[index].add(picked, row, picked.confidences[row], self.calibration)
                if stop is None or not stop(index, confidence, k):
                    going.append(row)
            if k == count or not going:
                break
            if len(going) < len(running):
                features = features.index_select(0, torch.tensor(going, device=self._device))
            running = [running[row] for row in going]
            batch = flat_batch(
                [drafts[index].token_ids[-1:] for index in running],
                [requests[index].position + k - 1 for index in running],
                [requests[index].slot for index in running],
                device=self._device,
            )
            hidden = self._layer(batch, features)
        return [draft.proposal() for draft in drafts]

    def release(self, slot: int) -> None:
        self._cache.release(slot)
        self._waiting.pop(slot, None)

    def _run_waiting(self, slots: Sequence[int], anchors: Sequence[int | None]) -> Tensor:
        """Run the pairs that wait, the last row's with its anchor where there is one; the layer's output [R, K] of
        each sequence's last pair."""
        waiting = [self._waiting[slot] for slot in slots]
        rows: list[list[int]] = []
        parts: list[Tensor] = []
        for own, anchor in zip(waiting, anchors, strict=True):
            rows.append(own.tokens[1:] if anchor is None else [*own.tokens[1:], anchor])
            features = own.features if len(own.features) == 1 else [torch.cat(own.features)]
            parts.append(features[0][: len(rows[-1])])
        batch = flat_batch(rows, [own.first for own in waiting], slots, [1] * len(slots), self._device)
        hidden = self._layer(batch, torch.cat(parts)).index_select(0, batch.logit_rows)
        for slot, own, end in zip(slots, waiting, batch.ends, strict=True):
            self._cache.commit(slot, end)
            own.keep_last()
        return hidden
