"""The memory of running sequences: whether there is room for more of a sequence, and what need not be computed."""

from collections.abc import Sequence as Ids
from typing import Protocol

from foredraft.drafters.base import Drafter
from foredraft.engine.sequence import Sequence
from foredraft.models.cache import Cache, PagedCache
from foredraft.models.pages import PageTable, PageUse, page_contents


class Memory(Protocol):
    """What the scheduler asks before it gives a sequence a slot or more rows."""

    def admit(self, sequence: Sequence, slot: int, rows: int, spare: int) -> bool:
        """Whether ``slot`` can take a sequence with room for ``rows`` more of its tokens, ``spare`` pages left over for
        others; then what is known of it counts as computed."""

    def has_another(self, sequence: Sequence, spare: int) -> bool:
        """Whether there is room for all tokens of a running sequence once more, with ``spare`` pages left over."""

    def known_soon(self, sequence: Sequence, running: Ids[Sequence]) -> bool:
        """Whether a running sequence is about to compute what this one, which has no slot yet, need not then."""

    def reserve(self, sequence: Sequence, end: int) -> bool:
        """Make room for a sequence's positions up to ``end``, if there is any."""

    def room(self, sequence: Sequence) -> int:
        """The most positions that ``reserve`` can make room for."""

    def release(self, sequence: Sequence) -> None:
        """A sequence leaves its slot."""

    def computed(self, sequence: Sequence) -> None:
        """A sequence has new committed positions."""


class Unlimited:
    """Caches that grow as they need; nothing is kept."""

    def __init__(self, caches: Ids[Cache], drafter: Drafter | None) -> None:
        self._caches = caches
        self._drafter = drafter

    def admit(self, sequence: Sequence, slot: int, rows: int, spare: int) -> bool:
        return True

    def has_another(self, sequence: Sequence, spare: int) -> bool:
        return True

    def known_soon(self, sequence: Sequence, running: Ids[Sequence]) -> bool:
        return False

    def reserve(self, sequence: Sequence, end: int) -> bool:
        return True

    def room(self, sequence: Sequence) -> int:
        return 2**31

    def release(self, sequence: Sequence) -> None:
        for cache in self._caches:
            cache.release(sequence.slot)
        if self._drafter:
            self._drafter.release(sequence.slot)

    def computed(self, sequence: Sequence) -> None:
        pass


class Paged(Unlimited):
    """A table of pages with a limit, which the target's cache and the drafter's share. Full pages are kept by their
    content for later sequences that begin alike (automatic prefix caching); a page that is taken over is never
    written: what follows it begins on the next one.

    A drafter whose keys at a position depend on the next token too (``lookahead``) can take over a page only where the
    next page is known as well.

    queries, hits: tokens of admitted sequences, and those of them that were not computed again.
    """

    def __init__(self, caches: Ids[PagedCache], drafter: Drafter | None, table: PageTable, reuse: bool) -> None:
        super().__init__(caches[:1], drafter)
        self.table = table
        self._reuse = reuse
        self.queries = self.hits = 0
        self._lengths = caches
        self._lag = 1 if drafter and drafter.lookahead else 0
        for cache in caches:
            cache.share(table)

    @property
    def page_bytes(self) -> int:
        """Of a page in all caches together."""
        return sum(cache.page_bytes for cache in self._lengths)

    @property
    def use(self) -> PageUse:
        return self.table.use

    def admit(self, sequence: Sequence, slot: int, rows: int, spare: int) -> bool:
        table = self.table
        contents, most = self._reusable(sequence)
        lag = self._lag if self._drafts(sequence) else 0
        known = min(max(0, table.known(contents, complete=self._drafts(sequence)) - lag), most)
        begin = known * table.positions
        taken = contents[:known]
        end = min(begin + rows, len(sequence.tokens))
        if table.count(end) - known + table.unused(taken) + spare > table.available:
            return False
        table.adopt(slot, taken)
        table.ensure(slot, end)
        for cache in self._caches_of(sequence):
            cache.commit(slot, begin)
        if self._drafter and sequence.followed and begin:
            self._drafter.adopt(slot, sequence.tokens[:begin])
        sequence.computed = begin
        if not sequence.admitted_at:
            sequence.reused = begin
        sequence.described = known
        self.queries += len(sequence.tokens)
        self.hits += begin
        return True

    def has_another(self, sequence: Sequence, spare: int) -> bool:
        return bool(self.table.count(len(sequence.tokens)) + spare <= self.table.available)

    def known_soon(self, sequence: Sequence, running: Ids[Sequence]) -> bool:
        contents, most = self._reusable(sequence)
        drafts = self._drafts(sequence)
        known = self.table.known(contents, complete=drafts)
        return known < most and any(
            other.described <= known < len(other.contents) and other.contents[known] == contents[known]
            for other in running
            # Pages of a sequence that the drafter does not follow are of no use to one that it does.
            if not other.decoding and (self._drafts(other) or not drafts)
        )

    def _drafts(self, sequence: Sequence) -> bool:
        return self._drafter is not None and sequence.followed

    def _reusable(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Hashes of its full pages, and how many of those need not be computed if they are known."""
        if not self._reuse:
            return [], 0
        positions = self.table.positions
        sequence.contents = page_contents(sequence.tokens, positions, sequence.contents)
        # The last token is run in any case: the next one comes from its logits. The one before an anchor too, for what
        # it leaves to a drafter.
        return sequence.contents, (len(sequence.tokens) - (2 if sequence.num_output else 1)) // positions

    def reserve(self, sequence: Sequence, end: int) -> bool:
        if self.table.missing(sequence.slot, end) > self.table.available:
            return False
        self.table.ensure(sequence.slot, end)
        return True

    def room(self, sequence: Sequence) -> int:
        return int(self.table.owned(sequence.slot) + self.table.available) * self.table.positions

    def computed(self, sequence: Sequence) -> None:
        positions, slot = self.table.positions, sequence.slot
        if not self._reuse or sequence.computed // positions <= sequence.described:
            return
        full = min(cache.length(slot) for cache in self._caches_of(sequence)) // positions
        if full > sequence.described:
            sequence.contents = page_contents(sequence.tokens[: full * positions], positions, sequence.contents)
            for index in range(sequence.described, full):
                self.table.describe(slot, index, sequence.contents[index], sequence.followed)
            sequence.described = full

    def _caches_of(self, sequence: Sequence) -> Ids[PagedCache]:
        """Those that follow it; the target's comes first."""
        return self._lengths if sequence.followed else self._lengths[:1]
