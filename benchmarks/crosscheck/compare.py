"""Acceptance of one engine from its answers, and on the text that two engines share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """token_ids: None where the engine did not say. steps: tokens that each step brought, the first one after the
    prompt, without a proposal."""

    token_ids: list[int | None]
    steps: list[int]


@dataclass(frozen=True)
class Figures:
    """rates: for each position k of N, the share of rounds that kept the token at k."""

    rounds: int
    acceptance_length: float
    rates: list[float]

    def as_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate_per_position": self.rates,
        }


@dataclass(frozen=True)
class Difference:
    """Of an engine against foredraft. length: ratio of acceptance lengths less one. rate: largest of any position."""

    length: float
    rate: float

    @property
    def agrees(self) -> bool:
        return abs(self.length) <= 0.05 and self.rate <= 0.03


def kept_in_rounds(answer: Answer, limit: int, count: int) -> Iterator[int]:
    """How many draft tokens each round kept, of the rounds with room for all ``count`` of them before ``limit``.

    Whether a round counts depends on where it begins alone, so that the choice favours neither long nor short ones.
    """
    start = answer.steps[0] if answer.steps else 0
    for tokens in answer.steps[1:]:
        if start + count + 1 <= limit:
            yield tokens - 1
        start += tokens


def shared_length(one: Answer, other: Answer) -> int:
    """How many tokens they have in common from the start."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    differing = (index for index, (mine, theirs) in enumerate(pairs) if None not in (mine, theirs) and mine != theirs)
    return next(differing, min(len(one.token_ids), len(other.token_ids)))


def figures(answers: Sequence[Answer], count: int, limits: Sequence[int] | None = None) -> Figures:
    """limits: how much of each answer counts; by default all of it."""
    ends = [len(answer.token_ids) for answer in answers] if limits is None else limits
    kept = [each for answer, end in zip(answers, ends, strict=True) for each in kept_in_rounds(answer, end, count)]
    rounds = max(len(kept), 1)
    return Figures(
        rounds=len(kept),
        acceptance_length=1 + sum(kept) / rounds,
        rates=[sum(each > position for each in kept) / rounds for position in range(count)],
    )


def difference(engine: Figures, foredraft: Figures) -> Difference:
    rates = zip(engine.rates, foredraft.rates, strict=True)
    return Difference(
        length=engine.acceptance_length / foredraft.acceptance_length - 1,
        rate=max(abs(theirs - mine) for theirs, mine in rates),
    )
