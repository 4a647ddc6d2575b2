"""What goes into a forward pass and what comes out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of several sequences in one flat list: prefill chunks, plain decode and verification alike.

    Sequence i contributes ``counts[i]`` consecutive rows whose first stands at position ``starts[i]`` of the
    sequence whose state lies in cache slot ``slots[i]``.

    token_ids: [T] int64. positions: [T] int64. logit_rows: [R] indices of the rows whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    slots: tuple[int, ...]
    logit_rows: Tensor

    @property
    def ends(self) -> tuple[int, ...]:
        """The context length of each sequence once this batch has run."""
        return tuple(start + count for start, count in zip(self.starts, self.counts, strict=True))

    def first_rows(self, counts: Sequence[int]) -> "BatchPart":
        """The first ``counts[i]`` rows of each sequence."""
        if tuple(counts) == self.counts:
            return BatchPart(self, None)
        kept: list[int] = []
        first = 0
        for own, count in zip(self.counts, counts, strict=True):
            kept.extend(range(first, first + count))
            first += own
        rows = torch.tensor(kept, dtype=torch.int64, device=self.positions.device)
        part = replace(
            self,
            token_ids=self.token_ids.index_select(0, rows),
            positions=self.positions.index_select(0, rows),
            counts=tuple(counts),
            logit_rows=rows[:0],
        )
        return BatchPart(part, rows)


@dataclass(frozen=True)
class BatchPart:
    """Some rows of a batch, as a batch, and their indices [T] there; None when they are all."""

    batch: Batch
    rows: Tensor | None


def flat_batch(
    rows: Sequence[Sequence[int]],
    starts: Sequence[int],
    slots: Sequence[int],
    logit_counts: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """Build a batch from each sequence's token ids.

    logit_counts: for how many of its last rows each sequence wants logits (all of them by default).
    """
    flat: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    for index, (tokens, start) in enumerate(zip(rows, starts, strict=True)):
        first = len(flat)
        flat.extend(tokens)
        positions.extend(range(start, start + len(tokens)))
        count = len(tokens) if logit_counts is None else logit_counts[index]
        wanted.extend(range(first + len(tokens) - count, first + len(tokens)))
    return Batch(
        token_ids=torch.tensor(flat, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        starts=tuple(starts),
        counts=tuple(len(tokens) for tokens in rows),
        slots=tuple(slots),
        logit_rows=torch.tensor(wanted, dtype=torch.int64, device=device),
    )


@dataclass(frozen=True)
class TargetOutput:
    """logits: [R, V] for the rows asked for. taps: [T, len(taps) * K], the tapped layers side by side."""

    logits: Tensor
    taps: Tensor | None
