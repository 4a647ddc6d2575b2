"""Prompt lookup: what followed the last few tokens when they last occurred, proposed without any model.

Of the sequence so far, anchor included, the longest suffix of 4, 3 or 2 tokens that occurred before decides; of several
occurrences the most recent one. Where what followed runs into the end of the sequence, it goes on with itself, so that
a text that repeats with any period is continued.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from torch import Tensor

from foredraft.drafters.base import DraftRequest, Proposal, Stop
from foredraft.drafters.calibration import Calibration
from foredraft.models.batch import Batch
from foredraft.models.cache import Cache

SIZES = (4, 3, 2)
LONGEST_MATCH = 16
MAX_TOKENS = 15
DEFAULT_TOKENS = 7


@dataclass
class History:
    """Committed tokens of a sequence, and for every n-gram of them where its most recent occurrence ends."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for size in SIZES:
                if size <= end:
                    self.ends[tuple(self.tokens[end - size :])] = end

    def match(self, anchor: int) -> tuple[int, int] | None:
        """Where the most recent earlier occurrence of the longest known suffix of [tokens, anchor] ends, and how many
        tokens before that end agree with the sequence's last ones, counted up to LONGEST_MATCH."""
        for size in SIZES:
            before = len(self.tokens) - (size - 1)
            end = self.ends.get((*self.tokens[before:], anchor)) if before >= 0 else None
            if end is not None:
                return end, self._agreeing(end, size)
        return None

    def _agreeing(self, end: int, size: int) -> int:
        # The anchor is the last one; what stands before it are the last tokens.
        last, most = len(self.tokens), min(end, LONGEST_MATCH)
        while size < most and self.tokens[end - size - 1] == self.tokens[last - size]:
            size += 1
        return size


class NgramDrafter:
    """Remembers the tokens of every slot. Confidences grow with the match, see ``raw_confidence``."""

    taps: tuple[int, ...] = ()
    caches: tuple[Cache, ...] = ()
    lookahead = False
    max_tokens = MAX_TOKENS
    default_tokens = DEFAULT_TOKENS

    def __init__(self, calibration: Calibration | None = None) -> None:
        self.calibration = calibration
        self._histories: dict[int, History] = {}

    def adopt(self, slot: int, tokens: Sequence[int]) -> None:
        self._histories[slot] = History()
        self._histories[slot].extend(tokens)

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        """Take in the committed tokens, prompts included."""
        tokens = batch.token_ids.tolist()
        first = 0
        for slot, start, own, count in zip(batch.slots, batch.starts, batch.counts, accepted, strict=True):
            if count:
                history = self._histories.setdefault(slot, History())
                _check(slot, len(history.tokens), start)
                history.extend(tokens[first : first + count])
            first += own

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        """What followed the last occurrence, nothing where there is none."""
        count = min(max_tokens, self.max_tokens)
        return [self._propose(request, count) for request in requests]

    def release(self, slot: int) -> None:
        self._histories.pop(slot, None)

    def _propose(self, request: DraftRequest, count: int) -> Proposal:
        history = self._histories.get(request.slot, History())
        _check(request.slot, len(history.tokens), request.position)
        found = history.match(request.anchor)
        if found is None:
            return Proposal(())
        end, length = found
        followed = islice(cycle([*history.tokens[end : end + count], request.anchor]), count)
        confidences = []
        for k in range(1, count + 1):
            raw = raw_confidence(length, k)
            confidences.append(self.calibration.apply(k, raw) if self.calibration else raw)
        return Proposal(tuple(followed), None, tuple(confidences))


def raw_confidence(length: int, k: int) -> float:
    """m / (m + 4) with m = length + k - 1: how many tokens agree by the time that draft token k is looked at, if the
    ones before it were kept. A guess of the right shape; calibration makes probabilities of it."""
    agreeing = length + k - 1
    return agreeing / (agreeing + 4)


def _check(slot: int, seen: int, position: int) -> None:
    if seen != position:
        raise RuntimeError(f"slot {slot}: the drafter has seen {seen} positions, what comes next stands at {position}")
