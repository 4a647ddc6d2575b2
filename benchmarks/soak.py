"""Thousands of random requests on the real model, each compared with its answer when it runs alone.

python benchmarks/soak.py [--requests 2000] [--seed 0] [--quantization none,mxfp4] [--minutes 60] [--data-dir DIR]

A round makes an engine with a random method, N, batch size, prefill chunk and number of threads, and serves requests of
random prompts, lengths, temperatures and penalties that arrive at random; some are aborted. Then every request is run
alone, without speculation. Any token that differs is a mismatch, and the exit status is 1.
"""

import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from foredraft.benchmark.machine import environment
from foredraft.benchmark.workloads import BUNDLED, NAMES, load_workload, read_conversations
from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters import METHODS, load_drafter
from foredraft.engine.engine import Engine
from foredraft.engine.sequence import Sequence as Running
from foredraft.errors import UserError
from foredraft.models.loading import EMBEDDED, Quantization, Target, load_target
from foredraft.ops import native
from foredraft.sampling_params import SamplingParams

MAX_TOKENS = 64
MAX_PROMPT = 400


@dataclass(frozen=True)
class Request:
    """arrives, aborted: steps of the engine; None: it is left to finish."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    aborted: int | None


@dataclass(frozen=True)
class Round:
    """How the engine of one round is made. method: none or a drafting method."""

    method: str
    num_speculative_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    threads: int


@dataclass
class Tally:
    """What was compared for one quantization. methods: requests of each. mismatches: what it takes to repeat them."""

    quantization: Quantization
    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    compared_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    rounds: int = 0
    methods: dict[str, int] = field(default_factory=dict)
    mismatches: list[dict[str, Any]] = field(default_factory=list)


def main(
    model: Annotated[str, typer.Argument(help="Target with a drafter of its own.")] = EMBEDDED,
    requests: Annotated[int, typer.Option(help="Requests to compare, over all quantizations.")] = 2000,
    seed: Annotated[int, typer.Option(help="What all random choices follow from.")] = 0,
    quantization: Annotated[str, typer.Option(help="Of the target, one or several.")] = "none,mxfp4",
    minutes: Annotated[float, typer.Option(help="Begin no round after so many minutes.")] = 60.0,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="FOREDRAFT_DATA", help="Folder with DATASET.jsonl files; else our prompts.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
) -> None:
    """Compare requests in random company with the same requests alone."""
    console = Console()
    began = time.perf_counter()
    chosen = quantization.split(",")
    if unknown := sorted(set(chosen) - set(get_args(Quantization))):
        raise UserError(f"--quantization names {', '.join(unknown)}; known: {', '.join(get_args(Quantization))}")
    if missing := native.unavailable():
        raise UserError(f"only the native kernels promise exactness: {missing}")
    rng = random.Random(seed)
    targets = {name: load_target(model, quantization=name, kernels="native") for name in chosen}  # type: ignore[arg-type]
    prompts = tokenized(next(iter(targets.values())), data_dir)
    tallies = [Tally(name) for name in chosen]  # type: ignore[arg-type]
    done = 0
    with Progress(console=console) as progress:
        task = progress.add_task("requests", total=requests)
        while done < requests and time.perf_counter() - began < 60 * minutes:
            tally = min(tallies, key=lambda each: each.requests)
            count = min(rng.randint(1, 32), requests - done)
            soak_round(rng, targets[tally.quantization], [random_request(rng, prompts) for _ in range(count)], tally)
            done += count
            progress.update(task, completed=done, description=f"requests, {mismatches(tallies)} mismatches")
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        "isa": native.isa(),
        "model": model,
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        "requests": done,
        "mismatches": mismatches(tallies),
        "tallies": [asdict(tally) for tally in tallies],
    }
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")
    report(console, tallies, f"{result['command']}: {result['seconds']} s, {result['isa']}")
    raise typer.Exit(1 if mismatches(tallies) or not done else 0)


def tokenized(target: Target, data_dir: Path | None) -> list[list[int]]:
    """The conversations' first turns as chat prompts."""
    prompts = []
    for name in NAMES:
        conversations = (
            read_conversations(BUNDLED / f"{name}.jsonl")
            if data_dir is None
            else load_workload(name, data_dir, 1000).conversations
        )
        prompts += [target.tokenizer.encode_chat([{"role": "user", "content": turns[0]}]) for turns in conversations]
    return prompts


def random_request(rng: random.Random, prompts: Sequence[list[int]]) -> Request:
    """A whole prompt or the beginning of one; mostly without penalties, often greedy."""
    prompt = rng.choice(prompts)[:MAX_PROMPT]
    if rng.random() < 0.3:
        prompt = prompt[: rng.randint(1, len(prompt))]
    penalised = rng.random() < 0.25
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.2]),
        seed=rng.randrange(2**31),
        max_tokens=rng.randint(1, MAX_TOKENS),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        top_k=rng.choice([0, 0, 40]),
        repetition_penalty=rng.choice([1.0, 1.2]) if penalised else 1.0,
        presence_penalty=rng.choice([0.0, 0.8]) if penalised else 0.0,
        frequency_penalty=rng.choice([0.0, 0.5]) if penalised else 0.0,
        ignore_eos=rng.random() < 0.3,
    )
    arrives = rng.randint(0, 40)
    return Request(prompt, params, arrives, arrives + rng.randint(1, 30) if rng.random() < 0.15 else None)


def random_round(rng: random.Random, most_drafted: int) -> Round:
    method = rng.choice(["none", *list(METHODS) * 3])
    return Round(
        method=method,
        num_speculative_tokens=0 if method == "none" else rng.randint(1, most_drafted),
        max_num_seqs=rng.choice([1, 2, 3, 5, 8, 12, 16]),
        max_num_batched_tokens=rng.choice([1, 7, 33, 100, 512, 2048]),
        # More threads than processors are tested in the suite: here they would take most of the time.
        threads=rng.randint(1, native.library().available_threads()),
    )


def soak_round(rng: random.Random, target: Target, requests: Sequence[Request], tally: Tally) -> None:
    """Serve the requests together, then each alone, and count."""
    drafter = load_drafter(SpeculativeConfig(next(iter(METHODS))), target)
    made = random_round(rng, drafter.max_tokens)
    drafted = made.num_speculative_tokens
    together = Engine(
        target.model,
        EngineConfig(max_num_seqs=made.max_num_seqs, max_num_batched_tokens=made.max_num_batched_tokens),
        eos_token_ids=target.tokenizer.eos_token_ids,
        drafter=drafter if drafted else None,
        num_speculative_tokens=drafted,
    )
    with native.threads(made.threads):
        served = serve(together, requests)
    tally.rounds += 1
    for request, sequence in zip(requests, served, strict=True):
        engine = Engine(target.model, EngineConfig(), eos_token_ids=target.tokenizer.eos_token_ids)
        alone = engine.add(request.prompt, request.params)[0]
        enough = sequence.num_output if sequence.finish_reason == "abort" else MAX_TOKENS
        while engine.has_work and alone.num_output < enough:
            engine.step()
        count(tally, made, request, sequence, alone)


def serve(engine: Engine, requests: Sequence[Request]) -> list[Running]:
    waiting = sorted(range(len(requests)), key=lambda index: requests[index].arrives)
    served: dict[int, Running] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and (requests[waiting[0]].arrives <= step or not engine.has_work):
            index = waiting.pop(0)
            served[index] = engine.add(requests[index].prompt, requests[index].params)[0]
        engine.step()
        step += 1
        for index, sequence in served.items():
            aborted = requests[index].aborted
            if aborted is not None and aborted <= step:
                engine.abort(sequence)
    return [served[index] for index in range(len(requests))]


def count(tally: Tally, made: Round, request: Request, sequence: Running, alone: Running) -> None:
    """Add one request's comparison; of an aborted one, what it had until then."""
    aborted = sequence.finish_reason == "abort"
    tally.requests += 1
    tally.aborted += aborted
    tally.prompt_tokens += len(request.prompt)
    tally.output_tokens += sequence.num_output
    tally.draft_tokens += sum(sequence.acceptance.proposed)
    tally.accepted_draft_tokens += sum(sequence.acceptance.kept)
    tally.methods[made.method] = tally.methods.get(made.method, 0) + 1
    found, expected = sequence.output, alone.output
    if aborted:
        expected = expected[: len(found)]
    tally.compared_tokens += len(expected)
    if found != expected or (not aborted and sequence.finish_reason != alone.finish_reason):
        tally.mismatches.append(
            {
                "round": asdict(made),
                "request": asdict(request),
                "found": found,
                "expected": expected,
                "finish_reasons": [sequence.finish_reason, alone.finish_reason],
            }
        )


def mismatches(tallies: Sequence[Tally]) -> int:
    return sum(len(tally.mismatches) for tally in tallies)


def report(console: Console, tallies: Sequence[Tally], caption: str) -> None:
    table = Table(caption=caption)
    columns = ("quantization", "requests", "aborted", "tokens", "drafted", "accepted", "mismatches")
    for column in columns:
        table.add_column(column, justify="right")
    for tally in tallies:
        table.add_row(
            tally.quantization,
            *(f"{number:,}" for number in (tally.requests, tally.aborted, tally.compared_tokens)),
            *(f"{number:,}" for number in (tally.draft_tokens, tally.accepted_draft_tokens, len(tally.mismatches))),
        )
    console.print(table)


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        print(f"soak: {error}", file=sys.stderr)
        sys.exit(2)
