"""Who owns which pages of the key/value caches, and which content may be taken over.

A page is a number: the same place in the pool of every cache that shares the table, the target's and its drafter's.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


class OutOfPages(RuntimeError):
    """No page is free and the limit is reached."""


@dataclass
class _Page:
    """users: slots that own it. content: the hash of the tokens up to its end, once all its positions are computed.
    complete: in all caches, not in the target's alone."""

    users: int = 0
    content: bytes | None = None
    complete: bool = False


@dataclass(frozen=True)
class PageUse:
    """Pages owned by sequences, kept for their content alone, and the most there may be (None: no limit)."""

    used: int
    cached: int
    limit: int | None


@dataclass
class PageTable:
    """Pages of ``positions`` positions each, at most ``limit`` of them.

    Pages whose content is known stay when their sequence leaves, until others need the room; the one whose last owner
    left first goes first.
    """

    positions: int
    limit: int | None = None
    total: int = 0
    _pages: list[_Page] = field(default_factory=list)
    _free: list[int] = field(default_factory=list)
    _kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _by_content: dict[bytes, int] = field(default_factory=dict)
    _owned: dict[int, list[int]] = field(default_factory=dict)
    _table: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int32))

    def count(self, end: int) -> int:
        """Pages that ``end`` positions take."""
        return -(-end // self.positions)

    @property
    def use(self) -> PageUse:
        return PageUse(self.total - len(self._free) - len(self._kept), len(self._kept), self.limit)

    @property
    def available(self) -> float:
        """Pages that can still be taken."""
        if self.limit is None:
            return float("inf")
        return self.limit - self.total + len(self._free) + len(self._kept)

    def owned(self, slot: int) -> int:
        """Pages of a slot."""
        return len(self._owned.get(slot, ()))

    def missing(self, slot: int, end: int) -> int:
        """Pages that a slot still lacks for its positions up to ``end``."""
        return max(0, self.count(end) - self.owned(slot))

    def ensure(self, slot: int, end: int) -> None:
        """Give a slot pages for its positions up to ``end``. Raises OutOfPages, with nothing changed."""
        missing = self.missing(slot, end)
        if missing > self.available:
            raise OutOfPages(f"{missing} pages are needed, {self.available} of {self.limit} are left")
        owned = self._owned.setdefault(slot, [])
        for _ in range(missing):
            self._own(slot, owned, self._take())

    def rows(self, slots: Sequence[int]) -> NDArray[np.int32]:
        """The pages of each slot, [slots, most pages of one]."""
        most = max((len(self._owned.get(slot, ())) for slot in slots), default=0)
        self._fit(max(slots, default=-1) + 1, most)
        return np.ascontiguousarray(self._table[list(slots), :most])

    def release(self, slot: int) -> None:
        """Take a slot's pages back."""
        # The beginning of a text is of use to more texts than its end: it is to go last.
        for page in reversed(self._owned.pop(slot, [])):
            state = self._pages[page]
            state.users -= 1
            if state.users:
                continue
            if state.content is None:
                self._free.append(page)
            else:
                self._kept[page] = None

    def adopt(self, slot: int, contents: Sequence[bytes]) -> None:
        """Give a slot that owns nothing the pages with these contents, all of which must be ``known``."""
        owned = self._owned.setdefault(slot, [])
        if owned:
            raise ValueError(f"slot {slot} owns pages already")
        for content in contents:
            page = self._by_content[content]
            self._kept.pop(page, None)
            self._own(slot, owned, page)

    def known(self, contents: Sequence[bytes], complete: bool) -> int:
        """How many of these contents, from the first on, are there; complete: in all caches."""
        found = 0
        while found < len(contents):
            page = self._by_content.get(contents[found])
            if page is None or (complete and not self._pages[page].complete):
                break
            found += 1
        return found

    def unused(self, contents: Sequence[bytes]) -> int:
        """How many of these ``known`` contents no slot owns: taking them over takes them from what is available."""
        return sum(self._by_content[content] in self._kept for content in contents)

    def describe(self, slot: int, index: int, content: bytes, complete: bool) -> None:
        """All positions of a slot's page ``index`` are computed; this is what they hold.

        A page that is complete takes the place of one with the same content that is not.
        """
        page = self._owned[slot][index]
        state, known = self._pages[page], self._by_content.get(content)
        if known == page or state.content is not None:
            return
        if known is not None:
            if not complete or self._pages[known].complete:
                return
            self._pages[known].content = None
            if known in self._kept:
                del self._kept[known]
                self._free.append(known)
        state.content, state.complete = content, complete
        self._by_content[content] = page

    def _own(self, slot: int, owned: list[int], page: int) -> None:
        self._fit(slot + 1, len(owned) + 1)
        self._table[slot, len(owned)] = page
        self._pages[page].users += 1
        owned.append(page)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if self.limit is None or self.total < self.limit:
            self._pages.append(_Page())
            self.total += 1
            return self.total - 1
        page, _ = self._kept.popitem(last=False)
        content, self._pages[page].content = self._pages[page].content, None
        assert content is not None
        del self._by_content[content]
        return page

    def _fit(self, slots: int, pages: int) -> None:
        rows, columns = self._table.shape
        if slots <= rows and pages <= columns:
            return
        more_rows = rows if slots <= rows else max(2 * rows, slots)
        more_columns = columns if pages <= columns else max(2 * columns, pages, 8)
        grown = np.zeros((more_rows, more_columns), dtype=np.int32)
        grown[:rows, :columns] = self._table
        self._table = grown


def page_contents(tokens: Sequence[int], positions: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """The hash of each full page of ``tokens``, each over the text from its beginning (BLAKE2b, 128 bits).

    known: those of the first pages, which need not be computed again.
    """
    contents = list(known)
    for index in range(len(contents), len(tokens) // positions):
        own = np.array(tokens[index * positions : (index + 1) * positions], dtype=np.int64).tobytes()
        before = contents[-1] if contents else b""
        contents.append(hashlib.blake2b(before + own, digest_size=16).digest())
    return contents
