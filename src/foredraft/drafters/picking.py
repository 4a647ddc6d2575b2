"""From draft logits to draft tokens: the best one, or a draw that tends to agree with the target's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.drafters.base import DraftRequest, Proposal
from foredraft.drafters.calibration import Calibration
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
    that they do not depend on the draw. log_probs: for rows whose request wants it [V], log of the distribution that
    the token was drawn from, -inf outside the draft vocabulary; None for the others.
    """

    token_ids: list[int]
    confidences: list[float]
    log_probs: list[Tensor | None]


@dataclass
class Draft:
    """A proposal while it grows."""

    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)

    def add(self, picked: Picked, row: int, raw: float, calibration: Calibration | None) -> float:
        """Append the token of ``row``, whose raw confidence is given; returns the calibrated one."""
        self.token_ids.append(picked.token_ids[row])
        confidence = calibration.apply(len(self.token_ids), raw) if calibration else raw
        self.confidences.append(confidence)
        log_probs = picked.log_probs[row]
        if log_probs is not None:
            self.log_probs.append(log_probs)
        return confidence

    def proposal(self) -> Proposal:
        log_probs = torch.stack(self.log_probs) if self.log_probs else None
        return Proposal(tuple(self.token_ids), log_probs, tuple(self.confidences))


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
    log_probs: list[Tensor | None] = [None] * len(rows)
    for index, (request, k) in enumerate(rows):
        sampling = request.sampling
        if sampling is None:
            continue
        wide = logits.dtype == torch.float64
        scores = logits[index].detach().to("cpu", torch.float64 if wide else torch.float32).numpy()
        scores = scores / sampling.temperature
        chosen[index] = draw(scores, sampling.seed, request.position + k, Stream.TARGET, ids)
        if sampling.want_log_probs:
            log_probs[index] = _log_probs(scores, ids, vocab.size)
    token_ids = chosen if ids is None else ids[chosen].tolist()
    return Picked(token_ids, confidences, log_probs)


def _log_probs(scores: NDArray[np.floating[Any]], ids: NDArray[np.int64] | None, size: int) -> Tensor:
    """log q [V], float64: the softmax of ``scores`` [Vd] at the target's ids."""
    full = np.full(size, -np.inf)
    full[slice(None) if ids is None else ids] = log_softmax(scores)
    return torch.from_numpy(full)
