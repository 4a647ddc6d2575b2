"""Native multi-token prediction: one more decoder layer on the target's own hidden state (arXiv 2412.19437 §2.2).

A pair (hidden state of position i, token i + 1) predicts token i + 2. Further tokens come from the layer's own
normed output in place of the target's hidden state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.drafters.calibration import Calibration
from foredraft.drafters.fitting import FORM, fitted
from foredraft.drafters.recursive import RecursiveDrafter
from foredraft.models.batch import Batch
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.layers import DecoderLayer
from foredraft.ops import Operations


@dataclass(frozen=True)
class MTPConfig:
    """layers: the shape of the drafter's one decoder layer. default_tokens: N unless the user says otherwise."""

    layers: ModelConfig
    num_target_layers: int
    default_tokens: int = 3
    max_tokens: int = 15


@dataclass(frozen=True)
class MTPWeights:
    """fc: [K, 2 * K], of [normed embedding; normed hidden state]. embedding_norm, hidden_norm, norm: [K].
    draft_vocab: [Vd] target ids the head predicts, None for all. The head is the target's."""

    fc: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor
    layers: tuple[DecoderLayer[Tensor], ...]
    norm: Tensor
    draft_vocab: Tensor | None = None


class MTPDrafter(RecursiveDrafter):
    """Runs an MTP layer beside its target. F is the target's hidden state after its final norm, then the layer's own
    normed output."""

    def __init__(
        self,
        config: MTPConfig,
        weights: MTPWeights,
        target: DecoderModel,
        ops: Operations | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        ops = ops or target.ops
        weights = fitted(weights, target)
        super().__init__(config, weights, None, target, ops, calibration)
        self.taps = (config.num_target_layers - 1,)
        self._fc = ops.pack(weights.fc, FORM)
        self._embedding_norm, self._hidden_norm = weights.embedding_norm, weights.hidden_norm
        self._norm = weights.norm
        self._final_norm, self._final_eps = target.final_norm, target.config.rms_norm_eps

    def _features(self, taps: Tensor) -> Tensor:
        return self._ops.rms_norm(taps, self._final_norm, self._final_eps)

    def _layer(self, batch: Batch, features: Tensor) -> Tensor:
        embedded = self._ops.embedding(batch.token_ids, self._embeddings)
        pair = (
            self._ops.rms_norm(embedded, self._embedding_norm, self._eps),
            self._ops.rms_norm(features, self._hidden_norm, self._eps),
        )
        fused = self._ops.linear(torch.cat(pair, dim=-1), self._fc, None)
        return self._decoder.forward(fused, batch, self._cache, ())[0]

    def _outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._ops.rms_norm(hidden, self._norm, self._eps)
        return normed, normed
