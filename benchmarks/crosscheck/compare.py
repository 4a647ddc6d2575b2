"""Acceptance of an engine from its answers, and of foredraft's drafter in the same rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """steps: how many tokens each step brought, the first one after the prompt, without a proposal."""

    token_ids: list[int]
    steps: list[int]

    @classmethod
    def known(cls, token_ids: Sequence[int | None], steps: Sequence[int]) -> "Answer":
        """Up to the first token that the engine did not name, in whole steps."""
        length = next((index for index, token in enumerate(token_ids) if token is None), len(token_ids))
        taken, end = [], 0
        for step in steps:
            if end + step > length:
                break
            taken.append(step)
            end += step
        return cls([token for token in token_ids[:end] if token is not None], taken)

    @property
    def kept(self) -> list[int]:
        """Draft tokens that each round kept."""
        return [tokens - 1 for tokens in self.steps[1:]]

    def full_rounds(self, count: int) -> list[bool]:
        """Which rounds have room for all ``count`` draft tokens and the one after them.

        That depends on where a round begins alone, so that leaving the others out favours neither long nor short ones.
        """
        start, full = self.steps[0] if self.steps else 0, []
        for tokens in self.steps[1:]:
            full.append(start + count + 1 <= len(self.token_ids))
            start += tokens
        return full


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


def figures(kept: Sequence[int], count: int) -> Figures:
    """From the draft tokens kept in rounds of ``count``."""
    rounds = max(len(kept), 1)
    return Figures(
        rounds=len(kept),
        acceptance_length=1 + sum(kept) / rounds,
        rates=[sum(each > position for each in kept) / rounds for position in range(count)],
    )


def in_full_rounds(answers: Sequence[Answer], kept: Sequence[Sequence[int]], count: int) -> list[int]:
    """``kept`` of each answer's rounds, of those alone that had room."""
    return [
        tokens
        for answer, own in zip(answers, kept, strict=True)
        for tokens, full in zip(own, answer.full_rounds(count), strict=True)
        if full
    ]


def difference(engine: Figures, foredraft: Figures) -> Difference:
    rates = zip(engine.rates, foredraft.rates, strict=True)
    return Difference(
        length=engine.acceptance_length / foredraft.acceptance_length - 1,
        rate=max(abs(theirs - mine) for theirs, mine in rates),
    )
