"""What a drafter is asked in training: at random anchors of an answer, the tokens that follow."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.training.data import Example
from foredraft.training.losses import BEYOND_TEXT, OUTSIDE_VOCABULARY


@dataclass(frozen=True)
class Blocks:
    """A anchors in all of several texts, each with S tokens to draft after it.

    anchors: per text [A_i] positions, ascending. inputs: [A, S] the token before each drafted one, the anchor first.
    labels: [A, S] draft-vocabulary ids, or BEYOND_TEXT, or OUTSIDE_VOCABULARY. rows: [A, S] of the texts' concatenated
    positions, the one whose next-token distribution judges the drafted token.
    """

    anchors: list[Tensor]
    inputs: Tensor
    labels: Tensor
    rows: Tensor


def draft_ids(vocab_size: int, draft_vocab: Tensor | None) -> Tensor:
    """[V] the draft-vocabulary id of each target id, OUTSIDE_VOCABULARY where it has none."""
    if draft_vocab is None:
        return torch.arange(vocab_size)
    ids = torch.full((vocab_size,), OUTSIDE_VOCABULARY)
    ids[draft_vocab] = torch.arange(len(draft_vocab))
    return ids


def draw_blocks(
    examples: Sequence[Example],
    ids: Tensor,
    count: int,
    drafts: int,
    generator: torch.Generator,
    device: torch.device,
) -> Blocks:
    """``count`` random anchors of each answer, or all where it has fewer. ids: see ``draft_ids``. drafts: S."""
    anchors, inputs, labels, rows = [], [], [], []
    offset = 0
    for example in examples:
        tokens = torch.tensor(example.tokens)
        first, last = len(example.prompt), len(tokens) - 2
        chosen = first + torch.randperm(last - first + 1, generator=generator)[:count]
        chosen, _ = chosen.sort()
        before = (chosen.unsqueeze(1) + torch.arange(drafts)).clamp(max=len(tokens) - 1)
        padded = torch.cat((ids[tokens], torch.full((drafts,), BEYOND_TEXT)))
        anchors.append(chosen.to(device))
        inputs.append(tokens[before])
        labels.append(padded[chosen.unsqueeze(1) + torch.arange(1, drafts + 1)])
        rows.append(offset + before)
        offset += len(tokens)
    return Blocks(anchors, *(torch.cat(parts).to(device) for parts in (inputs, labels, rows)))
