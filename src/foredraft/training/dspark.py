"""Training DSpark: DFlash's blocks, a Markov head on the token before, and a confidence head (arXiv 2607.05147)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.checkpoints import save_dspark
from foredraft.drafters.dflash import DFlashConfig, DFlashWeights
from foredraft.drafters.dspark import DSparkConfig, DSparkWeights, MarkovKind, MarkovWeights, markov_latent
from foredraft.drafters.weights import map_tensors, named_tensors
from foredraft.errors import UserError
from foredraft.models.decoder import DecoderModel
from foredraft.ops import REFERENCE
from foredraft.training.blocks import draft_ids, draw_blocks
from foredraft.training.data import Example
from foredraft.training.dflash import training_forward
from foredraft.training.losses import Bias, BlockScores, position_weights, score_blocks
from foredraft.training.recipe import Recipe, rotary_table, soft_labels, trainable


class DSparkObjective:
    """The trainable side of DSpark, as the trainer sees a method.

    The loss is the recipe's mixture (0.1 cross-entropy, 0.9 distance) plus the cross-entropy of the confidence with the
    chance that the draft token is accepted, sum of min(q, p).
    """

    def __init__(self, target: DecoderModel, config: DSparkConfig, weights: DSparkWeights, recipe: Recipe) -> None:
        if weights.head is not None or weights.embeddings is not None:
            raise UserError("a DSpark drafter with a head or embeddings of its own cannot be trained further here")
        if not recipe.mixture.distance:
            raise UserError("DSpark learns its confidence from the distance of the distributions; give it a weight")
        backbone = config.backbone
        self.taps = (*backbone.target_layer_ids, target.config.num_layers - 1)
        self.evaluation_drafts = min(recipe.evaluation_drafts, backbone.block_size)
        self._target = target
        self._config = config
        self._recipe = recipe
        self._weights = trainable(weights, target.device)
        vocab = weights.backbone.draft_vocab
        self._head = target.head_rows(vocab)
        self._draft_ids = draft_ids(target.config.vocab_size, vocab)
        self._rotary = rotary_table(backbone.layers, target)

    def parameters(self) -> dict[str, Tensor]:
        return dict(named_tensors(self._weights))

    def score(
        self,
        examples: Sequence[Example],
        features: Sequence[Tensor],
        generator: torch.Generator,
        drafts: int | None = None,
    ) -> BlockScores:
        drafts = drafts or self._recipe.draw_drafts(generator)
        target, backbone = self._target, self._config.backbone
        width = len(backbone.target_layer_ids) * backbone.layers.hidden_size
        blocks = draw_blocks(examples, self._draft_ids, self._recipe.anchors, drafts, generator, target.device)
        weights = map_tensors(self._weights, lambda tensor: tensor.to(target.dtype))
        hidden = training_forward(
            backbone,
            weights.backbone,
            target.embeddings,
            [part[:, :width] for part in features],
            blocks.anchors,
            blocks.inputs[:, 0],
            drafts,
            self._rotary,
        )
        vectors, latents = self._markov(weights.markov, blocks.inputs, hidden)
        decay = position_weights(drafts, self._recipe.gamma).to(target.device)
        scores = score_blocks(
            hidden,
            self._head,
            blocks.labels,
            decay,
            self._recipe.mixture,
            soft_labels(target, self._head, [part[:, width:] for part in features]),
            blocks.rows,
            Bias(latents, weights.markov.w2),
        )
        if weights.confidence is None or weights.confidence_bias is None:
            return scores
        assert scores.overlap is not None
        read = torch.cat((hidden, vectors), dim=-1) if self._config.confidence_with_markov else hidden
        logits = (read @ weights.confidence.T + weights.confidence_bias).squeeze(-1).float()
        weight = decay * (blocks.labels >= 0)
        entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, scores.overlap, weight, reduction="sum")
        return replace(scores, loss=scores.loss + entropy / weight.sum().clamp(min=1e-9))

    def _markov(self, markov: MarkovWeights, before: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """W1 of the tokens ``before [A, S]`` and what W2 reads, [A, S, r] both."""
        vectors = torch.nn.functional.embedding(before, markov.w1)
        state = torch.zeros_like(vectors[:, 0])
        latents = []
        for k in range(before.shape[1]):
            latent, state = markov_latent(
                self._config.markov_kind, vectors[:, k], hidden[:, k], state, markov.gate, markov.gate_bias, REFERENCE
            )
            latents.append(latent)
        return vectors, torch.stack(latents, dim=1)

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write the drafter in bfloat16."""
        save_dspark(folder, self._config, map_tensors(self._weights, lambda tensor: tensor.bfloat16()), extra)


def initial_dspark(
    start: tuple[DFlashConfig, DFlashWeights], recipe: Recipe, rank: int, kind: MarkovKind = "vanilla"
) -> tuple[DSparkConfig, DSparkWeights]:
    """A drafter around a DFlash one, whose Markov and confidence heads say nothing yet."""
    backbone, weights = start
    shape = backbone.layers
    config = DSparkConfig(replace(backbone, block_size=max(recipe.drafts)), markov_rank=rank, markov_kind=kind)
    predicted = shape.vocab_size if weights.draft_vocab is None else len(weights.draft_vocab)
    generator = torch.Generator().manual_seed(0)
    return config, DSparkWeights(
        backbone=weights,
        markov=MarkovWeights(
            w1=torch.randn(shape.vocab_size, rank, generator=generator) * 0.1,
            w2=torch.zeros(predicted, rank),
            **_gates(kind, rank, shape.hidden_size),
        ),
        confidence=torch.zeros(1, shape.hidden_size + rank),
        confidence_bias=torch.zeros(1),
    )


def _gates(kind: MarkovKind, rank: int, hidden: int) -> dict[str, Tensor]:
    shapes = {"vanilla": None, "gated": (rank, rank + hidden), "rnn": (3 * rank, 2 * rank + hidden)}
    shape = shapes[kind]
    if shape is None:
        return {}
    generator = torch.Generator().manual_seed(1)
    gate = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    return {"gate": gate, "gate_bias": torch.zeros(shape[0])}
