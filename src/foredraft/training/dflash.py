"""Training a DFlash drafter: blocks at random anchors, one denoising step (arXiv 2602.06036).

A training text is a prompt with the target's own answer. At an anchor position p the drafter sees the taps of
positions 0..p-1 and the block [anchor, MASK, ...]; block row k is to predict the token at p + k.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.checkpoints import save_dflash
from foredraft.drafters.dflash import DFlashConfig, DFlashWeights, context_features
from foredraft.drafters.weights import map_tensors, named_tensors
from foredraft.errors import UserError
from foredraft.models.batch import flat_batch
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.layers import DecoderLayer, context_keys_values, finish_layer, key_value_rows, project
from foredraft.models.rope import RotaryTable
from foredraft.ops import REFERENCE
from foredraft.training.blocks import draft_ids, draw_blocks
from foredraft.training.data import Example
from foredraft.training.losses import BlockScores, position_weights, score_blocks
from foredraft.training.recipe import Recipe, rotary_table, soft_labels, target_layers, trainable

BLOCKS_AT_ONCE = 24


def training_mask(context: int, anchors: Tensor, block: int, window: int | None) -> Tensor:
    """[A * block, context + A * block] bool: what the rows of A blocks of one text may see.

    A row sees the context before its anchor (``anchors [A]``), and its own block in both directions.
    """
    device = anchors.device
    first = anchors.repeat_interleave(block)
    own = first + torch.arange(block, device=device).repeat(len(anchors))
    owner = torch.arange(len(anchors), device=device).repeat_interleave(block)
    past = torch.arange(context, device=device)
    sees_context = past < first.unsqueeze(1)
    sees_block = owner == owner.unsqueeze(1)
    if window is not None:
        sees_context &= past > own.unsqueeze(1) - window
        sees_block &= own > own.unsqueeze(1) - window
    return torch.cat((sees_context, sees_block), dim=1)


def training_attention(
    queries: Tensor, keys: Tensor, values: Tensor, context: int, anchors: Tensor, window: int | None
) -> Tensor:
    """Attention of many blocks of one text.

    queries: [A * b, H, D], the blocks' rows. keys, values: [context + A * b, G, D], the context first, then the
    blocks. anchors: [A] positions, ascending. Returns [A * b, H, D].

    A few blocks are attended at a time, so that little is computed between blocks that do not see each other.
    """
    rows, heads, size = queries.shape
    groups = keys.shape[1]
    share = heads // groups
    block = rows // len(anchors)
    parts = []
    for begin in range(0, len(anchors), BLOCKS_AT_ONCE):
        some = anchors[begin : begin + BLOCKS_AT_ONCE]
        past = min(context, int(some[-1]))
        own = slice(begin * block, (begin + len(some)) * block)
        count = len(some) * block
        query = queries[own].view(count, groups, share, size).permute(1, 2, 0, 3)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query.reshape(1, groups, share * count, size),
            torch.cat((keys[:past], keys[context:][own])).transpose(0, 1).unsqueeze(0),
            torch.cat((values[:past], values[context:][own])).transpose(0, 1).unsqueeze(0),
            attn_mask=training_mask(past, some, block, window).repeat(share, 1),
        )
        parts.append(mixed.view(groups, share, count, size).permute(2, 0, 1, 3).reshape(count, heads, size))
    return torch.cat(parts)


def training_forward(
    config: DFlashConfig,
    weights: DFlashWeights,
    embeddings: Tensor,
    taps: Sequence[Tensor],
    anchors: Sequence[Tensor],
    anchor_tokens: Tensor,
    block: int,
    rotary: RotaryTable,
) -> Tensor:
    """Hidden states of the rows of many blocks of several texts, as ``DFlashDrafter`` computes them.

    taps: per text [T_i, m * K]. anchors: per text [A_i] positions; anchor_tokens: [sum A_i] ids. block: rows a
    block, anchor included. Returns [sum A_i, block, K], normed.
    """
    shape, ops = config.layers, REFERENCE
    lengths = [len(part) for part in taps]
    context = context_features(weights.fc, weights.context_norm, torch.cat(list(taps)), shape.rms_norm_eps, ops)
    end = max(lengths) + block
    device = embeddings.device
    context_angles = rotary(torch.cat([torch.arange(length, device=device) for length in lengths]), end)
    steps = torch.arange(block, device=device)
    block_angles = rotary(torch.cat([(part.unsqueeze(1) + steps).flatten() for part in anchors]), end)
    tokens = torch.full((sum(map(len, anchors)), block), config.mask_token_id, device=device)
    tokens[:, 0] = anchor_tokens
    hidden = ops.embedding(tokens.flatten(), embeddings)
    counts = [len(part) * block for part in anchors]
    for index, layer in enumerate(weights.layers):
        projected = ops.linear(context, key_value_rows(layer, shape), None)
        past = context_keys_values(layer, projected, context_angles, shape, ops)
        queries, *own = project(layer, hidden, block_angles, shape, ops)
        keys, values = (
            [torch.cat(pair) for pair in zip(torch.split(old, lengths), torch.split(new, counts), strict=True)]
            for old, new in zip(past, own, strict=True)
        )
        mixed = [
            training_attention(query, key, value, length, part, config.windows[index])
            for query, key, value, length, part in zip(
                torch.split(queries, counts), keys, values, lengths, anchors, strict=True
            )
        ]
        hidden = finish_layer(layer, hidden, torch.cat(mixed), shape, ops)
    return ops.rms_norm(hidden.view(-1, block, shape.hidden_size), weights.norm, shape.rms_norm_eps)


class DFlashObjective:
    """The trainable side of DFlash, as the trainer sees a method."""

    def __init__(self, target: DecoderModel, config: DFlashConfig, weights: DFlashWeights, recipe: Recipe) -> None:
        if config.causal_windows:
            raise UserError("a drafter whose sliding-window layers are causal cannot be trained further here")
        last = target.config.num_layers - 1
        self.taps = (*config.target_layer_ids, last) if recipe.mixture.needs_target else config.target_layer_ids
        self.evaluation_drafts = min(recipe.evaluation_drafts, config.block_size - 1)
        self._target = target
        self._config = config
        self._recipe = recipe
        self._weights = trainable(weights, target.device)
        self._head = target.head_rows(weights.draft_vocab)
        self._draft_ids = draft_ids(target.config.vocab_size, weights.draft_vocab)
        self._rotary = rotary_table(config.layers, target)

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
        target, width = self._target, len(self._config.target_layer_ids) * self._config.layers.hidden_size
        blocks = draw_blocks(examples, self._draft_ids, self._recipe.anchors, drafts, generator, target.device)
        hidden = training_forward(
            self._config,
            map_tensors(self._weights, lambda tensor: tensor.to(target.dtype)),
            target.embeddings,
            [part[:, :width] for part in features],
            blocks.anchors,
            blocks.inputs[:, 0],
            drafts + 1,
            self._rotary,
        )
        mixture = self._recipe.mixture
        last = [part[:, width:] for part in features]
        return score_blocks(
            hidden[:, 1:],
            self._head,
            blocks.labels,
            position_weights(drafts, self._recipe.gamma).to(target.device),
            mixture,
            soft_labels(target, self._head, last) if mixture.needs_target else None,
            blocks.rows,
        )

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write the drafter in bfloat16."""
        save_dflash(folder, self._config, map_tensors(self._weights, lambda tensor: tensor.bfloat16()), extra)


def initial_dflash(
    target: DecoderModel,
    recipe: Recipe,
    draft_vocab: Sequence[int] | None,
    sample: Sequence[int],
) -> tuple[DFlashConfig, DFlashWeights]:
    """A drafter that starts from the target's last layers.

    The fusion starts as the identity on the last tap, so that the context keys and values are close to those
    the target's own last layers compute. The layers' input norms are folded into their projections, because all
    layers share one normed context. Query and key norms, which the target may lack, start at the average size
    of its queries and keys on ``sample`` (token ids of one text).
    """
    base = target.config
    shape = replace(base, architecture="dflash", num_layers=recipe.layers, qk_norm=True, tie_word_embeddings=False)
    sources = target_layers(target)[-recipe.layers :]
    before = [base.num_layers - recipe.layers - 1 + index for index in range(recipe.layers)]
    with torch.inference_mode():
        batch = flat_batch([sample], [0], [0], [1], target.device)
        taps = target.forward(batch, target.new_cache(), before).taps
    assert taps is not None
    layers = tuple(
        _adapted(layer, inputs, shape, base.qk_norm)
        for layer, inputs in zip(sources, taps.chunk(recipe.layers, dim=-1), strict=True)
    )
    hidden = base.hidden_size
    fusion = torch.zeros(hidden, hidden * len(recipe.taps))
    fusion[:, -hidden:] = torch.eye(hidden)
    config = DFlashConfig(
        layers=shape,
        block_size=max(recipe.drafts) + 1,
        target_layer_ids=recipe.taps,
        num_target_layers=base.num_layers,
        mask_token_id=recipe.mask_token_id,
        windows=(None,) * recipe.layers,
    )
    weights = DFlashWeights(
        fc=fusion,
        context_norm=torch.ones(hidden),
        layers=layers,
        norm=target.final_norm,
        draft_vocab=None if draft_vocab is None else torch.tensor(draft_vocab),
    )
    return config, weights


def _adapted(layer: DecoderLayer[Tensor], inputs: Tensor, shape: ModelConfig, has_norms: bool) -> DecoderLayer[Tensor]:
    folded = layer.qkv.float() * layer.input_norm.float()
    q_norm, k_norm = layer.q_norm, layer.k_norm
    if not has_norms:
        normed = REFERENCE.rms_norm(inputs.float(), torch.ones_like(inputs[0]).float(), shape.rms_norm_eps)
        heads = (normed @ folded.T).view(len(inputs), -1, shape.head_dim)
        size = heads.square().mean(-1).sqrt()
        q_size = size[:, : shape.num_heads].mean()
        k_size = size[:, shape.num_heads : shape.num_heads + shape.num_kv_heads].mean()
        q_norm = torch.full((shape.head_dim,), float(q_size))
        k_norm = torch.full((shape.head_dim,), float(k_size))
    return replace(
        layer,
        input_norm=torch.ones_like(layer.input_norm),
        qkv=folded,
        qkv_bias=None,
        out_bias=None,
        q_norm=q_norm,
        k_norm=k_norm,
    )
