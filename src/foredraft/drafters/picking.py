"""From draft logits to draft tokens: the best one, or a draw that tends to agree with the target's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.drafters.base import DraftRequest
from foredraft.ops import Operations
from foredraft.ops.noise import Stream, draw, log_softmax


@dataclass(frozen=True)
class DraftVocabulary:
    """What a drafter's head predicts.

    ids: [Vd] target ids of its rows, None where they are all of the target's. size: V, of the target's vocabulary.
    """

    ids: Tensor | None
    size: int


@dataclass(frozen=True)
class Picked:
    """One draft token for each row.

    token_ids: target ids. confidences: raw, the highest probability of the draft distribution at temperature 1, so
    that they do not depend on the draw. log_probs: per row [V], log of the distribution that its token was drawn
    from, -inf outside the draft vocabulary, one-hot for greedy requests; None unless a request wants them.
    """

    token_ids: list[int]
    confidences: list[float]
    log_probs: list[Tensor] | None


def pick(logits: Tensor, rows: Sequence[tuple[DraftRequest, int]], vocab: DraftVocabulary, ops: Operations) -> Picked:
    """The tokens of draft logits [R, Vd]; row i is the k-th draft token of a request, for its (request, k) in ``rows``.

    Greedy requests take the most likely token, of equals the first row of the head. Sampling requests draw from
    softmax(logits / temperature) with the Gumbel noise of (seed, position, target id) by which the target samples
    at that position, so that both tend to pick the same token.
    """
    rows_of_head, log_probs_of_best = ops.best(logits)
    chosen: list[int] = rows_of_head.tolist()
    confidences: list[float] = log_probs_of_best.exp().tolist()
    ids = None if vocab.ids is None else vocab.ids.cpu().numpy()
    wanted = any(request.sampling and request.sampling.want_log_probs for request, _ in rows)
    log_probs: list[Tensor] = []
    for index, (request, k) in enumerate(rows):
        sampling = request.sampling
        scores = None
        if sampling is not None:
            wide = logits.dtype == torch.float64
            scores = logits[index].detach().to("cpu", torch.float64 if wide else torch.float32).numpy()
            scores = scores / sampling.temperature
            chosen[index] = draw(scores, sampling.seed, request.position + k, Stream.TARGET, ids)
        if wanted:
            log_probs.append(_log_probs(scores, chosen[index], ids, vocab.size))
    token_ids = chosen if ids is None else ids[chosen].tolist()
    return Picked(token_ids, confidences, log_probs if wanted else None)


def _log_probs(
    scores: NDArray[np.floating[Any]] | None, chosen: int, ids: NDArray[np.int64] | None, size: int
) -> Tensor:
    """log q [V], float64: softmax of ``scores`` [Vd], or one-hot at row ``chosen`` of the head."""
    full = np.full(size, -np.inf)
    if scores is None:
        full[chosen if ids is None else ids[chosen]] = 0.0
    else:
        full[slice(None) if ids is None else ids] = log_softmax(scores)
    return torch.from_numpy(full)
