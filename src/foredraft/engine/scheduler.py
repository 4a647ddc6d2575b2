"""Which sequences run in a pass, and with how many of their tokens."""

import heapq
from collections import deque
from dataclasses import dataclass

from foredraft.config import EngineConfig
from foredraft.engine.sequence import Sequence


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
    """First come, first served: everything that decodes runs in every pass, prefill fills what room is left."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._free = list(range(config.max_num_seqs))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[Work]:
        """The next pass: at least one token of some sequence, whenever there is one."""
        while self.waiting and self._free:
            sequence = self.waiting.popleft()
            sequence.slot = heapq.heappop(self._free)
            self.running.append(sequence)
        work = [Work(sequence, 1) for sequence in self.running if sequence.decoding]
        left = self._config.max_num_batched_tokens
        for sequence in self.running:
            if not sequence.decoding and left:
                count = min(left, len(sequence.tokens) - sequence.computed)
                work.append(Work(sequence, count))
                left -= count
        return sorted(work, key=lambda item: item.sequence.slot)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out; its slot is free again."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        heapq.heappush(self._free, sequence.slot)
