"""How many tokens are drafted, and how many of them are sent to verification.

Symbols as in DSpark (arXiv 2607.05147): R sequences, survival a_(r,j) of draft token j of sequence r, that is the
probability that tokens 1 to j are all kept; a pass of B = R + admitted tokens commits tau = R + sum of the admitted
survivals in expectation.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import mul
from typing import Protocol

from foredraft.drafters.base import Proposal, Stop
from foredraft.engine.costs import Costs, DraftCost
from foredraft.engine.scheduler import Work
from foredraft.engine.sequence import Sequence as Running


def draft_room(sequence: Running, num_speculative_tokens: int) -> int:
    """The most draft tokens that can be of use: a round commits one more than it keeps, and the output, which
    ``max_tokens`` and the context length bound, has room for ``sequence.room`` tokens; as many as the request wants at
    most, and none where the drafter does not follow."""
    return max(0, min(num_speculative_tokens, sequence.draft_limit, sequence.room - 1)) if sequence.followed else 0


def admissions(survivals: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """(a, j, r) of every draft token j = 1, 2, ... of every sequence r, in the order of admission: descending in a,
    no token before the ones it follows."""
    found = []
    for r, own in enumerate(survivals):
        least = 1.0
        for j, value in enumerate(own, start=1):
            if value < least:
                least = value
            found.append((-least, j, r))
    found.sort()
    return [(-negative, j, r) for negative, j, r in found]


def choose(survivals: Sequence[Sequence[float]], cost: Callable[[int], float], look_ahead: bool = False) -> list[int]:
    """How many draft tokens of each sequence go to verification (hardware-aware prefix scheduling).

    survivals: of each of the R sequences, those of its draft tokens. cost: from the number of rows of a pass, at
    least R, to seconds. Tokens are admitted in descending order of survival while tau per second grows. The first
    decrease ends it, so that whether a token is verified depends on no token after it, which the rule ``rejection``
    needs to keep the distribution. look_ahead: go through all tokens and take the best place to end, which finds the
    optimum for any cost; without it that is certain for convex costs only.
    """
    lengths = [0] * len(survivals)
    tau, rows = float(len(survivals)), len(survivals)
    if not rows:
        return lengths
    best = tau / cost(rows)
    order = admissions(survivals)
    admitted = 0
    for count, (survival, _, _) in enumerate(order, start=1):
        tau += survival
        rate = tau / cost(rows + count)
        if rate > best:
            best, admitted = rate, count
        elif not look_ahead:
            break
    for _, j, r in order[:admitted]:
        lengths[r] = j
    return lengths


class Budget(Protocol):
    """Decides for the engine, round by round."""

    stop: Stop | None
    """For the drafter, in the round that ``plan`` was asked about last."""

    def follows(self, load: int) -> bool:
        """Whether the drafter is to follow one more sequence, when ``load`` sequences run; what it has not followed
        from the beginning it cannot draft for."""

    def catches_up(self, sequence: Running, load: int) -> bool:
        """Whether a sequence that is not followed is worth running anew, its tokens up to here, with the drafter."""

    def plan(self, work: Sequence[Work]) -> dict[int, int]:
        """Which items of ``work`` draft, by index, and how many tokens at most (at least 1)."""

    def trim(self, work: Sequence[Work], proposals: Sequence[Proposal]) -> list[Proposal]:
        """What goes to verification of each proposal."""

    def record(self, sequence: Running, kept: int) -> None:
        """How many tokens of a decoding sequence's trimmed proposal were kept."""

    def forget(self, sequence: Running) -> None:
        """A sequence left."""


class FixedBudget:
    """N tokens, as far as there is room for them."""

    stop: Stop | None = None

    def __init__(self, num_speculative_tokens: int) -> None:
        self._tokens = num_speculative_tokens

    def follows(self, load: int) -> bool:
        return self._tokens > 0

    def catches_up(self, sequence: Running, load: int) -> bool:
        return False

    def plan(self, work: Sequence[Work]) -> dict[int, int]:
        rooms = {}
        for index, item in enumerate(work):
            if item.sequence.decoding and (room := draft_room(item.sequence, self._tokens)):
                rooms[index] = room
        return rooms

    def trim(self, work: Sequence[Work], proposals: Sequence[Proposal]) -> list[Proposal]:
        return list(proposals)

    def record(self, sequence: Running, kept: int) -> None:
        pass

    def forget(self, sequence: Running) -> None:
        pass


@dataclass
class Offset:
    """A correction on the logit of confidences, learned from what became of them.

    Online logistic regression in Laplace's approximation: a normal belief whose prior has mean 0, so that little
    evidence moves it little. Its variance never falls below ``least``, so that it follows a text that changes.
    """

    variance: float
    least: float
    mean: float = 0.0


def learn(offsets: Sequence[Offset], p: float, kept: bool) -> None:
    """Update ``offsets``, whose sum led to probability ``p``, by one outcome."""
    information = p * (1 - p)
    spread = 1 + information * sum(offset.variance for offset in offsets)
    for offset in offsets:
        offset.mean += offset.variance * (kept - p) / spread
        offset.variance = max(offset.least, offset.variance * (1 - offset.variance * information / spread))


@dataclass
class Expectation:
    """Mean survival, or worth, of each position over rounds, of late ones above all.

    ratios: of each mean to the one before it. A round that drafts less far than others leaves those of the later
    positions as they are; where no round has drafted, a ratio is the geometric mean of those up to there.
    """

    ratios: list[float]
    least_pace: float
    rounds: int = 0
    deepest: int = 0

    def means(self) -> list[float]:
        return list(accumulate(self.ratios, mul))

    def update(self, seen: Sequence[float]) -> None:
        """Move towards the survivals, positive and never rising, of what a round drafted."""
        self.rounds += 1
        pace = max(self.least_pace, 1 / (self.rounds + 3))
        old = new = 1.0
        for k, value in enumerate(seen):
            before = new
            old *= self.ratios[k]
            new = old + pace * (value - old)
            self.ratios[k] = new / before
        if len(seen) >= self.deepest:
            self.deepest = len(seen)
            beyond = len(self.ratios) - len(seen)
            self.ratios[len(seen) :] = [new ** (1 / len(seen))] * beyond


@dataclass(eq=False)
class Belief:
    """What the budget expects of one sequence.

    offset: on top of those of all sequences. expected: mean survivals. drafted: the round in which it drafted last.
    confidences, sent: of the round in progress, as drafted, and how many of its tokens went to verification.
    """

    offset: Offset
    expected: Expectation
    drafted: int
    confidences: tuple[float, ...] = ()
    sent: int = 0


FIRST_GUESS = 0.8
"""Of how often a token is kept, until there is evidence; rather too high, so that drafting is tried."""
TRUSTED, SHRINKAGE, FORGETTING = 20, 3, 0.99
"""Rounds of a sequence that count at most, those that the average of all counts for, and what is left of its own
after a round in which it does not draft."""
HOLDS = 8
"""Rounds for which a decision about drafting holds while the same sequences go on: it changes slowly, and takes a share
of a small model's pass."""
NEGLIGIBLE = 0.01
"""Survival below which no token is drafted on average."""
PATIENCE = 16
"""The fewest rounds between two tries to draft where that does not seem to pay."""
WORTH_FOLLOWING = 1.03
"""How much faster it must be: what is expected is not certain, and rounds that draft take some time for deciding."""
USUAL = 0.002
"""The least share of a round in the survivals by which that is decided: sequences differ, and the next one need not be
like the last."""
RECENT = 0.05
"""The share of the newest sequence in the mean lengths of prompts and answers."""
PROBES = 8
"""Where drafting does not pay: times the load, sequences that are not followed for one that is."""
TRYING = 0.015
"""The share of the time that such tries may take."""


class AutoBudget:
    """Drafts and verifies what is expected to pay, by measured costs and by what became of earlier tokens.

    Before drafting, mean survivals say who drafts, and how far; in a drafter that goes token by token, ``stop`` ends
    sequences whose next token would not pay; ``choose`` decides what is verified. Of the sequences whose drafts do not
    seem to pay, which decode plainly, one tries again now and then.

    max_tokens: the most draft tokens of a round. look_ahead: see ``choose``; right unless the rule is ``rejection``.
    prefill_rows: the most tokens of prompts in a pass that decodes, None where there is no limit.
    """

    def __init__(self, costs: Costs, max_tokens: int, look_ahead: bool, prefill_rows: int | None = None) -> None:
        self.stop: Stop | None = None
        self._costs = costs
        self._max_tokens = max_tokens
        self._look_ahead = look_ahead
        self._prefill_rows = prefill_rows
        self._shared = Offset(1.0, 0.005)
        self._positions = [Offset(0.3, 0.005) for _ in range(max_tokens)]
        self._expected = Expectation([FIRST_GUESS] * max_tokens, 0.02)
        self._usual = Expectation([FIRST_GUESS] * max_tokens, USUAL)
        self._worth = Expectation([FIRST_GUESS] * max_tokens, 0.02)
        self._beliefs: dict[Running, Belief] = {}
        self._round = self._last_try = 0
        self._trying: Running | None = None
        self._spent = self._besides = self._row_price = self._rate = 0.0
        self._pays: dict[int, bool] = {}
        self._prompts = self._outputs = 100.0
        self._news: list[tuple[Belief, list[float]]] = []
        self._situation: tuple[dict[int, Belief], Set[int], int] = ({}, set(), 0)
        self._until = self._unfollowed = 0
        self._planned: dict[int, int] = {}
        self._asked_of: list[tuple[Belief, list[float], int]] = []
        self._ask()

    def _ask(self) -> None:
        """Costs as they are now; rounds ask for the same few numbers over and over."""
        self._asked = self._costs.verify
        draft = self._costs.draft
        self._verify, self._draft, self._step = cache(self._asked), cache(draft), cache(draft.step)
        self._affordable = _affordable(draft, self._max_tokens)
        self._pays = {}

    def follows(self, load: int) -> bool:
        """Where drafting would not pay with ``load`` sequences like those before, following does not either; but one
        of several is followed, so that a text that turns predictable is noticed."""
        pays = self._pays_at(load)
        self._unfollowed = 0 if pays or self._unfollowed >= PROBES * load else self._unfollowed + 1
        return not self._unfollowed

    def catches_up(self, sequence: Running, load: int) -> bool:
        """It is expected to have as many tokens before it as behind it."""
        if not self._pays_at(load):
            return False
        plain, drafting = self._token_seconds(load)
        tokens, left = len(sequence.tokens), min(sequence.room, sequence.num_output)
        again = self._verify(load + tokens) - self._verify(load) + self._costs.observe.prompt_token * tokens
        return left * (plain - drafting) > again

    def _pays_at(self, load: int) -> bool:
        """Whether ``load`` sequences at once are faster with the drafter than without, from prompt to end: each runs
        its prompt beside the others, which decode plainly meanwhile."""
        if self._costs.verify is not self._asked:
            self._ask()
        if load not in self._pays:
            plain, drafting = self._token_seconds(load)
            passes = max(1.0, self._prompts / self._prefill_rows) if self._prefill_rows else 1.0
            rows = load - 1 + round(self._prompts / passes)
            prefill = passes * (load * self._costs.rest + self._verify(rows))
            left = max(0.0, self._outputs - passes * (load - 1))
            following = self._costs.observe.prompt_token * self._prompts
            gain = (prefill + left * plain) / (prefill + left * drafting + following)
            self._pays[load] = gain > WORTH_FOLLOWING
        return self._pays[load]

    def _token_seconds(self, load: int) -> tuple[float, float]:
        """Seconds of a token of all together where ``load`` sequences decode: without the drafter, and with it."""
        rest, rooms = load * self._costs.rest, dict.fromkeys(range(load), self._max_tokens)
        means = self._usual.means()
        plain = (rest + self._verify(load)) / load
        lengths, rate = self._best_lengths(dict.fromkeys(rooms, means), rooms, load, 0, rest)
        tau = load + sum(sum(means[:length]) for length in lengths.values())
        return plain, 1 / rate + self._costs.observe(load) / tau

    def plan(self, work: Sequence[Work]) -> dict[int, int]:
        self._round += 1
        self._trying = self.stop = None
        rooms, beliefs, others = {}, {}, 0
        for index, item in enumerate(work):
            sequence = item.sequence
            if sequence.decoding:
                beliefs[index] = belief = self._belief(sequence)
                belief.confidences, belief.sent = (), 0
                if room := draft_room(sequence, self._max_tokens):
                    rooms[index] = room
            else:
                others += item.count
        situation = (beliefs, rooms.keys(), others)
        if self._round >= self._until or situation != self._situation:
            self._situation = situation
            self._decide(work, beliefs, rooms, others)
        for index in self._planned:
            beliefs[index].drafted = self._round
        if self._planned:
            self.stop = self._stop()
        return {index: min(rooms[index], length) for index, length in self._planned.items()}

    def _decide(
        self, work: Sequence[Work], beliefs: Mapping[int, Belief], rooms: Mapping[int, int], others: int
    ) -> None:
        if self._costs.verify is not self._asked:
            self._ask()
        self._take_in()
        able = {index: self._survivals(beliefs[index]) for index in rooms}
        self._besides = len(beliefs) * self._costs.rest + (self._costs.observe(len(rooms)) if rooms else 0.0)
        lengths, rate = self._best_lengths(able, rooms, len(beliefs), others, self._besides)
        self._row_price = rate * self._slope(others + len(beliefs), sum(lengths.values()))
        longest = self._worth_drafting(len(lengths), max(lengths.values(), default=0), rate)
        planned = {index: min(rooms[index], longest) for index in lengths}
        tried = self._try(rooms, beliefs, planned, others)
        self._until = self._round + HOLDS
        if tried is not None:
            self._trying, self._last_try, self._until = work[tried].sequence, self._round, 0
            planned[tried] = min(rooms[tried], max(longest, self._affordable))
        self._planned, self._rate = planned, rate
        self._asked_of = [(beliefs[index], able[index], limit) for index, limit in planned.items()]
        if planned:
            # As a round like this usually does: what a deeper draft costs on top is no reason to verify more.
            self._spent = self._besides + self._draft(len(planned), max(lengths.values(), default=1))

    def trim(self, work: Sequence[Work], proposals: Sequence[Proposal]) -> list[Proposal]:
        decoding = [index for index, item in enumerate(work) if item.sequence.decoding]
        survivals: list[list[float]] = []
        for index in decoding:
            belief = self._beliefs[work[index].sequence]
            draft = proposals[index]
            # Without confidences, what became of earlier tokens is all there is to go by.
            belief.confidences = draft.confidences or (FIRST_GUESS,) * len(draft.token_ids)
            corrected = [self._corrected(belief, k, raw) for k, raw in enumerate(belief.confidences)]
            own = list(accumulate(corrected, mul))
            survivals.append(own)
            if own:
                self._news.append((belief, own))
        others = sum(item.count for item in work) - len(decoding)
        verify = self._verify
        lengths = choose(survivals, lambda rows: self._spent + verify(others + rows), self._look_ahead)
        trimmed = list(proposals)
        for index, length in zip(decoding, lengths, strict=True):
            sequence = work[index].sequence
            belief = self._beliefs[sequence]
            belief.sent = max(length, min(1, len(belief.confidences))) if sequence is self._trying else length
            trimmed[index] = proposals[index].first(belief.sent)
        return trimmed

    def record(self, sequence: Running, kept: int) -> None:
        belief = self._beliefs[sequence]
        for k in range(min(belief.sent, kept + 1)):
            # By the offsets as they are now: the same round of other sequences has moved them.
            p = self._corrected(belief, k, belief.confidences[k])
            learn((self._shared, self._positions[k], belief.offset), p, k < kept)

    def forget(self, sequence: Running) -> None:
        self._beliefs.pop(sequence, None)
        if sequence.finish_reason not in ("stop", "length"):
            return  # How long it would have become nobody knows.
        self._prompts += RECENT * (sequence.prompt_length - sequence.reused - self._prompts)
        self._outputs += RECENT * (max(1, sequence.num_output) - self._outputs)

    def _belief(self, sequence: Running) -> Belief:
        if sequence not in self._beliefs:
            self._beliefs[sequence] = Belief(Offset(0.5, 0.02), Expectation([], 0.1), self._round)
        return self._beliefs[sequence]

    def _survivals(self, belief: Belief) -> list[float]:
        """Mean survivals of a sequence: its own, and the fewer or older they are, the more those of all."""
        weight = min(belief.expected.rounds, TRUSTED) * FORGETTING ** (self._round - belief.drafted)
        if not weight:
            return self._expected.means()
        share = weight / (weight + SHRINKAGE)
        rest = 1 - share
        pairs = zip(belief.expected.means(), self._expected.means(), strict=True)
        return [share * own + rest * average for own, average in pairs]

    def _corrected(self, belief: Belief, k: int, confidence: float) -> float:
        """P(kept | the ones before kept) of the token at place ``k``, from 0."""
        held = min(max(confidence, 0.001), 0.999)
        logit = math.log(held / (1 - held)) + self._shared.mean + self._positions[k].mean + belief.offset.mean
        return 1 / (1 + math.exp(-logit))

    def _take_in(self) -> None:
        """The survivals of the rounds since the last decision."""
        price = self._row_price
        for belief, survivals in self._news:
            self._worth.update([max(1e-9, value - price) for value in survivals])
            if not belief.expected.rounds:
                belief.expected.ratios, belief.expected.deepest = list(self._expected.ratios), self._expected.deepest
            belief.expected.update(survivals)
            self._expected.update(survivals)
            self._usual.update(survivals)
        self._news.clear()
        self._pays.clear()

    def _best_lengths(
        self, able: Mapping[int, Sequence[float]], rooms: Mapping[int, int], decoding: int, others: int, besides: float
    ) -> tuple[dict[int, int], float]:
        """Draft lengths with the most tokens a second by mean survivals, drafting included, and those tokens a second;
        only of sequences that draft, so none where plain decoding has more. besides: seconds of what every round does.
        """
        if not decoding:
            return {}, 0.0
        verify, draft = self._verify, self._draft
        tau = float(decoding)
        best = tau / (besides + verify(others + decoding))
        indices = list(able)
        order = admissions(
            [[value for value in own[: rooms[index]] if value > NEGLIGIBLE] for index, own in able.items()]
        )
        admitted = sequences = longest = 0
        for count, (survival, j, _) in enumerate(order, start=1):
            tau += survival
            if j == 1:
                sequences += 1
            if j > longest:
                longest = j
            seconds = besides + draft(sequences, longest) + verify(others + decoding + count)
            rate = tau / seconds
            if rate > best:
                best, admitted = rate, count
            elif tau + survival * (len(order) - count) <= best * seconds:
                break  # Not even if all that is left cost nothing.
        return {indices[r]: j for _, j, r in order[:admitted]}, best

    def _worth_drafting(self, drafting: int, longest: int, rate: float) -> int:
        """How far to draft: further than is verified on average, as long as what rounds gain by a token at that place,
        of those in which it is verified, is worth more than drafting it in all."""
        price = rate * self._step(max(1, drafting))
        ratios = self._worth.ratios
        worth = drafting * math.prod(ratios[:longest])
        while longest < self._max_tokens:
            worth *= ratios[longest]
            if worth <= price:
                break
            longest += 1
        return longest

    def _slope(self, plain: int, drafted: int) -> float:
        """Seconds of one more row in a pass with ``plain`` rows and about ``drafted`` draft tokens."""
        around = (max(1, drafted) + 1) // 2
        rows = plain + max(1, drafted)
        return (self._verify(rows + around) - self._verify(rows - around)) / (2 * around)

    def _try(
        self, rooms: Mapping[int, int], beliefs: Mapping[int, Belief], planned: Mapping[int, int], others: int
    ) -> int | None:
        """The sequence that tries to draft although it does not seem to pay: the one that did not for longest, once
        enough rounds have passed for what it costs."""
        idle = [index for index in rooms if index not in planned]
        if not idle:
            return None
        draft, plain = self._draft, self._verify(others + len(beliefs))
        already = draft(len(planned), max(planned.values())) if planned else 0.0
        depth = max(max(planned.values(), default=0), self._affordable)
        price = draft(len(planned) + 1, depth) - already + self._verify(others + len(beliefs) + 1) - plain
        if self._round - self._last_try < max(PATIENCE, price / (TRYING * plain)):
            return None
        return min(idle, key=lambda index: beliefs[index].drafted)

    def _stop(self) -> Stop:
        asked, rate, row_price = self._asked_of, self._rate, self._row_price
        survivals = [1.0] * len(asked)
        going = len(asked)

        def stop(request: int, confidence: float, k: int) -> bool:
            nonlocal going
            belief, means, limit = asked[request]
            survivals[request] *= self._corrected(belief, k - 1, confidence)
            if k < limit:
                next_one = survivals[request] * means[k] / means[k - 1]
                # A step costs what it costs: the fewer still draft, the more each of them has to bring.
                if next_one >= rate * self._step(going) / going + row_price:
                    return False
            going -= 1
            return True

        return stop


def _affordable(draft: DraftCost, max_tokens: int) -> int:
    """As many tokens as cost at most half as much again as the first."""
    return min(max_tokens, int(1.5 + 0.5 * draft.fixed / draft.token)) if draft.token else max_tokens
