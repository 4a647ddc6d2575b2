"""Which sequences run: first come, first served, within the limits, and everyone gets there."""

import random

from hypothesis import given
from hypothesis import strategies as st

from foredraft.config import EngineConfig
from foredraft.engine.memory import Unlimited
from foredraft.engine.scheduler import Scheduler, Work
from foredraft.engine.sequence import Sequence
from foredraft.sampling_params import SamplingParams

NO_CACHES = Unlimited((), None)


def sequence(prompt: int, output: int = 1) -> Sequence:
    return Sequence(range(prompt), SamplingParams(max_tokens=output), 0, 1000, (), None)


def advance(scheduler: Scheduler, work: list[Work], token: int = 0) -> None:
    """What a pass does to its sequences, without a model."""
    for item in work:
        ends = item.reaches_end
        item.sequence.computed += item.count
        if ends:
            item.sequence.append([token], 0)
            if item.sequence.finished:
                scheduler.remove(item.sequence)


def counts(work: list[Work]) -> dict[int, int]:
    return {item.sequence.prompt_length: item.count for item in work}


def test_prefill_in_chunks_beside_decoding() -> None:
    scheduler = Scheduler(EngineConfig(max_num_seqs=2, max_num_batched_tokens=4), NO_CACHES)
    for prompt in (3, 9, 5):
        scheduler.add(sequence(prompt, 3))
    passes = []
    while scheduler.has_work:
        work = scheduler.schedule()
        passes.append(counts(work))
        advance(scheduler, work)
    assert passes == [
        *({3: 3, 9: 1}, {3: 1, 9: 4}, {3: 1, 9: 4}),
        # The third prompt takes the slot of the first; decoding does not count against prefill.
        *({5: 4, 9: 1}, {5: 1, 9: 1}, {5: 1}, {5: 1}),
    ]


def test_work_names_its_tokens() -> None:
    running = sequence(5, 2)
    running.computed = 2
    assert Work(running, 2).tokens == [2, 3] and not Work(running, 2).reaches_end
    assert Work(running, 3).tokens == [2, 3, 4] and Work(running, 3).reaches_end


def test_the_lowest_free_slot_is_taken() -> None:
    scheduler = Scheduler(EngineConfig(max_num_seqs=3), NO_CACHES)
    first = [sequence(2, 9) for _ in range(3)]
    for each in first:
        scheduler.add(each)
    scheduler.schedule()
    assert [each.slot for each in first] == [0, 1, 2]
    scheduler.remove(first[2])
    scheduler.remove(first[0])
    late = [sequence(2, 9) for _ in range(3)]
    for each in late:
        scheduler.add(each)
    work = scheduler.schedule()
    assert [each.slot for each in late] == [0, 2, -1]
    assert [item.sequence.slot for item in work] == [0, 1, 2]


def test_a_waiting_sequence_can_be_taken_out() -> None:
    scheduler = Scheduler(EngineConfig(max_num_seqs=1), NO_CACHES)
    running, waiting = sequence(2), sequence(3)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    scheduler.remove(waiting)
    advance(scheduler, scheduler.schedule())
    assert not scheduler.has_work


def test_removing_twice_takes_one_out() -> None:
    scheduler = Scheduler(EngineConfig(), NO_CACHES)
    only = sequence(2)
    scheduler.add(only)
    scheduler.schedule()
    assert scheduler.remove(only) and not scheduler.remove(only)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(0, 999),
)
def test_every_pass_keeps_the_limits_and_everyone_finishes(
    sizes: list[tuple[int, int]], slots: int, rows: int, seed: int
) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(EngineConfig(max_num_seqs=slots, max_num_batched_tokens=rows), NO_CACHES)
    waiting = [sequence(*size) for size in sizes]
    everyone, started = list(waiting), []
    while waiting or scheduler.has_work:
        while waiting and (rng.random() < 0.3 or not scheduler.has_work):
            scheduler.add(waiting.pop(0))
        work = scheduler.schedule()
        assert work and len({item.sequence.slot for item in work}) == len(work) <= slots
        assert all(0 <= item.sequence.slot < slots and item.count >= 1 for item in work)
        decoding = [each for each in scheduler.running if each.decoding]
        assert all(any(item.sequence is each and item.count == 1 for item in work) for each in decoding)
        prefill = [item for item in work if not item.sequence.decoding]
        unfinished = sum(len(s.tokens) - s.computed for s in scheduler.running if not s.decoding)
        assert sum(item.count for item in prefill) == min(rows, unfinished)
        started += [each for each in scheduler.running if each not in started]
        advance(scheduler, work)
    assert started == everyone
    assert all(each.num_output == size[1] for each, size in zip(everyone, sizes, strict=True))


class Counting(Unlimited):
    """Room for so many tokens of running sequences."""

    def __init__(self, tokens: int) -> None:
        super().__init__((), None)
        self.tokens, self.held = tokens, dict[Sequence, int]()

    def admit(self, sequence: Sequence, slot: int, rows: int, spare: int) -> bool:
        return self.reserve(sequence, min(rows, len(sequence.tokens)))

    def reserve(self, sequence: Sequence, end: int) -> bool:
        if sum(self.held.values()) - self.held.get(sequence, 0) + end > self.tokens:
            return False
        self.held[sequence] = end
        return True

    def has_another(self, sequence: Sequence, spare: int) -> bool:
        return sum(self.held.values()) + len(sequence.tokens) + spare <= self.tokens

    def release(self, sequence: Sequence) -> None:
        self.held.pop(sequence, None)


def test_a_sequence_that_catches_up_is_not_the_one_that_came_last() -> None:
    memory, asked = Counting(200), list[Sequence]()

    def follow(sequence: Sequence, load: int) -> bool:
        asked.append(sequence)
        return len(asked) > 2

    scheduler = Scheduler(EngineConfig(max_num_seqs=2), memory, 0, follow, lambda *_: True)
    first, second = sequence(10, 200), sequence(5, 200)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(34):
        advance(scheduler, scheduler.schedule())
    assert scheduler.catch_ups == 1 and first.followed and scheduler.running == [first, second]
    # Nor does it give its place up where there is none for it to come back to, nor is anybody asked in vain.
    while scheduler.catch_ups == 1 and not scheduler.preemptions:
        advance(scheduler, scheduler.schedule())
    assert scheduler.preemptions == 1 and scheduler.running == [first] and list(scheduler.waiting) == [second]
    for _ in range(2):
        advance(scheduler, scheduler.schedule())
    assert asked == [first, second, first, second]
