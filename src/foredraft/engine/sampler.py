"""From logits to tokens: what the target samples after each row, and the log-probabilities it reports.

Everything here runs on the CPU, one row at a time: a row's result then depends on that row alone, on every device the
logits came from. The native library takes over the two searches through the vocabulary, where it is built.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.engine.grammar import Constraint
from foredraft.ops import native
from foredraft.ops.noise import Row, Stream, draw, log_softmax, require_finite
from foredraft.sampling_params import SamplingParams


@dataclass(slots=True)
class History:
    """What penalties need to know of a sequence."""

    prompt_token_ids: NDArray[np.int64]
    """The distinct ones, in any order."""
    output_counts: dict[int, int] = field(default_factory=dict)
    num_output_tokens: int = 0

    @classmethod
    def from_prompt(cls, token_ids: Iterable[int]) -> "History":
        return cls(np.array(sorted(set(token_ids)), dtype=np.int64))

    def commit(self, token_ids: Iterable[int]) -> None:
        """Count output tokens, in place."""
        for token_id in token_ids:
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1
            self.num_output_tokens += 1

    def counts_after(self, draft_prefix: Sequence[int]) -> Mapping[int, int]:
        """`output_counts` as if the draft tokens were committed."""
        if not draft_prefix:
            return self.output_counts
        counts = self.output_counts.copy()
        for token_id in draft_prefix:
            counts[token_id] = counts.get(token_id, 0) + 1
        return counts


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the raw logits: before penalties, temperature, filters.

    rank: how many tokens are at least as likely as `token_id`, itself included. top: the most likely tokens
    and their log-probabilities, in descending order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def is_plain_greedy(params: SamplingParams) -> bool:
    """Whether these parameters mean the argmax of the raw logits, `greedy_rows`, whatever the history."""
    return (
        params.greedy
        and params.structured_outputs is None
        and not params.logit_bias
        and params.min_tokens == 0
        and params.repetition_penalty == 1
        and params.frequency_penalty == 0
        and params.presence_penalty == 0
    )


def greedy_rows(logits: Tensor) -> list[int]:
    """The most likely token of each row of logits [R, V], of equals the lowest id.

    The rows may belong to different sequences. Raises `RuntimeError` on NaN.
    """
    rows = _array(logits)
    fast = rows.dtype == np.float32 and native.unavailable() is None
    tokens = native.argmax(torch.from_numpy(rows)).numpy() if fast else rows.argmax(-1)
    require_finite(rows[np.arange(len(rows)), tokens])
    chosen: list[int] = tokens.tolist()
    return chosen


def process_logits(
    logits: Tensor,
    params: SamplingParams,
    history: History,
    draft_prefix: Sequence[int],
    stop_ids: Collection[int],
    constraint: Constraint | None = None,
) -> Tensor:
    """What is sampled from after `draft_prefix`: logits [V] after every processor, filtered ones -inf.

    Order and meaning are vLLM's: the constraint of structured output, logit bias, `min_tokens` (masks stop_ids),
    repetition, frequency and presence penalty, temperature, min-p, top-k, top-p. Greedy parameters end after the
    penalties. Among equal logits top-k and top-p keep the lower token ids. Returns float64 for float64 logits and
    float32 for all others, on the CPU; `logits` is not changed. Raises `RuntimeError` on NaN, or if no token is left.
    """
    return torch.from_numpy(_processed(logits, params, history, draft_prefix, stop_ids, constraint))


def sample_rows(
    logits: Tensor,
    params: SamplingParams,
    history: History,
    draft_token_ids: Sequence[int],
    position_of_first_row: int,
    seed: int,
    stop_ids: Collection[int],
    constraint: Constraint | None = None,
) -> list[int]:
    """The tokens that the target samples after [anchor, d1..dN]: what is committed under the rule `exact`.

    logits: [N+1, V]; row k is judged as if draft_token_ids[:k] were committed after `history`, and to
    `constraint`, where the output is structured. The token sampled there has position
    position_of_first_row + k + 1, which with `seed` fixes its noise (Stream.TARGET).

    The list ends with the first token that differs from its draft token, so its length is 1 to N+1: later
    rows saw a token that is not committed, and are not worth their time. Raises `RuntimeError` on NaN.
    """
    if len(logits) != len(draft_token_ids) + 1:
        raise ValueError(f"{len(draft_token_ids)} draft tokens need one more row of logits, got {len(logits)}")
    draws: Iterator[int]
    if is_plain_greedy(params):
        draws = iter(greedy_rows(logits))
    else:
        draws = (
            _sample(
                _processed(row, params, history, draft_token_ids[:k], stop_ids, constraint),
                params,
                position_of_first_row + k + 1,
                seed,
            )
            for k, row in enumerate(logits)
        )
    tokens = []
    for draft_token_id in draft_token_ids:
        tokens.append(next(draws))
        if tokens[-1] != draft_token_id:
            return tokens
    tokens.append(next(draws))
    return tokens


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of the chosen and of the `top` most likely tokens (-1: all), as vLLM reports them.

    logits: [R, V], raw. tokens: at most R; rows beyond them are ignored. Raises `RuntimeError` on NaN.
    """
    reports = []
    for row, token in zip(logits, tokens, strict=False):
        scores = _array(row)
        require_finite(scores.max())
        logprobs = log_softmax(scores)
        ids = _highest(scores, len(scores) if top < 0 else min(top, len(scores)))
        reports.append(
            TokenLogprobs(
                token_id=token,
                logprob=float(logprobs[token]),
                rank=int(np.count_nonzero(scores >= scores[token])),
                top=tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True)),
            )
        )
    return reports


def _array(logits: Tensor, *, copy: bool = False) -> Row:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    array: Row = logits.detach().to("cpu", dtype, copy=copy).numpy()
    return array


def _sample(scores: Row, params: SamplingParams, position: int, seed: int) -> int:
    if params.greedy:
        return int(scores.argmax())
    return draw(scores, seed, position, Stream.TARGET)


def _processed(
    logits: Tensor,
    params: SamplingParams,
    history: History,
    draft_prefix: Sequence[int],
    stop_ids: Collection[int],
    constraint: Constraint | None,
) -> Row:
    row = _array(logits, copy=True)
    require_finite(row.max())
    if constraint is not None:
        constraint.apply(row, draft_prefix)
        require_finite(row.max())
    if params.logit_bias:
        row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), dtype=row.dtype)
    if history.num_output_tokens + len(draft_prefix) < params.min_tokens:
        row[[token_id for token_id in stop_ids if token_id < len(row)]] = -np.inf
        require_finite(row.max())
    _penalise(row, params, history, draft_prefix)
    if not params.greedy:
        row /= params.temperature
        _filter(row, params)
    return row


def _penalise(row: Row, params: SamplingParams, history: History, draft_prefix: Sequence[int]) -> None:
    if params.repetition_penalty != 1:
        output = np.array([*history.output_counts, *draft_prefix], dtype=np.int64)
        seen = np.concatenate([history.prompt_token_ids, output])
        scores = row[seen]
        row[seen] = np.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        counts = history.counts_after(draft_prefix)
        ids = np.fromiter(counts, dtype=np.int64, count=len(counts))
        occurrences = np.fromiter(counts.values(), dtype=row.dtype, count=len(counts))
        row[ids] -= params.frequency_penalty * occurrences
        row[ids] -= params.presence_penalty


def _filter(row: Row, params: SamplingParams) -> None:
    if params.min_p > 0:
        # p < min_p * max p, without the softmax
        row[row < row.max() + math.log(params.min_p)] = -np.inf
    if 0 < params.top_k < len(row):
        _keep(row, _highest(row, params.top_k))
    if params.top_p < 1:
        _keep(row, _nucleus(row, params.top_p))


def _keep(row: Row, ids: NDArray[np.int64]) -> None:
    kept = row[ids]
    row.fill(-np.inf)
    row[ids] = kept


def _descending(row: Row, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ascending ids by descending score, of equals the lower id first."""
    return ids[np.argsort(-row[ids], kind="stable")]


def _highest(row: Row, k: int) -> NDArray[np.int64]:
    if k == 0:
        return np.empty(0, dtype=np.int64)
    kth = np.partition(row, -k)[-k]
    return _descending(row, np.flatnonzero(row >= kth))[:k]


def _nucleus(row: Row, p: float) -> NDArray[np.int64]:
    weights = np.exp(row.astype(np.float64) - row.max())
    total = weights.sum()
    # Tokens less likely than (1 - p) / V together weigh less than 1 - p: none is needed, few remain to sort.
    likely = np.flatnonzero(weights >= (1 - p) * total / len(row))
    ids = _descending(row, likely)
    return ids[: int(np.searchsorted(np.cumsum(weights[ids]), p * total)) + 1]
