"""Training the drafters that draft token by token: MTP, EAGLE-3 and Gemma 4 MTP, unrolled over their own outputs.

A text's positions i hold features F_i of the target and tokens t_i. At anchor p the first step takes F_(p-1) and t_p,
step s its own output and t_(p+s-1), and predicts t_(p+s) (training-time test, arXiv 2503.01840; the recursion that
FastMTP, arXiv 2509.18362, trains). The steps of a block attend to keys and values of true features up to position
p - 1 and to those of their own steps, so that one step of all blocks is one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from foredraft.drafters.weights import map_tensors, named_tensors
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.ops import REFERENCE
from foredraft.training.blocks import draft_ids, draw_blocks
from foredraft.training.data import Example
from foredraft.training.losses import BlockScores, position_weights, score_blocks
from foredraft.training.recipe import Recipe, rotary_table, soft_labels, trainable

Angles = tuple[Tensor, Tensor]
KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Step:
    """What a step hands on. logits_from: [A, K] what the head reads; carried: [A, K] the next step's feature."""

    logits_from: Tensor
    carried: Tensor


class Past(Protocol):
    """Attention of a step's queries [A, H, D] to the true past of each block and, where there is such, the block's own
    earlier steps, whose keys and values [A, G, D] it takes in."""

    def __call__(self, layer: int, queries: Tensor, keys: Tensor | None, values: Tensor | None) -> Tensor: ...


class Cell(Protocol):
    """One method's side of a step; ``weights`` handed in are those trained, in the computing dtype.

    taps: target layers read, besides the last one. weights: to start from. head: [Vd, K] frozen. shape: of the layers.
    moves: whether each step stands one position further.
    """

    taps: tuple[int, ...]
    weights: Any
    head: Tensor
    draft_vocab: Tensor | None
    shape: ModelConfig
    moves: bool

    def features(self, weights: Any, taps: Tensor) -> Tensor:
        """F of every position [T, K] from ``taps [T, m * K]``, the last layer's among them, last."""

    def past(self, weights: Any, features: Tensor, taps: Tensor, embedded: Tensor, angles: Angles) -> list[KeysValues]:
        """Keys and values of the true positions, for each layer. embedded: of the token after each position."""

    def step(self, weights: Any, carried: Tensor, embedded: Tensor, angles: Angles, past: Past) -> Step: ...

    def save(self, folder: Path, weights: Any, extra: dict[str, Any]) -> None: ...


class BlockPast:
    """Attention of the blocks of several texts, and the keys and values that their steps leave behind."""

    def __init__(self, layers: list[list[KeysValues]], anchors: Sequence[Tensor], heads: int) -> None:
        """layers: for each layer, per text keys and values [T_i, G, D]. anchors: per text [A_i]."""
        self._layers = layers
        self._counts = [len(part) for part in anchors]
        self._heads = heads
        self._own: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in layers]
        # A block of anchor p sees the pairs up to position p - 1.
        self._masks = [torch.arange(int(part.max()), device=part.device) >= part.unsqueeze(1) for part in anchors]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor | None, values: Tensor | None) -> Tensor:
        own_keys, own_values = self._own[layer]
        rows, heads, size = queries.shape
        groups = self._layers[layer][0][0].shape[1]
        share = heads // groups
        grouped = queries.view(rows, groups, share, size)
        scale = size**-0.5
        if keys is not None and values is not None:
            own_keys.append(keys)
            own_values.append(values)
        own = None
        if own_keys:
            # [A, G, share, steps]
            own = grouped @ torch.stack(own_keys, dim=-1)
        parts = []
        first = 0
        for (past_keys, past_values), count, mask in zip(self._layers[layer], self._counts, self._masks, strict=True):
            part = slice(first, first + count)
            first += count
            length = mask.shape[1]
            stacked = grouped[part].permute(1, 2, 0, 3).reshape(groups, share * count, size)
            scores = stacked @ past_keys[:length].permute(1, 2, 0)
            scores = scores.view(groups, share, count, length).masked_fill(mask, float("-inf"))
            if own is not None:
                scores = torch.cat((scores, own[part].permute(1, 2, 0, 3)), dim=-1)
            weights = torch.softmax(scores.float() * scale, dim=-1).to(queries.dtype)
            mixed = weights[..., :length].reshape(groups, share * count, length) @ past_values[:length].transpose(0, 1)
            mixed = mixed.view(groups, share, count, size).permute(2, 0, 1, 3)
            if own is not None:
                values_of = torch.stack([value[part] for value in own_values], dim=2)
                mixed = mixed + weights[..., length:].permute(2, 0, 1, 3) @ values_of
            parts.append(mixed.reshape(count, heads, size))
        return torch.cat(parts)


class RecursiveObjective:
    """The trainable side of a token-by-token method, as the trainer sees it."""

    def __init__(self, target: DecoderModel, cell: Cell, recipe: Recipe) -> None:
        self.taps = (*cell.taps, target.config.num_layers - 1)
        self.evaluation_drafts = recipe.evaluation_drafts
        self._target = target
        self._cell = cell
        self._recipe = recipe
        self._weights = trainable(cell.weights, target.device)
        self._draft_ids = draft_ids(target.config.vocab_size, cell.draft_vocab)
        self._rotary = rotary_table(cell.shape, target)

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
        target, cell = self._target, self._cell
        blocks = draw_blocks(examples, self._draft_ids, self._recipe.anchors, drafts, generator, target.device)
        weights = map_tensors(self._weights, lambda tensor: tensor.to(target.dtype))
        hidden = torch.stack(self._unrolled(weights, examples, features, blocks.anchors, blocks.inputs), dim=1)
        mixture = self._recipe.mixture
        width = target.config.hidden_size
        last = [part[:, -width:] for part in features]
        return score_blocks(
            hidden,
            cell.head,
            blocks.labels,
            position_weights(drafts, self._recipe.gamma).to(target.device),
            mixture,
            soft_labels(target, cell.head, last) if mixture.needs_target else None,
            blocks.rows,
        )

    def _unrolled(
        self,
        weights: Any,
        examples: Sequence[Example],
        features: Sequence[Tensor],
        anchors: Sequence[Tensor],
        inputs: Tensor,
    ) -> list[Tensor]:
        """What the head reads after each of the S steps, [A, K] each. inputs: [A, S]."""
        target, cell = self._target, self._cell
        device = target.device
        lengths = [len(part) for part in features]
        taps = torch.cat(list(features))
        read = cell.features(weights, taps)
        end = max(lengths) + inputs.shape[1]
        angles = self._rotary(torch.cat([torch.arange(length, device=device) for length in lengths]), end)
        following = torch.cat([torch.tensor([*example.tokens[1:], 0], device=device) for example in examples])
        upcoming = REFERENCE.embedding(following, target.embeddings)
        past = [
            list(zip(torch.split(keys, lengths), torch.split(values, lengths), strict=True))
            for keys, values in cell.past(weights, read, taps, upcoming, angles)
        ]
        attend = BlockPast(past, anchors, cell.shape.num_heads)
        offsets = torch.tensor([0, *lengths], device=device).cumsum(0).tolist()
        before = torch.cat([part - 1 for part in anchors])
        carried = read.index_select(0, torch.cat([o + part - 1 for o, part in zip(offsets, anchors, strict=False)]))
        found = []
        for number in range(inputs.shape[1]):
            embedded = REFERENCE.embedding(inputs[:, number], target.embeddings)
            here = self._rotary(before + number * cell.moves, end)
            step = cell.step(weights, carried, embedded, here, _first_is_past(attend, number))
            found.append(step.logits_from)
            carried = step.carried
        return found

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write the drafter in bfloat16."""
        self._cell.save(folder, map_tensors(self._weights, lambda tensor: tensor.bfloat16()), extra)


def _first_is_past(attend: BlockPast, number: int) -> Past:
    """The first step's own keys and values are among the true ones already."""
    if number:
        return attend
    return lambda layer, queries, keys, values: attend(layer, queries, None, None)
