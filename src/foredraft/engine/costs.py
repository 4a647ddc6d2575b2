"""What passes of the target and drafting cost on this machine: measured before the first request, then followed."""

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import truediv
from statistics import fmean, median
from time import perf_counter
from typing import Protocol

import torch

from foredraft.drafters.base import Drafter, DraftRequest
from foredraft.engine.sampler import greedy_rows
from foredraft.models.batch import flat_batch
from foredraft.models.cache import Cache
from foredraft.models.decoder import DecoderModel

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXT = 32
"""Positions before the rows that are measured, in each slot."""
SLOTS = 8
"""The most sequences that are measured together."""
REPEATS = 9
SECONDS = 1.0
"""After half of this, a group of sizes is timed no more, but every one at least once. Sizes beyond the rows of one
sequence get as long again, one after the other; those that have not come by then are extrapolated."""
OBSERVE_REPEATS = 5
FEW_REPEATS = 3
"""For them: they take longer, and so differ less."""


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a pass with some number of rows: linear between those measured, never falling.

    rows: ascending. seconds: never falling. Beyond the last it goes on as between the last two.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, measured: Mapping[int, float]) -> "CostCurve":
        """The curve through measured points; a pass costs at least what a smaller one does."""
        rows = sorted(measured)
        return cls(tuple(rows), tuple(accumulate((measured[count] for count in rows), max)))

    def __call__(self, rows: int) -> float:
        if len(self.rows) == 1:
            return self.seconds[0]
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (x, after), (y, value) = self.rows[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return max(self.seconds[0], y + (value - y) * (rows - x) / (after - x))


@dataclass(frozen=True)
class DraftCost:
    """Seconds of drafting: a fixed part and a part for each token, both with a share for each further sequence."""

    fixed: float
    token: float
    fixed_more: float = 0.0
    token_more: float = 0.0

    def __call__(self, sequences: int, tokens: int) -> float:
        return self.fixed + (sequences - 1) * self.fixed_more + tokens * self.step(sequences)

    def step(self, sequences: int) -> float:
        """Seconds of one more token for each sequence."""
        return self.token + (sequences - 1) * self.token_more

    def of(self, lengths: Sequence[int]) -> float:
        """Seconds of a round in which each sequence drafts its own number of tokens."""
        steps = (self.step(sum(length > k for length in lengths)) for k in range(max(lengths)))
        return self(len(lengths), 0) + sum(steps)

    @classmethod
    def through(cls, measured: Callable[[int, int], float], sequences: int, tokens: int) -> "DraftCost":
        """From the corners of 1 to ``sequences`` sequences and 1 to ``tokens`` tokens."""
        fixed, token = _line(measured(1, 1), measured(1, tokens) if tokens > 1 else None, tokens)
        if sequences == 1:
            return cls(fixed, token)
        fixed_many, token_many = _line(
            measured(sequences, 1), measured(sequences, tokens) if tokens > 1 else None, tokens
        )
        more = sequences - 1
        return cls(fixed, token, max(0.0, fixed_many - fixed) / more, max(0.0, token_many - token) / more)

    def times(self, factor: float) -> "DraftCost":
        return DraftCost(self.fixed * factor, self.token * factor, self.fixed_more * factor, self.token_more * factor)


@dataclass(frozen=True)
class ObserveCost:
    """Seconds in which the drafter takes in what was committed: for each token of a prompt, and for a round with one
    sequence and with each further one."""

    prompt_token: float = 0.0
    round: float = 0.0
    round_more: float = 0.0

    def __call__(self, sequences: int) -> float:
        """Of a round."""
        return self.round + (sequences - 1) * self.round_more


class Costs(Protocol):
    """What rounds cost; asked anew in every round."""

    @property
    def verify(self) -> CostCurve: ...

    @property
    def draft(self) -> DraftCost: ...

    @property
    def observe(self) -> ObserveCost: ...

    @property
    def rest(self) -> float:
        """Seconds of all else in a round, for each sequence."""
        ...


@dataclass(frozen=True)
class FixedCosts:
    verify: CostCurve
    draft: DraftCost
    observe: ObserveCost = ObserveCost()
    rest: float = 0.0


NOISE = 0.02
"""Variance of the logarithm of one time against its model: 14 %."""
SURPRISE = 0.4
"""The most that one time may differ from what was expected, as a logarithm: a pause of the process is no news."""
BEYOND = 1.5
"""A pass with this many times the rows of the largest measured becomes a point of the curve."""

SHORTEST = 1e-9
"""Seconds; a clock that says less says nothing."""
EVERY = 16
"""Passes after which what they took is learned from: a decision is made in microseconds, and its costs must be few."""
PACE = 0.02
"""Share of the newest round in ``rest``."""


@dataclass
class Factor:
    """A correction on the logarithm of a cost: a normal belief whose variance never falls below ``least``."""

    variance: float
    least: float
    mean: float = 0.0


FREE, LOOSE, TIED = (0.05, 0.001), (0.02, 0.0005), (0.002, 0.0002)
"""Variances, before the first time and at least: of a factor that stands alone, and of those that add to it."""
REVERSION = 0.02
"""What is lost, at each learning, of the correction of a number of rows that did not come up."""


class LiveCosts:
    """Costs as measured at the start, corrected by what rounds take: contexts grow, clocks and neighbours change.

    A pass has a factor on all of it, one on what a single row costs, which is reading the weights, one on what further
    rows add, which is computing, and one for each measured number of rows, shared by the numbers in between; drafting
    has one. All are followed by a Kalman filter on logarithms. ``verify`` and ``draft`` are new objects
    after every ``EVERY`` passes. ``observe`` stays as measured. ``rest`` is a moving average.
    """

    def __init__(self, measured: FixedCosts) -> None:
        self.verify, self.draft = self._passing, self._drafting = measured.verify, measured.draft
        self.observe, self.rest = measured.observe, measured.rest
        self._all, self._base, self._more = Factor(*FREE), Factor(*LOOSE), Factor(*LOOSE)
        self._own = [Factor(*TIED) for _ in measured.verify.rows]
        self._draft = Factor(*FREE)
        self._passes: list[tuple[int, float]] = []
        self._drafts: list[tuple[Sequence[int], float]] = []

    def verified(self, rows: int, seconds: float) -> None:
        """A pass of the target with ``rows`` rows took ``seconds``."""
        self._passes.append((rows, seconds))
        if len(self._passes) >= EVERY or rows >= BEYOND * self._passing.rows[-1]:
            self._learn()

    def drafted(self, lengths: Sequence[int], seconds: float) -> None:
        """Drafting these numbers of tokens, one for each sequence, took ``seconds``; a pass follows."""
        self._drafts.append((lengths, seconds))

    def rested(self, sequences: int, seconds: float) -> None:
        """What a round of so many sequences took besides drafting, the pass, and what the drafter takes in."""
        seconds = min(seconds, self.verify.seconds[0])  # A pause of the process is no news.
        self.rest += PACE * (seconds / sequences - self.rest) if self.rest else seconds / sequences

    def _learn(self) -> None:
        drafting = ((seconds, self._drafting.of(lengths)) for lengths, seconds in self._drafts)
        ratios = [seconds / expected for seconds, expected in drafting if seconds >= SHORTEST and expected > 0]
        if ratios:
            _follow([(self._draft, 1.0)], ratios)
        passes: dict[int, list[float]] = {}
        for rows, seconds in self._passes:
            if seconds >= SHORTEST:
                passes.setdefault(rows, []).append(seconds)
        for factor in self._own:
            factor.mean *= 1 - REVERSION
        for rows, times in passes.items():
            self._learn_passes(rows, times)
        self._drafts.clear()
        self._passes.clear()
        self._publish()

    def _learn_passes(self, rows: int, times: Sequence[float]) -> None:
        known = self._passing
        if rows < BEYOND * known.rows[-1]:
            base, more = self._parts(known(rows))
            share = base / (base + more)
            parts = [(self._all, 1.0), (self._base, share), (self._more, 1 - share)]
            # Linear around what is believed now.
            now = (base + more) / math.exp(sum(part * factor.mean for factor, part in parts))
            _follow([*parts, *self._near(rows)], [seconds / now for seconds in times])
            return
        base, more = self._parts(known.seconds[-1])
        seconds = known.seconds[-1] * max(1.0, median(times) / (base + more))
        self._passing = CostCurve((*known.rows, rows), (*known.seconds, seconds))
        self._own.append(Factor(*TIED))

    def _parts(self, measured: float) -> tuple[float, float]:
        """Of a pass that took so many seconds when it was measured: those of the first row and of all others now."""
        base, every = self._passing.seconds[0], math.exp(self._all.mean)
        return base * every * math.exp(self._base.mean), (measured - base) * every * math.exp(self._more.mean)

    def _near(self, rows: int) -> list[tuple[Factor, float]]:
        """The factors of the measured points around ``rows``, with their shares."""
        points = self._passing.rows
        right = min(bisect_left(points, rows), len(points) - 1)
        if right == 0 or rows >= points[right]:
            return [(self._own[right], 1.0)]
        share = (rows - points[right - 1]) / (points[right] - points[right - 1])
        return [(self._own[right - 1], 1 - share), (self._own[right], share)]

    def _publish(self) -> None:
        points = zip(self._passing.rows, self._passing.seconds, self._own, strict=True)
        self.verify = CostCurve.through(
            {rows: sum(self._parts(seconds)) * math.exp(own.mean) for rows, seconds, own in points}
        )
        self.draft = self._drafting.times(math.exp(self._draft.mean))


def _follow(factors: Sequence[tuple[Factor, float]], ratios: Sequence[float]) -> None:
    """One step of the filter. factors: with their shares in the logarithm of each of ``ratios``, what was seen to what
    was measured at the start."""
    known = sum(share * factor.mean for factor, share in factors)
    news = [math.log(ratio) - known for ratio in ratios]
    surprises = [min(SURPRISE, max(-SURPRISE, value)) for value in news]
    surprise, taken = fmean(surprises), surprises == news
    spread = NOISE / len(ratios) + sum(share * share * factor.variance for factor, share in factors)
    for factor, share in factors:
        gain = factor.variance * share / spread
        factor.mean += gain * surprise
        if taken:
            factor.variance = max(factor.least, factor.variance * (1 - gain * share))


def measure(
    target: DecoderModel, cache: Cache, drafter: Drafter, max_len: int, max_num_seqs: int, max_tokens: int
) -> FixedCosts:
    """Run target and drafter on made-up tokens in the first slots of their caches, which are left empty.

    max_tokens: the most draft tokens of a round. Before drafting is timed, the target runs, as it does in every round:
    what it leaves in the processor's caches is not the drafter.
    """
    began = perf_counter()
    slots = min(SLOTS, max_num_seqs)
    context = max(1, min(CONTEXT, max_len - max_tokens - 2))
    tokens = [index % target.config.vocab_size for index in range(context)]
    batch = flat_batch([tokens] * slots, [0] * slots, range(slots), [1] * slots, target.device)
    taps = target.forward(batch, cache, drafter.taps).taps
    for slot in range(slots):
        cache.commit(slot, context)

    def observe(sequences: int) -> tuple[float, float]:
        """Seconds of the contexts, with a first proposal, where some of the work may be done, and of a round, in which
        each sequence keeps one of two rows."""
        rows = flat_batch([[0, 0]] * sequences, [context] * sequences, range(sequences), device=target.device)
        found = []
        for _ in range(OBSERVE_REPEATS):
            for slot in range(slots):
                drafter.release(slot)
            begin = perf_counter()
            drafter.observe(batch, taps, [context] * slots)
            drafter.propose([DraftRequest(slot, 0, context) for slot in range(slots)], 1)
            middle = perf_counter()
            tapped = target.forward(rows, cache, drafter.taps).taps
            end = perf_counter()
            drafter.observe(rows, tapped, [1] * sequences)
            found.append((middle - begin, perf_counter() - end))
        contexts, rounds = zip(*found, strict=True)
        for slot in range(slots):
            drafter.release(slot)
        drafter.observe(batch, taps, [context] * slots)
        return median(contexts), median(rounds)

    prompt, alone = observe(1)
    more = max(0.0, observe(slots)[1] - alone) / (slots - 1) if slots > 1 else 0.0
    observing = ObserveCost(prompt / (slots * context), alone, more)

    def verifying(rows: int) -> Callable[[], object]:
        sequences = min(slots, -(-rows // (max_tokens + 1)))
        counts = [rows // sequences + (index < rows % sequences) for index in range(sequences)]
        own = [[0] * count for count in counts]
        passed = flat_batch(own, [context] * sequences, range(sequences), counts, target.device)
        return lambda: greedy_rows(target.forward(passed, cache, drafter.taps).logits)

    one = flat_batch([[0]], [context], [0], device=target.device)

    def draft(sequences: int, count: int) -> float:
        requests = [DraftRequest(slot, 0, context) for slot in range(sequences)]
        drafting = {0: lambda: drafter.propose(requests, count)}
        return median(_times(drafting, target.device, lambda: target.forward(one, cache))[0])

    drafting = DraftCost.through(draft, slots, max_tokens)
    least, most = max_tokens + 1, min(max_num_seqs * (max_tokens + 1), slots * max(1, max_len - context))
    small = [rows for rows in sorted({*ROWS, least}) if rows <= min(least, most)]
    # In turns, so that a machine that slows down does so for all of them.
    times = _times({rows: verifying(rows) for rows in small}, target.device)
    measured = smoothed(times)
    large = perf_counter()
    known, reference = measured[small[-1]], verifying(small[-1])
    for rows in (rows for rows in ROWS if least < rows <= most):
        if perf_counter() - large > SECONDS:
            break
        # In turns with the largest of those, for the same reason.
        few = _times({0: reference, rows: verifying(rows)}, target.device, repeats=FEW_REPEATS)
        measured[rows] = known * median(map(truediv, few[rows], few[0]))
    for slot in range(slots):
        cache.release(slot)
        drafter.release(slot)
    costs = FixedCosts(CostCurve.through(measured), drafting, observing)
    _say(costs, perf_counter() - began, max_tokens)
    return costs


def smoothed(times: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Seconds of a pass by its rows, from several times of each: medians, drawn to the line through all of them.

    What one row more costs is less than the noise of a median, and a curve with dents leads to decisions that differ by
    several tokens. A median stays where it is as far as it is further from the line than its own error (the positive
    part of James and Stein's estimator).
    """
    medians = {rows: median(found) for rows, found in times.items()}
    if len(medians) < 3:
        return medians
    centre, level = fmean(medians), fmean(medians.values())
    spread = sum((rows - centre) ** 2 for rows in medians)
    slope = max(0.0, sum((rows - centre) * value for rows, value in medians.items()) / spread)
    smooth = {}
    for rows, value in medians.items():
        line = level + slope * (rows - centre)
        error = 1.86 * median(abs(time - value) for time in times[rows]) / math.sqrt(len(times[rows]))
        apart = (value - line) ** 2
        smooth[rows] = line + (value - line) * (max(0.0, 1 - 2 * error**2 / apart) if apart else 0.0)
    return smooth


def _times(
    runs: Mapping[int, Callable[[], object]],
    device: torch.device,
    before: Callable[[], object] | None = None,
    repeats: int = REPEATS,
) -> dict[int, list[float]]:
    """Seconds of each run, in turns, several times after one that does not count."""
    found: dict[int, list[float]] = {name: [] for name in runs}
    began = perf_counter()
    for turn in range(repeats + 1):
        for name, run in runs.items():
            if before:
                before()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:
                found[name].append(perf_counter() - begin)
        if turn and perf_counter() - began > SECONDS / 2:
            break
    return found


def _line(at_one: float, at_most: float | None, most: int) -> tuple[float, float]:
    """Fixed part and slope of the line through (1, at_one) and (most, at_most)."""
    slope = 0.0 if at_most is None else max(0.0, at_most - at_one) / (most - 1)
    return max(0.0, at_one - slope), slope


def _say(costs: FixedCosts, seconds: float, max_tokens: int) -> None:
    logging.getLogger("foredraft").info(
        "measured costs in %.1f s: a pass takes %.2f ms with 1 row and %.2f ms with %d; drafting %d tokens %.2f ms",
        seconds,
        1000 * costs.verify(1),
        1000 * costs.verify(max_tokens + 1),
        max_tokens + 1,
        max_tokens,
        1000 * costs.draft(1, max_tokens),
    )
