"""What a benchmark found: from measured answers to the figures of a run and their JSON file."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.engine.sequence import Acceptance
from foredraft.errors import UserError


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
class Measurement:
    """All that one configuration did on one workload at one concurrency.

    seconds: wall time of its slices. conversations: the answers of each, in the workload's order. acceptance:
    None where a server does not tell.
    """

    seconds: float = 0.0
    conversations: list[tuple[Answer, ...]] = field(default_factory=list)
    acceptance: Acceptance | None = None

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
    num_speculative_tokens: int | None
    acceptance_rule: str | None
    dataset: str
    dataset_source: str
    concurrency: int
    max_tokens: int
    temperature: float
    seed: int
    base_url: str | None = None


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

    def as_json(self) -> dict[str, Any]:
        """One flat object with the names of DESIGN.md's contract."""
        flat = asdict(self)
        condition: dict[str, Any] = flat.pop("condition")
        return condition | flat


def summarize(condition: Condition, measured: Measurement, plain: Measurement | None) -> Run:
    """The figures of a measurement; ``plain`` is plain decoding's from the same benchmark, if it ran."""
    answers = measured.answers
    acceptance = measured.acceptance
    differences = None if plain is None else find_differences(plain, measured)
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


def check_output(path: Path) -> None:
    """Raise UserError, before any work, where results cannot be written to ``path``."""
    if path.is_dir():
        raise UserError(f"--output {path} is a folder; give a file name such as {path / 'bench.json'}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"--output {path}: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output {path}: the folder {folder} is not writable")


def write_results(path: Path, environment: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Write a results file at once, so that a reader, or a crash, never meets half of one."""
    content = {"environment": dict(environment), "runs": [run.as_json() for run in runs]}
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
