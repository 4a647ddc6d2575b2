"""Training Gemma 4 MTP: layers with queries only, over the keys and values of the target's last layer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.gemma4_checkpoints import save_gemma4_mtp
from foredraft.drafters.gemma4_mtp import Gemma4MTPConfig, Gemma4MTPWeights
from foredraft.errors import UserError
from foredraft.models.decoder import DecoderModel
from foredraft.models.layers import finish_layer, project, project_queries
from foredraft.ops import REFERENCE
from foredraft.training.recipe import Recipe, final_hidden, residual_size, target_layers
from foredraft.training.recursive import Angles, KeysValues, Past, Step


class Gemma4MTPCell:
    """See ``training.recursive.Cell``. The target's keys and values are computed from the tap before its last layer."""

    moves = False

    def __init__(self, target: DecoderModel, config: Gemma4MTPConfig, weights: Gemma4MTPWeights) -> None:
        last = target.config.num_layers - 1
        if weights.head is not None or any(layer != last for layer in config.kv_layers):
            raise UserError("only a Gemma 4 MTP drafter on the target's last layer and head can be trained here")
        self._target = target
        self._config = config
        self._read = target_layers(target)[-1]
        self.taps: tuple[int, ...] = (last - 1,)
        self.shape = config.layers
        self.weights = weights
        self.draft_vocab = weights.draft_vocab
        self.head = target.head_rows(weights.draft_vocab)

    def features(self, weights: Gemma4MTPWeights, taps: Tensor) -> Tensor:
        return final_hidden(self._target, taps[:, self._target.config.hidden_size :])

    @torch.no_grad()
    def past(
        self, weights: Gemma4MTPWeights, features: Tensor, taps: Tensor, embedded: Tensor, angles: Angles
    ) -> list[KeysValues]:
        before = taps[:, : self._target.config.hidden_size]
        _, keys, values = project(self._read, before, angles, self._target.config, REFERENCE)
        return [(keys, values)] * len(weights.layers)

    def step(self, weights: Gemma4MTPWeights, carried: Tensor, embedded: Tensor, angles: Angles, past: Past) -> Step:
        hidden = REFERENCE.linear(torch.cat((embedded, carried), dim=-1), weights.pre_projection, None)
        for index, layer in enumerate(weights.layers):
            queries = project_queries(layer, hidden, angles, self.shape, REFERENCE)
            hidden = finish_layer(layer, hidden, past(index, queries, None, None), self.shape, REFERENCE)
        normed = REFERENCE.rms_norm(hidden, weights.norm, self.shape.rms_norm_eps)
        return Step(normed, REFERENCE.linear(normed, weights.post_projection, None))

    def save(self, folder: Path, weights: Gemma4MTPWeights, extra: dict[str, Any]) -> None:
        save_gemma4_mtp(folder, self._config, weights, extra)


def initial_gemma4_mtp(
    target: DecoderModel, recipe: Recipe, draft_vocab: Sequence[int] | None, sample: Sequence[int]
) -> tuple[Gemma4MTPConfig, Gemma4MTPWeights]:
    """A drafter of the target's last layers, all with the queries of its last one, whose keys they read."""
    base = target.config
    hidden = base.hidden_size
    sources = target_layers(target)[-recipe.layers :]
    queries = sources[-1].qkv[: base.num_heads * base.head_dim]
    identity = torch.eye(hidden)
    layers = tuple(
        replace(
            layer,
            input_norm=sources[-1].input_norm,
            qkv=queries,
            q_norm=sources[-1].q_norm,
            k_norm=None,
            qkv_bias=None,
            out_bias=None,
            gate_up_bias=None,
            down_bias=None,
        )
        for layer in sources
    )
    config = Gemma4MTPConfig(
        layers=replace(base, num_layers=recipe.layers, attention_bias=False, mlp_bias=False),
        backbone_hidden_size=hidden,
        num_target_layers=base.num_layers,
        kv_layers=(base.num_layers - 1,) * recipe.layers,
    )
    # Embedding and final hidden state come unnormed; the layers are used to a residual stream of a certain size.
    wanted = residual_size(target, sample)
    of_embedding = wanted / 4 / target.head_rows(None)[:4096].float().square().mean().sqrt()
    of_hidden = wanted / target.final_norm.float().square().mean().sqrt()
    return config, Gemma4MTPWeights(
        pre_projection=torch.cat((identity * of_embedding, identity * of_hidden), dim=1),
        layers=layers,
        norm=target.final_norm,
        post_projection=identity,
        draft_vocab=None if draft_vocab is None else torch.tensor(draft_vocab),
    )
