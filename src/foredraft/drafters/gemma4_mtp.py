"""Gemma 4 MTP: a small decoder without keys and values of its own, which reads the target's KV cache.

A step takes [embedding of the last token; hidden state]: the target's at the last position that it has run, then the
drafter's own, projected back. The position stays that of the first step, and nothing is written to a cache.
"""

from dataclasses import dataclass

from torch import Tensor

from foredraft.models.config import ModelConfig
from foredraft.models.layers import DecoderLayer


@dataclass(frozen=True)
class Gemma4MTPConfig:
    """layers: shape of the drafter's decoder (hidden size h). backbone_hidden_size: the target's, H.
    kv_layers: for each drafter layer the target layer whose keys and values it reads."""

    layers: ModelConfig
    backbone_hidden_size: int
    num_target_layers: int
    kv_layers: tuple[int, ...]
    default_tokens: int = 3
    max_tokens: int = 15


@dataclass(frozen=True)
class Gemma4MTPWeights:
    """pre_projection: [h, 2 * H], of [embedding; hidden state]. layers: qkv holds the query rows alone.
    norm: [h]. post_projection: [H, h]. head: [Vd, h], None for the target's own rows (then h = H).
    draft_vocab: [Vd], None for all."""

    pre_projection: Tensor
    layers: tuple[DecoderLayer[Tensor], ...]
    norm: Tensor
    post_projection: Tensor
    head: Tensor | None = None
    draft_vocab: Tensor | None = None
