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
    """loss: scalar. matches: [A, S] bool, draft token equals label. counted: [A, S] bool, label exists.
    overlap: [A, S] sum of min(q, p), the chance that a sampled draft token is accepted; None where the loss does not
    need it."""

    loss: Tensor
    matches: Tensor
    counted: Tensor
    overlap: Tensor | None = None


@dataclass(frozen=True)
class Mixture:
    """Weights of the parts of a loss at a draft position.

    token: cross-entropy with the token that the target wrote. target: cross-entropy with the target's distribution p.
    distance: the total of |q - p|, q the draft's distribution (arXiv 2607.05147).
    """

    token: float = 1.0
    target: float = 0.0
    distance: float = 0.0

    @property
    def needs_target(self) -> bool:
        return self.target > 0 or self.distance > 0


@dataclass(frozen=True)
class Bias:
    """A low-rank addition to the logits: vectors [A, S, r] times matrix [Vd, r]."""

    vectors: Tensor
    matrix: Tensor


def position_weights(count: int, gamma: float) -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for block positions k = 1..count (arXiv 2602.06036)."""
    return torch.exp(-torch.arange(count) / gamma)


def score_blocks(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    mixture: Mixture = Mixture(),
    soft: Tensor | None = None,
    soft_rows: Tensor | None = None,
    bias: Bias | None = None,
) -> BlockScores:
    """Weighted loss of the drafts with logits ``hidden [A, S, K] @ head [Vd, K].T`` (and ``bias``).

    labels: [A, S] draft-vocabulary ids. soft: [T, Vd] distributions of the target, soft_rows: [A, S] which of them.
    weights: [S]. The loss is the weighted mean over the positions whose label the head can predict.
    """
    weight = (weights * (labels >= 0)).flatten()
    weight = weight / weight.sum().clamp(min=1e-9)
    loss, matches, overlap = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1),
        None if bias is None else bias.vectors.flatten(0, 1),
        None if bias is None else bias.matrix,
        head,
        labels.flatten(),
        weight,
        soft,
        None if soft_rows is None else soft_rows.flatten(),
        mixture,
    )
    return BlockScores(
        loss=loss,
        matches=matches.view_as(labels) & (labels >= 0),
        counted=labels != BEYOND_TEXT,
        overlap=overlap.view_as(labels) if mixture.distance else None,
    )


class _HeadLoss(torch.autograd.Function):
    """The loss through a frozen head, a chunk of rows at a time, so that the logits never leave the cache.

    The gradients with respect to hidden states and bias are computed on the way, while a chunk's softmax is at hand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        vectors: Tensor | None,
        matrix: Tensor | None,
        head: Tensor,
        labels: Tensor,
        weight: Tensor,
        soft: Tensor | None,
        soft_rows: Tensor | None,
        mixture: Mixture,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wanted else None
        of_vectors = torch.empty_like(vectors) if wanted and vectors is not None else None
        of_matrix = torch.zeros(matrix.shape, device=hidden.device) if wanted and matrix is not None else None
        matches = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        overlap = torch.empty(len(hidden) if mixture.distance else 0, device=hidden.device)
        loss = torch.zeros((), device=hidden.device)
        for begin in range(0, len(hidden), CHUNK):
            part = slice(begin, begin + CHUNK)
            logits = (hidden[part] @ head.T).float()
            if vectors is not None and matrix is not None:
                logits += (vectors[part] @ matrix.T).float()
            label = labels[part].clamp(min=0).unsqueeze(1)
            top = logits.amax(dim=1, keepdim=True)
            chosen = logits.gather(1, label)
            matches[part] = (chosen >= top).squeeze(1)
            total = torch.logsumexp(logits, dim=1, keepdim=True)
            row_weight = weight[part].unsqueeze(1)
            entropy = mixture.token * (total - chosen)
            teacher = None
            if soft is not None and soft_rows is not None:
                teacher = soft[soft_rows[part]].float()
                if mixture.target:
                    entropy += mixture.target * (total - (teacher * logits).sum(dim=1, keepdim=True))
            loss += (entropy * row_weight).sum()
            q = logits.sub_(total).exp_()
            slope = q * (mixture.token + mixture.target)
            slope.scatter_add_(1, label, torch.full_like(chosen, -mixture.token))
            if teacher is not None and mixture.target:
                slope.sub_(teacher, alpha=mixture.target)
            if teacher is not None and mixture.distance:
                difference = q - teacher
                distance = difference.abs().sum(dim=1, keepdim=True)
                overlap[part] = (1 - distance / 2).squeeze(1)
                loss += mixture.distance * (distance * row_weight).sum()
                sign = difference.sign_()
                sign.sub_((q * sign).sum(dim=1, keepdim=True))
                slope.addcmul_(q, sign, value=mixture.distance)
            if gradient is None:
                continue
            narrow = slope.mul_(row_weight).to(head.dtype)
            gradient[part] = narrow @ head
            if of_vectors is not None and of_matrix is not None and vectors is not None and matrix is not None:
                of_vectors[part] = narrow @ matrix
                of_matrix += narrow.T @ vectors[part]
        ctx.gradients = (gradient, of_vectors, of_matrix)
        ctx.mark_non_differentiable(matches, overlap)
        return loss, matches, overlap

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        found = (None if gradient is None else gradient * outputs[0] for gradient in ctx.gradients)
        return (*found, None, None, None, None, None, None)


def acceptance_length(matches: Tensor, counted: Tensor) -> float:
    """Predicted τ: 1 + the mean number of leading matches over whole blocks of [A, b - 1]."""
    whole = counted.all(dim=1)
    if not whole.any():
        return 1.0
    return 1.0 + float(matches[whole].cumprod(dim=1).sum(dim=1).double().mean())
