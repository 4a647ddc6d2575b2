"""Prompt lookup against a search through the whole sequence."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters.base import DraftRequest, Proposal
from foredraft.drafters.calibration import Calibration
from foredraft.drafters.ngram import LONGEST_MATCH, NgramDrafter, raw_confidence
from foredraft.models.batch import flat_batch


def brute_force(sequence: Sequence[int], count: int) -> tuple[list[int], int]:
    """What follows the most recent earlier occurrence of the longest suffix of 4, 3 or 2 tokens, token by token in a
    sequence that grows by it; and how many tokens the two places have in common."""
    for size in (4, 3, 2):
        suffix = list(sequence[len(sequence) - size :])
        for end in range(len(sequence) - 1, size - 1, -1):
            if len(suffix) == size and list(sequence[end - size : end]) == suffix:
                grown = list(sequence)
                for place in range(end, end + count):
                    grown.append(grown[place])
                common = 0
                while common < min(end, LONGEST_MATCH) and sequence[end - 1 - common] == sequence[-1 - common]:
                    common += 1
                return grown[len(sequence) :], common
    return [], 0


def primed(tokens: Sequence[int]) -> NgramDrafter:
    drafter = NgramDrafter()
    if tokens:
        drafter.observe(flat_batch([tokens], [0], [0]), None, [len(tokens)])
    return drafter


@settings(max_examples=300)
@given(
    sequence=st.lists(st.integers(0, 2), min_size=1, max_size=40)
    | st.lists(st.integers(0, 9), min_size=1, max_size=60),
    count=st.integers(1, 20),
)
def test_proposals_are_those_of_a_search(sequence: list[int], count: int) -> None:
    drafter = primed(sequence[:-1])
    (found,) = drafter.propose([DraftRequest(0, sequence[-1], len(sequence) - 1)], count)
    kept = min(count, drafter.max_tokens)
    expected, common = brute_force(sequence, kept)
    assert list(found.token_ids) == expected
    if expected:
        assert found.confidences == tuple((common + k - 1) / (common + k + 3) for k in range(1, kept + 1))
    assert found.log_probs is None


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_any_pattern_of_acceptance(seed: int) -> None:
    """Several slots in prefill and decoding, rejected rows in the batch, slots used again: each proposes what a search
    through its own tokens gives."""
    rng, drafter = random.Random(seed), NgramDrafter()
    sequences: dict[int, list[int]] = {}
    for _ in range(12):
        for slot in range(4):
            if rng.random() < 0.1 and slot in sequences:
                drafter.release(slot)
                del sequences[slot]
        slots = rng.sample(range(4), rng.randint(1, 4))
        rows = [rng.choices(range(4), k=rng.randint(1, 9)) for _ in slots]
        kept = [rng.randint(0, len(own)) for own in rows]
        starts = [len(sequences.get(slot, [])) for slot in slots]
        drafter.observe(flat_batch(rows, starts, slots), None, kept)
        for slot, own, keep in zip(slots, rows, kept, strict=True):
            if keep:
                sequences.setdefault(slot, []).extend(own[:keep])
        asked = [slot for slot in sequences if rng.random() < 0.7]
        anchors = [rng.randrange(4) for _ in asked]
        requests = [
            DraftRequest(slot, anchor, len(sequences[slot])) for slot, anchor in zip(asked, anchors, strict=True)
        ]
        for slot, anchor, found in zip(asked, anchors, drafter.propose(requests, 5), strict=True):
            assert list(found.token_ids) == brute_force([*sequences[slot], anchor], 5)[0]


def test_by_hand() -> None:
    """Longest suffix first, then the most recent occurrence; a repetition goes on."""
    assert primed([1, 2, 3, 7, 2, 3, 8, 1, 2]).propose([DraftRequest(0, 3, 9)], 3) == [
        Proposal((7, 2, 3), None, (3 / 7, 4 / 8, 5 / 9))
    ]
    assert primed([2, 3, 7, 2, 3, 8, 5, 2]).propose([DraftRequest(0, 3, 8)], 2)[0].token_ids == (8, 5)
    assert primed([4, 5, 4]).propose([DraftRequest(0, 5, 3)], 5)[0].token_ids == (4, 5, 4, 5, 4)
    assert primed([6, 6]).propose([DraftRequest(0, 6, 2)], 3)[0].token_ids == (6, 6, 6)
    assert primed([1, 2, 3]).propose([DraftRequest(0, 4, 3)], 3) == [Proposal(())]
    assert primed([1]).propose([DraftRequest(0, 1, 1)], 3) == [Proposal(())]
    assert primed([]).propose([DraftRequest(0, 1, 0)], 3) == [Proposal(())]


def test_confidences() -> None:
    assert raw_confidence(4, 1) == 0.5 and raw_confidence(2, 3) == 0.5
    sequence = list(range(30)) + list(range(29))
    drafter = primed(sequence)
    found = drafter.propose([DraftRequest(0, 29, len(sequence))], 2)[0]
    assert found.confidences == (16 / 20, 17 / 21)
    calibration = Calibration((2.0,), (-0.5,))
    drafter.calibration = calibration
    calibrated = drafter.propose([DraftRequest(0, 29, len(sequence))], 2)[0].confidences
    assert calibrated == (calibration.apply(1, 16 / 20), calibration.apply(2, 17 / 21))


def test_limits() -> None:
    drafter = NgramDrafter()
    assert drafter.taps == () and drafter.max_tokens == 15 and drafter.default_tokens == 7
    assert drafter.calibration is None


def test_a_gap_is_not_drafted_over() -> None:
    drafter = primed([1, 2, 3])
    with pytest.raises(RuntimeError, match="slot 0: the drafter has seen 3 positions, what comes next stands at 5"):
        drafter.propose([DraftRequest(0, 1, 5)], 3)
    with pytest.raises(RuntimeError, match="slot 0: the drafter has seen 3 positions"):
        drafter.observe(flat_batch([[1]], [2], [0]), torch.empty(1, 0), [1])
