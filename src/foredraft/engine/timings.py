"""Where the time of an engine's rounds goes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, get_args

Phase = Literal["draft", "verify", "observe"]
"""draft: proposals are made. verify: the target's pass, and judging its logits. observe: the drafter takes in what
was committed."""

PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass
class Timings:
    """Seconds spent in each phase since the engine was made, and how often it came there.

    Totals, and the last time of each phase, so that it stays as small however long the engine runs.
    """

    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    counts: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    last: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add(self, phase: Phase, seconds: float) -> None:
        self.seconds[phase] += seconds
        self.counts[phase] += 1
        self.last[phase] = seconds

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add the time that the block takes; about a microsecond of its own."""
        begin = perf_counter()
        yield
        self.add(phase, perf_counter() - begin)
