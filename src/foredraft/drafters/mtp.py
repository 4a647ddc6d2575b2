"""Native multi-token prediction: one more decoder layer on the target's own hidden state (arXiv 2412.19437 §2.2).

A pair (hidden state of position i, token i + 1) predicts token i + 2. Further tokens come from the layer's own
normed output in place of the target's hidden state.
"""

from dataclasses import dataclass

from torch import Tensor

from foredraft.models.config import ModelConfig
from foredraft.models.layers import DecoderLayer


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
