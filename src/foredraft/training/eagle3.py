"""Training EAGLE-3 with its training-time test (arXiv 2503.01840)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.eagle3 import Eagle3Config, Eagle3Weights
from foredraft.drafters.sequential_checkpoints import save_eagle3
from foredraft.errors import UserError
from foredraft.models.decoder import DecoderModel
from foredraft.models.layers import finish_layer, project
from foredraft.ops import REFERENCE
from foredraft.training.recipe import Recipe, target_layers
from foredraft.training.recursive import Angles, KeysValues, Past, Step


class Eagle3Cell:
    """See ``training.recursive.Cell``."""

    moves = True

    def __init__(self, target: DecoderModel, config: Eagle3Config, weights: Eagle3Weights) -> None:
        if weights.head is not None:
            raise UserError("an EAGLE-3 drafter with a head of its own cannot be trained further here")
        self._config = config
        self.taps = config.target_layer_ids
        self.shape = config.layers
        self.weights = weights
        self.draft_vocab = weights.draft_vocab
        self.head = target.head_rows(weights.draft_vocab)

    def features(self, weights: Eagle3Weights, taps: Tensor) -> Tensor:
        return REFERENCE.linear(taps[:, : weights.fc.shape[1]], weights.fc, None)

    def past(
        self, weights: Eagle3Weights, features: Tensor, taps: Tensor, embedded: Tensor, angles: Angles
    ) -> list[KeysValues]:
        _, read = self._inputs(weights, features, embedded)
        _, keys, values = project(weights.layers[0], features, angles, self.shape, REFERENCE, read)
        return [(keys, values)]

    def step(self, weights: Eagle3Weights, carried: Tensor, embedded: Tensor, angles: Angles, past: Past) -> Step:
        layer = weights.layers[0]
        residual, read = self._inputs(weights, carried, embedded)
        mixed = past(0, *project(layer, residual, angles, self.shape, REFERENCE, read))
        hidden = finish_layer(layer, residual, mixed, self.shape, REFERENCE)
        return Step(REFERENCE.rms_norm(hidden, weights.norm, self.shape.rms_norm_eps), hidden)

    def save(self, folder: Path, weights: Eagle3Weights, extra: dict[str, Any]) -> None:
        save_eagle3(folder, self._config, weights, extra)

    def _inputs(self, weights: Eagle3Weights, feature: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream [T, K] and what attention reads [T, 2 * K]."""
        eps = self.shape.rms_norm_eps
        normed = REFERENCE.rms_norm(feature, weights.hidden_norm, eps)
        read = torch.cat((REFERENCE.rms_norm(embedded, weights.layers[0].input_norm, eps), normed), dim=-1)
        return normed if self._config.norm_before_residual else feature, read


def initial_eagle3(
    target: DecoderModel, recipe: Recipe, draft_vocab: Sequence[int] | None
) -> tuple[Eagle3Config, Eagle3Weights]:
    """A drafter whose layer is the target's last one. The fusion starts as the last tap; attention reads the embedding
    through small random weights."""
    base = target.config
    hidden = base.hidden_size
    layer = target_layers(target)[-1]
    folded = layer.qkv.float() * layer.input_norm.float()
    of_embedding = torch.randn(folded.shape, generator=torch.Generator().manual_seed(0)) * folded.std() / 4
    fusion = torch.zeros(hidden, hidden * len(recipe.taps))
    fusion[:, -hidden:] = torch.eye(hidden)
    config = Eagle3Config(
        layers=replace(base, num_layers=1, attention_bias=False, mlp_bias=False),
        target_layer_ids=recipe.taps,
        num_target_layers=base.num_layers,
    )
    return config, Eagle3Weights(
        fc=fusion,
        hidden_norm=torch.ones(hidden),
        layers=(
            replace(
                layer,
                input_norm=torch.ones(hidden),
                qkv=torch.cat((of_embedding, folded), dim=1),
                qkv_bias=None,
                out_bias=None,
                gate_up_bias=None,
                down_bias=None,
            ),
        ),
        norm=target.final_norm,
        draft_vocab=None if draft_vocab is None else torch.tensor(draft_vocab),
    )
