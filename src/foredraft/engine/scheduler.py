"""Which sequences run in a pass, and with how many of their tokens."""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from foredraft.config import EngineConfig
from foredraft.engine.memory import Memory
from foredraft.engine.sequence import Sequence

CATCH_UP_EVERY = 32
"""Passes after which a sequence without speculation is looked at again."""


@dataclass(frozen=True)
class Work:
    """``count`` tokens of a sequence, from its first one not yet computed."""

    sequence: Sequence
    count: int

    @property
    def tokens(self) -> list[int]:
        begin = self.sequence.computed
        return self.sequence.tokens[begin : begin + self.count]

    @property
    def reaches_end(self) -> bool:
        """Whether the pass computes the last token, so that the next one can be sampled."""
        return self.sequence.computed + self.count == len(self.sequence.tokens)


class Scheduler:
    """First come, first served: everything that decodes runs in every pass, prefill fills what room is left.

    Where memory runs out, the sequence that came last leaves its slot and waits again (preemption); its tokens are
    run anew when there is room. draft_tokens: the most that a drafter is asked for. follow: whether the drafter is to
    follow a sequence that gets a slot, when so many, itself included, are running or waiting. catch_up: whether one
    that the drafter does not follow is worth running anew with it, when so many are running.

    preemptions, catch_ups: sequences that left their slot for want of memory, and to be followed. admissions: of
    sequences that are followed (True) and are not.
    """

    def __init__(
        self,
        config: EngineConfig,
        memory: Memory,
        draft_tokens: int = 0,
        follow: Callable[[Sequence, int], bool] = lambda sequence, load: True,
        catch_up: Callable[[Sequence, int], bool] = lambda sequence, load: False,
    ) -> None:
        self._config = config
        self._follow, self._catch_up = follow, catch_up
        self._memory = memory
        self._draft_tokens = draft_tokens
        self._free = list(range(config.max_num_seqs))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = self.catch_ups = 0
        self.admissions = {True: 0, False: 0}
        self._passes = 0
        self._asked: Sequence | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[Work]:
        """The next pass: at least one token of some sequence, whenever there is one."""
        self._passes += 1
        if self._passes % CATCH_UP_EVERY == 0 and not self.waiting:
            self._run_anew()
        before = self.preemptions
        work = self._decoding()
        left = self._config.max_num_batched_tokens
        if work and self._config.prefill_beside_decode is not None:
            left = min(left, self._config.prefill_beside_decode)
        for sequence in list(self.running):
            if not sequence.decoding and left and sequence.slot >= 0:
                count = self._prefill(sequence, left, bool(work))
                if count:
                    work.append(Work(sequence, count))
                    left -= count
        # Whoever was sent away has not waited long enough.
        while left and self.preemptions == before and (new := self._admit(left)):
            count = min(left, len(new.tokens) - new.computed)
            work.append(Work(new, count))
            left -= count
        return sorted(work, key=lambda item: item.sequence.slot)

    def remove(self, sequence: Sequence) -> bool:
        """Take a finished or cancelled sequence out, if it is here; its slot and its memory are free again."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._vacate(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return False
        return True

    def _decoding(self) -> list[Work]:
        # Making room takes sequences out of ``running``, and they no longer decode.
        return [Work(each, 1) for each in list(self.running) if each.decoding and self._make_room(each)]

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for a round of a decoding sequence, by preemption if need be, its own in the end."""
        drafts = self._draft_tokens if sequence.followed else 0
        while not self._memory.reserve(sequence, len(sequence.tokens) + drafts):
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _prefill(self, sequence: Sequence, left: int, others: bool) -> int:
        """How many of its tokens a sequence runs; none where it lacks room that ``others``, which run, will leave."""
        count = min(left, len(sequence.tokens) - sequence.computed)
        while not self._memory.reserve(sequence, sequence.computed + count):
            count = min(count, self._memory.room(sequence) - sequence.computed)
            if count > 0:
                continue
            if others or self.running[-1] is sequence:
                return 0
            self._preempt(self.running[-1])
            count = min(left, len(sequence.tokens) - sequence.computed)
        return count

    def _admit(self, rows: int) -> Sequence | None:
        if not (self.waiting and self._free):
            return None
        sequence, slot = self.waiting[0], self._free[0]
        if sequence is not self._asked:
            # Once for each time that it waits.
            load = min(self._config.max_num_seqs, len(self.running) + len(self.waiting))
            sequence.followed, self._asked = self._follow(sequence, load), sequence
        if self._memory.known_soon(sequence, self.running):
            return None
        # A page for each that runs, so that it is not the newcomer who sends them away.
        if not self._memory.admit(sequence, slot, rows, spare=len(self.running)):
            return None
        self.waiting.popleft()
        self._asked = None
        sequence.slot = heapq.heappop(self._free)
        sequence.admitted_at = sequence.admitted_at or perf_counter()
        # In the order of arrival, so that who has been sent back is not who came last.
        insort(self.running, sequence, key=lambda each: each.arrived)
        self.admissions[sequence.followed] += 1
        return sequence

    def _run_anew(self) -> None:
        """Of the sequences that the drafter does not follow, the longest leaves its slot, if that pays by now, to get
        another one and be followed."""
        plain = [each for each in self.running if each.decoding and not each.followed]
        if not plain:
            return
        sequence = max(plain, key=lambda each: each.num_output)
        room = self._memory.has_another(sequence, len(self.running))
        if room and self._catch_up(sequence, len(self.running)):
            self.catch_ups += 1
            self._send_back(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._send_back(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._vacate(sequence)
        self.waiting.appendleft(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self._memory.release(sequence)
        heapq.heappush(self._free, sequence.slot)
        sequence.slot, sequence.computed = -1, 0
