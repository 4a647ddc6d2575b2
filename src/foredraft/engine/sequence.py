"""One running sequence: its tokens, when it ends, its text, and what speculation did for it."""

import sys
from bisect import bisect_right
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from foredraft.engine.grammar import Constraint
from foredraft.engine.sampler import History, TokenLogprobs
from foredraft.sampling_params import SamplingParams
from foredraft.tokenizer import Detokenizer, Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass
class Acceptance:
    """Counts of one sequence's rounds.

    rounds: draft-and-verify cycles (plain decoding: steps). committed: tokens they committed. proposed, kept:
    per position k, rounds that sent a draft token at k to verification, and rounds that kept it.
    """

    rounds: int = 0
    committed: int = 0
    proposed: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def record(self, proposed: int, kept: int, committed: int) -> None:
        self.rounds += 1
        self.committed += committed
        for counts, reached in ((self.proposed, proposed), (self.kept, kept)):
            counts.extend([0] * (proposed - len(counts)))
            for position in range(reached):
                counts[position] += 1

    def add(self, other: "Acceptance") -> None:
        self.rounds += other.rounds
        self.committed += other.committed
        for mine, theirs in ((self.proposed, other.proposed), (self.kept, other.kept)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count

    @property
    def length(self) -> float:
        """Acceptance length τ: tokens committed per round, bonus token included."""
        return self.committed / self.rounds if self.rounds else 1.0

    @property
    def rates(self) -> list[float]:
        """Acceptance rate at each position."""
        return [k / p if p else 0.0 for p, k in zip(self.proposed, self.kept, strict=True)]


@dataclass(frozen=True)
class RoundTrace:
    """A pass that gave a sequence ``committed`` tokens, the first ``accepted`` of them from the ``draft`` that it
    verified."""

    committed: int
    accepted: int
    draft: tuple[int, ...]


class Sequence:
    """A prompt and what has been generated after it.

    slot: its place in the caches while it runs, -1 otherwise. computed: positions whose state the caches hold.
    origins: of each output token, the block position k >= 1 of the accepted draft token, or 0 for a token of the
    target itself. draft_limit: the most draft tokens of a round. followed: whether the drafter follows it;
    what it does not follow decodes plainly. error: why it cannot go on, with the finish reason
    "error". rounds: None; a list that somebody puts there gets every round. arrived, admitted_at, first_token_at,
    finished_at: by ``perf_counter``.

    For ``Memory``: contents: hashes of full pages of its tokens. described: pages known to others. reused: positions
    that need not be computed when it was first admitted.
    """

    def __init__(
        self,
        prompt: Ids[int],
        params: SamplingParams,
        seed: int,
        max_len: int,
        eos_token_ids: Ids[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self.params = params
        self.seed = seed
        self.slot = -1
        self.computed = 0
        self.draft_limit = sys.maxsize
        self.followed = True
        self.contents: list[bytes] = []
        self.described = self.reused = 0
        room = max_len - len(prompt)
        self.max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        self.stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            self.stop_ids |= frozenset(eos_token_ids)
        self.history = History.from_prompt(prompt)
        self.constraint: Constraint | None = None
        self.origins: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.acceptance = Acceptance()
        self.rounds: list[RoundTrace] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.text = ""
        self._text_ends: list[int] = []
        self.arrived = perf_counter()
        self.admitted_at = self.first_token_at = self.finished_at = 0.0
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens) if tokenizer else None
        self._stops = tuple(params.stop or ())
        self._longest_stop = max(map(len, self._stops), default=0)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def decoding(self) -> bool:
        """Whether only the anchor, the last token, is still to be run through the target."""
        return self.computed == len(self.tokens) - 1 and self.num_output > 0

    @property
    def room(self) -> int:
        """How many more tokens may be generated."""
        return self.max_tokens - self.num_output

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def settled_text(self) -> int:
        """How many characters of ``text`` no stop string can take back any more."""
        if self.finished:
            return len(self.text)
        return max(0, len(self.text) - max(0, self._longest_stop - 1))

    def pieces(self, begin: int, end: int) -> list[tuple[str, int]]:
        """``text[begin:end]`` cut where its tokens meet, each piece with its token's origin."""
        found = []
        index = bisect_right(self._text_ends, begin)
        while begin < end:
            until = min(end, self._text_ends[index])
            if until > begin:
                found.append((self.text[begin:until], self.origins[index]))
            begin = max(begin, until)
            index += 1
        return found

    def append(self, tokens: Ids[int], accepted: int) -> int:
        """Commit tokens of a round until one ends the sequence; the first ``accepted`` come from the drafter.

        Returns how many were committed.
        """
        if not self.num_output:
            self.first_token_at = perf_counter()
        for index, token in enumerate(tokens):
            self.tokens.append(token)
            self.origins.append(index + 1 if index < accepted else 0)
            self.history.commit((token,))
            if self.constraint:
                self.constraint.commit(token)
            self._end_after(token)
            self._text_ends.append(len(self.text))
            if self.finished:
                return index + 1
        return len(tokens)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.finished_at = perf_counter()

    def fail(self, error: str) -> None:
        """It cannot go on; what it has so far stays."""
        self.error = error
        self.finish("error")

    def _end_after(self, token: int) -> None:
        stopped = token in self.stop_ids
        visible = not stopped or self.params.include_stop_str_in_output
        piece = self._detokenizer.push(token) if self._detokenizer and visible else ""
        full = self.room == 0
        if self._detokenizer and (stopped or full):
            piece += self._detokenizer.finish()
        self.text += piece
        if self._stops and piece and self.num_output > self.params.min_tokens and self._stop_string(piece):
            return
        if stopped:
            self.finish("stop", token if token in (self.params.stop_token_ids or ()) else None)
        elif full:
            self.finish("length")

    def _stop_string(self, piece: str) -> bool:
        """End at the earliest stop string that the newest ``piece`` of text completes."""
        before = len(self.text) - len(piece)
        found = [(self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stops]
        hits = [(place, stop) for place, stop in found if place >= 0]
        if not hits:
            return False
        place, stop = min(hits, key=lambda hit: hit[0])
        kept = place + len(stop) if self.params.include_stop_str_in_output else place
        self.text = self.text[:kept]
        self.finish("stop", stop)
        return True
