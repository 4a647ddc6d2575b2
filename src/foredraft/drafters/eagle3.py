"""EAGLE-3: one decoder layer on three fused taps (arXiv 2503.01840).

f = fc([tap_low; tap_middle; tap_high]). A pair (f of position i, token i + 1) predicts token i + 2: the layer's attention
reads [RMSNorm(embedding); RMSNorm(f)], its residual stream is f. Within a round its own output replaces f.
"""

from dataclasses import dataclass

from torch import Tensor

from foredraft.models.config import ModelConfig
from foredraft.models.layers import DecoderLayer


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
