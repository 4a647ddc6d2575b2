"""Per-layer state of running sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.models.batch import Batch
from foredraft.models.config import ModelConfig
from foredraft.ops import native
from foredraft.ops.plan import AttentionPlan, Visibility, plan_attention


class Cache(Protocol):
    """State of the sequences in its slots. A slot's committed length is the only truth: what lies beyond it (rejected
    draft tokens, a drafter's block) is overwritten by the next rows."""

    def length(self, slot: int) -> int:
        """Committed positions of a slot, 0 for an unused one."""

    def commit(self, slot: int, length: int) -> None:
        """Keep the first ``length`` positions of a slot and forget the rest."""

    def release(self, slot: int) -> None:
        """Forget a slot's sequence."""


@dataclass(frozen=True)
class CacheStep:
    """Where the rows of one batch are written and what they see."""

    rows: Tensor
    attention: AttentionPlan


class KVCache:
    """Keys and values of every layer for the sequences in its slots, [layers, slots, capacity, G, D] each.

    Storage grows by doubling, so that short work stays small.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shape = (config.num_kv_heads, config.head_dim)
        self._share = config.num_heads // config.num_kv_heads
        self._layers = config.num_layers
        self._lengths: dict[int, int] = {}
        self.keys = torch.empty(self._layers, 0, 0, *self._shape, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)

    def length(self, slot: int) -> int:
        return self._lengths.get(slot, 0)

    def commit(self, slot: int, length: int) -> None:
        self._lengths[slot] = length

    def release(self, slot: int) -> None:
        self._lengths.pop(slot, None)

    def prepare(self, batch: Batch, visibility: Visibility = Visibility()) -> CacheStep:
        """Make room for a batch and plan its writes and its attention (see ``plan_attention``)."""
        self.reserve(max(batch.slots) + 1, max(batch.ends))
        attention = plan_attention(
            batch.starts,
            batch.counts,
            batch.slots,
            share=self._share,
            visibility=visibility,
            device=self.keys.device,
        )
        return CacheStep(rows=self.rows(batch.slots, batch.counts, batch.positions), attention=attention)

    def rows(self, slots: Sequence[int], counts: Sequence[int], positions: Tensor) -> Tensor:
        """Where each of a flat batch's rows lies in a layer's storage seen as [slots * capacity, G, D]."""
        capacity = self.keys.shape[2]
        if len(slots) == 1:
            return positions + slots[0] * capacity
        device = self.keys.device
        first = torch.tensor(slots, device=device) * capacity
        return torch.repeat_interleave(first, torch.tensor(counts, device=device)) + positions

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values [T, G, D]`` at ``rows [T]`` of a layer's storage."""
        self.keys[layer].view(-1, *self._shape).index_copy_(0, rows, keys)
        self.values[layer].view(-1, *self._shape).index_copy_(0, rows, values)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for ``length`` positions in each of ``slots`` slots."""
        _, have_slots, capacity, _, _ = self.keys.shape
        if slots <= have_slots and length <= capacity:
            return
        new_slots = have_slots if slots <= have_slots else max(slots, 2 * have_slots)
        new_capacity = capacity if length <= capacity else max(length, 2 * capacity, 256)
        self.keys = self._grown(self.keys, new_slots, new_capacity)
        self.values = self._grown(self.values, new_slots, new_capacity)

    def _grown(self, old: Tensor, slots: int, capacity: int) -> Tensor:
        new = old.new_zeros(self._layers, slots, capacity, *self._shape)
        new[:, : old.shape[1], : old.shape[2]] = old
        return new


class PagedCache:
    """Keys and values of every layer in pages of the native library's pool; a slot owns the pages it needs.

    Pages are taken when rows are to be written and given back with the sequence, so that memory follows the
    positions in use.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        library = native.library()
        self._page_positions: int = library.PAGE_POSITIONS
        self.pool = library.PagePool(layers, kv_heads, head_dim)
        self._lengths: dict[int, int] = {}
        self._owned: dict[int, list[int]] = {}
        self._free: list[int] = []
        self._tables = np.zeros((0, 0), dtype=np.int32)

    def length(self, slot: int) -> int:
        return self._lengths.get(slot, 0)

    def commit(self, slot: int, length: int) -> None:
        self._lengths[slot] = length

    def release(self, slot: int) -> None:
        self._lengths.pop(slot, None)
        self._free.extend(reversed(self._owned.pop(slot, [])))

    def pages(self, slots: Sequence[int], ends: Sequence[int]) -> NDArray[np.int32]:
        """The pages of each slot, [slots, most pages of one], with room for its positions up to ``ends``."""
        needed = [-(-end // self._page_positions) for end in ends]
        self._fit(max(slots, default=-1) + 1, max(needed, default=0))
        for slot, count in zip(slots, needed, strict=True):
            owned = self._owned.setdefault(slot, [])
            while len(owned) < count:
                page = self._take()
                self._tables[slot, len(owned)] = page
                owned.append(page)
        most = max((len(self._owned[slot]) for slot in slots), default=0)
        return np.ascontiguousarray(self._tables[list(slots), :most])

    def _take(self) -> int:
        if not self._free:
            existing: int = self.pool.pages
            self.pool.reserve(existing + 1)
            self._free.extend(range(self.pool.pages - 1, existing - 1, -1))
        return self._free.pop()

    def _fit(self, slots: int, pages: int) -> None:
        """Make the table large enough."""
        rows, columns = self._tables.shape
        if slots <= rows and pages <= columns:
            return
        more_rows = rows if slots <= rows else max(2 * rows, slots)
        more_columns = columns if pages <= columns else max(2 * columns, pages, 8)
        grown = np.zeros((more_rows, more_columns), dtype=np.int32)
        grown[:rows, :columns] = self._tables
        self._tables = grown
