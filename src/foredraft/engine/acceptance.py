"""Which draft tokens are kept, and the token that follows them.

Symbols as in Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318): p is the target's
distribution, q the drafter's, d_1..d_N the draft tokens. Position k below counts from 0, so d_(k+1) is judged
by row k.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from foredraft.engine.grammar import Constraint
from foredraft.engine.sampler import History, process_logits, sample_rows
from foredraft.ops.noise import Stream, gumbel, gumbel_argmax, log_softmax, uniform
from foredraft.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Verdict:
    """accepted: how many draft tokens are kept, 0 to N. token: the one after them, replacement or bonus."""

    accepted: int
    token: int


def exact(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> Verdict:
    """Keep the longest prefix that equals what the target samples.

    draft_token_ids: [N]. target_token_ids: [N+1], or what `sampler.sample_rows` returns, which ends at the
    first mismatch.
    """
    accepted = 0
    for draft_token_id, target_token_id in zip(draft_token_ids, target_token_ids, strict=False):
        if draft_token_id != target_token_id:
            break
        accepted += 1
    return Verdict(accepted, target_token_ids[accepted])


def rejection(
    draft_token_ids: Sequence[int],
    target_log_probs: Iterable[Tensor],
    draft_log_probs: Tensor | None,
    uniforms: Iterable[float],
    noise: Callable[[int, NDArray[np.int64]], NDArray[np.float64]],
) -> Verdict:
    """Keep d with probability min(1, p(d) / q(d)), up to the first that is not.

    That one is replaced by a draw from norm(max(p - q, 0)). If all N are kept, the bonus token is a draw from
    row N of p. The tokens are then distributed as the
    target's own (Leviathan et al., appendix A.1), provided that d was drawn from q, independently of
    `uniforms` and `noise`.

    draft_token_ids: [N].
    target_log_probs: [N+1, V], log p: processed, normalised, -inf where filtered. Rows are taken one by one,
        and only those that are needed, so an iterator can compute them on demand.
    draft_log_probs: [N, V], log q, normalised; `None` if the drafter picks greedily, which makes q one-hot.
    uniforms: [N], in (0, 1), taken like the rows.
    noise: noise(k, token_ids) is the standard Gumbel noise, within `noise.GUMBEL_MIN` and `GUMBEL_MAX`, by
        which the token after k kept draft tokens is drawn: a replacement for k < N, the bonus for k = N.
    """
    rows = iter(target_log_probs)
    for k, (d, row, u) in enumerate(zip(draft_token_ids, rows, uniforms, strict=False)):
        log_p = _float64(row)
        log_q = None if draft_log_probs is None else _float64(draft_log_probs[k])
        log_q_of_d = 0.0 if log_q is None else float(log_q[d])
        # Written so that 0 / 0 (a filtered token from a drafter that gives it no probability) is a rejection.
        if not math.log(u) < float(log_p[d]) - log_q_of_d:
            return Verdict(k, gumbel_argmax(_log_residual(log_p, log_q, d), partial(noise, k)))
    num_drafts = len(draft_token_ids)
    return Verdict(num_drafts, gumbel_argmax(_float64(next(rows)), partial(noise, num_drafts)))


def rejection_rows(
    logits: Tensor,
    params: SamplingParams,
    history: History,
    draft_token_ids: Sequence[int],
    draft_log_probs: Tensor | None,
    position_of_first_row: int,
    seed: int,
    stop_ids: Collection[int],
    constraint: Constraint | None = None,
) -> Verdict:
    """`rejection` of d1..dN by the target's raw logits [N+1, V], with arguments as in `sampler.sample_rows`.

    draft_log_probs: [N, V] or `None`, as in `rejection`. The bonus token shares the noise (Stream.TARGET) by
    which plain decoding would sample it. Greedy parameters reduce the rule to `exact`.
    """
    num_drafts = len(draft_token_ids)
    if params.greedy:
        sampled = sample_rows(
            logits, params, history, draft_token_ids, position_of_first_row, seed, stop_ids, constraint
        )
        return exact(draft_token_ids, sampled)
    if len(logits) != num_drafts + 1:
        raise ValueError(f"{num_drafts} draft tokens need one more row of logits, got {len(logits)}")

    def target_log_probs(k: int) -> Tensor:
        processed = process_logits(logits[k], params, history, draft_token_ids[:k], stop_ids, constraint)
        return from_numpy(log_softmax(processed.numpy()))

    def accept_uniform(k: int) -> float:
        return float(uniform(seed, position_of_first_row + k + 1, [0], Stream.ACCEPT)[0])

    def noise(k: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        stream = Stream.TARGET if k == num_drafts else Stream.RESIDUAL
        return gumbel(seed, position_of_first_row + k + 1, token_ids, stream)

    return rejection(
        draft_token_ids,
        map(target_log_probs, range(num_drafts + 1)),
        draft_log_probs,
        map(accept_uniform, range(num_drafts)),
        noise,
    )


def _float64(log_probs: Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = log_probs.detach().cpu().double().numpy()
    return array


def _log_residual(log_p: NDArray[np.float64], log_q: NDArray[np.float64] | None, d: int) -> NDArray[np.float64]:
    """log(max(p - q, 0)), not normalised."""
    if log_q is None:
        residual = log_p.copy()
        residual[d] = -np.inf
    else:
        with np.errstate(divide="ignore"):
            residual = np.log(np.maximum(np.exp(log_p) - np.exp(log_q), 0))
    # p = q up to rounding can still reject, and then leaves nothing of the difference.
    return residual if residual.max() > -np.inf else log_p
