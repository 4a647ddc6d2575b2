"""How the rows of a flat batch attend: computed once for a forward pass, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEW_ROWS = 64
"""Most rows a sequence has in decode and verification; more is prefill."""


@dataclass(frozen=True)
class Visibility:
    """What a row of a layer sees. causal: the positions up to its own; otherwise up to the last row of its sequence
    (the bidirectional block of DFlash). window: only the last ``window`` positions, its own included."""

    causal: bool = True
    window: int | None = None


@dataclass(frozen=True)
class AttentionGroup:
    """Sequences of a batch that have the same number of rows, attended in one call.

    slots: cache slot of each sequence. length: the longest context among them, this batch's rows included.
    rows: the indices of their rows in the flat batch, None when the group is the whole batch.
    triangular: long prompts from their beginning, each row seeing the rows up to its own; then there is no mask.
    mask: [sequences, 1, share * rows_each, length], True where a row may look; None where it may look
    everywhere. ``share`` query heads read one key/value head; their rows are stacked, head by head.
    """

    slots: tuple[int, ...]
    rows_each: int
    length: int
    rows: Tensor | None
    triangular: bool
    mask: Tensor | None

    def select(self, cached: Tensor) -> Tensor:
        """The group's part of ``cached [slots, capacity, G, D]``: a view when its slots are neighbours."""
        first, count = self.slots[0], len(self.slots)
        if self.slots == tuple(range(first, first + count)):
            return cached[first : first + count, : self.length]
        return cached[list(self.slots), : self.length]


@dataclass(frozen=True)
class AttentionPlan:
    groups: tuple[AttentionGroup, ...]


def plan_attention(
    starts: Sequence[int],
    counts: Sequence[int],
    slots: Sequence[int],
    *,
    share: int = 1,
    visibility: Visibility = Visibility(),
    device: torch.device | str = "cpu",
) -> AttentionPlan:
    """Plan a batch in which sequence i has ``counts[i]`` rows at positions ``starts[i]``, ``starts[i] + 1``, ...

    share: query heads per key/value head.
    """
    causal, window = visibility.causal, visibility.window
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    by_count: dict[int, list[int]] = {}
    for index, count in enumerate(counts):
        by_count.setdefault(count, []).append(index)
    groups = []
    for count, members in by_count.items():
        members.sort(key=lambda index: slots[index])
        length = max(starts[index] for index in members) + count
        ordered = len(by_count) == 1 and members == list(range(len(counts)))
        rows = None
        if not ordered:
            rows = torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in members]).to(device)
        first = [starts[index] for index in members]
        triangular = causal and window is None and count > FEW_ROWS and not any(first)
        mask = None if triangular else _mask(first, count, length, causal, window)
        groups.append(
            AttentionGroup(
                slots=tuple(slots[index] for index in members),
                rows_each=count,
                length=length,
                rows=rows,
                triangular=triangular,
                mask=None if mask is None else mask.to(device).repeat(1, 1, share, 1),
            )
        )
    return AttentionPlan(tuple(groups))


def _mask(starts: list[int], count: int, length: int, causal: bool, window: int | None) -> Tensor | None:
    everything_visible = all(start + count == length for start in starts) and (count == 1 or not causal)
    if everything_visible and (window is None or length <= window):
        return None
    key = torch.arange(length)
    first = torch.tensor(starts).view(-1, 1, 1)
    own = first + torch.arange(count).view(1, -1, 1)
    last = own if causal else (first + count - 1).expand_as(own)
    visible = key <= last
    if window is not None:
        visible &= key > own - window
    return visible.unsqueeze(1)
