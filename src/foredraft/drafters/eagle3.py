"""EAGLE-3: one decoder layer on three fused taps (arXiv 2503.01840).

f = fc([tap_low; tap_middle; tap_high]). A pair (f of position i, token i + 1) predicts token i + 2: the layer's
attention reads [RMSNorm(embedding); RMSNorm(f)], its residual stream is f. Within a round its own output replaces f.
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
class Eagle3Config:
    """layers: the shape of the one decoder layer. target_layer_ids: 0-based, by the layers' output.
    norm_before_residual: the residual stream starts from RMSNorm(f) instead of f."""

    layers: ModelConfig
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    norm_before_residual: bool = False
    default_tokens: int = 3
    max_tokens: int = 15


@dataclass(frozen=True)
class Eagle3Weights:
    """fc: [K, taps * K]. layers: one layer whose qkv is [.., 2 * K] and whose input_norm norms the embedding.
    hidden_norm, norm: [K]. head: [Vd, K], None for the target's own rows. draft_vocab: [Vd], None for all."""

    fc: Tensor
    hidden_norm: Tensor
    layers: tuple[DecoderLayer[Tensor], ...]
    norm: Tensor
    head: Tensor | None = None
    draft_vocab: Tensor | None = None


class Eagle3Drafter(RecursiveDrafter):
    """Runs an EAGLE-3 layer beside its target. F is f of the target's taps, then the layer's own output before the
    norm."""

    def __init__(
        self,
        config: Eagle3Config,
        weights: Eagle3Weights,
        target: DecoderModel,
        ops: Operations | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        ops = ops or target.ops
        weights = fitted(weights, target)
        super().__init__(config, weights, weights.head, target, ops, calibration)
        self.taps = config.target_layer_ids
        self._norm_before_residual = config.norm_before_residual
        self._fc = ops.pack(weights.fc, FORM)
        self._embedding_norm = weights.layers[0].input_norm
        self._hidden_norm, self._norm = weights.hidden_norm, weights.norm

    def _features(self, taps: Tensor) -> Tensor:
        return self._ops.linear(taps, self._fc, None)

    def _layer(self, batch: Batch, features: Tensor) -> Tensor:
        embedded = self._ops.embedding(batch.token_ids, self._embeddings)
        normed = self._ops.rms_norm(features, self._hidden_norm, self._eps)
        pair = torch.cat((self._ops.rms_norm(embedded, self._embedding_norm, self._eps), normed), dim=-1)
        residual = normed if self._norm_before_residual else features
        return self._decoder.forward(residual, batch, self._cache, (), attention_input=pair)[0]

    def _outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, self._ops.rms_norm(hidden, self._norm, self._eps)
