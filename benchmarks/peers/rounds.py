"""Measuring in turns, and what is kept of it."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Turn = Callable[[], Mapping[str, float]]
"""Runs one engine once; what it measured by name, such as ``{"llama.cpp BF16": 131.2}``."""


@dataclass(frozen=True)
class Series:
    """Values of one engine, one from each round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def over(self, other: "Series") -> "Ratio":
        pairs = [mine / theirs for mine, theirs in zip(self.values, other.values, strict=True)]
        return Ratio(self.median / other.median, min(pairs), max(pairs))


@dataclass(frozen=True)
class Ratio:
    """The ratio of two medians, and the range of the ratios within single rounds."""

    value: float
    low: float
    high: float


def in_turns(turns: Mapping[str, Turn], repeats: int, told: Callable[[str], None]) -> dict[str, Series]:
    """Every turn once a round; the order rotates, so that nobody always follows the same neighbour."""
    values: dict[str, list[float]] = {}
    names = list(turns)
    for number in range(repeats):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            told(f"round {number + 1} of {repeats}: {name}")
            for key, value in turns[name]().items():
                values.setdefault(key, []).append(value)
    return {name: Series(tuple(own)) for name, own in values.items()}


def fastest(series: Mapping[str, Series], belongs: Callable[[str], bool]) -> tuple[str, Series] | None:
    """The one with the highest median of those whose name belongs, if any."""
    chosen: Iterator[tuple[str, Series]] = ((name, own) for name, own in series.items() if belongs(name))
    return max(chosen, key=lambda item: item[1].median, default=None)
