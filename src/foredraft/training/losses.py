"""Losses over drafted blocks, and the figures that say what they would buy."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BEYOND_TEXT = -100
"""Label of a block position after the end of the text: it does not count."""

OUTSIDE_VOCABULARY = -1
"""Label of a token that the drafter's head cannot predict: a miss that gives no gradient."""

CHUNK = 256
"""Rows whose logits exist at a time: 256 of 12,288 in float32 fit a processor's cache."""


@dataclass(frozen=True)
class BlockScores:
    """loss: scalar. matches: [A, b - 1] bool, draft token equals label. counted: [A, b - 1] bool, label exists."""

    loss: Tensor
    matches: Tensor
    counted: Tensor


def position_weights(count: int, gamma: float) -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for block positions k = 1..count (arXiv 2602.06036)."""
    return torch.exp(-torch.arange(count) / gamma)


def score_blocks(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    soft: Tensor | None = None,
    soft_rows: Tensor | None = None,
    distillation: float = 0.0,
) -> BlockScores:
    """Weighted cross-entropy of the drafts ``hidden [A, b - 1, K] @ head [Vd, K].T``.

    The label of a position is ``(1 - distillation) * onehot(labels) + distillation * soft[soft_rows]``:
    labels [A, b - 1] draft-vocabulary ids; soft [T, Vd] distributions of the target; soft_rows [A, b - 1].
    weights: [b - 1]. The loss is the weighted mean over the positions whose label the head can predict.
    """
    flat = labels.flatten()
    weight = (weights * (labels >= 0)).flatten()
    weight = weight / weight.sum().clamp(min=1e-9)
    rows = None if soft_rows is None else soft_rows.flatten()
    loss, matches = _HeadCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1), head, flat, weight, soft, rows, distillation
    )
    return BlockScores(
        loss=loss,
        matches=matches.view_as(labels) & (labels >= 0),
        counted=labels != BEYOND_TEXT,
    )


class _HeadCrossEntropy(torch.autograd.Function):
    """Cross-entropy through a frozen head, a chunk of rows at a time, so that the logits never leave the cache.

    The gradient with respect to the hidden states is computed on the way, while a chunk's softmax is at hand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weight: Tensor,
        soft: Tensor | None,
        soft_rows: Tensor | None,
        distillation: float,
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wanted else None
        matches = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        loss = torch.zeros((), device=hidden.device)
        for begin in range(0, len(hidden), CHUNK):
            part = slice(begin, begin + CHUNK)
            logits = (hidden[part] @ head.T).float()
            label = labels[part].clamp(min=0).unsqueeze(1)
            top = logits.amax(dim=1, keepdim=True)
            chosen = logits.gather(1, label)
            matches[part] = (chosen >= top).squeeze(1)
            total = torch.logsumexp(logits, dim=1, keepdim=True)
            expected = (1 - distillation) * chosen
            teacher = None
            if soft is not None and soft_rows is not None:
                teacher = soft[soft_rows[part]].float()
                expected += distillation * (teacher * logits).sum(dim=1, keepdim=True)
            row_weight = weight[part].unsqueeze(1)
            loss += ((total - expected) * row_weight).sum()
            if gradient is None:
                continue
            slope = logits.sub_(total).exp_()
            slope.scatter_add_(1, label, torch.full_like(chosen, distillation - 1))
            if teacher is not None:
                slope.sub_(teacher, alpha=distillation)
            gradient[part] = slope.mul_(row_weight).to(head.dtype) @ head
        ctx.gradient = gradient
        ctx.mark_non_differentiable(matches)
        return loss, matches

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        return (ctx.gradient * outputs[0], None, None, None, None, None, None)


def acceptance_length(matches: Tensor, counted: Tensor) -> float:
    """Predicted τ: 1 + the mean number of leading matches over whole blocks of [A, b - 1]."""
    whole = counted.all(dim=1)
    if not whole.any():
        return 1.0
    return 1.0 + float(matches[whole].cumprod(dim=1).sum(dim=1).double().mean())
