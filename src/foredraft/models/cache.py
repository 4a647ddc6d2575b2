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
from foredraft.models.pages import PageTable
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
    positions in use. Caches whose slots hold the same sequences can ``share`` a table of pages.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        library = native.library()
        self.pool = library.PagePool(layers, kv_heads, head_dim)
        self.table = PageTable(library.PAGE_POSITIONS)
        self._lengths: dict[int, int] = {}

    @property
    def page_bytes(self) -> int:
        size: int = self.pool.page_bytes
        return size

    def share(self, table: PageTable) -> None:
        """Take pages from ``table``, which other caches use as well; only while no slot is in use."""
        if self._lengths or self.table.use.used:
            raise RuntimeError("the cache is in use; its pages cannot change")
        self.table = table

    def length(self, slot: int) -> int:
        return self._lengths.get(slot, 0)

    def commit(self, slot: int, length: int) -> None:
        self._lengths[slot] = length

    def release(self, slot: int) -> None:
        self._lengths.pop(slot, None)
        self.table.release(slot)

    def pages(self, slots: Sequence[int], ends: Sequence[int]) -> NDArray[np.int32]:
        """The pages of each slot, [slots, most pages of one], with room for its positions up to ``ends``."""
        for slot, end in zip(slots, ends, strict=True):
            self.table.ensure(slot, end)
        if self.table.total > self.pool.pages:
            self.pool.reserve(self.table.total)
        return self.table.rows(slots)
