"""Training native multi-token prediction on a target that has none (arXiv 2412.19437 §2.2, FastMTP 2509.18362)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.mtp import MTPConfig, MTPWeights
from foredraft.drafters.sequential_checkpoints import save_mtp
from foredraft.models.decoder import DecoderModel
from foredraft.models.layers import finish_layer, project
from foredraft.ops import REFERENCE
from foredraft.training.recipe import final_hidden, residual_size, target_layers
from foredraft.training.recursive import Angles, KeysValues, Past, Step


class MTPCell:
    """See ``training.recursive.Cell``."""

    taps: tuple[int, ...] = ()
    moves = True

    def __init__(self, target: DecoderModel, config: MTPConfig, weights: MTPWeights) -> None:
        self._target = target
        self._config = config
        self.shape = config.layers
        self.weights = weights
        self.draft_vocab = weights.draft_vocab
        self.head = target.head_rows(weights.draft_vocab)

    def features(self, weights: MTPWeights, taps: Tensor) -> Tensor:
        return final_hidden(self._target, taps)

    def past(
        self, weights: MTPWeights, features: Tensor, taps: Tensor, embedded: Tensor, angles: Angles
    ) -> list[KeysValues]:
        _, keys, values = project(
            weights.layers[0], self._fused(weights, features, embedded), angles, self.shape, REFERENCE
        )
        return [(keys, values)]

    def step(self, weights: MTPWeights, carried: Tensor, embedded: Tensor, angles: Angles, past: Past) -> Step:
        layer = weights.layers[0]
        hidden = self._fused(weights, carried, embedded)
        mixed = past(0, *project(layer, hidden, angles, self.shape, REFERENCE))
        hidden = finish_layer(layer, hidden, mixed, self.shape, REFERENCE)
        normed = REFERENCE.rms_norm(hidden, weights.norm, self.shape.rms_norm_eps)
        return Step(normed, normed)

    def save(self, folder: Path, weights: MTPWeights, extra: dict[str, Any]) -> None:
        save_mtp(folder, self._config, weights, extra)

    def _fused(self, weights: MTPWeights, hidden: Tensor, embedded: Tensor) -> Tensor:
        eps = self.shape.rms_norm_eps
        embedded = REFERENCE.rms_norm(embedded, weights.embedding_norm, eps)
        hidden = REFERENCE.rms_norm(hidden, weights.hidden_norm, eps)
        return REFERENCE.linear(torch.cat((embedded, hidden), dim=-1), weights.fc, None)


def initial_mtp(
    target: DecoderModel, draft_vocab: Sequence[int] | None, sample: Sequence[int]
) -> tuple[MTPConfig, MTPWeights]:
    """A drafter whose layer is the target's last one; the fusion adds hidden state and, smaller, embedding, in the size
    that this layer is used to (``sample``: token ids of one text)."""
    base = target.config
    hidden = base.hidden_size
    shape = replace(base, num_layers=1, attention_bias=False, mlp_bias=False)
    ones, identity = torch.ones(hidden), torch.eye(hidden)
    return MTPConfig(shape, base.num_layers), MTPWeights(
        fc=torch.cat((identity / 4, identity), dim=1) * residual_size(target, sample),
        embedding_norm=ones,
        hidden_norm=ones,
        layers=(replace(target_layers(target)[-1], qkv_bias=None, out_bias=None, gate_up_bias=None, down_bias=None),),
        norm=target.final_norm,
        draft_vocab=None if draft_vocab is None else torch.tensor(draft_vocab),
    )
