"""DSpark: a DFlash backbone whose anchor row predicts too, with a sequential Markov head and a confidence head
(arXiv 2607.05147)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from foredraft.drafters.base import DraftRequest, Proposal, Stop
from foredraft.drafters.calibration import Calibration
from foredraft.drafters.dflash import Backbone, DFlashConfig, DFlashWeights
from foredraft.drafters.fitting import FORM, draft_head, fitted
from foredraft.drafters.picking import Draft, DraftVocabulary, pick
from foredraft.models.batch import Batch
from foredraft.models.decoder import DecoderModel
from foredraft.ops import NATIVE, Matrix, Operations

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class DSparkConfig:
    """backbone: its block_size b rows, anchor included, give b proposals. markov_rank: r. confidence_with_markov:
    the confidence head reads the Markov embedding too; None where there is no confidence head."""

    backbone: DFlashConfig
    markov_rank: int
    markov_kind: MarkovKind = "vanilla"
    confidence_with_markov: bool | None = True


@dataclass(frozen=True)
class MarkovWeights:
    """w1: [V, r], by the token before. w2: [Vd, r]. gate, gate_bias: [r, K + r] and [r] of the ``gated`` kind, which
    read [hidden; embedding]; [3 * r, 2 * r + K] and [3 * r] of the ``rnn`` kind, which read [state; embedding;
    hidden]."""

    w1: Tensor
    w2: Tensor
    gate: Tensor | None = None
    gate_bias: Tensor | None = None


@dataclass(frozen=True)
class DSparkWeights:
    """confidence: [1, K + r] or [1, K]; confidence_bias: [1]; None where there is no confidence head.
    embeddings: [V, K], head: [Vd, K], None for the target's."""

    backbone: DFlashWeights
    markov: MarkovWeights
    confidence: Tensor | None = None
    confidence_bias: Tensor | None = None
    embeddings: Tensor | None = None
    head: Tensor | None = None


def markov_latent(
    kind: MarkovKind,
    embedded: Tensor,
    hidden: Tensor,
    state: Tensor,
    gate: Matrix | None,
    gate_bias: Tensor | None,
    ops: Operations,
) -> tuple[Tensor, Tensor]:
    """What W2 turns into a bias on the logits of block position k, and the state after it: [R, r] both.

    embedded: [R, r] e = W1[x_(k-1)]. hidden: [R, K] the backbone's normed output h_k. state: [R, r], zeros at k = 1.
    vanilla: e. gated: sigmoid(G [h; e] + b) * e. rnn: with [g; c; o] = G [s; e; h] + b, the state becomes
    sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c), and tanh(o) is the result.
    """
    if kind == "vanilla":
        return embedded, state
    if kind == "gated":
        return torch.sigmoid(ops.linear(torch.cat((hidden, embedded), dim=-1), gate, gate_bias)) * embedded, state
    update, candidate, output = ops.linear(torch.cat((state, embedded, hidden), dim=-1), gate, gate_bias).chunk(3, -1)
    share = torch.sigmoid(update)
    return torch.tanh(output), share * state + (1 - share) * torch.tanh(candidate)


class DSparkDrafter:
    """Runs a DSpark drafter beside its target; ``ops`` as for DFlash."""

    lookahead = False

    def __init__(
        self,
        config: DSparkConfig,
        weights: DSparkWeights,
        target: DecoderModel,
        ops: Operations | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.taps = config.backbone.target_layer_ids
        self.max_tokens = config.backbone.block_size
        self.default_tokens = min(config.backbone.default_tokens, self.max_tokens)
        self.calibration = calibration
        self._config = config
        self._ops = ops = ops or target.ops
        self._device = target.device
        weights = fitted(weights, target)
        markov, ids = weights.markov, weights.backbone.draft_vocab
        embeddings = target.embeddings if weights.embeddings is None else _table(weights.embeddings, ops)
        self._backbone = Backbone(config.backbone, weights.backbone, target, ops, embeddings)
        self.caches = self._backbone.caches
        self._vocab = DraftVocabulary(ids, target.config.vocab_size)
        self._head = draft_head(weights.head, ids, target, ops)
        self._w1, self._w2 = _table(markov.w1, ops), ops.pack(markov.w2, FORM)
        self._gate = None if markov.gate is None else ops.pack(markov.gate, FORM)
        self._gate_bias = markov.gate_bias
        self._confidence = None if weights.confidence is None else ops.pack(weights.confidence, "bf16")
        self._confidence_bias = weights.confidence_bias

    def adopt(self, slot: int, tokens: Sequence[int]) -> None:
        """Nothing: its state is its cache."""

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        self._backbone.observe(batch, taps, accepted)

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        """One pass over [anchor, MASK x (max_tokens - 1)] and one product with the head; then token by token, each
        with the bias that the token before it adds."""
        count = min(max_tokens, self.max_tokens)
        normed = self._backbone.hidden(requests, masks=count - 1, predicting=count)
        base = self._ops.linear(normed, self._head, None).view(len(requests), count, -1)
        hidden = normed.view(len(requests), count, -1)
        state = normed.new_zeros(len(requests), self._config.markov_rank)
        previous = [request.anchor for request in requests]
        drafts = [Draft() for _ in requests]
        for k in range(1, count + 1):
            own = hidden[:, k - 1]
            embedded = self._ops.embedding(torch.tensor(previous, device=self._device), self._w1)
            latent, state = markov_latent(
                self._config.markov_kind, embedded, own, state, self._gate, self._gate_bias, self._ops
            )
            logits = self._ops.linear(latent, self._w2, None)
            logits += base[:, k - 1]
            picked = pick(logits, [(request, k) for request in requests], self._vocab, self._ops)
            confidences = self._confidences(own, embedded) or picked.confidences
            for index, draft in enumerate(drafts):
                draft.add(picked, index, confidences[index], self.calibration)
            previous = picked.token_ids
        return [draft.proposal() for draft in drafts]

    def release(self, slot: int) -> None:
        self._backbone.release(slot)

    def _confidences(self, hidden: Tensor, embedded: Tensor) -> list[float] | None:
        """sigmoid(w [h_k; e] + b) of each row, or of h_k alone; None without a confidence head."""
        if self._confidence is None:
            return None
        features = torch.cat((hidden, embedded), dim=-1) if self._config.confidence_with_markov else hidden
        scores = self._ops.linear(features, self._confidence, self._confidence_bias)
        found: list[float] = torch.sigmoid(scores.double()).flatten().tolist()
        return found


def _table(values: Tensor, ops: Operations) -> Matrix:
    """``values [V, K]`` as ``ops.embedding`` reads them."""
    return ops.pack(values, FORM) if ops is NATIVE else values
