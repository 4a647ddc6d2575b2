"""What a benchmark found: from measured answers to the figures of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from statistics import median
from typing import Any

import numpy as np

from foredraft.config import NumSpeculativeTokens
from foredraft.engine.sequence import Acceptance
from foredraft.engine.timings import PHASES, Phase


@dataclass(frozen=True)
class Answer:
    """One measured answer.

    ttft: seconds from the request to the first token. decode_seconds: from the first token to the last.
    token_ids: None where a server does not tell.
    """

    num_tokens: int
    ttft: float
    decode_seconds: float
    token_ids: tuple[int, ...] | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for an answer of a single token."""
        return self.decode_seconds / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass
class PhaseTimes:
    """Seconds that an engine spent in its phases.

    seconds: in all. rounds: in each round without prefill.
    """

    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    rounds: dict[Phase, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def note(self, spent: Mapping[Phase, float], prefill: bool) -> None:
        """Add what one step took."""
        for phase, seconds in spent.items():
            self.seconds[phase] += seconds
            if not prefill:
                self.rounds[phase].append(seconds)

    def round_ms(self, phase: Phase) -> float | None:
        """The median over rounds."""
        return 1000 * median(self.rounds[phase]) if self.rounds[phase] else None

    @property
    def draft_share(self) -> float | None:
        """What the drafter, proposing and observing, takes of the rounds' time in phases."""
        sums = {phase: sum(seconds) for phase, seconds in self.rounds.items()}
        whole = sum(sums.values())
        return 1 - sums["verify"] / whole if whole else None


@dataclass
class Measurement:
    """All that one configuration did on one workload at one concurrency.

    seconds: wall time of its slices. conversations: the answers of each, in the workload's order. acceptance,
    times: None where a server does not tell.
    """

    seconds: float = 0.0
    conversations: list[tuple[Answer, ...]] = field(default_factory=list)
    acceptance: Acceptance | None = None
    times: PhaseTimes | None = None

    @property
    def answers(self) -> list[Answer]:
        return [answer for conversation in self.conversations for answer in conversation]

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.num_tokens for answer in self.answers) / self.seconds


@dataclass(frozen=True)
class Condition:
    """What was run. base_url: the server that was measured, None for this process."""

    model: str
    dtype: str | None
    quantization: str | None
    method: str
    drafter: str | None
    num_speculative_tokens: NumSpeculativeTokens | None
    acceptance_rule: str | None
    dataset: str
    dataset_source: str
    concurrency: int
    max_tokens: int
    temperature: float
    seed: int
    base_url: str | None = None

    @property
    def keeps_tokens(self) -> bool:
        """Whether the output ought to be plain decoding's: rule `rejection` keeps the distribution only."""
        return self.acceptance_rule != "rejection" or self.temperature == 0


@dataclass(frozen=True)
class Percentiles:
    """None where there was nothing to measure."""

    p50: float | None
    p95: float | None


@dataclass(frozen=True)
class Difference:
    """Where a conversation first left plain decoding's: 0-based prompt, turn and output token."""

    prompt: int
    turn: int
    token: int


@dataclass(frozen=True)
class Run:
    """A condition and its figures; None where they could not be had.

    num_prompts: conversations. turns: answers in all. identical_to_plain: whether every answer has the token ids
    of plain decoding in the same benchmark. num_different: conversations that do not.
    draft_seconds, verify_seconds, observe_seconds: the engine's phases (see ``Phase``), prefill included. draft_ms,
    verify_ms, observe_ms: medians over rounds without prefill. draft_share: of those rounds' time in the three
    phases, what the drafter takes, proposing and observing.
    """

    condition: Condition
    num_prompts: int
    turns: int
    output_tokens: int
    seconds: float
    output_tokens_per_second: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    rounds: int | None
    acceptance_length: float | None
    acceptance_rate_per_position: list[float] | None
    speedup: float | None
    identical_to_plain: bool | None
    num_different: int | None
    differences: list[Difference] | None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    observe_seconds: float | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None
    observe_ms: float | None = None
    draft_share: float | None = None

    def as_json(self) -> dict[str, Any]:
        """One flat object with the names of DESIGN.md's contract."""
        flat = asdict(self)
        condition: dict[str, Any] = flat.pop("condition")
        return condition | flat


def summarize(condition: Condition, measured: Measurement, plain: Measurement | None) -> Run:
    """The figures of a measurement; ``plain`` is plain decoding's from the same benchmark, if it ran."""
    answers = measured.answers
    acceptance, times = measured.acceptance, measured.times
    differences = find_differences(plain, measured) if plain and condition.keeps_tokens else None
    return Run(
        condition=condition,
        num_prompts=len(measured.conversations),
        turns=len(answers),
        output_tokens=sum(answer.num_tokens for answer in answers),
        seconds=measured.seconds,
        output_tokens_per_second=measured.tokens_per_second,
        ttft_ms=percentiles_ms([answer.ttft for answer in answers]),
        tpot_ms=percentiles_ms([answer.tpot for answer in answers if answer.tpot is not None]),
        rounds=acceptance.rounds if acceptance else None,
        acceptance_length=acceptance.length if acceptance else None,
        acceptance_rate_per_position=acceptance.rates if acceptance else None,
        speedup=measured.tokens_per_second / plain.tokens_per_second if plain else None,
        identical_to_plain=None if differences is None else not differences,
        num_different=None if differences is None else len(differences),
        differences=differences,
        draft_seconds=times.seconds["draft"] if times else None,
        verify_seconds=times.seconds["verify"] if times else None,
        observe_seconds=times.seconds["observe"] if times else None,
        draft_ms=times.round_ms("draft") if times else None,
        verify_ms=times.round_ms("verify") if times else None,
        observe_ms=times.round_ms("observe") if times else None,
        draft_share=times.draft_share if times else None,
    )


def percentiles_ms(seconds: Sequence[float]) -> Percentiles:
    """p50 and p95 in milliseconds, interpolated linearly."""
    if not seconds:
        return Percentiles(None, None)
    p50, p95 = np.percentile(np.array(seconds) * 1000, [50, 95])
    return Percentiles(float(p50), float(p95))


def find_differences(plain: Measurement, other: Measurement) -> list[Difference]:
    """The first difference of each conversation that has one.

    What follows it in the same conversation answers another prompt, so it is not compared.
    """
    differences = []
    for prompt, pair in enumerate(zip(plain.conversations, other.conversations, strict=True)):
        for turn, (expected, found) in enumerate(zip(*pair, strict=True)):
            if expected.token_ids != found.token_ids:
                token = first_difference(expected.token_ids or (), found.token_ids or ())
                differences.append(Difference(prompt, turn, token))
                break
    return differences


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int:
    """Index of the first token that differs; the length of the shorter one if it begins the other."""
    pairs = enumerate(zip_longest(expected, found))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), len(expected))
