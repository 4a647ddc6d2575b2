"""Runs the same drafters in foredraft, vLLM and llama.cpp on the same prompts, and compares what is accepted.

python benchmarks/crosscheck --work DIR [--vllm PYTHON] [--llama BIN_DIR] [--data-dir DIR]
    [--methods eagle3,dflash,dspark] [-N 3,7] [--drafter METHOD=DIR] [--output F.json]

Greedy, one request at a time, the target in bfloat16. Each engine gets the same token ids. Where the texts of two
engines part, because their sums round differently, so does what there is to accept; so figures come twice. First over
the answers of each. Then foredraft's drafter is put into the rounds of the other engine's answers, on the text that
it wrote: there both propose from the same prefix, round by round. Exit status 1: in these rounds some engine
disagrees by more than 5 % in acceptance length or 0.03 in the rate of a position.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from compare import Answer, Difference, Figures, difference, figures, in_full_rounds
from rich.console import Console
from rich.table import Table

from foredraft.benchmark.machine import environment
from foredraft.benchmark.workloads import NAMES, load_workload
from foredraft.drafters.export import LAYOUTS, drafter_folder, load_portable, write_portable
from foredraft.drafters.export_gguf import write_gguf
from foredraft.errors import UserError
from foredraft.models.loading import EMBEDDED, Target, embedded_file, load_target

PEERS = Path(__file__).parent.parent / "peers"
sys.path.append(str(PEERS))
from engines import Command, EngineError, LlamaServer, Worker  # noqa: E402
from sections import vllm_environment  # noqa: E402
from weights import prepare  # noqa: E402

DFLASH = drafter_folder(EMBEDDED, "dflash", None)


@dataclass(frozen=True)
class Drafter:
    """One drafter as each engine loads it."""

    method: str
    folder: Path
    for_vllm: Path
    for_llama: Path


@dataclass(frozen=True)
class Check:
    """What all runs share. llama, vllm: the folder of llama.cpp's programs, vLLM's Python; None if absent."""

    work: Path
    target_folder: Path
    target_gguf: Path
    vllm: Path | None
    llama: Path | None
    prompts: list[list[int]]
    max_tokens: int
    threads: int
    repair_vllm: bool


def main(
    work: Annotated[
        Path, typer.Option(help="Folder for weights and logs; kept and used again (that of peers will do).")
    ],
    vllm: Annotated[Path | None, typer.Option(help="Python of an environment that has vLLM for CPU.")] = None,
    llama: Annotated[Path | None, typer.Option(help="Folder with llama-server and the rest.")] = None,
    methods: Annotated[str, typer.Option(help=f"Some of {', '.join(LAYOUTS)}.")] = "eagle3,dflash,dspark",
    drafter: Annotated[
        list[str] | None, typer.Option(help="METHOD=DIR, repeatable. \\[default: those that ship]", show_default=False)
    ] = None,
    num_speculative_tokens: Annotated[
        str, typer.Option("--num-speculative-tokens", "-N", help="Draft tokens a round, each run.")
    ] = "3,7",
    num_prompts: Annotated[int, typer.Option(help="First turns in all, spread over the workloads.")] = 24,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 192,
    repair_vllm: Annotated[
        bool, typer.Option(help="Let vLLM's DFlash and DSpark normalise keys with each layer's own weights.")
    ] = True,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="FOREDRAFT_DATA", help="Folder with the workloads' DATASET.jsonl files.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
) -> None:
    """Compare acceptance in foredraft, vLLM and llama.cpp."""
    console = Console()
    chosen = methods.split(",")
    unknown = sorted({*chosen} - {*LAYOUTS})
    if unknown:
        raise UserError(f"--methods names {', '.join(unknown)}; known: {', '.join(LAYOUTS)}")
    given = dict(_named(each) for each in drafter or [])
    counts = [int(each) for each in num_speculative_tokens.split(",")]
    work.mkdir(parents=True, exist_ok=True)
    weights = prepare(work, None, DFLASH)
    target = load_target(EMBEDDED, torch.bfloat16, kernels="pytorch")
    drafters = [_exported(work, method, given.get(method), target) for method in chosen]
    check = Check(
        work=work,
        target_folder=weights.folder,
        target_gguf=weights.ggufs["BF16"],
        vllm=vllm and vllm.absolute(),
        llama=llama and llama.absolute(),
        prompts=_prompts(target, data_dir, num_prompts),
        max_tokens=max_tokens,
        threads=int(environment()["threads"]),
        repair_vllm=repair_vllm,
    )
    del target
    results = []
    for each in drafters:
        for count in counts:
            with console.status(f"{each.method}, N = {count}") as status:
                results.append(_result(check, each, count, status.update))
            console.print(_table(results[-1]))
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        found = {"command": sys.argv, "environment": environment(), "results": results}
        output.write_text(json.dumps(found, indent=1) + "\n")
    if not all(engine["agrees"] for result in results for engine in result["others"].values()):
        raise typer.Exit(1)


def _named(option: str) -> tuple[str, str]:
    method, equals, folder = option.partition("=")
    if not equals or method not in LAYOUTS:
        raise UserError(f"--drafter is {option!r}, expected METHOD=DIR with one of {', '.join(LAYOUTS)}")
    return method, folder


def _exported(work: Path, method: str, given: str | None, target: Target) -> Drafter:
    folder = drafter_folder(EMBEDDED, method, given)
    portable = load_portable(method, folder, target.model)
    for_vllm, for_llama = work / f"crosscheck-{method}", work / f"crosscheck-{method}.gguf"
    write_portable(portable, LAYOUTS[method][0], for_vllm, EMBEDDED)
    write_gguf(portable, embedded_file(), for_llama)
    return Drafter(method, folder, for_vllm.absolute(), for_llama)


def _prompts(target: Target, data_dir: Path | None, count: int) -> list[list[int]]:
    """Token ids of first turns, the workloads in turn."""
    loaded = [load_workload(name, data_dir, -(-count // len(NAMES))) for name in NAMES]
    turns = [
        conversation[0]
        for conversation in chain.from_iterable(zip_longest(*(each.conversations for each in loaded)))
        if conversation
    ]
    return [target.tokenizer.encode_chat([{"role": "user", "content": turn}]) for turn in turns[:count]]


Run = tuple[list[Answer], dict[str, Any]]
"""An engine's answers, and what it says of itself."""


def _result(check: Check, drafter: Drafter, count: int, told: Callable[[str], None]) -> dict[str, Any]:
    """Runs the engines one after the other."""
    engines = {"vLLM": (check.vllm, _vllm), "llama.cpp": (check.llama, _llama)}
    others: dict[str, Any] = {}
    with _foredraft(check, drafter, count) as worker:
        told(f"{drafter.method}, N = {count}: foredraft")
        asked = {"prompts": check.prompts, "engine": "drafting"}
        found = worker.ask("generate_rounds", max_tokens=check.max_tokens, **asked)
        ours = [Answer(**each) for each in found["answers"]]
        for name, (present, run) in engines.items():
            if present:
                told(f"{drafter.method}, N = {count}: {name}")
                answers, counters = run(check, drafter, count)
                told(f"{drafter.method}, N = {count}: foredraft in the rounds of {name}")
                replayed = worker.ask("replay", answers=[asdict(each) for each in answers], count=count, **asked)[
                    "kept"
                ]
                others[name] = _compared(count, ours, answers, replayed) | {"counters": counters}
    return {
        "method": drafter.method,
        "drafter": str(drafter.folder),
        "num_speculative_tokens": count,
        "repair_vllm": check.repair_vllm,
        "num_prompts": len(check.prompts),
        "max_tokens": check.max_tokens,
        "foredraft": _own(ours, count).as_json(),
        "others": others,
    }


@contextmanager
def _foredraft(check: Check, drafter: Drafter, count: int) -> Iterator[Worker]:
    command: Command = [sys.executable, PEERS / "worker.py"]
    with Worker(command, check.work / "crosscheck-foredraft.log") as worker:
        worker.ask("open_target", model=EMBEDDED, quantization="none")
        speculative = {"method": drafter.method, "model": str(drafter.folder), "num_speculative_tokens": count}
        worker.ask("open_engine", name="drafting", speculative=speculative)
        yield worker


def _vllm(check: Check, drafter: Drafter, count: int) -> Run:
    assert check.vllm
    command: Command = [check.vllm, PEERS / "vllm_worker.py"]
    log = check.work / f"crosscheck-vllm-{drafter.method}-{count}.log"
    extra = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"} if drafter.method == "dspark" else {}
    with Worker(command, log, **vllm_environment(check.threads), **extra) as worker:
        speculative = {"method": drafter.method, "model": str(drafter.for_vllm), "num_speculative_tokens": count}
        worker.ask(
            "open_target",
            model=str(check.target_folder),
            max_model_len=2048,
            speculative=speculative,
            repair=check.repair_vllm and drafter.method != "eagle3",
        )
        found = worker.ask("generate_rounds", prompts=check.prompts, max_tokens=check.max_tokens)
        return [Answer.known(**each) for each in found["answers"]], worker.ask("counters")


def _llama(check: Check, drafter: Drafter, count: int) -> Run:
    assert check.llama
    extra = ("--spec-type", f"draft-{drafter.method}", "-md", str(drafter.for_llama), "--spec-draft-n-max", str(count))
    log = check.work / f"crosscheck-llama-{drafter.method}-{count}.log"
    with LlamaServer(check.llama, check.threads, check.target_gguf, log, slots=1, extra=extra) as server:
        found = server.generate_rounds(check.prompts, max_tokens=check.max_tokens)
        return [Answer.known(**each) for each in found], {}


def _own(answers: list[Answer], count: int) -> Figures:
    return figures(in_full_rounds(answers, [answer.kept for answer in answers], count), count)


def _compared(count: int, ours: list[Answer], theirs: list[Answer], replayed: list[list[int]]) -> dict[str, Any]:
    whole = _own(theirs, count)
    own = in_full_rounds(theirs, [answer.kept for answer in theirs], count)
    here = in_full_rounds(theirs, replayed, count)
    in_its_rounds = difference(whole, figures(here, count))
    return {
        **whole.as_json(),
        "difference": asdict(difference(whole, _own(ours, count))),
        "identical_answers": sum(one.token_ids == other.token_ids for one, other in zip(ours, theirs, strict=True)),
        "in_its_rounds": {
            "foredraft": figures(here, count).as_json(),
            "difference": asdict(in_its_rounds),
            "same_rounds": sum(one == other for one, other in zip(own, here, strict=True)),
        },
        "agrees": in_its_rounds.agrees,
    }


def _table(result: dict[str, Any]) -> Table:
    title = f"{result['method']}, N = {result['num_speculative_tokens']}, {result['num_prompts']} prompts"
    table = Table("", "τ", "rates per position", "rounds", "against foredraft", title=title, title_justify="left")

    def row(name: str, found: dict[str, Any], against: dict[str, float] | None) -> None:
        rates = " ".join(f"{rate:.3f}" for rate in found["acceptance_rate_per_position"])
        said = ""
        if against:
            agrees = "" if Difference(**against).agrees else "  differs"
            said = f"τ {against['length']:+.1%}, rates within {against['rate']:.3f}{agrees}"
        table.add_row(name, f"{found['acceptance_length']:.3f}", rates, str(found["rounds"]), said)

    row("foredraft", result["foredraft"], None)
    for name, found in result["others"].items():
        row(name, found, found["difference"])
        there = found["in_its_rounds"]
        same = there["same_rounds"] / max(found["rounds"], 1)
        row(f"  foredraft in its rounds, {same:.1%} alike", there["foredraft"], None)
        row(f"  {name} against that", found, there["difference"])
    return table


if __name__ == "__main__":
    # The engines are stopped between turns, and must not be left behind so.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        typer.run(main)
    except (UserError, EngineError) as error:
        print(f"crosscheck: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
