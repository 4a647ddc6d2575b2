"""Training a DFlash drafter: blocks at random anchors, one denoising step (arXiv 2602.06036).

A training text is a prompt with the target's own answer. At an anchor position p the drafter sees the taps of
positions 0..p-1 and the block [anchor, MASK, ...]; block row k is to predict the token at p + k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.checkpoints import save_dflash
from foredraft.drafters.dflash import DFlashConfig, DFlashWeights, context_features
from foredraft.errors import UserError
from foredraft.models.batch import flat_batch
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel, TorchDecoder
from foredraft.models.layers import DecoderLayer, context_keys_values, finish_layer, key_value_rows, project
from foredraft.models.rope import RotaryTable, inverse_frequencies
from foredraft.ops import REFERENCE
from foredraft.training.data import Example
from foredraft.training.losses import (
    BEYOND_TEXT,
    OUTSIDE_VOCABULARY,
    BlockScores,
    position_weights,
    score_blocks,
)

BLOCKS_AT_ONCE = 24
EVALUATION_BLOCK = 8


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
    anchor_tokens: Sequence[Tensor],
    block: int,
    rotary: RotaryTable,
) -> Tensor:
    """Hidden states of the mask rows of many blocks of several texts, as ``DFlashDrafter`` computes them.

    taps: per text [T_i, m * K]. anchors, anchor_tokens: per text [A_i] positions and token ids. block: rows a
    block, anchor included. Returns [sum A_i, block - 1, K], normed.
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
    tokens[:, 0] = torch.cat(list(anchor_tokens))
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
    predicted = hidden.view(-1, block, shape.hidden_size)[:, 1:]
    return ops.rms_norm(predicted, weights.norm, shape.rms_norm_eps)


@dataclass(frozen=True)
class DFlashRecipe:
    """What is chosen before training.

    layers: drafter depth D. block_size: the largest block, anchor included. block_sizes: blocks trained, drawn
    per step, so that a short block drafts as well as a long one. taps: target layers. gamma: decay of the loss
    weight exp(-(k - 1) / gamma) over block positions k. distillation: share of the target's distribution in
    the label, the rest being the token it wrote. anchors: blocks per answer and step.
    """

    layers: int
    block_sizes: tuple[int, ...]
    taps: tuple[int, ...]
    mask_token_id: int
    gamma: float
    distillation: float
    anchors: int


class DFlashObjective:
    """The trainable side of DFlash, as the trainer sees a method."""

    def __init__(
        self, target: DecoderModel, config: DFlashConfig, weights: DFlashWeights, recipe: DFlashRecipe
    ) -> None:
        if config.causal_windows:
            raise UserError("a drafter whose sliding-window layers are causal cannot be trained further here")
        self._last = target.config.num_layers - 1
        self.taps = (*config.target_layer_ids, self._last) if recipe.distillation else config.target_layer_ids
        self.evaluation_block = min(EVALUATION_BLOCK, config.block_size)
        self._final_norm = target.final_norm
        self._config = config
        self._recipe = recipe
        self._weights = weights.map(
            lambda tensor: tensor.detach().to(target.device, torch.float32, copy=True).requires_grad_()
        )
        self._compute_dtype = target.dtype
        vocab = weights.draft_vocab
        self._embeddings = target.embeddings
        self._head = target.head_rows(vocab)
        self._draft_ids = torch.full((target.config.vocab_size,), OUTSIDE_VOCABULARY)
        self._draft_ids[torch.arange(target.config.vocab_size) if vocab is None else vocab] = torch.arange(
            len(self._head)
        )
        frequencies, factor = inverse_frequencies(config.layers.rope, config.layers.head_dim)
        self._rotary = RotaryTable(frequencies, factor, target.dtype, target.device)

    def parameters(self) -> dict[str, Tensor]:
        """Everything trained, float32, by name."""
        found = {
            "fc": self._weights.fc,
            "context_norm": self._weights.context_norm,
            "norm": self._weights.norm,
        }
        for index, layer in enumerate(self._weights.layers):
            for field in fields(layer):
                tensor = getattr(layer, field.name)
                if tensor is not None:
                    found[f"layers.{index}.{field.name}"] = tensor
        return found

    def score(
        self,
        examples: Sequence[Example],
        features: Sequence[Tensor],
        generator: torch.Generator,
        block: int | None = None,
    ) -> BlockScores:
        """Draft at random anchors of ``examples`` and compare with what the target wrote.

        features: per example [T, m * K]. block: rows per block; drawn from the recipe's sizes when None.
        """
        sizes = self._recipe.block_sizes
        if block is None:
            block = sizes[int(torch.randint(len(sizes), (), generator=generator))]
        device = self._embeddings.device
        width = len(self._config.target_layer_ids) * self._config.layers.hidden_size
        anchors, anchor_tokens, labels, soft_rows = [], [], [], []
        offset = 0
        for example in examples:
            tokens = torch.tensor(example.tokens)
            first, last = len(example.prompt), len(tokens) - 2
            count = min(self._recipe.anchors, last - first + 1)
            chosen = first + torch.randperm(last - first + 1, generator=generator)[:count]
            chosen, _ = chosen.sort()
            padded = torch.cat((self._draft_ids[tokens], torch.full((block,), BEYOND_TEXT)))
            ahead = chosen.unsqueeze(1) + torch.arange(1, block)
            anchors.append(chosen.to(device))
            anchor_tokens.append(tokens[chosen].to(device))
            labels.append(padded[ahead])
            soft_rows.append(offset + (ahead - 1).clamp(max=len(tokens) - 1))
            offset += len(tokens)
        hidden = training_forward(
            self._config,
            self._weights.map(lambda tensor: tensor.to(self._compute_dtype)),
            self._embeddings,
            [part[:, :width] for part in features],
            anchors,
            anchor_tokens,
            block,
            self._rotary,
        )
        return score_blocks(
            hidden,
            self._head,
            torch.cat(labels).to(device),
            position_weights(block - 1, self._recipe.gamma).to(device),
            self._soft_labels([part[:, width:] for part in features]) if self._recipe.distillation else None,
            torch.cat(soft_rows).to(device),
            self._recipe.distillation,
        )

    @torch.no_grad()
    def _soft_labels(self, last: Sequence[Tensor]) -> Tensor:
        """The target's distribution over the draft vocabulary after every position, [sum T_i, Vd] bfloat16."""
        normed = REFERENCE.rms_norm(torch.cat(list(last)), self._final_norm, self._config.layers.rms_norm_eps)
        return torch.softmax(REFERENCE.linear(normed, self._head, None), dim=-1)

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write the drafter in bfloat16."""
        save_dflash(folder, self._config, self._weights.map(lambda tensor: tensor.bfloat16()), extra)


def initial_drafter(
    target: DecoderModel,
    recipe: DFlashRecipe,
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
    if not isinstance(target.decoder, TorchDecoder):
        raise UserError("training needs a target on PyTorch; load it with kernels 'pytorch'")
    sources = [layer.map_matrices(target.ops.unpack) for layer in target.decoder.layers[-recipe.layers :]]
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
        block_size=max(recipe.block_sizes),
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
