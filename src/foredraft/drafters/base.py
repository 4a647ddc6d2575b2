"""What every drafting method offers to the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foredraft.models.batch import Batch


@dataclass(frozen=True)
class DraftRequest:
    """One sequence that wants a proposal: its cache slot, its anchor token and the anchor's position."""

    slot: int
    anchor: int
    position: int


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one sequence in one round.

    log_probs: [N, V] log-probabilities that the tokens were drawn from; None when they were picked greedily,
    that is, when the draft distribution is one-hot.
    """

    token_ids: tuple[int, ...]
    log_probs: Tensor | None = None


class Drafter(Protocol):
    """A drafting method, with its own state for each cache slot of the target.

    taps: the target layers (0-based, by their output) whose hidden states ``observe`` needs.
    max_tokens: the largest number of tokens it can propose in a round. default_tokens: how many it proposes when the
    user does not say.
    """

    taps: tuple[int, ...]
    max_tokens: int
    default_tokens: int

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        """Take in what a target pass committed: the first ``accepted[i]`` rows of each sequence of ``batch``."""

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int) -> list[Proposal]:
        """Propose up to ``max_tokens`` tokens after each anchor."""

    def release(self, slot: int) -> None:
        """Forget a finished sequence."""
