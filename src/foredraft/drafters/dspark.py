"""DSpark: a DFlash backbone whose anchor row predicts too, with a sequential Markov head and a confidence head
(arXiv 2607.05147)."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from foredraft.drafters.dflash import DFlashConfig, DFlashWeights

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
    """w1: [V, r], by the token before. w2: [Vd, r]. gate: of the ``gated`` and ``rnn`` kinds."""

    w1: Tensor
    w2: Tensor
    gate: Tensor | None = None


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
