"""What every drafting method offers to the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from foredraft.drafters.calibration import Calibration
from foredraft.models.batch import Batch
from foredraft.models.cache import Cache


@dataclass(frozen=True)
class DraftSampling:
    """How a sequence is sampled, for drafters that sample alike.

    temperature: above 0, for the draft logits. seed: of the sequence, the key of its noise. want_log_probs: whether
    the distributions that the tokens are drawn from are needed (rule ``rejection``).
    """

    temperature: float
    seed: int
    want_log_probs: bool = False


@dataclass(frozen=True)
class DraftRequest:
    """One sequence that wants a proposal: its cache slot, its anchor token and the anchor's position.

    sampling: None for a greedy sequence.
    """

    slot: int
    anchor: int
    position: int
    sampling: DraftSampling | None = None


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one sequence in one round.

    log_probs: [N, V] log-probabilities that the tokens were drawn from; None when they were picked greedily,
    that is, when the draft distribution is one-hot, and when nobody wants to know.
    confidences: [N] estimates of P(d_k accepted | d_1..d_(k-1) accepted), calibrated where the drafter has a
    calibration; None when the method has none. The k-th may depend on d_1..d_(k-1), never on d_k: otherwise leaving
    out tokens of little confidence would change what the rule ``rejection`` gives.
    """

    token_ids: tuple[int, ...]
    log_probs: Tensor | None = None
    confidences: tuple[float, ...] | None = None

    def first(self, count: int) -> "Proposal":
        """The proposal cut to ``count`` tokens."""
        return Proposal(
            self.token_ids[:count],
            None if self.log_probs is None else self.log_probs[:count],
            None if self.confidences is None else self.confidences[:count],
        )


Stop: TypeAlias = Callable[[int, float, int], bool]
"""stop(i, confidence, k), asked when token k = 1, 2, ... of request i is drafted: whether more does not pay."""


class Drafter(Protocol):
    """A drafting method, with its own state for each cache slot of the target.

    taps: the target layers (0-based, by their output) whose hidden states ``observe`` needs.
    max_tokens: the largest number of tokens it can propose in a round. default_tokens: how many it proposes when the
    user does not say. calibration: what its confidences went through, None for raw ones. caches: its own, in the
    target's slots. lookahead: whether what they hold of a position depends on the token after it.
    """

    taps: tuple[int, ...]
    max_tokens: int
    default_tokens: int
    calibration: Calibration | None
    caches: tuple[Cache, ...]
    lookahead: bool

    def adopt(self, slot: int, tokens: Sequence[int]) -> None:
        """A new sequence whose first positions, those of ``tokens``, are in ``caches`` already, and committed."""

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        """Take in what a target pass committed: the first ``accepted[i]`` rows of each sequence of ``batch``."""

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        """Propose up to ``max_tokens`` tokens after each anchor.

        Methods that draft token by token leave a sequence out of further steps once ``stop`` says so; those that
        draft a block at once do not ask.
        """

    def release(self, slot: int) -> None:
        """Forget a finished sequence."""


@runtime_checkable
class ReadsTargetCache(Protocol):
    """A drafter that reads the target's own keys and values (Gemma 4 MTP)."""

    reads_target_cache: bool

    def attach(self, cache: Cache) -> None:
        """Called once, before use, with the cache that the target runs in."""
